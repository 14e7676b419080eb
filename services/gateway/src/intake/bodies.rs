//! Reads the bodies of requests, within limits on the size of one, on its time to arrive, and on bodies that arrive
//! at once.
//!
//! An arriving body does not count among its tenant's requests in flight, since nothing is done for it yet. Arriving
//! bodies have slots of their own. When the slots are full, the tenant's body that has been arriving for longest is
//! cut off for a new one. So clients that send a byte now and then keep nobody of their tenant out, let alone others.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::web;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::ContentEncoding;
use tokio::sync::Notify;

use super::rate_limited;
use crate::metrics::GatewayMetrics;

/// A body is not cut off for another one before it has had this time to arrive. Most take less.
const CUT_OFF_AFTER: Duration = Duration::from_secs(1);

/// Bytes of a compressed body's text that are made at once.
const DECODED_PIECE_BYTES: usize = 64 << 10;

/// The limits on bodies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    pub(crate) bytes_max: usize,
    /// Time from the head of the request to the last byte of its body.
    pub(crate) time_max: Duration,
    /// Most bodies that arrive at once, of all tenants together.
    pub(crate) bodies_max: usize,
    /// Most bodies that arrive at once, of one tenant.
    pub(crate) tenant_bodies_max: usize,
    /// Most bytes that have arrived of all these bodies. The bodies of a tenant may have half of it.
    pub(crate) arrived_bytes_max: usize,
}

/// Reads bodies and knows those that are arriving.
pub(crate) struct BodyReader {
    limits: BodyLimits,
    arriving: Mutex<ArrivingBodies>,
    metrics: Arc<GatewayMetrics>,
}

/// The bodies that are arriving.
#[derive(Default)]
struct ArrivingBodies {
    total: usize,
    /// Bytes that have arrived of them.
    bytes: usize,
    /// Number of the last body.
    last_number: u64,
    /// The bodies of each tenant in the order in which they began.
    by_tenant: HashMap<String, BTreeMap<u64, ArrivingBody>>,
}

struct ArrivingBody {
    began: Instant,
    bytes: usize,
    cut_off: Arc<Notify>,
}

/// The slot of an arriving body, which is free when this is dropped.
struct BodySlot<'a> {
    bodies: &'a BodyReader,
    tenant: &'a str,
    number: u64,
    cut_off: Arc<Notify>,
}

impl BodyReader {
    /// Creates a reader without arriving bodies.
    pub(crate) fn new(limits: BodyLimits, metrics: Arc<GatewayMetrics>) -> Self {
        BodyReader {
            limits,
            arriving: Mutex::default(),
            metrics,
        }
    }

    /// Reads the body of a tenant's request whose head arrived at `received`. All limits hold for a compressed body
    /// and for its text.
    ///
    /// # Errors
    /// `TooLarge`, `RequestTimeout`, `InvalidRequest` if the body is incomplete, or `Overloaded` if too many are
    /// arriving. A part of the body may be unread then, so the connection has to be closed.
    pub(crate) async fn read(
        &self,
        tenant: &str,
        announced_bytes: Option<u64>,
        encoding: ContentEncoding,
        payload: web::Payload,
        received: Instant,
    ) -> Result<Bytes, ApiError> {
        let most = self.limits.bytes_max;
        if announced_bytes.is_some_and(|bytes| bytes > most as u64) {
            return Err(self.too_large(tenant));
        }
        let slot = self.begin(tenant, Instant::now())?;
        let left = self.limits.time_max.saturating_sub(received.elapsed());
        tokio::select! {
            biased;
            read = self.gather(payload, encoding, &slot) => read,
            () = tokio::time::sleep(left) => Err(self.late(tenant, format!(
                "the body did not arrive within {} ms",
                self.limits.time_max.as_millis()
            ))),
            () = slot.cut_off.notified() => Err(self.late(
                tenant,
                "the body took so long to arrive that it was cut off for another one".to_owned(),
            )),
        }
    }

