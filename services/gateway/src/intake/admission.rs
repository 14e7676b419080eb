//! Limits on requests in flight, of all tenants and of each. A request with n choices is as much work as n requests,
//! and counts as n.
//!
//! Interactive requests and rollouts have limits of their own, so that a training run keeps nobody else out. The
//! class of a request is known only after its body is parsed. Until then it counts beside both classes, and is
//! refused only where neither has room.

use std::sync::Arc;

use parking_lot::Mutex;
use refrain_protocol::error::code;
use refrain_protocol::scheduling::RequestClass;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::drain::{Drain, InFlight};

use super::tenant_counts::TenantCounts;
use super::{RETRY_AFTER_MS, rate_limited};
use crate::metrics::GatewayMetrics;

/// The limits on the requests of a class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClassLimits {
    /// Most requests in flight of all tenants together.
    pub(crate) requests_max: usize,
    /// Most requests in flight of one tenant.
    pub(crate) tenant_requests_max: usize,
}

/// The limits of all classes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdmissionLimits {
    pub(crate) interactive: ClassLimits,
    pub(crate) rollouts: ClassLimits,
}

/// Counts the requests in flight and admits new ones. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Admission {
    shared: Arc<Shared>,
}

struct Shared {
    counts: Mutex<Counts>,
    limits: AdmissionLimits,
    drain: Drain,
    metrics: Arc<GatewayMetrics>,
}

/// Requests in flight.
#[derive(Default)]
struct Counts {
    /// Those whose class is not known yet.
    undecided: TenantCounts,
    interactive: TenantCounts,
    rollouts: TenantCounts,
}

impl Counts {
    fn of(&mut self, class: Option<RequestClass>) -> &mut TenantCounts {
        match class {
            None => &mut self.undecided,
            Some(RequestClass::Interactive) => &mut self.interactive,
            Some(RequestClass::Rollout) => &mut self.rollouts,
        }
    }
}

/// A limit that a request would exceed.
struct Exceeded {
    limit: &'static str,
    message: String,
}

/// The admission of a request. It counts until it is dropped.
pub(crate) struct AdmissionTicket {
    tenant: String,
    /// Its class, once it is known.
    class: Option<RequestClass>,
    /// The number of requests that it counts as.
    slots: usize,
    admission: Admission,
    _in_flight: InFlight,
}

impl Admission {
    /// Creates the limits, without requests in flight.
    pub(crate) fn new(limits: AdmissionLimits, drain: Drain, metrics: Arc<GatewayMetrics>) -> Self {
        Admission {
            shared: Arc::new(Shared {
                counts: Mutex::default(),
                limits,
                drain,
                metrics,
            }),
        }
    }

    /// Checks whether a request of some class would be admitted, without admitting it.
    ///
    /// # Errors
    /// As [`Admission::admit`].
    pub(crate) fn check(&self, tenant: &str) -> Result<(), ApiError> {
        match self.shared.drain.is_draining() {
            true => Err(draining()),
            false => self.shared.check_any(&self.shared.counts.lock(), tenant),
        }
    }

