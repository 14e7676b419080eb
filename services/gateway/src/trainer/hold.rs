//! Holds requests back until there is room for them, in order of arrival: a trainer would lose a rollout that is
//! refused, or send it again every second.
//!
//! A request waits three times at most. Its body is read when there is memory for it. It is asked of the scheduler
//! when fewer rollouts than the limit are. Where another limit of the gateway or of the tenant is reached, the
//! request that waits for longest tries again now and then, and the others wait behind it.
//!
//! Each limit has a line of its own. A request that waits in one holds what it got from earlier limits only, so those
//! that it waits for never wait behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::drain::Drain;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

use crate::metrics::{GatewayMetrics, GaugeGuard};
use crate::tenants::USAGE_UNKNOWN;

/// Bytes per permit of the semaphore for bodies, since semaphores have at most 2^29 permits on 32-bit machines.
const UNIT_BYTES: usize = 1 << 10;

/// Pauses between two attempts of the request that waits for longest.
const ATTEMPT_EVERY_MIN: Duration = Duration::from_millis(2);
const ATTEMPT_EVERY_MAX: Duration = Duration::from_millis(200);

/// Time after which a request that cannot even be held may be sent again.
const RETRY_AFTER_MS: u64 = 5_000;

/// Room for requests, and those that wait for it.
pub(super) struct Hold {
    bodies: Arc<Semaphore>,
    body_units_max: u32,
    slots: Arc<Semaphore>,
    slots_max: u32,
    /// Whoever has one of these is the first of those that wait for another limit.
    turns: [Mutex<()>; Limit::COUNT],
    held: AtomicUsize,
    held_max: usize,
    drain: Drain,
    metrics: Arc<GatewayMetrics>,
}

/// A limit outside of [`Hold`], in the order in which a request meets them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Limit {
    /// Bodies that are parsed and tokenized.
    Parsing,
    /// Forms of outputs that are compiled.
    Forms,
    /// Rollouts in flight, of the gateway and of the tenant.
    Admission,
    /// Requests of the tenant, at once and per minute.
    Requests,
    /// Tokens of the tenant per minute.
    Tokens,
}

impl Limit {
    const COUNT: usize = 5;
}

/// The limits of [`Hold`].
#[derive(Clone, Copy, Debug)]
pub(super) struct HoldLimits {
    /// Bytes of bodies that are read and wait.
    pub(super) bytes_max: usize,
    /// Choices that are asked of the scheduler at once.
    pub(super) in_flight_max: usize,
    /// Requests that wait.
    pub(super) held_max: usize,
}

/// The memory of a body, until its request is admitted.
pub(super) struct BodyRoom {
    _permit: OwnedSemaphorePermit,
    _bytes: GaugeGuard,
}

/// The slots of an admitted request, until it ends.
pub(super) struct Slots {
    _permit: OwnedSemaphorePermit,
}

/// Counts a request that waits.
struct Held<'a> {
    hold: &'a Hold,
    _gauge: GaugeGuard,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.hold.held.fetch_sub(1, Ordering::Relaxed);
    }
}

fn permits(wanted: usize) -> u32 {
    let most = Semaphore::MAX_PERMITS.min(u32::MAX as usize);
    wanted.clamp(1, most) as u32
}

impl Hold {
    /// Creates the room, without requests.
    pub(super) fn new(limits: HoldLimits, drain: Drain, metrics: Arc<GatewayMetrics>) -> Self {
        let body_units_max = permits(limits.bytes_max / UNIT_BYTES);
        let slots_max = permits(limits.in_flight_max);
        Hold {
            bodies: Arc::new(Semaphore::new(body_units_max as usize)),
            body_units_max,
            slots: Arc::new(Semaphore::new(slots_max as usize)),
            slots_max,
            turns: Default::default(),
            held: AtomicUsize::new(0),
            held_max: limits.held_max,
            drain,
            metrics,
        }
    }

