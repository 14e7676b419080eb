//! Panics of a process: they are counted, and a process that lost an actor is not ready. The state is that of a whole
//! process, so these tests have one of their own.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use refrain_service_kit::actors;
use refrain_service_kit::http::{ListenerConfig, ServeOptions, serve};
use refrain_service_kit::tasks;
use refrain_service_kit::telemetry::{Metrics, install_crypto_provider};

/// The value of a family on a page of metrics.
fn value(metrics: &Metrics, series: &str) -> u64 {
    let page = String::from_utf8(metrics.render()).unwrap();
    let line = page.lines().find_map(|line| line.strip_prefix(series));
    line.unwrap_or_else(|| panic!("{page}"))
        .trim()
        .parse()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_counted_and_readiness_tells_of_a_lost_actor() {
    tasks::report_panics();
    let metrics = Metrics::new().unwrap();
    let options = ServeOptions {
        service: "bakery",
        listen: "127.0.0.1:0".parse().unwrap(),
        threads: 1,
        body_bytes_max: 1_000,
        connections_max: 16,
        http: ListenerConfig::default(),
    };
    let server = serve(options, &metrics, Arc::new(|| Ok(())), |_| {}).unwrap();
    let url = format!("http://{}/readyz", server.addr());
    install_crypto_provider();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let ready = async || {
        let answer = client.get(&url).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    assert_eq!(value(&metrics, "refrain_panics_total"), 0);

    // One that begins anew goes on as if nothing had happened.
    let begun = Arc::new(AtomicU64::new(0));
    let counted = begun.clone();
    let kneading = actors::start("kneading", move || {
        assert!(counted.fetch_add(1, Ordering::Relaxed) >= 2, "planned");
        async {}
    });
    kneading.ended().await;
    assert_eq!(begun.load(Ordering::Relaxed), 3);
    assert_eq!(value(&metrics, "refrain_panics_total"), 2);
    let restarts = |actor: &str| {
        let series = format!("refrain_actor_restarts_total{{actor=\"{actor}\"}}");
        value(&metrics, &series)
    };
    assert_eq!(restarts("kneading"), 2);
    assert_eq!(ready().await.0, 200);
    assert_eq!(value(&metrics, "refrain_ready{service=\"bakery\"}"), 1);

    // One that panics again and again, and one that cannot begin anew.
    let baking = actors::start("baking", || async { panic!("planned") });
    while ready().await.0 == 200 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(restarts("baking") >= 6, "{}", restarts("baking"));
    let (status, reason) = ready().await;
    assert_eq!(status, 503);
    assert!(reason.contains("\"baking\" is lost"), "{reason}");
    drop(baking);
    let acting = tokio::spawn(async {
        let _sentinel = actors::Sentinel::new("acting");
        panic!("planned")
    });
    assert!(acting.await.is_err());
    let (_, reason) = ready().await;
    assert!(reason.contains("\"acting\" is lost"), "{reason}");
    assert_eq!(restarts("acting"), 0);
    assert_eq!(value(&metrics, "refrain_ready{service=\"bakery\"}"), 0);
}
