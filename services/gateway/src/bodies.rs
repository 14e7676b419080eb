//! Reads requests' bodies: how large one may be, how long it may take to arrive, and how many arrive at once.
//!
//! A body that is on its way holds none of its tenant's places among the requests in flight, since nothing is done
//! for it yet. It has a place of its own kind: where those are all taken, the tenant's body that has been on its way
//! for longest gives way to a new one. So clients that send a byte now and then keep nobody of their tenant out, let
//! alone others.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use actix_web::web;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use prometheus::{IntCounterVec, IntGauge};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::Notify;

/// A body does not give way before it has been on its way for so long, which most take less than.
const GIVES_WAY_AFTER: Duration = Duration::from_secs(1);
/// When a refused client may try again.
const RETRY_AFTER_MS: u64 = 1_000;

/// Limits on bodies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    pub(crate) bytes_max: usize,
    /// From the request's head to its body's last byte.
    pub(crate) time_max: Duration,
    /// On their way at once, of all tenants together.
    pub(crate) bodies_max: usize,
    /// On their way at once, of one tenant.
    pub(crate) tenant_bodies_max: usize,
    /// Bytes that have come of all of them; a tenant's bodies may have half of it.
    pub(crate) arrived_bytes_max: usize,
}

/// The bodies that are on their way.
pub(crate) struct Bodies {
    limits: BodyLimits,
    arriving: Mutex<Arriving>,
    gauge: IntGauge,
    rejections: IntCounterVec,
}

#[derive(Default)]
struct Arriving {
    total: usize,
    /// Bytes that have come of them.
    bytes: usize,
    numbers: u64,
    /// Only tenants of whom a body is on its way; theirs are in the order in which they began.
    by_tenant: HashMap<String, BTreeMap<u64, Body>>,
}

struct Body {
    began: Instant,
    bytes: usize,
    gives_way: Arc<Notify>,
}

/// A body's place; dropping it gives it back.
struct Place<'a> {
    bodies: &'a Bodies,
    tenant: &'a str,
    number: u64,
    gives_way: Arc<Notify>,
}

impl Bodies {
    pub(crate) fn new(limits: BodyLimits, gauge: IntGauge, rejections: IntCounterVec) -> Self {
        Bodies {
            limits,
            arriving: Mutex::default(),
            gauge,
            rejections,
        }
    }

    /// Reads a tenant's body whose head came `received`.
    ///
    /// # Errors
    /// `TooLarge`, `RequestTimeout`, or `InvalidRequest` if it broke off; `Overloaded` if too many are on their way.
    /// Some of it may then be unread, so the connection is of no further use.
    pub(crate) async fn read(
        &self,
        tenant: &str,
        announced_bytes: Option<u64>,
        payload: web::Payload,
        received: Instant,
    ) -> Result<Bytes, ApiError> {
        let most = self.limits.bytes_max;
        if announced_bytes.is_some_and(|bytes| bytes > most as u64) {
            return Err(self.too_large());
        }
        let place = self.begin(tenant, Instant::now())?;
        let left = self.limits.time_max.saturating_sub(received.elapsed());
        tokio::select! {
            biased;
            read = self.gather(payload, &place) => read,
            () = tokio::time::sleep(left) => Err(self.late(format!(
                "the body did not arrive within {} ms",
                self.limits.time_max.as_millis()
            ))),
            () = place.gives_way.notified() => Err(self.late(
                "the body was on its way for so long that it had to give way to another one".to_owned(),
            )),
        }
    }

