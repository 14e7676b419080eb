//! Limits on the bytes of bodies that are parsed and tokenized at once, and on those that wait for it.
//!
//! Parsing and tokenizing take memory in proportion to the bytes of a body. Large and small bodies have a lane each:
//! in a common queue a small one would wait until all large ones before it are done. A lane serves bodies in the
//! order in which they came. A body that waits is in memory as well, so the bytes of waiting bodies are limited, and
//! a tenant may have half.

use std::sync::Arc;

use parking_lot::Mutex;
use refrain_protocol::ApiError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::rate_limited;
use super::tenant_counts::TenantCounts;
use crate::metrics::GatewayMetrics;

/// Largest body of the lane for small bodies.
const SMALL_BYTES_MAX: usize = 512 << 10;
/// The lane for small bodies has one part in this many of all bytes.
const SMALL_SHARE: usize = 4;
/// A tenant may have one part in this many of the bytes that wait.
const TENANT_SHARE: usize = 2;
/// Bytes per permit of a semaphore. Semaphores have at most 2^29 permits on 32-bit machines.
const UNIT_BYTES: usize = 1 << 10;

/// Admits bodies to be parsed and tokenized. Cheap to clone.
#[derive(Clone)]
pub(crate) struct TokenizingLimiter {
    small: Lane,
    large: Lane,
    waiting: Arc<Waiting>,
}

/// The bodies of one class of size.
#[derive(Clone)]
struct Lane {
    units: Arc<Semaphore>,
    units_max: u32,
    is_large: bool,
}

/// The bodies that wait in both lanes.
struct Waiting {
    bytes_max: usize,
    /// Bytes of bodies that wait.
    counts: Mutex<TenantCounts>,
    metrics: Arc<GatewayMetrics>,
}

/// The permission to parse and tokenize a body. It counts until it is dropped.
pub(crate) struct TokenizingPermit {
    bytes: i64,
    metrics: Arc<GatewayMetrics>,
    /// `None` only during the drop.
    units: Option<OwnedSemaphorePermit>,
    lane: Lane,
}

impl Lane {
    fn new(bytes: usize, is_large: bool) -> Self {
        let units = (bytes / UNIT_BYTES).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Lane {
            units: Arc::new(Semaphore::new(units)),
            units_max: units as u32,
            is_large,
        }
    }

    fn is_empty(&self) -> bool {
        self.units.available_permits() == self.units_max as usize
    }

    /// The permits of a body. One that is larger than the lane takes all of them, so it runs alone.
    fn units_of(&self, bytes: usize) -> u32 {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        units.clamp(1, self.units_max)
    }
}

impl TokenizingLimiter {
    /// Creates the limits: bytes of bodies that run at once, and that wait.
    pub(crate) fn new(
        running_max: usize,
        waiting_max: usize,
        metrics: Arc<GatewayMetrics>,
    ) -> Self {
        map_large_blocks();
        let small = running_max / SMALL_SHARE;
        TokenizingLimiter {
            small: Lane::new(small, false),
            large: Lane::new(running_max - small, true),
            waiting: Arc::new(Waiting {
                bytes_max: waiting_max,
                counts: Mutex::default(),
                metrics,
            }),
        }
    }

    /// Waits until a body may be parsed and tokenized.
    ///
    /// # Errors
    /// `Overloaded` if too many bytes wait already.
    pub(crate) async fn enter(
        &self,
        tenant: &str,
        bytes: usize,
    ) -> Result<TokenizingPermit, ApiError> {
        let lane = match bytes {
            0..=SMALL_BYTES_MAX => &self.small,
            _ => &self.large,
        };
        let (units, wanted) = (lane.units.clone(), lane.units_of(bytes));
        // This fails if another body waits in the lane, so it does not overtake.
        let units = match lane.units.clone().try_acquire_many_owned(wanted) {
            Ok(units) => units,
            Err(_) => {
                let _waits = self.wait(tenant, bytes)?;
                let acquired = units.acquire_many_owned(wanted).await;
                acquired.map_err(ApiError::internal)?
            }
        };
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let metrics = &self.waiting.metrics;
        metrics.families.tokenizing.add(bytes);
        Ok(TokenizingPermit {
            bytes,
            metrics: metrics.clone(),
            units: Some(units),
            lane: lane.clone(),
        })
    }

    fn wait(&self, tenant: &str, bytes: usize) -> Result<WaitingBody, ApiError> {
        let waiting = &self.waiting;
        let mut counts = waiting.counts.lock();
        let of_tenant = counts.of(tenant);
        // The first one of a tenant may always wait if there is room at all, however large it is.
        let is_past_share = of_tenant > 0 && of_tenant + bytes > waiting.bytes_max / TENANT_SHARE;
        if is_past_share || counts.total + bytes > waiting.bytes_max {
            drop(counts);
            waiting.metrics.rejected(tenant, "tokenizing");
            let whose = if is_past_share { "of yours " } else { "" };
            return Err(rate_limited(format!(
                "too many large requests {whose}wait to be tokenized; try again"
            )));
        }
        counts.add(tenant, bytes);
        waiting.show(&counts);
        Ok(WaitingBody {
            tenant: tenant.to_owned(),
            bytes,
            waiting: waiting.clone(),
        })
    }
}

