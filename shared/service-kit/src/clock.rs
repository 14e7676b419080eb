//! The system clock as numbers that can be stored and sent.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// Seconds since 1970.
pub fn unix_s() -> u64 {
    since_1970().as_secs()
}

/// Milliseconds since 1970.
pub fn unix_ms() -> u64 {
    millis(since_1970())
}

/// A time in whole milliseconds.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Processor time that this thread has used so far. On a busy machine it goes more slowly than the time of day.
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

/// A clock before 1970 was never set. It reads as 1970, and signatures then fail as too new or too old.
fn since_1970() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}
