//! Chunks, the unit of decoding: a piece of one request on one worker, streamed step by step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::engine::{DrafterKind, Sampling, TokenLogprob};
use crate::prefix::PrefixHash;
use crate::{LeaseId, RequestId, SignedNamespace, TokenId, WorkerId};

/// The drafts that a request may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Speculation {
    /// The router of the worker decides in every step.
    #[default]
    Auto,
    /// Suffix drafts, whenever the index has one.
    Suffix,
    /// Drafts of the EAGLE-3 head; plain decoding if there is none.
    Eagle3,
    /// Drafts of the draft model; plain decoding if there is none.
    DraftModel,
    /// Plain decoding. The output is still stored.
    Off,
}

/// How drafts of a request are made, where its tenant has rules of its own. The worker decides what is missing, and
/// inside an engine the plugin does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DraftRules {
    /// A match of p tokens allows alpha * p draft tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f32>,
    /// Draft tokens that are less likely are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_token_prob: Option<f32>,
    /// Most draft tokens in one step, of whatever source. The limits of the worker hold as well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_spec_tokens: Option<u32>,
}

impl DraftRules {
    /// The rules of a request that is decoded without drafts.
    pub const NO_DRAFTS: DraftRules = DraftRules {
        alpha: None,
        min_token_prob: None,
        max_spec_tokens: Some(0),
    };

    /// Whether it leaves all to the worker.
    pub fn is_empty(&self) -> bool {
        *self == DraftRules::default()
    }
}

/// The weight of a request among those that are decoded with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// A lower weight than most.
    Low,
    /// The usual weight.
    #[default]
    Normal,
    /// A higher weight than most.
    High,
}

/// Hints on the share of a step that a request should get when there is not enough for all. They change no output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Urgency {
    /// The weight of its draft tokens.
    #[serde(default)]
    pub priority: Priority,
    /// Most milliseconds per output token after the first that the request wants, at least 1. `None`: it has no wish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<u32>,
}

impl Urgency {
    /// Whether the request wants more of a step than others get.
    pub fn is_urgent(&self) -> bool {
        self.priority == Priority::High || self.tpot_ms.is_some()
    }

    /// The same without what makes it urgent.
    pub fn ordinary(self) -> Urgency {
        Urgency {
            priority: match self.priority {
                Priority::High => Priority::Normal,
                priority => priority,
            },
            tpot_ms: None,
        }
    }
}

/// The attempts and the time that a request has left. Its chunk may use all of them; the sender keeps count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkBudget {
    /// Attempts at the first token of the request, at least 1. The worker reports each one after the first
    /// ([`ChunkEvent::Retry`]). After the first token only the worker's own limit holds.
    pub attempts: u32,
    /// Milliseconds until nobody waits for the request any more. `None`: there is no limit.
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

/// The source of a draft, which is the `source` label of metrics and of `metrics.speculative_decoding`.
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
    /// Tokens that the form of the output forces.
    Grammar,
    /// No draft, in a plain decoding step. It is the last one: tables have a place for each source up to it.
    None,
}

impl DraftSource {
    /// The value of the label.
    pub fn as_str(self) -> &'static str {
        match self {
            DraftSource::Suffix => "suffix",
            DraftSource::Eagle3 => DrafterKind::Eagle3.as_str(),
            DraftSource::DraftModel => DrafterKind::DraftModel.as_str(),
            DraftSource::Prediction => "prediction",
            DraftSource::Grammar => "grammar",
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

/// The scope in which a suffix draft was found, which is the `scope` label of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftScope {
    /// The prompt and output of the request itself.
    Request,
    /// Other samples of its group.
    Group,
    /// The namespace of the tenant. Earlier versions of workers have a scope of its outputs to the same prompt.
    #[serde(alias = "history")]
    Tenant,
    /// No scope, in a plain decoding step. It is the last one: tables have a place for each scope up to it.
    None,
}

impl DraftScope {
    /// The value of the label.
    pub fn as_str(self) -> &'static str {
        match self {
            DraftScope::Request => "request",
            DraftScope::Group => "group",
            DraftScope::Tenant => "tenant",
            DraftScope::None => "none",
        }
    }
}

/// Counts of verify steps. The accepted length is `emitted / steps`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepCounts {
    /// Engine steps that sampled for this request.
    pub steps: u64,
    /// Draft tokens offered.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Tokens emitted, bonus tokens included.
    pub emitted: u64,
}

impl StepCounts {
    /// Adds other counts.
    pub fn add(&mut self, other: StepCounts) {
        self.steps += other.steps;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.emitted += other.emitted;
    }
}

/// Counts by the source of drafts.
pub type SourceCounts = BTreeMap<DraftSource, StepCounts>;