    fn begin<'a>(&'a self, tenant: &'a str, now: Instant) -> Result<BodySlot<'a>, ApiError> {
        let mut arriving = self.arriving.lock();
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
            self.metrics.rejected(tenant, limit);
            if !arriving.cut_off_oldest(&crowded, now) {
                let message = "too many bodies are arriving at once; try again";
                return Err(rate_limited(message));
            }
        }
        arriving.last_number += 1;
        arriving.total += 1;
        let number = arriving.last_number;
        let cut_off = Arc::new(Notify::new());
        let body = ArrivingBody {
            began: now,
            bytes: 0,
            cut_off: cut_off.clone(),
        };
        let of_tenant = arriving.by_tenant.entry(tenant.to_owned()).or_default();
        of_tenant.insert(number, body);
        self.show(&arriving);
        Ok(BodySlot {
            bodies: self,
            tenant,
            number,
            cut_off,
        })
    }

    async fn gather(
        &self,
        mut payload: web::Payload,
        encoding: ContentEncoding,
        slot: &BodySlot<'_>,
    ) -> Result<Bytes, ApiError> {
        let mut body = BytesMut::new();
        while let Some(chunk) = payload.next().await {
            let chunk = chunk.map_err(|error| {
                let message = "the connection broke off before the body was complete";
                ApiError::new(ErrorKind::InvalidRequest, message).with_detail(error)
            })?;
            self.add(&mut body, &chunk, slot)?;
        }
        let Some(mut reader) = encoding.reader(&body).map_err(undecodable)? else {
            return Ok(body.freeze());
        };
        let mut text = BytesMut::new();
        let mut piece = vec![0; DECODED_PIECE_BYTES];
        loop {
            match reader.read(&mut piece).map_err(undecodable)? {
                0 => break,
                bytes => self.add(&mut text, &piece[..bytes], slot)?,
            }
            // A small body may have a long text, and other requests of this thread wait.
            tokio::task::yield_now().await;
        }
        Ok(text.freeze())
    }

    /// Adds bytes to a body, or to its text.
    ///
    /// # Errors
    /// The body is too large, or there is no room for it.
    fn add(&self, body: &mut BytesMut, bytes: &[u8], slot: &BodySlot<'_>) -> Result<(), ApiError> {
        if body.len() + bytes.len() > self.limits.bytes_max {
            return Err(self.too_large(slot.tenant));
        }
        let most = self.limits.arrived_bytes_max;
        let has_room = self.arriving.lock().arrived(
            slot.tenant,
            slot.number,
            bytes.len(),
            most,
            Instant::now(),
        );
        if !has_room {
            self.metrics.rejected(slot.tenant, "bodies_bytes");
            let message = "the bodies that are arriving have reached their memory limit; try again";
            return Err(rate_limited(message));
        }
        body.extend_from_slice(bytes);
        Ok(())
    }

    fn too_large(&self, tenant: &str) -> ApiError {
        self.metrics.rejected(tenant, "body_bytes");
        let most = self.limits.bytes_max;
        let message = format!("the body is larger than {most} bytes");
        ApiError::new(ErrorKind::TooLarge, message).with_code(code::REQUEST_TOO_LARGE)
    }

    fn late(&self, tenant: &str, message: String) -> ApiError {
        self.metrics.rejected(tenant, "body_time");
        ApiError::new(ErrorKind::RequestTimeout, message).with_code("body_timeout")
    }

    fn show(&self, arriving: &ArrivingBodies) {
        self.metrics.families.bodies.set(arriving.total as i64);
    }
}

fn undecodable(error: io::Error) -> ApiError {
    let message = "the body is not what its content-encoding says";
    ApiError::new(ErrorKind::InvalidRequest, message).with_detail(error)
}

impl ArrivingBodies {
    /// Cuts off the tenant's oldest body, if it has had its time. Returns whether it did.
    fn cut_off_oldest(&mut self, tenant: &str, now: Instant) -> bool {
        let oldest = self
            .by_tenant
            .get(tenant)
            .and_then(BTreeMap::first_key_value)
            .filter(|(_, body)| now.saturating_duration_since(body.began) >= CUT_OFF_AFTER)
            .map(|(number, body)| (*number, body.cut_off.clone()));
        let Some((number, cut_off)) = oldest else {
            return false;
        };
        cut_off.notify_one();
        self.remove(tenant, number);
        true
    }

