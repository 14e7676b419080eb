//! Panics of a process: they are counted, and a process that lost a task is not ready. The state is that of a whole
//! process, so these tests have one of their own.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::cell::Cell;
use std::sync::Arc;

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
async fn a_panic_is_counted_and_readiness_tells_of_a_lost_task() {
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
    let begun = Cell::new(0);
    let end = tasks::restarted("kneading", || {
        begun.set(begun.get() + 1);
        assert!(begun.get() > 2, "planned");
        async { "dough" }
    });
    assert_eq!((end.await, begun.get()), ("dough", 3));
    assert_eq!(value(&metrics, "refrain_panics_total"), 2);
    assert_eq!(ready().await.0, 200);
    assert_eq!(value(&metrics, "refrain_ready{service=\"bakery\"}"), 1);

    // A thread and a task that nobody can begin anew.
    let thread = std::thread::spawn(tasks::lasting_work("baking", || panic!("planned")));
    assert!(thread.join().is_err());
    let task = tokio::spawn(tasks::lasting("selling", async { panic!("planned") }));
    assert!(task.await.unwrap_err().is_panic());
    assert_eq!(value(&metrics, "refrain_panics_total"), 4);
    let (status, reason) = ready().await;
    assert_eq!(status, 503);
    assert!(reason.contains("\"baking\" panicked"), "{reason}");
    assert_eq!(value(&metrics, "refrain_ready{service=\"bakery\"}"), 0);
}
