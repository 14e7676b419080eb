//! How much text is parsed and tokenized at once.
//!
//! Either takes memory by the bytes of the body, so the bytes are counted. Large bodies and small ones have a
//! lane each: in a common queue a small one would wait until all large ones before it are done. In a lane it is
//! first come, first served. A body that waits is in memory already, so
//! these are bounded too, and a tenant may have half of that.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::{IntCounter, IntGauge};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bodies up to here go by the lane of the small ones.
const SMALL_BYTES_MAX: usize = 512 << 10;
/// The small ones' share of what runs is one in so many.
const SMALL_SHARE: usize = 4;
/// A tenant may have one in so many parts of all bytes that wait.
const TENANT_SHARE: usize = 2;
/// Semaphores count in these, in bytes: they end at 2^29 or so on small machines.
const UNIT_BYTES: usize = 1 << 10;
/// When a refused client may try again.
const RETRY_AFTER_MS: u64 = 1_000;

/// Its gauges and its counter.
#[derive(Clone)]
pub(crate) struct TokenizingMetrics {
    /// Bytes of bodies that are parsed and tokenized now.
    pub(crate) running: IntGauge,
    /// Bytes of bodies that wait for it.
    pub(crate) waiting: IntGauge,
    /// Bodies that were refused.
    pub(crate) rejections: IntCounter,
}

/// Lets bodies in. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Tokenizing {
    small: Lane,
    large: Lane,
    waiting: Arc<Waiting>,
    metrics: TokenizingMetrics,
}

#[derive(Clone)]
struct Lane {
    units: Arc<Semaphore>,
    units_max: u32,
    is_large: bool,
}

struct Waiting {
    bytes_max: usize,
    counts: Mutex<Counts>,
    gauge: IntGauge,
}

#[derive(Default)]
struct Counts {
    total: usize,
    /// Only tenants whose bodies wait.
    by_tenant: HashMap<String, usize>,
}

/// A body's place among those that run; dropping it gives it back.
pub(crate) struct Place {
    bytes: i64,
    running: IntGauge,
    /// None while it is dropped.
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

    /// One that is larger than the whole lane runs alone.
    fn units_of(&self, bytes: usize) -> u32 {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        units.clamp(1, self.units_max)
    }
}

impl Tokenizing {
    /// `running_max` and `waiting_max` are bytes of bodies.
    pub(crate) fn new(running_max: usize, waiting_max: usize, metrics: TokenizingMetrics) -> Self {
        map_large_blocks();
        let small = running_max / SMALL_SHARE;
        Tokenizing {
            small: Lane::new(small, false),
            large: Lane::new(running_max - small, true),
            waiting: Arc::new(Waiting {
                bytes_max: waiting_max,
                counts: Mutex::default(),
                gauge: metrics.waiting.clone(),
            }),
            metrics,
        }
    }

    /// Waits until a body may be worked on.
    ///
    /// # Errors
    /// `Overloaded` if too much waits already.
    pub(crate) async fn enter(&self, tenant: &str, bytes: usize) -> Result<Place, ApiError> {
        let lane = match bytes {
            0..=SMALL_BYTES_MAX => &self.small,
            _ => &self.large,
        };
        let (units, wanted) = (lane.units.clone(), lane.units_of(bytes));
        // Does not overtake: it fails if anybody waits in this lane.
        let units = match lane.units.clone().try_acquire_many_owned(wanted) {
            Ok(units) => units,
            Err(_) => {
                let _waits = self.wait(tenant, bytes)?;
                let acquired = units.acquire_many_owned(wanted).await;
                acquired.map_err(ApiError::internal)?
            }
        };
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.metrics.running.add(bytes);
        Ok(Place {
            bytes,
            running: self.metrics.running.clone(),
            units: Some(units),
            lane: lane.clone(),
        })
    }

    fn wait(&self, tenant: &str, bytes: usize) -> Result<Waits, ApiError> {
        let waiting = &self.waiting;
        let mut counts = waiting.lock();
        let of_tenant = counts.by_tenant.get(tenant).copied().unwrap_or(0);
        // The first one of a tenant may always wait if there is room at all, however large it is.
        let is_past_share = of_tenant > 0 && of_tenant + bytes > waiting.bytes_max / TENANT_SHARE;
        if is_past_share || counts.total + bytes > waiting.bytes_max {
            drop(counts);
            self.metrics.rejections.inc();
            let whose = if is_past_share { "of yours " } else { "" };
            return Err(ApiError::new(
                ErrorKind::Overloaded,
                format!("too many large requests {whose}wait to be tokenized; try again"),
            )
            .with_code(code::RATE_LIMIT_EXCEEDED)
            .with_retry_after_ms(RETRY_AFTER_MS));
        }
        counts.total += bytes;
        *counts.by_tenant.entry(tenant.to_owned()).or_default() += bytes;
        waiting.gauge.set(counts.total as i64);
        Ok(Waits {
            tenant: tenant.to_owned(),
            bytes,
            waiting: waiting.clone(),
        })
    }
}

