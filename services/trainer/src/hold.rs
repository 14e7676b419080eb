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

use prometheus::IntGauge;
use refrain_accounts::AccountMetrics;
use refrain_accounts::tenants::USAGE_UNKNOWN;
use refrain_gateway::{Limit, TrainerConfig, WaitingLine};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, TenantName};
use refrain_service_kit::drain::Drain;
use refrain_service_kit::telemetry::GaugeGuard;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

/// Bytes per permit of the semaphore for bodies, since semaphores have at most 2^29 permits on 32-bit machines.
const UNIT_BYTES: usize = 1 << 10;

/// Pauses between two attempts of the request that waits for longest.
const ATTEMPT_EVERY_MIN: Duration = Duration::from_millis(2);
const ATTEMPT_EVERY_MAX: Duration = Duration::from_millis(200);

/// The limit of requests that cannot even be held, as metrics name it.
pub(super) const HELD_LIMIT: &str = "trainer_held";

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
    tenant: TenantName,
    accounts: Arc<AccountMetrics>,
    held_gauge: IntGauge,
    held_bytes: IntGauge,
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
    pub(super) fn new(
        tenant: TenantName,
        limits: &TrainerConfig,
        drain: Drain,
        accounts: Arc<AccountMetrics>,
        held_gauge: IntGauge,
        held_bytes: IntGauge,
    ) -> Self {
        let body_units_max = permits(limits.held_bytes_max / UNIT_BYTES);
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
            tenant,
            accounts,
            held_gauge,
            held_bytes,
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
    pub(super) async fn body_room(&self, bytes: usize) -> Result<BodyRoom, ApiError> {
        let units = permits(bytes.div_ceil(UNIT_BYTES)).min(self.body_units_max);
        let permit = self.acquire(&self.bodies, units).await?;
        let gauge = &self.held_bytes;
        let bytes = i64::from(units) * UNIT_BYTES as i64;
        Ok(BodyRoom {
            _permit: permit,
            _bytes: GaugeGuard::of(gauge, bytes),
        })
    }

    async fn acquire(
        &self,
        room: &Arc<Semaphore>,
        wanted: u32,
    ) -> Result<OwnedSemaphorePermit, ApiError> {
        if let Ok(permit) = room.clone().try_acquire_many_owned(wanted) {
            return Ok(permit);
        }
        let _held = self.wait()?;
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

    fn wait(&self) -> Result<Held<'_>, ApiError> {
        if self.held.fetch_add(1, Ordering::Relaxed) >= self.held_max {
            self.held.fetch_sub(1, Ordering::Relaxed);
            self.accounts.rejected(&self.tenant, HELD_LIMIT);
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
            _gauge: GaugeGuard::new(&self.held_gauge),
        })
    }
}

impl WaitingLine for Hold {
    type Room = Slots;

    async fn until_room<T>(
        &self,
        limit: Limit,
        mut attempt: impl AsyncFnMut() -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let turn = &self.turns[limit as usize];
        // Nobody overtakes those that wait.
        if turn.try_lock().is_ok() {
            match attempt().await {
                Err(error) if may_pass(&error) => {}
                done => return done,
            }
        }
        let _held = self.wait()?;
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

    /// A request with more choices than there are slots waits for all of them.
    async fn room(&self, choices: usize) -> Result<Slots, ApiError> {
        let wanted = permits(choices).min(self.slots_max);
        let permit = self.acquire(&self.slots, wanted).await?;
        Ok(Slots { _permit: permit })
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

    fn hold(in_flight_max: usize, held_max: usize) -> (Hold, [IntGauge; 2], Drain) {
        let metrics = Metrics::new().unwrap();
        let accounts = Arc::new(AccountMetrics::new(&metrics).unwrap());
        let gauge = |name| IntGauge::new(name, "test").unwrap();
        let (held, bytes) = (gauge("held"), gauge("bytes"));
        let drain = Drain::new();
        let limits = TrainerConfig {
            held_bytes_max: 4 * UNIT_BYTES,
            in_flight_max,
            held_max,
            ..TrainerConfig::default()
        };
        (
            Hold::new(
                "a".parse().unwrap(),
                &limits,
                drain.clone(),
                accounts,
                held.clone(),
                bytes.clone(),
            ),
            [held, bytes],
            drain,
        )
    }

    fn full() -> ApiError {
        ApiError::new(ErrorKind::Overloaded, "full")
    }

    #[tokio::test]
    async fn slots_are_granted_in_order_and_past_the_limit_on_waiting_a_request_is_refused() {
        let (hold, [held, _], _) = hold(4, 2);
        let first = hold.room(3).await.unwrap();
        // It has more choices than there are slots, and would wait for ever otherwise.
        let mut wide = Box::pin(hold.room(9));
        assert!(wide.as_mut().now_or_never().is_none());
        let mut narrow = Box::pin(hold.room(1));
        assert!(
            narrow.as_mut().now_or_never().is_none(),
            "it would overtake"
        );
        assert_eq!((hold.len(), held.get()), (2, 2));
        let error = hold.room(1).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Overloaded);
        assert!(error.message.contains("gateway.trainer.held_max"));
        let rejected = hold.accounts.rejections();
        let rejected = rejected.with_label_values(&["a", HELD_LIMIT]);
        assert_eq!(rejected.get(), 1);
        drop(first);
        let all = wide.await.unwrap();
        assert!(narrow.as_mut().now_or_never().is_none());
        drop(all);
        assert!(narrow.await.is_ok());
        assert_eq!((hold.len(), held.get()), (0, 0));
    }

    #[tokio::test]
    async fn bodies_have_memory_or_wait() {
        let (hold, [_, bytes], _) = hold(1, 2);
        let room = hold.body_room(3 * UNIT_BYTES).await.unwrap();
        assert_eq!(bytes.get(), 3 << 10);
        let mut large = Box::pin(hold.body_room(1 << 30));
        assert!(large.as_mut().now_or_never().is_none());
        drop(room);
        drop(large.await.unwrap());
        assert_eq!(bytes.get(), 0);
    }

    #[tokio::test]
    async fn the_first_tries_again_until_there_is_room_and_the_others_wait_behind_it() {
        let (hold, _, _) = hold(1, 9);
        let tries = Cell::new(0);
        let first = hold.until_room(Limit::Tokens, || {
            tries.set(tries.get() + 1);
            std::future::ready(match tries.get() {
                ..6 => Err(full()),
                _ => Ok(()),
            })
        });
        let others = Cell::new(0);
        let second = async {
            tokio::task::yield_now().await;
            hold.until_room(Limit::Tokens, || {
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
                hold.until_room(Limit::Tokens, refused).await,
                Err(error.clone())
            );
        }
        let waits = hold.until_room(Limit::Tokens, || std::future::ready(Err::<(), _>(full())));
        let stop = async { drain.begin() };
        let (ended, ()) = tokio::join!(waits, stop);
        assert!(ended.unwrap_err().has_code(code::SERVER_IS_DRAINING));
    }
}
