//! How many requests may be under way. One of several choices is as much work as so many requests, and counts as
//! that.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus::{IntCounterVec, IntGauge};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::drain::{Drain, InFlight};

/// When a refused client may try again.
const RETRY_AFTER_MS: u64 = 1_000;

/// Counts requests in flight, all and by tenant. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Admission {
    inner: Arc<Inner>,
}

struct Inner {
    counts: Mutex<Counts>,
    requests_max: usize,
    tenant_requests_max: usize,
    drain: Drain,
    in_flight: IntGauge,
    rejections: IntCounterVec,
}

#[derive(Default)]
struct Counts {
    total: usize,
    /// Only tenants with requests in flight.
    by_tenant: HashMap<String, usize>,
}

/// A request's places; dropping it gives them back.
pub(crate) struct Ticket {
    tenant: String,
    places: usize,
    admission: Admission,
    _running: InFlight,
}

impl Admission {
    pub(crate) fn new(
        requests_max: usize,
        tenant_requests_max: usize,
        drain: Drain,
        in_flight: IntGauge,
        rejections: IntCounterVec,
    ) -> Self {
        let counts = Mutex::default();
        Admission {
            inner: Arc::new(Inner {
                counts,
                requests_max,
                tenant_requests_max,
                drain,
                in_flight,
                rejections,
            }),
        }
    }

    /// Whether there is a place, without taking it.
    ///
    /// # Errors
    /// As [`Admission::admit`].
    pub(crate) fn check(&self, tenant: &str) -> Result<(), ApiError> {
        match self.inner.drain.is_draining() {
            true => Err(draining()),
            false => self.inner.room(&self.inner.counts(), tenant, 0, 1),
        }
    }

    /// Takes a place.
    ///
    /// # Errors
    /// `Overloaded` past a limit, `Unavailable` while draining.
    pub(crate) fn admit(&self, tenant: &str) -> Result<Ticket, ApiError> {
        let Some(running) = self.inner.drain.enter() else {
            return Err(draining());
        };
        let mut counts = self.inner.counts();
        self.inner.room(&counts, tenant, 0, 1)?;
        *counts.by_tenant.entry(tenant.to_owned()).or_default() += 1;
        counts.total += 1;
        self.inner.in_flight.set(counts.total as i64);
        Ok(Ticket {
            tenant: tenant.to_owned(),
            places: 1,
            admission: self.clone(),
            _running: running,
        })
    }
}

fn draining() -> ApiError {
    let message = "this gateway is shutting down; try again";
    ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::SERVER_IS_DRAINING)
        .with_retry_after_ms(RETRY_AFTER_MS)
}

impl Inner {
    /// Whether a request that has `held` places may have `wanted`. The only one of its tenant may always, since one
    /// with more choices than there are places would wait for ever otherwise; how many choices it may have, has a
    /// limit of its own.
    fn room(
        &self,
        counts: &Counts,
        tenant: &str,
        held: usize,
        wanted: usize,
    ) -> Result<(), ApiError> {
        let refused = |limit: &str, message: String| {
            self.rejections.with_label_values(&[limit]).inc();
            Err(ApiError::new(ErrorKind::Overloaded, message)
                .with_code(code::RATE_LIMIT_EXCEEDED)
                .with_retry_after_ms(RETRY_AFTER_MS))
        };
        let others = counts.total - held;
        if others > 0 && others + wanted > self.requests_max {
            return refused(
                "requests",
                format!("{others} requests are under way here; try again"),
            );
        }
        let others = counts.by_tenant.get(tenant).copied().unwrap_or(0) - held;
        if others > 0 && others + wanted > self.tenant_requests_max {
            let message = format!(
                "{others} of your requests are under way, counted by their choices, and this one has {wanted}; wait for some to end"
            );
            return refused("tenant_requests", message);
        }
        Ok(())
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ticket {
    /// Takes as many places as the request has choices.
    ///
    /// # Errors
    /// `Overloaded` past a limit.
    pub(crate) fn widen(&mut self, choices: usize) -> Result<(), ApiError> {
        let inner = &self.admission.inner;
        let more = choices.saturating_sub(self.places);
        let mut counts = inner.counts();
        if more == 0 {
            return Ok(());
        }
        inner.room(&counts, &self.tenant, self.places, choices)?;
        *counts.by_tenant.entry(self.tenant.clone()).or_default() += more;
        counts.total += more;
        inner.in_flight.set(counts.total as i64);
        self.places += more;
        Ok(())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let inner = &self.admission.inner;
        let mut counts = inner.counts();
        counts.total -= self.places;
        inner.in_flight.set(counts.total as i64);
        if let Some(of_tenant) = counts.by_tenant.get_mut(&self.tenant) {
            *of_tenant -= self.places;
            if *of_tenant == 0 {
                counts.by_tenant.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::GatewayMetrics;
    use refrain_service_kit::telemetry::Metrics;

    #[test]
    fn a_request_counts_as_often_as_it_has_choices() {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        let admission = Admission::new(
            10,
            6,
            Drain::new(),
            metrics.in_flight.clone(),
            metrics.rejections.clone(),
        );
        let mut wide = admission.admit("a").unwrap();
        wide.widen(4).unwrap();
        assert_eq!(metrics.in_flight.get(), 4);
        let mut another = admission.admit("a").unwrap();
        assert_eq!(
            another.widen(3).unwrap_err().kind,
            ErrorKind::Overloaded,
            "4 and 3 are more than 6"
        );
        another.widen(2).unwrap();
        assert!(admission.check("a").is_err());
        let mut others = admission.admit("b").unwrap();
        assert!(others.widen(5).is_err());
        others.widen(4).unwrap();
        assert!(admission.check("c").is_err());
        drop((wide, another));
        assert_eq!(metrics.in_flight.get(), 4);
        // Alone it may be as wide as requests may be, beside others it may not.
        let mut alone = admission.admit("a").unwrap();
        assert!(alone.widen(8).is_err());
        drop(others);
        alone.widen(128).unwrap();
        assert_eq!(metrics.in_flight.get(), 128);
        drop(alone);
        assert_eq!(metrics.in_flight.get(), 0);
        assert!(admission.inner.counts().by_tenant.is_empty());
    }

    #[test]
    fn places_are_counted_and_given_back() {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        let drain = Drain::new();
        let admission = Admission::new(
            3,
            2,
            drain.clone(),
            metrics.in_flight.clone(),
            metrics.rejections.clone(),
        );
        let first = admission.admit("a").unwrap();
        let _second = admission.admit("a").unwrap();
        let error = admission.admit("a").err().unwrap();
        assert_eq!(
            (error.kind, error.retry_after_ms),
            (ErrorKind::Overloaded, Some(RETRY_AFTER_MS))
        );
        let _third = admission.admit("b").unwrap();
        assert!(admission.admit("c").is_err());
        assert_eq!(metrics.in_flight.get(), 3);
        drop(first);
        assert!(admission.admit("a").is_ok());
        assert_eq!(metrics.rejections.with_label_values(&["requests"]).get(), 1);
        assert_eq!(
            metrics
                .rejections
                .with_label_values(&["tenant_requests"])
                .get(),
            1
        );
        drain.begin();
        assert_eq!(
            admission.admit("d").err().unwrap().kind,
            ErrorKind::Unavailable
        );
        assert_eq!(drain.in_flight(), 2);
    }
}