/// A context that a worker has parked at the end of a chunk, named in the place of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParkedContext {
    /// Epoch of the chunk after which it was parked.
    pub epoch: u64,
    /// Its length in tokens, prompt and output.
    pub tokens: u32,
    /// The hash of all of it ([`crate::prefix::PrefixHasher::whole`]), by which both sides know that they mean the
    /// same.
    pub hash: PrefixHash,
}

/// Asks a worker to decode on from `tokens` until a stop id, a limit, or the end of the chunk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChunkRequest {
    /// The lease that the scheduler granted.
    pub lease: LeaseId,
    /// Fencing epoch. A worker refuses a chunk whose epoch is below the highest that it knows of this request.
    pub epoch: u64,
    /// The request, which is one choice.
    pub request: RequestId,
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The client's session, which is stored with the document.
    pub session: Option<String>,
    /// The group of samples that the request belongs to.
    pub group: Option<String>,
    /// The context that the worker has parked, from which it decodes on. `tokens`, `prediction` and `sampling` are
    /// then those that it parked, and the request leaves them empty. A worker that no longer has it answers
    /// [`crate::error::code::CONTEXT_GONE`], and wants the whole context under the same lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumes: Option<ParkedContext>,
    /// The prompt, followed by the output so far.
    pub tokens: Vec<TokenId>,
    /// Length of the prompt in `tokens`.
    pub prompt_len: u32,
    /// How to sample, which never changes during a request.
    pub sampling: Sampling,
    /// Most tokens that the request may still emit.
    pub max_new_tokens: u32,
    /// Most tokens of this chunk; `None`: no limit. Tokens that a step accepted beyond it are kept.
    pub chunk_tokens: Option<u32>,
    /// The drafts that the request may use.
    pub speculation: Speculation,
    /// How they are made, where the tenant has rules of its own.
    #[serde(default, skip_serializing_if = "DraftRules::is_empty")]
    pub drafts: DraftRules,
    /// Its share of steps with other requests.
    #[serde(default)]
    pub urgency: Urgency,
    /// The attempts and the time that the request has left.
    #[serde(default)]
    pub budget: ChunkBudget,
    /// Output tokens that earlier outputs to the same prompt had. `None`: no such output is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_tokens: Option<u32>,
    /// The output that the client predicts, from its first token on. Empty: it predicts none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prediction: Vec<TokenId>,
    /// The request was transferred here by a worker whose fallback this is, and must not be transferred again.
    #[serde(default, rename = "handed_over")]
    pub transferred: bool,
    /// Milliseconds of silence after which the caller counts the worker as lost. Over HTTP, a worker without events
    /// sends empty lines several times within it. `None`: silence has no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alive_within_ms: Option<u64>,
}

impl ChunkRequest {
    /// Length of the text that the chunk decodes on from.
    pub fn context_len(&self) -> usize {
        self.resumes
            .map_or(self.tokens.len(), |parked| parked.tokens as usize)
    }
}

/// An event of a chunk, which the worker streams back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ChunkEvent {
    /// The engine failed before the first token of the request, and is asked once more. This uses one attempt of the
    /// budget.
    Retry,
    /// The worker is paused, and has held the request for so long since its last event. Time that is held is not the
    /// request's own, nor the engine's.
    Held {
        /// Milliseconds.
        ms: u64,
    },
    /// The tokens of one engine step.
    Step(StepMessage),
    /// The last event of a chunk that did not fail.
    End(ChunkEnd),
}

/// The tokens of one engine step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMessage {
    /// Number of the step within the chunk, from 0 without gaps.
    pub sequence: u64,
    /// Emitted tokens, at least one. A stop id is the last one.
    pub tokens: Vec<TokenId>,
    /// One entry per token, if the request asked for log-probabilities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// Version of the weights that sampled the tokens.
    pub weight_version: u64,
    /// The source of the draft.
    pub source: DraftSource,
    /// The scope in which it was found.
    pub scope: DraftScope,
    /// Draft tokens of that source in this step.
    pub drafted: u32,
    /// Number of them that were accepted.
    pub accepted: u32,
    /// The part of the draft tree that the engine drafted. Tokens that both sources drafted count as those of
    /// `source`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged: Option<DraftShare>,
    /// The part of the draft tree that the form of the output forced, where `source` drafted as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forced: Option<DraftShare>,
}

/// The part of a draft tree that a second drafter made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftShare {
    /// The second drafter.
    pub source: DraftSource,
    /// Draft tokens that only it drafted.
    pub drafted: u32,
    /// Number of them that were accepted.
    pub accepted: u32,
}

impl StepMessage {
    /// Draft tokens of all sources that the engine verified in this step and rejected.
    pub fn rejected(&self) -> u32 {
        let rejected = |share: &DraftShare| share.drafted.saturating_sub(share.accepted);
        let others = self.merged.iter().chain(&self.forced).map(rejected);
        others.fold(
            self.drafted.saturating_sub(self.accepted),
            u32::saturating_add,
        )
    }