    /// Admits a request, the class of which is told later by [`AdmissionTicket::decide`].
    ///
    /// # Errors
    /// `Overloaded` where neither class has room, `Unavailable` while draining.
    pub(crate) fn admit(&self, tenant: &str) -> Result<AdmissionTicket, ApiError> {
        let Some(in_flight) = self.shared.drain.enter() else {
            return Err(draining());
        };
        let mut counts = self.shared.counts.lock();
        self.shared.check_any(&counts, tenant)?;
        counts.undecided.add(tenant, 1);
        self.shared.show(&counts);
        Ok(AdmissionTicket {
            tenant: tenant.to_owned(),
            class: None,
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
    /// Checks whether a further request would find room in any class.
    fn check_any(&self, counts: &Counts, tenant: &str) -> Result<(), ApiError> {
        let room = |class| {
            let of_class = match class {
                RequestClass::Interactive => &counts.interactive,
                RequestClass::Rollout => &counts.rollouts,
            };
            let total = counts.undecided.total + of_class.total;
            let of_tenant = counts.undecided.of(tenant) + of_class.of(tenant);
            self.check_room(class, total, of_tenant, 1)
        };
        let refused = |exceeded| self.refused(tenant, exceeded);
        room(RequestClass::Rollout)
            .or_else(|_| room(RequestClass::Interactive))
            .map_err(refused)
    }

    /// Checks whether a request of `class` may count as `wanted`, beside `total` others, of which `of_tenant` are of
    /// the same tenant. A request alone always may: otherwise one with more choices than the limit could never run.
    /// The number of choices has a limit of its own.
    fn check_room(
        &self,
        class: RequestClass,
        total: usize,
        of_tenant: usize,
        wanted: usize,
    ) -> Result<(), Exceeded> {
        let (limits, of_all, of_one, what) = match class {
            RequestClass::Interactive => (
                &self.limits.interactive,
                "requests",
                "tenant_requests",
                "requests",
            ),
            RequestClass::Rollout => (
                &self.limits.rollouts,
                "rollouts",
                "tenant_rollouts",
                "rollouts",
            ),
        };
        if total > 0 && total + wanted > limits.requests_max {
            return Err(Exceeded {
                limit: of_all,
                message: format!("this gateway has {total} {what} in flight; try again"),
            });
        }
        if of_tenant > 0 && of_tenant + wanted > limits.tenant_requests_max {
            return Err(Exceeded {
                limit: of_one,
                message: format!(
                    "you have {of_tenant} {what} in flight, counted by their choices, and this one has {wanted} choices; wait for some to end"
                ),
            });
        }
        Ok(())
    }

    fn refused(&self, tenant: &str, exceeded: Exceeded) -> ApiError {
        self.metrics.rejected(tenant, exceeded.limit);
        rate_limited(exceeded.message)
    }

    fn show(&self, counts: &Counts) {
        let families = &self.metrics.families;
        let others = counts.undecided.total + counts.interactive.total;
        families.in_flight.set(others as i64);
        families.rollouts.set(counts.rollouts.total as i64);
    }
}

impl AdmissionTicket {
    /// Tells the class of the request, and makes it count as many times as it has choices.
    ///
    /// # Errors
    /// `Overloaded` past a limit of the class.
    pub(crate) fn decide(&mut self, class: RequestClass, choices: usize) -> Result<(), ApiError> {
        let shared = &self.admission.shared;
        let mut counts = shared.counts.lock();
        let of_class = counts.of(Some(class));
        let (total, of_tenant) = (of_class.total, of_class.of(&self.tenant));
        shared
            .check_room(class, total, of_tenant, choices)
            .map_err(|exceeded| shared.refused(&self.tenant, exceeded))?;
        counts.of(self.class).remove(&self.tenant, self.slots);
        counts.of(Some(class)).add(&self.tenant, choices);
        shared.show(&counts);
        (self.class, self.slots) = (Some(class), choices);
        Ok(())
    }
}

impl Drop for AdmissionTicket {
    fn drop(&mut self) {
        let shared = &self.admission.shared;
        let mut counts = shared.counts.lock();
        counts.of(self.class).remove(&self.tenant, self.slots);
        shared.show(&counts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_service_kit::telemetry::Metrics;

    const INTERACTIVE: RequestClass = RequestClass::Interactive;
    const ROLLOUT: RequestClass = RequestClass::Rollout;

    fn metrics() -> Arc<GatewayMetrics> {
        Arc::new(GatewayMetrics::new(&Metrics::new().unwrap()).unwrap())
    }

    fn limits(requests_max: usize, tenant_requests_max: usize) -> ClassLimits {
        ClassLimits {
            requests_max,
            tenant_requests_max,
        }
    }

    /// Limits under which there is always room for rollouts.
    fn interactive(requests_max: usize, tenant_requests_max: usize) -> AdmissionLimits {
        AdmissionLimits {
            interactive: limits(requests_max, tenant_requests_max),
            rollouts: limits(1_000, 1_000),
        }
    }

    #[test]
    fn a_request_counts_by_its_choices() {
        let metrics = metrics();
        let admission = Admission::new(interactive(10, 6), Drain::new(), metrics.clone());
        let mut wide = admission.admit("a").unwrap();
        wide.decide(INTERACTIVE, 4).unwrap();
        assert_eq!(metrics.families.in_flight.get(), 4);
        let mut another = admission.admit("a").unwrap();
        assert_eq!(
            another.decide(INTERACTIVE, 3).unwrap_err().kind,
            ErrorKind::Overloaded,
            "4 and 3 are more than 6"
        );
        another.decide(INTERACTIVE, 2).unwrap();
        let mut third = admission.admit("a").unwrap();
        assert!(third.decide(INTERACTIVE, 1).is_err());
        drop(third);
        let mut others = admission.admit("b").unwrap();
        assert!(others.decide(INTERACTIVE, 5).is_err());
        others.decide(INTERACTIVE, 4).unwrap();
        assert!(
            admission
                .admit("c")
                .unwrap()
                .decide(INTERACTIVE, 1)
                .is_err()
        );
        drop((wide, another));
        assert_eq!(metrics.families.in_flight.get(), 4);
        // Alone it may have any number of choices, beside others it may not.
        let mut alone = admission.admit("a").unwrap();
        assert!(alone.decide(INTERACTIVE, 8).is_err());
        drop(others);
        alone.decide(INTERACTIVE, 128).unwrap();
        assert_eq!(metrics.families.in_flight.get(), 128);
        drop(alone);
        assert_eq!(metrics.families.in_flight.get(), 0);
        assert!(
            admission
                .shared
                .counts
                .lock()
                .interactive
                .by_tenant
                .is_empty()
        );
        assert!(
            admission
                .shared
                .counts
                .lock()
                .undecided
                .by_tenant
                .is_empty()
        );
    }

    #[test]
    fn requests_are_counted_until_they_end() {
        let metrics = metrics();
        let drain = Drain::new();
        let admission = Admission::new(interactive(3, 2), drain.clone(), metrics.clone());
        let admit = |tenant| {
            let mut ticket = admission.admit(tenant)?;
            ticket.decide(INTERACTIVE, 1)?;
            Ok::<_, ApiError>(ticket)
        };
        let first = admit("a").unwrap();
        let _second = admit("a").unwrap();
        let error = admit("a").err().unwrap();
        assert_eq!(
            (error.kind, error.retry_after_ms),
            (ErrorKind::Overloaded, Some(RETRY_AFTER_MS))
        );
        let _third = admit("b").unwrap();
        assert!(admit("c").is_err());
        assert_eq!(metrics.families.in_flight.get(), 3);
        drop(first);
        assert!(admit("a").is_ok());
        assert_eq!(metrics.rejections("requests"), 1);
        assert_eq!(metrics.rejections("tenant_requests"), 1);
        drain.begin();
        assert_eq!(admit("d").err().unwrap().kind, ErrorKind::Unavailable);
        assert_eq!(drain.in_flight(), 2);
    }

    #[test]
    fn rollouts_and_interactive_requests_keep_each_other_from_nothing() {
        let metrics = metrics();
        let both = AdmissionLimits {
            interactive: limits(2, 1),
            rollouts: limits(6, 4),
        };
        let admission = Admission::new(both, Drain::new(), metrics.clone());
        let admit = |tenant, class, choices| {
            let mut ticket = admission.admit(tenant)?;
            ticket.decide(class, choices)?;
            Ok::<_, ApiError>(ticket)
        };
        let _rollouts = admit("a", ROLLOUT, 3).unwrap();
        let _interactive = admit("a", INTERACTIVE, 1).unwrap();
        assert!(admit("a", INTERACTIVE, 1).is_err());
        assert!(admit("a", ROLLOUT, 2).is_err());
        let _more = admit("a", ROLLOUT, 1).unwrap();
        // Both classes of this tenant are full, which shows before a body is read.
        assert!(admission.check("a").is_err());
        let undecided = admission.admit("b").unwrap();
        let _last = admit("b", INTERACTIVE, 1).unwrap();
        assert!(admit("c", ROLLOUT, 3).is_err());
        let gauges = || {
            let families = &metrics.families;
            (families.in_flight.get(), families.rollouts.get())
        };
        assert_eq!(gauges(), (3, 4));
        drop(undecided);
        assert_eq!(gauges(), (2, 4));
        assert_eq!(metrics.rejections("tenant_rollouts"), 1);
        assert_eq!(metrics.rejections("rollouts"), 1);
    }
}
