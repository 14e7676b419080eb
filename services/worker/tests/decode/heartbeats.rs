//! Heartbeats of a worker whose engine does not answer. The clock is paused.

use std::time::Duration;

use super::*;

/// The interval that the fake scheduler asks for.
const INTERVAL: Duration = Duration::from_millis(20);

#[tokio::test(start_paused = true)]
async fn a_silent_engine_delays_no_heartbeat() {
    let bench = bench(FakeEngine::new(repetitive), |_| {}).await;
    bench.engine.is_silent.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let last = || bench.scheduler.last.lock().unwrap().clone().unwrap();
    assert!(
        last().draining,
        "it takes no chunks while its engine is away"
    );
    bench.engine.is_silent.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!last().draining);
    let times = bench.scheduler.times.lock().unwrap().clone();
    let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
    let longest = gaps.max().unwrap();
    assert!(
        longest <= INTERVAL + Duration::from_millis(2),
        "{longest:?}"
    );
}