    /// Draft tokens of all sources that the engine accepted in this step.
    pub fn accepted(&self) -> u32 {
        let others = self.merged.iter().chain(&self.forced);
        let others = others.map(|share| share.accepted);
        others.fold(self.accepted, u32::saturating_add)
    }

    /// The counts of the step by source, if the first `kept` of its tokens are kept. The step itself counts for the
    /// first source, and so do bonus tokens.
    pub fn counts(&self, kept: usize) -> impl Iterator<Item = (DraftSource, StepCounts)> {
        let kept = kept as u64;
        let drafted = u64::from(self.drafted);
        // A path that leaves the tree of the first source does not come back to it.
        let accepted = u64::from(self.accepted).min(drafted).min(kept);
        let mut left = kept - accepted;
        let mut counts_of = |share: DraftShare| {
            let drafted = u64::from(share.drafted);
            let accepted = u64::from(share.accepted).min(drafted).min(left);
            left -= accepted;
            let counts = StepCounts {
                steps: 0,
                drafted,
                accepted,
                emitted: accepted,
            };
            (share.source, counts)
        };
        let forced = self.forced.map(&mut counts_of);
        let second = self.merged.map(&mut counts_of);
        let first = StepCounts {
            steps: 1,
            drafted,
            accepted,
            // Bonus tokens as well.
            emitted: accepted + left,
        };
        let all = [Some((self.source, first)), forced, second];
        all.into_iter().flatten()
    }
}

/// The reason why a chunk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkEndReason {
    /// A stop id was sampled.
    Stop,
    /// `max_new_tokens` or the context of the engine is reached.
    Length,
    /// The chunk is full. The request continues under its next lease.
    ChunkLimit,
    /// The request gives way to others, or its reader stalled. It continues under its next lease.
    GaveWay,
    /// The worker drains. The request continues on another worker.
    Draining,
    /// The request is better off on the fallback worker, which [`ChunkEnd::next_worker`] names.
    #[serde(rename = "hand_over")]
    Transfer,
    /// The worker was ordered to abort its requests, or its engine was. The output so far is all that there is.
    Aborted,
}

/// The last event of a chunk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChunkEnd {
    /// The reason.
    pub reason: ChunkEndReason,
    /// The worker that the request continues on, if the reason is [`ChunkEndReason::Transfer`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_worker: Option<WorkerId>,
    /// Prompt tokens that were in the KV cache of the engine.
    pub cached_tokens: u32,
    /// Seconds from the start of the chunk to its first token.
    pub prefill_s: f64,
    /// Seconds from the first step that emitted tokens to the last one.
    pub decode_s: f64,
    /// Tokens emitted in `decode_s`, which are all but those of the first step.
    pub decode_tokens: u32,
}

/// Tells a worker that the caller has stopped reading a chunk, and where the output ends.
///
/// A stream that is dropped without it means that the client went away. All tokens emitted so far are then kept as a
/// partial document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkCut {
    /// The lease of the chunk.
    pub lease: LeaseId,
    /// Length of the output, from the first output token of the request. If a stop string ends inside a step, this is
    /// less than the number of emitted tokens.
    pub output_len: u32,
    /// The request was aborted: its output serves as a draft, but its length is nobody's expectation. Callers of
    /// earlier versions leave it out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub aborted: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_merged_step_are_counted_once() {
        let message = StepMessage {
            sequence: 0,
            tokens: vec![1, 2, 3, 4, 5, 6],
            logprobs: None,
            weight_version: 0,
            source: DraftSource::Suffix,
            scope: DraftScope::Tenant,
            drafted: 4,
            accepted: 2,
            forced: None,
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
        assert_eq!(message.rejected(), 4);
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
            forced: None,
            ..message.clone()
        };
        assert_eq!(alone.counts(6).count(), 1);
        assert_eq!(alone.counts(6).next().unwrap().1.emitted, 6);
    }

    #[test]
    fn sources_have_the_same_names_in_metrics_and_on_the_wire() {
        for source in [
            DraftSource::Suffix,
            DraftSource::Eagle3,
            DraftSource::DraftModel,
            DraftSource::Prediction,
            DraftSource::Grammar,
            DraftSource::None,
        ] {
            assert_eq!(serde_json::json!(source), source.as_str());
        }
        for kind in [DrafterKind::Eagle3, DrafterKind::DraftModel] {
            assert_eq!(serde_json::json!(kind), kind.as_str());
            assert_eq!(serde_json::json!(DraftSource::from(kind)), kind.as_str());
        }
    }

    #[test]
    fn a_scope_of_older_workers_is_read() {
        let scope = |name: &str| serde_json::from_str::<DraftScope>(name).unwrap();
        assert_eq!(scope("\"history\""), DraftScope::Tenant);
        assert_eq!(scope("\"tenant\""), DraftScope::Tenant);
    }
}
