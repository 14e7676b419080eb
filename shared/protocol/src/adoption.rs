//! Engines that register while the mesh runs, and the process that adopts them.
//!
//! A trainer registers an engine with a gateway, and the gateway asks a process of the worker role to adopt it. That
//! process then runs a worker for it, which appears at the scheduler as any other does.

use serde::{Deserialize, Serialize};

use crate::WorkerId;
use crate::engine_order::PauseMode;

/// The wish that an engine be adopted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptRequest {
    /// Base URL of the engine: scheme, host and port.
    pub url: String,
    /// The pause in which its worker starts. `None`: it works at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause: Option<PauseMode>,
}

/// The wish that an engine be given up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseRequest {
    /// The id of the engine, or its URL.
    pub engine: String,
}

/// An engine that was adopted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedEngine {
    /// Its id, `host:port`. The same URL always has the same id.
    pub id: String,
    /// Its base URL.
    pub url: String,
    /// The worker that drives it.
    pub worker: WorkerId,
    /// Chunks that run on it.
    pub running: u32,
    /// Version of its weights, as far as it is known.
    pub weight_version: u64,
    /// Why it takes no chunks at present. `None`: it takes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

/// A process that adopts engines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdopterReport {
    /// Public name of the model that its engines serve.
    pub model: String,
    /// Most engines that it adopts.
    pub engines_max: u32,
    /// Its engines, by id.
    pub engines: Vec<AdoptedEngine>,
}