impl Waiting {
    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A body that waits.
struct Waits {
    tenant: String,
    bytes: usize,
    waiting: Arc<Waiting>,
}

impl Drop for Waits {
    fn drop(&mut self) {
        let mut counts = self.waiting.lock();
        counts.total -= self.bytes;
        self.waiting.gauge.set(counts.total as i64);
        if let Some(of_tenant) = counts.by_tenant.get_mut(&self.tenant) {
            *of_tenant -= self.bytes;
            if *of_tenant == 0 {
                counts.by_tenant.remove(&self.tenant);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.running.sub(self.bytes);
        drop(self.units.take());
        if self.lane.is_large && self.lane.is_empty() {
            return_freed_memory();
        }
    }
}

/// Blocks from here on are mapped one by one and unmapped when they are freed, in bytes. glibc raises its own bound to
/// 32 MiB with the blocks that it sees, and from then on keeps twice that for each group of threads. Bodies are parsed
/// by ever other threads, so a process grew to several times what it needed and stayed so. Much lower bounds would make
/// an engine in the same process map and unmap its tensors with every step.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES_MIN: i32 = 4 << 20;

/// Has the allocator give large blocks back at once. Holds for the whole process.
fn map_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes no pointers, and the allocator's own lock is taken for it.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
        libc::mallopt(libc::M_TRIM_THRESHOLD, MAPPED_BYTES_MIN);
    }
}

/// Gives small blocks back to the system as well: those of many small JSON values.
fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes no pointer, and any thread may call it at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::GatewayMetrics;
    use futures_util::FutureExt;
    use refrain_service_kit::telemetry::Metrics;

    const MIB: usize = 1 << 20;

    /// 6 MiB for large ones and 2 MiB for small ones at once; 10 MiB may wait.
    fn tokenizing() -> Tokenizing {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        Tokenizing::new(8 * MIB, 10 * MIB, metrics.tokenizing)
    }

    fn place(entered: Option<Result<Place, ApiError>>) -> Place {
        entered.expect("it waits").expect("it is refused")
    }

    #[test]
    fn large_ones_wait_for_their_turn_and_small_ones_go_past_them() {
        let tokenizing = tokenizing();
        let first = place(tokenizing.enter("a", 5 * MIB).now_or_never());
        let mut second = Box::pin(tokenizing.enter("a", 4 * MIB));
        assert!((&mut second).now_or_never().is_none());
        // One that would fit does not overtake.
        let mut third = Box::pin(tokenizing.enter("b", MIB));
        assert!((&mut third).now_or_never().is_none());
        let small = place(tokenizing.enter("b", 100 << 10).now_or_never());
        assert_eq!(tokenizing.metrics.waiting.get(), 5 * MIB as i64);
        let running = 5 * MIB + (100 << 10);
        assert_eq!(tokenizing.metrics.running.get(), running as i64);
        drop(first);
        let second = place(second.now_or_never());
        let third = place(third.now_or_never());
        assert_eq!(tokenizing.metrics.waiting.get(), 0);
        drop((second, third, small));
        assert_eq!(tokenizing.metrics.running.get(), 0);
    }

    #[test]
    fn one_that_is_larger_than_the_lane_runs_alone() {
        let tokenizing = tokenizing();
        let huge = place(tokenizing.enter("a", 7 * MIB).now_or_never());
        assert!(tokenizing.enter("a", MIB).now_or_never().is_none());
        drop(huge);
        assert!(tokenizing.enter("a", MIB).now_or_never().is_some());
    }

    #[test]
    fn what_waits_is_bounded_for_a_tenant_and_in_all() {
        let tokenizing = tokenizing();
        let _running = place(tokenizing.enter("a", 6 * MIB).now_or_never());
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
            (ErrorKind::Overloaded, Some(RETRY_AFTER_MS))
        );
        assert!(error.message.contains("of yours"));
        let second = waits("b", 6 * MIB).ok().unwrap();
        assert!(!waits("c", MIB).err().unwrap().message.contains("of yours"));
        assert_eq!(tokenizing.metrics.rejections.get(), 2);
        // Those that went away make room.
        drop((first, second));
        assert_eq!(tokenizing.metrics.waiting.get(), 0);
        assert!(tokenizing.waiting.lock().by_tenant.is_empty());
        assert!(waits("c", 7 * MIB).is_ok());
    }
}
