//! Scripted workers that take the orders of trainers.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use refrain_protocol::engine_order::{EngineAnswer, EngineOrder, EngineOrderReply, EngineState};
use refrain_protocol::scheduling::WorkerReport;
use refrain_protocol::{ApiError, WorkerId};

/// The calls by which engines are asked how many devices they have.
const SIZE_CALLS: [&str; 3] = ["/get_world_size", "/server_info", "/get_server_info"];

/// The workers, of which there is one unless a test says otherwise.
pub(crate) struct FakeFleet {
    state: Mutex<FleetState>,
}

/// The behaviour of the workers, and the orders that they got.
pub(crate) struct FleetState {
    /// The state of each worker by its name.
    pub(crate) workers: BTreeMap<String, EngineState>,
    /// Errors of orders, by the name of the worker.
    pub(crate) failing: HashMap<String, ApiError>,
    /// The answer of engines to calls that are passed on.
    pub(crate) engine: EngineAnswer,
    /// The facts that engines tell of themselves, by the name of the worker.
    pub(crate) facts: HashMap<String, String>,
    /// All orders but reports, with the names of the workers. Questions for these facts are not in it.
    pub(crate) orders: Vec<(String, EngineOrder)>,
}

impl Default for FakeFleet {
    fn default() -> Self {
        FakeFleet {
            state: Mutex::new(FleetState {
                workers: BTreeMap::from([("w0".to_owned(), EngineState::default())]),
                failing: HashMap::new(),
                engine: EngineAnswer {
                    status: 200,
                    body: "{\"success\": true}".into(),
                },
                facts: HashMap::new(),
                orders: Vec::new(),
            }),
        }
    }
}

impl FakeFleet {
    pub(crate) fn state(&self) -> MutexGuard<'_, FleetState> {
        self.state.lock().unwrap()
    }

    /// Adds a worker.
    pub(crate) fn add(&self, name: &str) {
        let mut state = self.state();
        state.workers.insert(name.into(), EngineState::default());
    }

    /// The orders of one worker, taken out.
    pub(crate) fn take_orders(&self) -> Vec<(String, EngineOrder)> {
        std::mem::take(&mut self.state().orders)
    }

    /// The reports of the scheduler.
    pub(crate) fn reports(&self, draining: bool) -> Vec<WorkerReport> {
        let state = self.state();
        let report = |name: &String| WorkerReport {
            worker: WorkerId(name.clone()),
            url: format!("http://{name}"),
            model: "tiny".into(),
            running: 1,
            max_running: 4,
            draining,
            trouble: None,
            suspect: false,
            silent_ms: 10,
            state: None,
            kv: None,
        };
        state.workers.keys().map(report).collect()
    }

    /// Waits while a worker is paused.
    pub(crate) async fn until_it_works(&self) {
        while self
            .state()
            .workers
            .values()
            .any(|worker| worker.pause.is_some())
        {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Carries an order out.
    pub(crate) fn order(
        &self,
        url: &str,
        order: EngineOrder,
    ) -> Result<EngineOrderReply, ApiError> {
        let name = url.trim_start_matches("http://").to_owned();
        let mut state = self.state();
        if let EngineOrder::PassOn(call) = &order
            && !call.is_post
            && SIZE_CALLS.contains(&call.path.as_str())
        {
            let facts = state
                .facts
                .get(&name)
                .filter(|_| call.path == SIZE_CALLS[1]);
            let answer = EngineAnswer {
                status: if facts.is_some() { 200 } else { 404 },
                body: facts.cloned().unwrap_or_default(),
            };
            return Ok(EngineOrderReply {
                state: state.workers[&name],
                answer: Some(answer),
            });
        }
        if order != EngineOrder::Report {
            state.orders.push((name.clone(), order.clone()));
            if let Some(error) = state.failing.get(&name) {
                return Err(error.clone());
            }
        }
        let engine = state.engine.clone();
        let worker = state.workers.get_mut(&name).unwrap();
        let mut answer = None;
        match order {
            EngineOrder::Report | EngineOrder::FlushCache => {}
            EngineOrder::Pause { mode, .. } => worker.pause = Some(mode),
            EngineOrder::Resume => worker.pause = None,
            EngineOrder::LoadWeights { version, .. } => {
                worker.weight_version = version.unwrap_or(worker.weight_version + 1);
            }
            EngineOrder::SetVersion { version } => worker.weight_version = version,
            EngineOrder::PassOn(_) => answer = Some(engine),
        }
        Ok(EngineOrderReply {
            state: *worker,
            answer,
        })
    }
}
