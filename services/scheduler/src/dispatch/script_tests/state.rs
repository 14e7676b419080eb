//! The state of the dispatcher as operators read it.

use expect_test::expect;

use super::*;

#[test]
fn the_state_is_readable() {
    let mut script = Script::new(small());
    script.run("0 beat a slots=1\n1 ask 1 acme\n2 ask 2 other");
    let state = serde_json::to_string_pretty(&script.dispatch.observe(START_MS + 702)).unwrap();
    expect![[r#"
        {
          "draining": false,
          "queue_length": 1,
          "leases_running": 1,
          "leases_ended_remembered": 0,
          "groups_tracked": 0,
          "prefixes_tracked": 0,
          "sessions_tracked": 0,
          "workers": [
            {
              "worker": "a",
              "url": "http://a",
              "model": "m",
              "tokenizer": "t",
              "leases": 1,
              "foreign": 0,
              "kv_planned_tokens": 356,
              "max_running": 1,
              "draining": false,
              "suspect": false,
              "silent_ms": 702
            }
          ],
          "pools": [
            {
              "model": "m",
              "tokenizer": "t",
              "waiting": 1,
              "rollouts_waiting": 0,
              "rollouts_running": 0,
              "service_ms": 1000,
              "output_tokens": 256,
              "history_correlation_percent": 0,
              "sibling_correlation_percent": 0,
              "reference_gain_percent": 0,
              "order_by_lengths_pays": false,
              "order_by_references_pays": true,
              "tenants_tracked": 2,
              "tenants": [
                {
                  "tenant": "other",
                  "waiting": 1,
                  "running": 0,
                  "served": 0
                },
                {
                  "tenant": "acme",
                  "waiting": 0,
                  "running": 1,
                  "served": 620
                }
              ]
            }
          ]
        }"#]]
    .assert_eq(&state);
    assert_eq!(
        script.dispatch.models(),
        [ServedModel {
            model: "m".into(),
            tokenizer: "t".into(),
            max_context: 4096,
            workers: 1,
            open: Some(1),
            trouble: None,
            compiles_forms: false,
        }]
    );
}
