//! Orders to a worker and its engine, as a trainer gives them: pauses, caches and weights.
//!
//! The gateway sends an order to every worker of a model, and tells the trainer what each of them answered.

use serde::{Deserialize, Serialize};

/// The fate of running requests in a pause. New ones wait until the worker resumes, whatever the mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// They end at once, with the tokens that they have ([`crate::chunk::ChunkEndReason::Aborted`]).
    Abort,
    /// They run to their ends, which the call waits for.
    Wait,
    /// They stop where they are, and go on from there later. Their streams stay open and alive.
    Keep,
}

/// An order to a worker and its engine. Repeats are harmless.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum EngineOrder {
    /// Tell the state, and change nothing.
    Report,
    /// Take no steps until the worker resumes.
    Pause {
        /// The fate of running requests.
        mode: PauseMode,
        /// Whether the engine forgets its KV caches, those of running requests included.
        clears_cache: bool,
    },
    /// Go on after a pause.
    Resume,
    /// Forget the KV caches that no running request uses.
    FlushCache,
    /// Replace the weights by those of a directory. Running requests go on with the new ones, and their contexts are
    /// read again.
    LoadWeights {
        /// The directory, as the engine sees it.
        directory: String,
        /// The version of these weights. `None`: one more than the present version.
        version: Option<u64>,
    },
    /// The weights were replaced by other means. Their version is this one from now on.
    SetVersion {
        /// The version.
        version: u64,
    },
    /// A call in the engine's own words, which is passed on unchanged. Engines of this project refuse it.
    PassOn(EngineCall),
}

/// A call to the HTTP interface of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineCall {
    /// Whether it is a POST; otherwise it is a GET.
    pub is_post: bool,
    /// Path with query, such as `/pause?mode=keep`.
    pub path: String,
    /// The body, JSON text. Empty: it has none.
    pub body: String,
}

/// The answer of an engine to an [`EngineCall`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineAnswer {
    /// HTTP status.
    pub status: u16,
    /// The body as text.
    pub body: String,
}

/// The state of a worker and its engine, as far as trainers are concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineState {
    /// Version of the weights; 0 for those that the engine started with.
    pub weight_version: u64,
    /// The mode of the present pause. `None`: the worker works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause: Option<PauseMode>,
    /// Requests that it decodes, or would decode if it were not paused.
    pub running: u32,
    /// Requests that it holds back because it is paused.
    pub held: u32,
}

/// The answer to an [`EngineOrder`] that was carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineOrderReply {
    /// The state after it.
    pub state: EngineState,
    /// The engine's own answer, if the order was [`EngineOrder::PassOn`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<EngineAnswer>,
}