    /// Number of requests that wait here.
    pub(super) fn len(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Waits for the memory of a body of so many bytes.
    ///
    /// # Errors
    /// `Overloaded` if too many requests wait already, `Unavailable` when the gateway drains.
    pub(super) async fn body_room(&self, tenant: &str, bytes: usize) -> Result<BodyRoom, ApiError> {
        let units = permits(bytes.div_ceil(UNIT_BYTES)).min(self.body_units_max);
        let permit = self.acquire(tenant, &self.bodies, units).await?;
        let gauge = &self.metrics.families.trainer_held_bytes;
        let bytes = i64::from(units) * UNIT_BYTES as i64;
        Ok(BodyRoom {
            _permit: permit,
            _bytes: GaugeGuard::of(gauge, bytes),
        })
    }

    /// Waits for the slots of a request with so many choices. One with more than there are waits for all of them.
    ///
    /// # Errors
    /// As [`Hold::body_room`].
    pub(super) async fn slots(&self, tenant: &str, choices: usize) -> Result<Slots, ApiError> {
        let wanted = permits(choices).min(self.slots_max);
        let permit = self.acquire(tenant, &self.slots, wanted).await?;
        Ok(Slots { _permit: permit })
    }

    /// Makes an attempt, and further ones for as long as a limit is reached that may have room later.
    ///
    /// # Errors
    /// Any other error of an attempt, or as [`Hold::body_room`].
    pub(super) async fn until_room<T, F>(
        &self,
        limit: Limit,
        tenant: &str,
        mut attempt: impl FnMut() -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let turn = &self.turns[limit as usize];
        // Nobody overtakes those that wait.
        if turn.try_lock().is_ok() {
            match attempt().await {
                Err(error) if may_pass(&error) => {}
                done => return done,
            }
        }
        let _held = self.wait(tenant)?;
        let _turn = self.unless_draining(turn.lock()).await?;
        let mut pause = ATTEMPT_EVERY_MIN;
        loop {
            match attempt().await {
                Err(error) if may_pass(&error) => {}
                done => return done,
            }
            self.unless_draining(tokio::time::sleep(pause)).await?;
            pause = (2 * pause).min(ATTEMPT_EVERY_MAX);
        }
    }

    async fn acquire(
        &self,
        tenant: &str,
        room: &Arc<Semaphore>,
        wanted: u32,
    ) -> Result<OwnedSemaphorePermit, ApiError> {
        if let Ok(permit) = room.clone().try_acquire_many_owned(wanted) {
            return Ok(permit);
        }
        let _held = self.wait(tenant)?;
        let permit = room.clone().acquire_many_owned(wanted);
        let permit = self.unless_draining(permit).await?;
        permit.map_err(ApiError::internal)
    }

    async fn unless_draining<T>(&self, work: impl Future<Output = T>) -> Result<T, ApiError> {
        tokio::select! {
            done = work => Ok(done),
            () = self.drain.begun() => {
                let message = "this gateway is shutting down; send the request again";
                let error = ApiError::new(ErrorKind::Unavailable, message);
                Err(error.with_code(code::SERVER_IS_DRAINING).with_retry_after_ms(RETRY_AFTER_MS))
            }
        }
    }

    fn wait(&self, tenant: &str) -> Result<Held<'_>, ApiError> {
        if self.held.fetch_add(1, Ordering::Relaxed) >= self.held_max {
            self.held.fetch_sub(1, Ordering::Relaxed);
            self.metrics.rejected(tenant, "trainer_held");
            let most = self.held_max;
            let message = format!(
                "{most} requests are held back already, which is gateway.trainer.held_max; send it again later"
            );
            let error = ApiError::new(ErrorKind::Overloaded, message);
            return Err(error
                .with_code(code::RATE_LIMIT_EXCEEDED)
                .with_retry_after_ms(RETRY_AFTER_MS));
        }
        Ok(Held {
            hold: self,
            _gauge: GaugeGuard::new(&self.metrics.families.trainer_held),
        })
    }
}

