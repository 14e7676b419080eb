//! Tests of the limits.

use refrain_service_kit::telemetry::Metrics;

use super::*;

fn store(bytes_max: usize) -> ResponseStore {
    let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
    let limits = StoreLimits {
        bytes_max,
        tenant_responses_max: 3,
        age_max: Duration::from_secs(60),
    };
    ResponseStore::new(limits, Arc::new(metrics))
}

fn response(id: &str, bytes: usize) -> StoredResponse {
    let said = |text: &str| {
        Arc::new(HistoryItem::Message {
            role: "user",
            text: text.into(),
        })
    };
    StoredResponse {
        body: Bytes::from("x".repeat(bytes)),
        history: vec![said("asked"), said(id)],
        items: vec![format!("item_{id}")],
    }
}

#[test]
fn a_response_belongs_to_its_tenant_until_it_is_removed() {
    let (store, now) = (store(1 << 20), Instant::now());
    store.insert("a", "r1", response("r1", 10), now);
    assert_eq!(store.body("a", "r1", now).unwrap().len(), 10);
    assert!(store.body("b", "r1", now).is_none() && store.item("b", "item_r1").is_none());
    let item = store.item("a", "item_r1").unwrap();
    assert!(matches!(&*item, HistoryItem::Message { text, .. } if text == "r1"));
    assert_eq!(store.metrics.families.responses.get(), 1);
    assert!(!store.remove("b", "r1") && store.remove("a", "r1") && !store.remove("a", "r1"));
    assert!(store.item("a", "item_r1").is_none());
    let families = &store.metrics.families;
    assert_eq!(
        (families.responses.get(), families.responses_bytes.get()),
        (0, 0)
    );
    assert!(store.table.lock().by_tenant.is_empty());
}

#[test]
fn an_erasure_forgets_the_responses_of_its_tenant_that_are_old_enough() {
    let (store, now) = (store(1 << 20), Instant::now());
    let later = now + Duration::from_secs(2);
    store.insert("a", "r1", response("r1", 10), now);
    store.insert("b", "r2", response("r2", 10), now);
    store.insert("a", "r3", response("r3", 10), later);
    store.forget_tenant("a", Duration::from_secs(1), later);
    assert!(store.body("a", "r1", later).is_none() && store.item("a", "item_r1").is_none());
    assert!(store.body("b", "r2", later).is_some() && store.body("a", "r3", later).is_some());
    store.forget_tenant("a", Duration::ZERO, later);
    assert!(store.body("a", "r3", later).is_none());
    assert_eq!(store.metrics.families.responses.get(), 1);
}

#[test]
fn the_oldest_responses_of_a_tenant_make_room() {
    let (store, now) = (store(1 << 20), Instant::now());
    for id in ["r1", "r2", "r3", "r4"] {
        store.insert("a", id, response(id, 10), now);
    }
    assert!(store.body("a", "r1", now).is_none() && store.item("a", "item_r1").is_none());
    assert!(
        ["r2", "r3", "r4"]
            .iter()
            .all(|id| store.body("a", id, now).is_some())
    );
}

#[test]
fn bytes_are_bounded_for_a_tenant_and_in_all() {
    let (store, now) = (store(10_000), Instant::now());
    store.insert("a", "too large", response("x", 6_000), now);
    assert!(store.body("a", "too large", now).is_none());
    store.insert("a", "r1", response("r1", 2_500), now);
    store.insert("a", "r2", response("r2", 2_500), now);
    // Two of them are more than half of all.
    assert!(store.body("a", "r1", now).is_none());
    store.insert("b", "r3", response("r3", 3_500), now);
    store.insert("c", "r4", response("r4", 4_000), now);
    // The tenant with most bytes gives way, also where it is the newest.
    assert!(store.table.lock().bytes <= 10_000);
    assert!(store.body("a", "r2", now).is_some() && store.body("b", "r3", now).is_some());
    assert!(store.body("c", "r4", now).is_none());
}

#[test]
fn old_responses_are_forgotten() {
    let (store, now) = (store(1 << 20), Instant::now());
    store.insert("a", "r1", response("r1", 10), now);
    let later = now + Duration::from_secs(60);
    assert!(store.body("a", "r1", later).is_none());
    store.insert("b", "r2", response("r2", 10), later);
    assert_eq!(store.metrics.families.responses.get(), 1);
}