    /// Counts bytes that have arrived of a body. If they do not fit, the oldest body of the tenant with most bytes is
    /// cut off. The share of a tenant does not limit its only body. Returns whether the bytes fit.
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
                // It was cut off, and its reader is about to notice.
                return true;
            };
            let held = |bodies: &BTreeMap<u64, ArrivingBody>| {
                bodies.values().map(|body| body.bytes).sum::<usize>()
            };
            let crowded = if held(of_tenant) + bytes > most / 2 && of_tenant.len() > 1 {
                tenant.to_owned()
            } else if self.bytes + bytes > most {
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
            if !self.cut_off_oldest(&crowded, now) {
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

impl Drop for BodySlot<'_> {
    fn drop(&mut self) {
        let mut arriving = self.bodies.arriving.lock();
        arriving.remove(self.tenant, self.number);
        self.bodies.show(&arriving);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_service_kit::telemetry::Metrics;

    fn bodies(bodies_max: usize, tenant_bodies_max: usize) -> BodyReader {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        let limits = BodyLimits {
            bytes_max: 1,
            time_max: Duration::MAX,
            bodies_max,
            tenant_bodies_max,
            arrived_bytes_max: 1_000,
        };
        BodyReader::new(limits, Arc::new(metrics))
    }

    async fn is_cut_off(slot: &BodySlot<'_>) -> bool {
        let notified = tokio::time::timeout(Duration::ZERO, slot.cut_off.notified());
        notified.await.is_ok()
    }

    #[tokio::test]
    async fn the_oldest_body_of_the_tenant_with_most_bodies_is_cut_off_once_it_has_had_its_time() {
        let bodies = bodies(5, 3);
        let start = Instant::now();
        let later = start + CUT_OFF_AFTER;
        let of_a: Vec<_> = (0..3).map(|_| bodies.begin("a", start).unwrap()).collect();
        let refused = bodies.begin("a", start).err().unwrap();
        assert_eq!(refused.kind, ErrorKind::Overloaded);
        let of_b = bodies.begin("b", start).unwrap();
        let newer = bodies.begin("a", later).unwrap();
        assert!(is_cut_off(&of_a[0]).await);
        assert!(!is_cut_off(&of_a[1]).await && !is_cut_off(&of_b).await);
        // Another tenant gets room at the expense of the tenant that has most.
        let of_c = bodies.begin("c", later).unwrap();
        let of_d = bodies.begin("d", later).unwrap();
        assert!(is_cut_off(&of_a[1]).await);
        assert!(!is_cut_off(&of_b).await && !is_cut_off(&of_c).await);
        assert_eq!(bodies.metrics.families.bodies.get(), 5);
        drop((of_a, of_b, of_c, of_d, newer));
        assert_eq!(
            (
                bodies.metrics.families.bodies.get(),
                bodies.arriving.lock().by_tenant.len()
            ),
            (0, 0)
        );
    }

    #[tokio::test]
    async fn arrived_bytes_are_bounded_and_the_oldest_body_of_the_tenant_with_most_bytes_is_cut_off()
     {
        let bodies = bodies(9, 9);
        let start = Instant::now();
        let later = start + CUT_OFF_AFTER;
        let of_a: Vec<_> = (0..3).map(|_| bodies.begin("a", start).unwrap()).collect();
        let of_b = bodies.begin("b", start).unwrap();
        let arrived = |slot: &BodySlot<'_>, bytes, now| {
            bodies
                .arriving
                .lock()
                .arrived(slot.tenant, slot.number, bytes, 1_000, now)
        };
        assert!(arrived(&of_a[0], 300, start) && arrived(&of_a[1], 200, start));
        // A tenant may have half of the bytes, unless it has only one body.
        assert!(!arrived(&of_a[2], 1, start));
        assert!(arrived(&of_b, 500, start));
        assert!(!arrived(&of_b, 1, start));
        assert_eq!(bodies.arriving.lock().bytes, 1_000);
        // A body that has had its time is cut off.
        assert!(arrived(&of_a[2], 200, later));
        assert!(is_cut_off(&of_a[0]).await && !is_cut_off(&of_a[1]).await);
        assert_eq!(bodies.arriving.lock().bytes, 900);
        // A body that was cut off no longer counts, and is not refused a second time.
        assert!(arrived(&of_a[0], 5_000, later));
        assert_eq!(bodies.arriving.lock().bytes, 900);
        drop((of_a, of_b));
        assert_eq!(bodies.arriving.lock().bytes, 0);
    }
}