/// Whether there may be room later. A budget that is spent has none before another day or month, unlike one of which
/// nobody knows yet what is spent.
fn may_pass(error: &ApiError) -> bool {
    let is_full = error.kind == ErrorKind::Overloaded && !error.has_code(code::INSUFFICIENT_QUOTA);
    is_full || error.has_code(USAGE_UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use refrain_service_kit::telemetry::Metrics;
    use std::cell::Cell;

    fn hold(in_flight_max: usize, held_max: usize) -> (Hold, Arc<GatewayMetrics>, Drain) {
        let metrics = Arc::new(GatewayMetrics::new(&Metrics::new().unwrap()).unwrap());
        let drain = Drain::new();
        let limits = HoldLimits {
            bytes_max: 4 * UNIT_BYTES,
            in_flight_max,
            held_max,
        };
        (
            Hold::new(limits, drain.clone(), metrics.clone()),
            metrics,
            drain,
        )
    }

    fn full() -> ApiError {
        ApiError::new(ErrorKind::Overloaded, "full")
    }

    #[tokio::test]
    async fn slots_are_granted_in_order_and_past_the_limit_on_waiting_a_request_is_refused() {
        let (hold, metrics, _) = hold(4, 2);
        let first = hold.slots("a", 3).await.unwrap();
        // It has more choices than there are slots, and would wait for ever otherwise.
        let mut wide = Box::pin(hold.slots("a", 9));
        assert!(wide.as_mut().now_or_never().is_none());
        let mut narrow = Box::pin(hold.slots("a", 1));
        assert!(
            narrow.as_mut().now_or_never().is_none(),
            "it would overtake"
        );
        assert_eq!((hold.len(), metrics.families.trainer_held.get()), (2, 2));
        let error = hold.slots("a", 1).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Overloaded);
        assert!(error.message.contains("gateway.trainer.held_max"));
        assert_eq!(metrics.rejections("trainer_held"), 1);
        drop(first);
        let all = wide.await.unwrap();
        assert!(narrow.as_mut().now_or_never().is_none());
        drop(all);
        assert!(narrow.await.is_ok());
        assert_eq!((hold.len(), metrics.families.trainer_held.get()), (0, 0));
    }

    #[tokio::test]
    async fn bodies_have_memory_or_wait() {
        let (hold, metrics, _) = hold(1, 2);
        let room = hold.body_room("a", 3 * UNIT_BYTES).await.unwrap();
        assert_eq!(metrics.families.trainer_held_bytes.get(), 3 << 10);
        let mut large = Box::pin(hold.body_room("a", 1 << 30));
        assert!(large.as_mut().now_or_never().is_none());
        drop(room);
        drop(large.await.unwrap());
        assert_eq!(metrics.families.trainer_held_bytes.get(), 0);
    }

    #[tokio::test]
    async fn the_first_tries_again_until_there_is_room_and_the_others_wait_behind_it() {
        let (hold, _, _) = hold(1, 9);
        let tries = Cell::new(0);
        let first = hold.until_room(Limit::Tokens, "a", || {
            tries.set(tries.get() + 1);
            std::future::ready(match tries.get() {
                ..6 => Err(full()),
                _ => Ok(()),
            })
        });
        let others = Cell::new(0);
        let second = async {
            tokio::task::yield_now().await;
            hold.until_room(Limit::Tokens, "a", || {
                others.set(others.get() + 1);
                std::future::ready(Ok(()))
            })
            .await
        };
        let (first, second) = tokio::join!(first, second);
        assert!(first.is_ok() && second.is_ok());
        assert_eq!((tries.get(), others.get()), (6, 1));
    }

    #[tokio::test]
    async fn what_no_wait_can_help_is_refused_at_once() {
        let (hold, _, drain) = hold(1, 9);
        for error in [
            ApiError::invalid("n", "must be less"),
            full().with_code(code::INSUFFICIENT_QUOTA),
        ] {
            let refused = || std::future::ready(Err::<(), _>(error.clone()));
            assert_eq!(
                hold.until_room(Limit::Tokens, "a", refused).await,
                Err(error.clone())
            );
        }
        let waits = hold.until_room(Limit::Tokens, "a", || {
            std::future::ready(Err::<(), _>(full()))
        });
        let stop = async { drain.begin() };
        let (ended, ()) = tokio::join!(waits, stop);
        assert!(ended.unwrap_err().has_code(code::SERVER_IS_DRAINING));
    }
}
