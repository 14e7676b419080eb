//! Limits on requests in flight, of all tenants and of each. A request with n choices is as much work as n requests,
//! and counts as n.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::drain::{Drain, InFlight};

use super::tenant_counts::TenantCounts;
use super::{RETRY_AFTER_MS, rate_limited};
use crate::metrics::GatewayMetrics;

/// Counts the requests in flight and admits new ones. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Admission {
    shared: Arc<Shared>,
}

struct Shared {
    /// Requests in flight.
    counts: Mutex<TenantCounts>,
    requests_max: usize,
    tenant_requests_max: usize,
    drain: Drain,
    metrics: Arc<GatewayMetrics>,
}

/// The admission of a request. It counts until it is dropped.
pub(crate) struct AdmissionTicket {
    tenant: String,
    /// The number of requests that it counts as.
    slots: usize,
    admission: Admission,
    _in_flight: InFlight,
}

impl Admission {
    /// Creates the limits, without requests in flight.
    pub(crate) fn new(
        requests_max: usize,
        tenant_requests_max: usize,
        drain: Drain,
        metrics: Arc<GatewayMetrics>,
    ) -> Self {
        Admission {
            shared: Arc::new(Shared {
                counts: Mutex::default(),
                requests_max,
                tenant_requests_max,
                drain,
                metrics,
            }),
        }
    }

    /// Checks whether a request would be admitted, without admitting it.
    ///
    /// # Errors
    /// As [`Admission::admit`].
    pub(crate) fn check(&self, tenant: &str) -> Result<(), ApiError> {
        match self.shared.drain.is_draining() {
            true => Err(draining()),
            false => self.shared.check_room(&self.shared.counts(), tenant, 0, 1),
        }
    }

    /// Admits a request.
    ///
    /// # Errors
    /// `Overloaded` past a limit, `Unavailable` while draining.
    pub(crate) fn admit(&self, tenant: &str) -> Result<AdmissionTicket, ApiError> {
        let Some(in_flight) = self.shared.drain.enter() else {
            return Err(draining());
        };
        let mut counts = self.shared.counts();
        self.shared.check_room(&counts, tenant, 0, 1)?;
        counts.add(tenant, 1);
        self.shared.show(&counts);
        Ok(AdmissionTicket {
            tenant: tenant.to_owned(),
            slots: 1,
            admission: self.clone(),
            _in_flight: in_flight,
        })
    }
}

fn draining() -> ApiError {
    let message = "this gateway is shutting down; try again";
    ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::SERVER_IS_DRAINING)
        .with_retry_after_ms(RETRY_AFTER_MS)
}

impl Shared {
    /// Checks whether a request that counts as `held` may count as `wanted`. A request alone always may: otherwise
    /// one with more choices than the limit could never run. The number of choices has a limit of its own.
    fn check_room(
        &self,
        counts: &TenantCounts,
        tenant: &str,
        held: usize,
        wanted: usize,
    ) -> Result<(), ApiError> {
        let refused = |limit: &str, message: String| {
            self.metrics.rejected(limit);
            Err(rate_limited(message))
        };
        let others = counts.total - held;
        if others > 0 && others + wanted > self.requests_max {
            return refused(
                "requests",
                format!("this gateway has {others} requests in flight; try again"),
            );
        }
        let others = counts.of(tenant) - held;
        if others > 0 && others + wanted > self.tenant_requests_max {
            let message = format!(
                "you have {others} requests in flight, counted by their choices, and this one has {wanted} choices; wait for some to end"
            );
            return refused("tenant_requests", message);
        }
        Ok(())
    }

    fn counts(&self) -> MutexGuard<'_, TenantCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self, counts: &TenantCounts) {
        self.metrics.families.in_flight.set(counts.total as i64);
    }
}

impl AdmissionTicket {
    /// Makes the request count as many times as it has choices.
    ///
    /// # Errors
    /// `Overloaded` past a limit.
    pub(crate) fn count_choices(&mut self, choices: usize) -> Result<(), ApiError> {
        let shared = &self.admission.shared;
        let more = choices.saturating_sub(self.slots);
        let mut counts = shared.counts();
        if more == 0 {
            return Ok(());
        }
        shared.check_room(&counts, &self.tenant, self.slots, choices)?;
        counts.add(&self.tenant, more);
        shared.show(&counts);
        self.slots += more;
        Ok(())
    }
}

impl Drop for AdmissionTicket {
    fn drop(&mut self) {
        let shared = &self.admission.shared;
        let mut counts = shared.counts();
        counts.remove(&self.tenant, self.slots);
        shared.show(&counts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_service_kit::telemetry::Metrics;

    #[test]
    fn a_request_counts_as_many_times_as_it_has_choices() {
        let metrics = Arc::new(GatewayMetrics::new(&Metrics::new().unwrap()).unwrap());
        let admission = Admission::new(10, 6, Drain::new(), metrics.clone());
        let mut wide = admission.admit("a").unwrap();
        wide.count_choices(4).unwrap();
        assert_eq!(metrics.families.in_flight.get(), 4);
        let mut another = admission.admit("a").unwrap();
        assert_eq!(
            another.count_choices(3).unwrap_err().kind,
            ErrorKind::Overloaded,
            "4 and 3 are more than 6"
        );
        another.count_choices(2).unwrap();
        assert!(admission.check("a").is_err());
        let mut others = admission.admit("b").unwrap();
        assert!(others.count_choices(5).is_err());
        others.count_choices(4).unwrap();
        assert!(admission.check("c").is_err());
        drop((wide, another));
        assert_eq!(metrics.families.in_flight.get(), 4);
        // Alone it may have any number of choices, beside others it may not.
        let mut alone = admission.admit("a").unwrap();
        assert!(alone.count_choices(8).is_err());
        drop(others);
        alone.count_choices(128).unwrap();
        assert_eq!(metrics.families.in_flight.get(), 128);
        drop(alone);
        assert_eq!(metrics.families.in_flight.get(), 0);
        assert!(admission.shared.counts().by_tenant.is_empty());
    }

    #[test]
    fn requests_are_counted_until_they_end() {
        let metrics = Arc::new(GatewayMetrics::new(&Metrics::new().unwrap()).unwrap());
        let drain = Drain::new();
        let admission = Admission::new(3, 2, drain.clone(), metrics.clone());
        let first = admission.admit("a").unwrap();
        let _second = admission.admit("a").unwrap();
        let error = admission.admit("a").err().unwrap();
        assert_eq!(
            (error.kind, error.retry_after_ms),
            (ErrorKind::Overloaded, Some(RETRY_AFTER_MS))
        );
        let _third = admission.admit("b").unwrap();
        assert!(admission.admit("c").is_err());
        assert_eq!(metrics.families.in_flight.get(), 3);
        drop(first);
        assert!(admission.admit("a").is_ok());
        assert_eq!(
            metrics
                .families
                .rejections
                .with_label_values(&["requests"])
                .get(),
            1
        );
        assert_eq!(
            metrics
                .families
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