    fn begin<'a>(&'a self, tenant: &'a str, now: Instant) -> Result<Place<'a>, ApiError> {
        let mut arriving = self.arriving();
        let of_tenant = arriving.by_tenant.get(tenant).map_or(0, BTreeMap::len);
        let (crowded, limit) = if of_tenant >= self.limits.tenant_bodies_max {
            (Some(tenant.to_owned()), "tenant_bodies")
        } else if arriving.total >= self.limits.bodies_max {
            let most = arriving
                .by_tenant
                .iter()
                .max_by_key(|(_, bodies)| bodies.len());
            (most.map(|(tenant, _)| tenant.clone()), "bodies")
        } else {
            (None, "")
        };
        if let Some(crowded) = crowded {
            self.rejections.with_label_values(&[limit]).inc();
            if !arriving.give_way(&crowded, now) {
                let message = "too many bodies are on their way at once; try again";
                return Err(ApiError::new(ErrorKind::Overloaded, message)
                    .with_code(code::RATE_LIMIT_EXCEEDED)
                    .with_retry_after_ms(RETRY_AFTER_MS));
            }
        }
        arriving.numbers += 1;
        arriving.total += 1;
        let number = arriving.numbers;
        let gives_way = Arc::new(Notify::new());
        let body = Body {
            began: now,
            bytes: 0,
            gives_way: gives_way.clone(),
        };
        let of_tenant = arriving.by_tenant.entry(tenant.to_owned()).or_default();
        of_tenant.insert(number, body);
        self.gauge.set(arriving.total as i64);
        Ok(Place {
            bodies: self,
            tenant,
            number,
            gives_way,
        })
    }

