//! Samples of a group draft from each other's outputs.

use refrain_protocol::chunk::{ChunkCut, ChunkRequest, DraftScope};
use refrain_rpc::Worker;

use crate::bench::*;
use crate::fakes::FakeEngine;

/// A sample of the same prompt as all others.
fn sample(bench: &Bench, group: Option<&str>) -> ChunkRequest {
    ChunkRequest {
        group: group.map(str::to_owned),
        ..chunk(bench, &[7, 8, 9], 100)
    }
}

fn figure(bench: &Bench, name: &str) -> f64 {
    bench.figure(&format!("refrain_replica_{name}"))
}

#[tokio::test]
async fn a_sample_drafts_from_its_group_and_credits_it() {
    let bench = bench(FakeEngine::new(stopping), |_| {}).await;
    let first = sample(&bench, Some("g"));
    let document = first.request.into();
    let first = run(&bench, first).await;
    assert!(!first.scopes.contains(&DraftScope::Group));
    let second = run(&bench, sample(&bench, Some("g"))).await;
    assert_eq!(second.tokens, first.tokens);
    assert!(second.accepted > 20, "{} accepted", second.accepted);
    // The namespace has the same text. Among equal drafts, the more local one is taken.
    assert!(second.scopes.contains(&DraftScope::Group));
    assert!(!second.scopes.contains(&DraftScope::Tenant));
    eventually("the first sample is touched", || {
        bench
            .store
            .content()
            .touched()
            .any(|touched| touched == document)
    })
    .await;
    for group in [Some("another"), None] {
        let other = run(&bench, sample(&bench, group)).await;
        assert_eq!(other.tokens, first.tokens);
        assert!(!other.scopes.contains(&DraftScope::Group));
        assert!(other.scopes.contains(&DraftScope::Tenant));
    }
    eventually("both groups are shown", || figure(&bench, "groups") == 2.0).await;
}

#[tokio::test]
async fn without_room_for_groups_the_namespace_serves() {
    let bench = bench(FakeEngine::new(stopping), |config| {
        config.replica.groups_max = 0;
    })
    .await;
    let first = run(&bench, sample(&bench, Some("g"))).await;
    let second = run(&bench, sample(&bench, Some("g"))).await;
    assert_eq!(second.tokens, first.tokens);
    assert!(second.scopes.contains(&DraftScope::Tenant));
    assert!(!second.scopes.contains(&DraftScope::Group));
    let refused = figure(&bench, "group_rejections_total{limit=\"groups_max\"}");
    assert_eq!(refused, 2.0);
}

#[tokio::test]
async fn a_group_does_not_draft_tokens_that_were_cut() {
    let bench = bench(FakeEngine::new(stopping), |config| {
        // The output is cut after it has ended and was sealed.
        config.replica.seal_tokens = 1;
        config.replica.upkeep_ms = 1;
    })
    .await;
    let request = sample(&bench, Some("g"));
    let cut = ChunkCut {
        lease: request.lease,
        output_len: 5,
        aborted: false,
    };
    let first = run(&bench, request).await;
    eventually("the output is sealed", || {
        figure(&bench, "jobs_total{job=\"seal\"}") >= 1.0
    })
    .await;
    bench.worker.handle().cut(cut).await.unwrap();
    let second = run(&bench, sample(&bench, Some("g"))).await;
    assert_eq!(second.tokens, first.tokens);
    assert!(
        (1..=5).contains(&second.accepted),
        "{} accepted",
        second.accepted
    );
}
