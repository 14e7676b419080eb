//! How many requests may be under way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::{IntCounterVec, IntGauge};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::drain::{Drain, Running};

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

/// A request's place; dropping it gives it back.
pub(crate) struct Ticket {
    tenant: String,
    admission: Admission,
    _running: Running,
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

    /// Takes a place.
    ///
    /// # Errors
    /// `Overloaded` past a limit, `Unavailable` while draining.
    pub(crate) fn admit(&self, tenant: &str) -> Result<Ticket, ApiError> {
        let Some(running) = self.inner.drain.enter() else {
            return Err(ApiError::new(
                ErrorKind::Unavailable,
                "this gateway is shutting down; try again",
            )
            .with_code("server_is_draining")
            .with_retry_after_ms(RETRY_AFTER_MS));
        };
        let refused = |limit: &str, message: String| {
            self.inner.rejections.with_label_values(&[limit]).inc();
            Err(ApiError::new(ErrorKind::Overloaded, message)
                .with_code("rate_limit_exceeded")
                .with_retry_after_ms(RETRY_AFTER_MS))
        };
        let mut counts = self
            .inner
            .counts
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if counts.total >= self.inner.requests_max {
            return refused(
                "requests",
                format!("{} requests are under way here; try again", counts.total),
            );
        }
        let of_tenant = counts.by_tenant.entry(tenant.to_owned()).or_default();
        if *of_tenant >= self.inner.tenant_requests_max {
            let message =
                format!("{of_tenant} of your requests are under way; wait for one to end");
            return refused("tenant_requests", message);
        }
        *of_tenant += 1;
        counts.total += 1;
        self.inner.in_flight.set(counts.total as i64);
        Ok(Ticket {
            tenant: tenant.to_owned(),
            admission: self.clone(),
            _running: running,
        })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let inner = &self.admission.inner;
        let mut counts = inner.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.total -= 1;
        inner.in_flight.set(counts.total as i64);
        if let Some(of_tenant) = counts.by_tenant.get_mut(&self.tenant) {
            *of_tenant -= 1;
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
        assert_eq!(drain.running(), 2);
    }
}
