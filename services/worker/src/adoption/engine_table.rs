//! The engines that a process has adopted.

use std::collections::BTreeMap;

use refrain_protocol::WorkerId;
use refrain_protocol::adoption::AdoptedEngine;
use refrain_rpc::EngineAddress;
use refrain_service_kit::actors::Actor;
use refrain_service_kit::telemetry::MetricsPart;

use crate::WorkerServer;
use crate::service::WorkerHandle;

/// An engine that was adopted.
pub(super) struct Engine {
    pub(super) address: EngineAddress,
    pub(super) worker: WorkerId,
    pub(super) stage: EngineStage,
    pub(super) claims: Claims,
}

/// The claims on an engine. It is given up when there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Claims {
    /// A trainer registered it, perhaps with an earlier process.
    pub(super) is_registered: bool,
    /// A source names it.
    pub(super) is_named: bool,
}

/// How far an engine is.
pub(super) enum EngineStage {
    /// Its worker runs.
    Driven(Box<DrivenEngine>),
    /// An earlier process adopted it, or a source names it. It is tried until it answers.
    Awaited {
        /// Why it has no worker yet.
        fault: String,
        /// Ends the attempts.
        attempts: Actor,
    },
    /// Its worker ends.
    Leaving,
}

/// The worker of an engine.
pub(super) struct DrivenEngine {
    pub(super) server: WorkerServer,
    pub(super) handle: WorkerHandle,
    /// The port that the worker listens on.
    pub(super) port: Option<u16>,
    /// The URL by which leases name it.
    pub(super) url: String,
    /// Shows the worker's metrics for as long as it runs.
    pub(super) _metrics: MetricsPart,
}

/// The engines by their ids.
#[derive(Default)]
pub(super) struct EngineTable(pub(super) BTreeMap<String, Engine>);

impl Engine {
    /// The engine as callers see it.
    pub(super) fn shown(&self) -> AdoptedEngine {
        let (mut running, mut weight_version) = (0, 0);
        let fault = match &self.stage {
            EngineStage::Driven(driven) => {
                running = driven.handle.running();
                weight_version = driven.handle.weight_version();
                driven.handle.readiness().err()
            }
            EngineStage::Awaited { fault, .. } => Some(fault.clone()),
            EngineStage::Leaving => Some("it is being given up".to_owned()),
        };
        AdoptedEngine {
            id: self.address.id.clone(),
            url: self.address.url.clone(),
            worker: self.worker.clone(),
            running,
            weight_version,
            fault,
        }
    }
}

impl EngineTable {
    /// The worker that leases name by this URL.
    pub(super) fn worker_at(&self, url: &str) -> Option<WorkerHandle> {
        let mut driven = self.0.values().filter_map(Engine::driven);
        let named = driven.find(|driven| driven.url == url);
        named.map(|driven| driven.handle.clone())
    }

    /// The ports that workers listen on.
    pub(super) fn ports(&self) -> Vec<u16> {
        let driven = self.0.values().filter_map(Engine::driven);
        driven.filter_map(|driven| driven.port).collect()
    }

    /// The URLs of all engines that registered and stay.
    pub(super) fn urls(&self) -> Vec<String> {
        let stays = |engine: &&Engine| {
            engine.claims.is_registered && !matches!(engine.stage, EngineStage::Leaving)
        };
        let engines = self.0.values().filter(stays);
        engines.map(|engine| engine.address.url.clone()).collect()
    }
}

impl Engine {
    fn driven(&self) -> Option<&DrivenEngine> {
        match &self.stage {
            EngineStage::Driven(driven) => Some(driven),
            _ => None,
        }
    }
}
