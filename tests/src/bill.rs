//! Usage as the draft store has it, and as answers tell it.

use std::sync::Arc;

use refrain_protocol::usage::UsageCounts;
use refrain_rpc::{HttpUsageStore, UsageGrouping, UsageQuery, UsageReplica, read_usage};
use refrain_service_kit::http::MeshClient;
use serde_json::Value;

use crate::{Answer, HttpMesh, PATIENCE, Service, wait_until};

/// The sums over everything that the store of a mesh has.
async fn stored_usage(mesh: &HttpMesh) -> anyhow::Result<UsageCounts> {
    let url = mesh.url(Service::DraftStore);
    let client = MeshClient::new(&url, &mesh.keys().secret, PATIENCE)?;
    let replica = UsageReplica {
        name: url,
        store: Arc::new(HttpUsageStore::new(client)),
    };
    let query = UsageQuery {
        until_hour: u32::MAX,
        grouping: UsageGrouping::parse("tenant").map_err(anyhow::Error::msg)?,
        lines_max: 10,
        ..UsageQuery::default()
    };
    let report = read_usage(&[replica], &query).await?;
    let sums = report.data.iter().map(|line| line.counts);
    Ok(sums.fold(UsageCounts::default(), UsageCounts::plus))
}

/// Waits until the sums of the store are right.
pub async fn until_stored(
    mesh: &HttpMesh,
    what: &str,
    is_so: impl Fn(UsageCounts) -> bool,
) -> UsageCounts {
    wait_until(what, async || {
        let sums = stored_usage(mesh).await.ok()?;
        is_so(sums).then_some(sums)
    })
    .await
}

/// The usage that an answer tells.
pub fn counts(answer: &Answer) -> UsageCounts {
    let usage = &answer.body["usage"];
    let drafts = &answer.body["metrics"]["speculative_decoding"];
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    UsageCounts {
        requests: 1,
        input_tokens: number(&usage["prompt_tokens"]),
        cached_input_tokens: number(&usage["prompt_tokens_details"]["cached_tokens"]),
        output_tokens: number(&usage["completion_tokens"]),
        reasoning_tokens: number(&usage["completion_tokens_details"]["reasoning_tokens"]),
        verified_draft_tokens: number(&drafts["drafted"]),
        accepted_draft_tokens: number(&drafts["accepted"]),
    }
}