    async fn gather(
        &self,
        mut payload: web::Payload,
        place: &Place<'_>,
    ) -> Result<Bytes, ApiError> {
        let mut body = BytesMut::new();
        while let Some(chunk) = payload.next().await {
            let chunk = chunk.map_err(|error| {
                ApiError::new(ErrorKind::InvalidRequest, "the body broke off").with_detail(error)
            })?;
            if body.len() + chunk.len() > self.limits.bytes_max {
                return Err(self.too_large());
            }
            let most = self.limits.arrived_bytes_max;
            let has_room = self.arriving().arrived(
                place.tenant,
                place.number,
                chunk.len(),
                most,
                Instant::now(),
            );
            if !has_room {
                self.rejections.with_label_values(&["bodies_bytes"]).inc();
                let message =
                    "the bodies that are on their way take all the memory they may; try again";
                return Err(ApiError::new(ErrorKind::Overloaded, message)
                    .with_code(code::RATE_LIMIT_EXCEEDED)
                    .with_retry_after_ms(RETRY_AFTER_MS));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body.freeze())
    }

    fn too_large(&self) -> ApiError {
        self.rejections.with_label_values(&["body_bytes"]).inc();
        let most = self.limits.bytes_max;
        let message = format!("the body is larger than {most} bytes");
        ApiError::new(ErrorKind::TooLarge, message).with_code(code::REQUEST_TOO_LARGE)
    }

    fn late(&self, message: String) -> ApiError {
        self.rejections.with_label_values(&["body_time"]).inc();
        ApiError::new(ErrorKind::RequestTimeout, message).with_code("body_timeout")
    }

    fn arriving(&self) -> MutexGuard<'_, Arriving> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arriving {
    /// Ends the tenant's oldest body, if that has had its time. Says whether it did.
    fn give_way(&mut self, tenant: &str, now: Instant) -> bool {
        let oldest = self
            .by_tenant
            .get(tenant)
            .and_then(BTreeMap::first_key_value)
            .filter(|(_, body)| now.saturating_duration_since(body.began) >= GIVES_WAY_AFTER)
            .map(|(number, body)| (*number, body.gives_way.clone()));
        let Some((number, gives_way)) = oldest else {
            return false;
        };
        gives_way.notify_one();
        self.remove(tenant, number);
        true
    }

    /// Counts bytes that have come of a body, if there is room for them or the oldest body of whoever has most gives
    /// way. A tenant's only body is always let through as far as there is room at all.
    fn arrived(
        &mut self,
        tenant: &str,
        number: u64,
        bytes: usize,
        most: usize,
        now: Instant,
    ) -> bool {
        loop {
            let of_tenant = self.by_tenant.get_mut(tenant);
            let Some(of_tenant) = of_tenant.filter(|bodies| bodies.contains_key(&number)) else {
                // It gave way, and is told so.
                return true;
            };
            let held: usize = of_tenant.values().map(|body| body.bytes).sum();
            let crowded = if held + bytes > most / 2 && of_tenant.len() > 1 {
                tenant.to_owned()
            } else if self.bytes + bytes > most {
                let held = |bodies: &BTreeMap<u64, Body>| {
                    bodies.values().map(|body| body.bytes).sum::<usize>()
                };
                match self.by_tenant.iter().max_by_key(|(_, bodies)| held(bodies)) {
                    Some((tenant, _)) => tenant.clone(),
                    None => return false,
                }
            } else {
                if let Some(body) = of_tenant.get_mut(&number) {
                    body.bytes += bytes;
                    self.bytes += bytes;
                }
                return true;
            };
            if !self.give_way(&crowded, now) {
                return false;
            }
        }
    }

    fn remove(&mut self, tenant: &str, number: u64) {
        if let Some(of_tenant) = self.by_tenant.get_mut(tenant)
            && let Some(body) = of_tenant.remove(&number)
        {
            self.total -= 1;
            self.bytes -= body.bytes;
            if of_tenant.is_empty() {
                self.by_tenant.remove(tenant);
            }
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut arriving = self.bodies.arriving();
        arriving.remove(self.tenant, self.number);
        self.bodies.gauge.set(arriving.total as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::GatewayMetrics;
    use refrain_service_kit::telemetry::Metrics;

    fn bodies(bodies_max: usize, tenant_bodies_max: usize) -> Bodies {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        let limits = BodyLimits {
            bytes_max: 1,
            time_max: Duration::MAX,
            bodies_max,
            tenant_bodies_max,
            arrived_bytes_max: 1_000,
        };
        Bodies::new(limits, metrics.bodies.clone(), metrics.rejections.clone())
    }

    async fn is_told(place: &Place<'_>) -> bool {
        let told = tokio::time::timeout(Duration::ZERO, place.gives_way.notified());
        told.await.is_ok()
    }

    #[tokio::test]
    async fn the_oldest_body_of_whoever_has_most_gives_way_once_it_has_had_its_time() {
        let bodies = bodies(5, 3);
        let start = Instant::now();
        let later = start + GIVES_WAY_AFTER;
        let of_a: Vec<_> = (0..3).map(|_| bodies.begin("a", start).unwrap()).collect();
        let refused = bodies.begin("a", start).err().unwrap();
        assert_eq!(refused.kind, ErrorKind::Overloaded);
        let of_b = bodies.begin("b", start).unwrap();
        let newer = bodies.begin("a", later).unwrap();
        assert!(is_told(&of_a[0]).await);
        assert!(!is_told(&of_a[1]).await && !is_told(&of_b).await);
        // Another tenant makes room at the expense of the one that takes most of it.
        let of_c = bodies.begin("c", later).unwrap();
        let of_d = bodies.begin("d", later).unwrap();
        assert!(is_told(&of_a[1]).await);
        assert!(!is_told(&of_b).await && !is_told(&of_c).await);
        assert_eq!(bodies.gauge.get(), 5);
        drop((of_a, of_b, of_c, of_d, newer));
        assert_eq!(
            (bodies.gauge.get(), bodies.arriving().by_tenant.len()),
            (0, 0)
        );
    }

    #[tokio::test]
    async fn bytes_that_have_come_are_bounded_and_the_oldest_body_of_whoever_has_most_gives_way() {
        let bodies = bodies(9, 9);
        let start = Instant::now();
        let later = start + GIVES_WAY_AFTER;
        let of_a: Vec<_> = (0..3).map(|_| bodies.begin("a", start).unwrap()).collect();
        let of_b = bodies.begin("b", start).unwrap();
        let arrived = |place: &Place<'_>, bytes, now| {
            bodies
                .arriving()
                .arrived(place.tenant, place.number, bytes, 1_000, now)
        };
        assert!(arrived(&of_a[0], 300, start) && arrived(&of_a[1], 200, start));
        // Half is a tenant's share, unless it has one body only.
        assert!(!arrived(&of_a[2], 1, start));
        assert!(arrived(&of_b, 500, start));
        assert!(!arrived(&of_b, 1, start));
        assert_eq!(bodies.arriving().bytes, 1_000);
        // A body that has had its time gives way.
        assert!(arrived(&of_a[2], 200, later));
        assert!(is_told(&of_a[0]).await && !is_told(&of_a[1]).await);
        assert_eq!(bodies.arriving().bytes, 900);
        // A body that gave way counts no more, and is told instead of refused.
        assert!(arrived(&of_a[0], 5_000, later));
        assert_eq!(bodies.arriving().bytes, 900);
        drop((of_a, of_b));
        assert_eq!(bodies.arriving().bytes, 0);
    }
}
