//! The limit on the rate at which a replica takes over what another one has.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Spreads bytes over time, over all calls of a join.
pub(super) struct Pace {
    bytes_s_max: u64,
    /// When everything that has passed would have taken its time.
    due: Mutex<Instant>,
}

impl Pace {
    pub(super) fn new(bytes_s_max: u64) -> Self {
        Pace {
            bytes_s_max,
            due: Mutex::new(Instant::now()),
        }
    }

    /// Waits until these bytes have taken their time. Time in which nothing passed is not made up for.
    pub(super) async fn pass(&self, bytes: usize) {
        let until = {
            let mut due = self.due.lock();
            *due = (*due).max(Instant::now()) + time_of(bytes, self.bytes_s_max);
            *due
        };
        tokio::time::sleep_until(until).await;
    }
}

/// The time that bytes take at a rate.
fn time_of(bytes: usize, bytes_s_max: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / bytes_s_max.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bytes_of_all_calls_take_their_time_together() {
        let pace = Pace::new(1_000);
        let began = Instant::now();
        tokio::join!(pace.pass(500), pace.pass(1_500));
        assert_eq!(began.elapsed().as_millis(), 2_000);
        tokio::time::sleep(Duration::from_secs(60)).await;
        let later = Instant::now();
        pace.pass(1_000).await;
        assert_eq!(later.elapsed().as_millis(), 1_000);
    }
}
