//! Transfers of requests to the worker that is the fallback, and the reports on heads that they go by.

use std::sync::Arc;

use parking_lot::Mutex;
use refrain_protocol::WorkerId;
use refrain_protocol::scheduling::Eagle3Report;
use refrain_speculation::router::{ACCEPTED_LENGTH_PRIOR, HeadStatus, Speeds, should_transfer};

use crate::config::{FallbackChoice, SpeculationConfig};
use crate::running::ActiveRequest;

/// Reports on heads, exchanged between the decode loop and the heartbeats.
#[derive(Default)]
pub(crate) struct HeadReports {
    own: Mutex<Option<Eagle3Report>>,
    fallback: Mutex<Option<Eagle3Report>>,
}

impl HeadReports {
    /// The report on this worker's head; `None` without one.
    pub(crate) fn own(&self) -> Option<Eagle3Report> {
        *self.own.lock()
    }

    /// Keeps the scheduler's report on the worker that is the fallback; `None` if that worker is not available.
    pub(crate) fn set_fallback(&self, report: Option<Eagle3Report>) {
        *self.fallback.lock() = report;
    }
}

/// Decides on transfers.
pub(crate) struct Transfers {
    /// The worker that is the fallback.
    worker: Option<WorkerId>,
    reports: Arc<HeadReports>,
}

impl Transfers {
    pub(super) fn new(config: &SpeculationConfig, reports: Arc<HeadReports>) -> Self {
        Transfers {
            worker: fallback_worker(config),
            reports,
        }
    }

    /// Reports how the engine's head does at the batch size that it serves best. An idle worker would else be judged
    /// by a straggler.
    pub(super) fn report(&self, status: &HeadStatus) {
        let accepted_length = status.accepted_length.map(|length| length as f32);
        *self.reports.own.lock() = Some(Eagle3Report {
            accepted_length: accepted_length.unwrap_or(ACCEPTED_LENGTH_PRIOR),
            speedup: status.best_gain.unwrap_or(1.0) as f32,
        });
    }

    /// The worker that is the fallback, if a request should go on there.
    pub(super) fn transfer(&self, running: &ActiveRequest, speeds: Speeds) -> Option<WorkerId> {
        let worker = self.worker.as_ref()?;
        let report = (*self.reports.fallback.lock())?;
        let candidacy = running.candidacy(report.speedup, speeds);
        should_transfer(&candidacy).then(|| worker.clone())
    }
}

/// The worker that is the fallback, if the configuration names one.
pub(crate) fn fallback_worker(config: &SpeculationConfig) -> Option<WorkerId> {
    match &config.fallback {
        FallbackChoice::Worker(name) => Some(WorkerId(name.clone())),
        FallbackChoice::Own | FallbackChoice::Off => None,
    }
}
