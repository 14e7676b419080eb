//! The unit of decoding: one chunk of one request on one worker, streamed step by step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::engine::{DrafterKind, Sampling, TokenLogprob};
use crate::{LeaseId, RequestId, SignedNamespace, TokenId, WorkerId};

/// Which drafts a request may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Speculation {
    /// The worker's router decides, step by step.
    #[default]
    Auto,
    /// Suffix drafts wherever the index has one.
    Suffix,
    /// Drafts of the fallback, an EAGLE-3 head; plain decoding where there is none.
    Eagle3,
    /// Drafts of the fallback, a draft model; plain decoding where there is none.
    DraftModel,
    /// Plain decoding. What it says is still remembered.
    Off,
}

/// What a request counts beside others that are decoded with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Less than most.
    Low,
    /// As much as most.
    #[default]
    Normal,
    /// More than most.
    High,
}

/// How much of a step a request is to have where there is not enough for all: hints, which change no output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Urgency {
    /// What its draft tokens count.
    #[serde(default)]
    pub priority: Priority,
    /// Milliseconds per output token after the first that it wants at most, at least 1; `None` wants nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<u32>,
}

/// What is left of a request's patience, of which its chunk may use as much as it likes. Whoever asks counts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkBudget {
    /// Attempts to have the engine begin the request's output, at least 1. Each one after the first is told of
    /// ([`ChunkEvent::Retry`]). Behind a token they do not count: there the worker's own limit holds.
    pub attempts: u32,
    /// Milliseconds until nobody waits for the request any more; `None`: somebody always does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_left_ms: Option<u64>,
}

impl Default for ChunkBudget {
    fn default() -> Self {
        ChunkBudget {
            attempts: 1,
            time_left_ms: None,
        }
    }
}

/// Where a draft came from: the `source` label of metrics and of `metrics.speculative_decoding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DraftSource {
    /// The suffix index.
    Suffix,
    /// An EAGLE-3 head.
    Eagle3,
    /// A draft model inside the engine.
    DraftModel,
    /// The output that the client predicted.
    Prediction,
    /// No draft: a plain decoding step.
    None,
}

impl DraftSource {
    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            DraftSource::Suffix => "suffix",
            DraftSource::Eagle3 => DrafterKind::Eagle3.as_str(),
            DraftSource::DraftModel => DrafterKind::DraftModel.as_str(),
            DraftSource::Prediction => "prediction",
            DraftSource::None => "none",
        }
    }
}

impl From<DrafterKind> for DraftSource {
    fn from(kind: DrafterKind) -> Self {
        match kind {
            DrafterKind::Eagle3 => DraftSource::Eagle3,
            DrafterKind::DraftModel => DraftSource::DraftModel,
        }
    }
}

/// How far away a suffix draft was found: the `scope` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftScope {
    /// The request's own prompt and output.
    Request,
    /// Other samples of its group.
    Group,
    /// The tenant's namespace.
    Tenant,
    /// Nowhere: a plain step.
    None,
}

impl DraftScope {
    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            DraftScope::Request => "request",
            DraftScope::Group => "group",
            DraftScope::Tenant => "tenant",
            DraftScope::None => "none",
        }
    }
}

/// Counts of verify steps. Accepted length is `emitted / steps`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepCounts {
    /// Engine steps that sampled for this request.
    pub steps: u64,
    /// Draft tokens offered.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Tokens emitted, the target's own included.
    pub emitted: u64,
}

impl StepCounts {
    /// Adds another count.
    pub fn add(&mut self, other: StepCounts) {
        self.steps += other.steps;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.emitted += other.emitted;
    }
}

/// Counts by source.
pub type SourceCounts = BTreeMap<DraftSource, StepCounts>;

/// One chunk: decode on from `tokens` until a stop id, a limit, or the end of the chunk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChunkRequest {
    /// The scheduler's grant.
    pub lease: LeaseId,
    /// Fencing: a worker refuses a chunk whose epoch is below the highest it has seen of this request.
    pub epoch: u64,
    /// The request (one choice).
    pub request: RequestId,
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// The client's session, recorded with the document.
    pub session: Option<String>,
    /// The group of samples it belongs to, if any.
    pub group: Option<String>,
    /// Prompt, then the output so far.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` are prompt.
    pub prompt_len: u32,
    /// Fixed for the life of the request.
    pub sampling: Sampling,
    /// Most tokens this request may still emit.
    pub max_new_tokens: u32,
    /// Most tokens of this chunk; `None`: no chunk limit. What a step accepted beyond it is kept.
    pub chunk_tokens: Option<u32>,
    /// Which drafts it may use.
    pub speculation: Speculation,
    /// What it is to have of a step that is shared.
    #[serde(default)]
    pub urgency: Urgency,
    /// How often, and for how long, it may be tried.
    #[serde(default)]
    pub budget: ChunkBudget,
    /// What the client predicts as the output, from its first token on; empty if it predicts nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prediction: Vec<TokenId>,
    /// The request was transferred here by a worker whose fallback this is, and must not be transferred again.
    #[serde(default, rename = "handed_over")]
    pub transferred: bool,
    /// Milliseconds of silence after which the caller takes the worker for lost: over a wire, a worker that has nothing to
    /// say yet says that it lives several times meanwhile. `None`: it is never missed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alive_within_ms: Option<u64>,
}

/// What a worker streams back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ChunkEvent {
    /// The engine failed before the request's first token and is asked once more: one attempt of the budget less.
    Retry,
    /// Tokens of one engine step.
    Step(StepMessage),
    /// The last event of a chunk that did not fail.
    End(ChunkEnd),
}