impl Waiting {
    fn show(&self, counts: &TenantCounts) {
        let gauge = &self.metrics.families.tokenizing_waiting;
        gauge.set(counts.total as i64);
    }
}

/// A waiting body, which counts until it is dropped.
struct WaitingBody {
    tenant: String,
    bytes: usize,
    waiting: Arc<Waiting>,
}

impl Drop for WaitingBody {
    fn drop(&mut self) {
        let mut counts = self.waiting.counts.lock();
        counts.remove(&self.tenant, self.bytes);
        self.waiting.show(&counts);
    }
}

impl Drop for TokenizingPermit {
    fn drop(&mut self) {
        self.metrics.families.tokenizing.sub(self.bytes);
        drop(self.units.take());
        if self.lane.is_large && self.lane.is_empty() {
            return_freed_memory();
        }
    }
}

/// Smallest block, in bytes, that the allocator maps by itself and unmaps when it is freed. glibc raises its own
/// bound to 32 MiB with the blocks that it sees, and then keeps twice that for each group of threads. Bodies are
/// parsed on many threads, so a process would grow to several times its need and stay there. With a much lower bound,
/// an engine in the same process would map and unmap its tensors in every step.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES_MIN: i32 = 4 << 20;

/// Makes the allocator return large blocks to the system at once, in the whole process.
fn map_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function takes no pointers, and takes the lock of the allocator itself.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
        libc::mallopt(libc::M_TRIM_THRESHOLD, MAPPED_BYTES_MIN);
    }
}

/// Returns small blocks to the system as well, such as those of many small JSON values.
fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function takes no pointer, and any thread may call it at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use refrain_protocol::ErrorKind;
    use refrain_service_kit::telemetry::Metrics;

    const MIB: usize = 1 << 20;

    /// 6 MiB of large bodies and 2 MiB of small ones may run at once, and 10 MiB may wait.
    fn tokenizing() -> TokenizingLimiter {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        TokenizingLimiter::new(8 * MIB, 10 * MIB, Arc::new(metrics))
    }

    fn waiting_bytes(tokenizing: &TokenizingLimiter) -> i64 {
        let families = &tokenizing.waiting.metrics.families;
        families.tokenizing_waiting.get()
    }

    fn running_bytes(tokenizing: &TokenizingLimiter) -> i64 {
        tokenizing.waiting.metrics.families.tokenizing.get()
    }

    fn permit(entered: Option<Result<TokenizingPermit, ApiError>>) -> TokenizingPermit {
        entered.expect("it waits").expect("it is refused")
    }

    #[test]
    fn large_bodies_wait_for_their_turn_and_small_ones_pass_them() {
        let tokenizing = tokenizing();
        let first = permit(tokenizing.enter("a", 5 * MIB).now_or_never());
        let mut second = Box::pin(tokenizing.enter("a", 4 * MIB));
        assert!((&mut second).now_or_never().is_none());
        // A body that would fit does not overtake.
        let mut third = Box::pin(tokenizing.enter("b", MIB));
        assert!((&mut third).now_or_never().is_none());
        let small = permit(tokenizing.enter("b", 100 << 10).now_or_never());
        assert_eq!(waiting_bytes(&tokenizing), 5 * MIB as i64);
        let running = 5 * MIB + (100 << 10);
        assert_eq!(running_bytes(&tokenizing), running as i64);
        drop(first);
        let second = permit(second.now_or_never());
        let third = permit(third.now_or_never());
        assert_eq!(waiting_bytes(&tokenizing), 0);
        drop((second, third, small));
        assert_eq!(running_bytes(&tokenizing), 0);
    }

    #[test]
    fn a_body_that_is_larger_than_the_lane_runs_alone() {
        let tokenizing = tokenizing();
        let huge = permit(tokenizing.enter("a", 7 * MIB).now_or_never());
        assert!(tokenizing.enter("a", MIB).now_or_never().is_none());
        drop(huge);
        assert!(tokenizing.enter("a", MIB).now_or_never().is_some());
    }

    #[test]
    fn waiting_bytes_are_bounded_for_a_tenant_and_in_all() {
        let tokenizing = tokenizing();
        let _running = permit(tokenizing.enter("a", 6 * MIB).now_or_never());
        let waits = |tenant: &'static str, bytes: usize| {
            let mut waits = Box::pin(tokenizing.enter(tenant, bytes));
            match (&mut waits).now_or_never() {
                None => Ok(waits),
                Some(entered) => Err(entered.map(|_| ()).unwrap_err()),
            }
        };
        let first = waits("a", 4 * MIB).ok().unwrap();
        let error = waits("a", 2 * MIB).err().unwrap();
        assert_eq!(
            (error.kind, error.retry_after_ms),
            (ErrorKind::Overloaded, Some(super::super::RETRY_AFTER_MS))
        );
        assert!(error.message.contains("of yours"));
        let second = waits("b", 6 * MIB).ok().unwrap();
        assert!(!waits("c", MIB).err().unwrap().message.contains("of yours"));
        assert_eq!(tokenizing.waiting.metrics.rejections("tokenizing"), 2);
        // Clients that went away make room.
        drop((first, second));
        assert_eq!(waiting_bytes(&tokenizing), 0);
        assert!(tokenizing.waiting.counts.lock().by_tenant.is_empty());
        assert!(waits("c", 7 * MIB).is_ok());
    }
}
