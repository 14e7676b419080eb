//! Scripted processes that adopt engines.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use refrain_protocol::adoption::{AdoptRequest, AdoptedEngine, AdopterReport, ReleaseRequest};
use refrain_protocol::engine_order::EngineState;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};
use refrain_rpc::{EngineAddress, EngineAdopter};

use crate::mesh::FakeMesh;

/// Most engines of a process.
pub(crate) const ENGINES_MAX: u32 = 2;

/// A process that adopts engines. The worker of each appears in the fleet under the name of the process and its id.
struct FakeAdopter {
    name: String,
    mesh: Arc<FakeMesh>,
    engines: Mutex<BTreeMap<String, AdoptedEngine>>,
}

/// Processes with these URLs, named after their hosts.
pub(crate) fn adopters(urls: &[String], mesh: &Arc<FakeMesh>) -> Vec<Arc<dyn EngineAdopter>> {
    let adopter = |url: &String| {
        let adopter = FakeAdopter {
            name: url.trim_start_matches("http://").to_owned(),
            mesh: mesh.clone(),
            engines: Mutex::default(),
        };
        Arc::new(adopter) as _
    };
    urls.iter().map(adopter).collect()
}

#[async_trait]
impl EngineAdopter for FakeAdopter {
    async fn adopt(&self, request: AdoptRequest) -> Result<AdoptedEngine, ApiError> {
        let address = EngineAddress::read(&request.url)?;
        if address.host == "faulty" {
            let error = ApiError::new(ErrorKind::InvalidRequest, "it serves another model");
            return Err(error.with_code("engine_refused"));
        }
        let mut engines = self.engines.lock().unwrap();
        if let Some(known) = engines.get(&address.id) {
            return Ok(known.clone());
        }
        let name = format!("{}@{}", self.name, address.id);
        let state = EngineState {
            pause: request.pause,
            ..EngineState::default()
        };
        let mut fleet = self.mesh.fleet.state();
        fleet.workers.insert(name.clone(), state);
        let adopted = AdoptedEngine {
            id: address.id.clone(),
            url: address.url,
            worker: WorkerId(name),
            running: 3,
            weight_version: 0,
            fault: None,
        };
        engines.insert(address.id, adopted.clone());
        Ok(adopted)
    }

    async fn release(&self, request: ReleaseRequest) -> Result<AdoptedEngine, ApiError> {
        let released = self.engines.lock().unwrap().remove(&request.engine);
        let released = released.ok_or_else(|| ApiError::new(ErrorKind::NotFound, "not here"))?;
        let mut fleet = self.mesh.fleet.state();
        fleet.workers.remove(&released.worker.0);
        Ok(released)
    }

    async fn report(&self) -> Result<AdopterReport, ApiError> {
        let engines = self.engines.lock().unwrap();
        Ok(AdopterReport {
            model: "tiny".into(),
            engines_max: ENGINES_MAX,
            engines: engines.values().cloned().collect(),
        })
    }
}