/// Tokens of one engine step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMessage {
    /// Counts up from 0 within the chunk, without gaps.
    pub sequence: u64,
    /// Emitted tokens, at least one. A stop id, if one was drawn, is the last.
    pub tokens: Vec<TokenId>,
    /// One per token, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// Version of the weights that drew them.
    pub weight_version: u64,
    /// Where the draft came from.
    pub source: DraftSource,
    /// How far away it was found.
    pub scope: DraftScope,
    /// Draft tokens offered in this step, by that source.
    pub drafted: u32,
    /// Of them accepted.
    pub accepted: u32,
    /// What the engine drafted in the same tree. Tokens that both drafted count above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged: Option<DraftShare>,
}

/// A second drafter's part of a step's tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftShare {
    /// Who it is.
    pub source: DraftSource,
    /// Draft tokens that it alone offered.
    pub drafted: u32,
    /// Of them accepted.
    pub accepted: u32,
}

impl StepMessage {
    /// The step's counts by source if the first `kept` of its tokens are kept. The step itself is its first source's, as are
    /// the tokens that no draft brought.
    pub fn counts(&self, kept: usize) -> impl Iterator<Item = (DraftSource, StepCounts)> {
        let kept = kept as u64;
        let drafted = u64::from(self.drafted);
        // A path that leaves the first source's tree does not come back to it.
        let accepted = u64::from(self.accepted).min(drafted).min(kept);
        let beside = self.merged.map(|share| {
            let drafted = u64::from(share.drafted);
            let accepted = u64::from(share.accepted).min(drafted).min(kept - accepted);
            let counts = StepCounts {
                steps: 0,
                drafted,
                accepted,
                emitted: accepted,
            };
            (share.source, counts)
        });
        let first = StepCounts {
            steps: 1,
            drafted,
            accepted,
            emitted: kept - beside.map_or(0, |(_, counts)| counts.emitted),
        };
        [Some((self.source, first)), beside].into_iter().flatten()
    }
}

/// Why a chunk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkEndReason {
    /// A stop id was drawn.
    Stop,
    /// `max_new_tokens` or the engine's context is reached.
    Length,
    /// The chunk is full; the request goes on under the next lease.
    ChunkLimit,
    /// Others have a turn, or the reader stood still; the request goes on under the next lease.
    GaveWay,
    /// The worker is draining; the request goes on elsewhere.
    Draining,
    /// The request is better off on the fallback worker, which [`ChunkEnd::next_worker`] names.
    #[serde(rename = "hand_over")]
    Transfer,
}

/// The last event of a chunk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChunkEnd {
    /// Why.
    pub reason: ChunkEndReason,
    /// The worker that the request continues on, if the reason is [`ChunkEndReason::Transfer`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_worker: Option<WorkerId>,
    /// Prompt tokens found in the engine's KV cache.
    pub cached_tokens: u32,
    /// Wall seconds from the chunk's start to its first token.
    pub prefill_s: f64,
    /// Wall seconds from the first step that emitted to the last.
    pub decode_s: f64,
    /// Tokens emitted in that time: all but those of the first step.
    pub decode_tokens: u32,
}

/// Tells a worker that the caller has stopped reading a chunk, and how much of the output it kept.
///
/// Without it, a dropped stream means that the client went away: everything emitted so far is kept as a
/// partial document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkCut {
    /// The chunk's lease.
    pub lease: LeaseId,
    /// Output tokens kept, counted from the request's first output token. A stop string that ends inside a
    /// step keeps fewer than were emitted.
    pub output_len: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_merged_steps_tokens_are_counted_once() {
        let message = StepMessage {
            sequence: 0,
            tokens: vec![1, 2, 3, 4, 5, 6],
            logprobs: None,
            weight_version: 0,
            source: DraftSource::Suffix,
            scope: DraftScope::Tenant,
            drafted: 4,
            accepted: 2,
            merged: Some(DraftShare {
                source: DraftSource::Eagle3,
                drafted: 5,
                accepted: 3,
            }),
        };
        let counts = |kept| {
            let counts = message.counts(kept);
            let numbers = counts.map(|(source, of)| {
                (
                    source.as_str(),
                    [of.steps, of.drafted, of.accepted, of.emitted],
                )
            });
            numbers.collect::<Vec<_>>()
        };
        assert_eq!(
            counts(6),
            [("suffix", [1, 4, 2, 3]), ("eagle3", [0, 5, 3, 3])]
        );
        assert_eq!(
            counts(3),
            [("suffix", [1, 4, 2, 2]), ("eagle3", [0, 5, 1, 1])]
        );
        assert_eq!(
            counts(1),
            [("suffix", [1, 4, 1, 1]), ("eagle3", [0, 5, 0, 0])]
        );
        let alone = StepMessage {
            merged: None,
            ..message.clone()
        };
        assert_eq!(alone.counts(6).count(), 1);
        assert_eq!(alone.counts(6).next().unwrap().1.emitted, 6);
    }

    #[test]
    fn sources_are_called_the_same_in_metrics_and_on_the_wire() {
        for source in [
            DraftSource::Suffix,
            DraftSource::Eagle3,
            DraftSource::DraftModel,
            DraftSource::Prediction,
            DraftSource::None,
        ] {
            assert_eq!(serde_json::json!(source), source.as_str());
        }
        for kind in [DrafterKind::Eagle3, DrafterKind::DraftModel] {
            assert_eq!(serde_json::json!(kind), kind.as_str());
            assert_eq!(serde_json::json!(DraftSource::from(kind)), kind.as_str());
        }
    }
}
