//! The operations listener, apart from the one that clients reach.

use serde_json::json;

use crate::mesh::{Bench, config};

/// The status and the body of a call.
async fn get(url: &str) -> (u16, String) {
    let answer = reqwest::get(url).await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

#[tokio::test]
async fn with_an_operations_listener_clients_see_no_metrics() {
    let mut with = config();
    with.operations_listen = Some(([127, 0, 0, 1], 0).into());
    let bench = Bench::with(with).await;
    let operations = format!("http://{}", bench.gateway.operations_addr().unwrap());
    assert_eq!(bench.chat(json!({})).await.0, 200);

    let (status, metrics) = get(&format!("{operations}/metrics")).await;
    assert_eq!(status, 200);
    assert!(metrics.contains("tenant=\"acme\""), "{metrics}");
    let (status, refused) = get(&format!("{}/metrics", bench.url)).await;
    assert_eq!(status, 404);
    assert!(refused.contains("unknown_url"), "{refused}");
    for listener in [&operations, &bench.url] {
        for path in ["/healthz", "/readyz", "/version"] {
            assert_eq!(
                get(&format!("{listener}{path}")).await.0,
                200,
                "{listener}{path}"
            );
        }
    }
    // Clients' routes are not there.
    assert_eq!(get(&format!("{operations}/v1/models")).await.0, 404);
}

#[tokio::test]
async fn without_an_operations_listener_metrics_are_on_the_only_one() {
    let bench = Bench::with(config()).await;
    assert!(bench.gateway.operations_addr().is_none());
    assert_eq!(get(&format!("{}/metrics", bench.url)).await.0, 200);
}
