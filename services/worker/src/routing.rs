//! Routing in the decode loop: the router of `refrain-speculation` with its inputs, outputs and metrics.
//!
//! The decisions are those of [`refrain_speculation::router`]; this folder has the rim around them. Read [`Routing`]
//! first.
//!
//! * `settings`: the configuration, fitted to the abilities of the engine.
//! * `statistics`: acceptance statistics that outlive the worker, kept by the draft store.
//! * `transfer`: moves of requests to the worker that is the fallback, and reports on heads for the scheduler.
//! * `proposers`: the threads that look for drafts.
//! * `profile`: step times that are measured before the first request.

mod profile;
mod proposers;
mod settings;
mod statistics;
mod transfer;

use std::sync::Arc;
use std::time::Instant;

use refrain_protocol::{NamespaceId, WorkerId};
use refrain_rpc::DraftStore;
use refrain_speculation::router::{Frame, Offer, Outcome, Prospect, Router, Step};

use crate::config::{RouterChoice, WorkerConfig};
use crate::metrics::WorkerMetrics;
use crate::running::{ActiveRequest, StepRecord};

pub(crate) use self::profile::profile;
pub(crate) use self::proposers::Proposers;
pub(crate) use self::settings::DraftSettings;
use self::statistics::StatisticsKeeper;
use self::transfer::Transfers;
pub(crate) use self::transfer::{HeadReports, fallback_worker};

/// The router of one engine, with everything that it is told and that is told of it.
pub(crate) struct Routing {
    pub(crate) settings: Arc<DraftSettings>,
    pub(crate) router: Router<NamespaceId>,
    pub(crate) statistics: StatisticsKeeper,
    pub(crate) transfers: Transfers,
    is_score: bool,
    metrics: Arc<WorkerMetrics>,
}

impl Routing {
    pub(crate) fn new(
        config: &WorkerConfig,
        settings: Arc<DraftSettings>,
        store: Arc<dyn DraftStore>,
        reports: Arc<HeadReports>,
        metrics: Arc<WorkerMetrics>,
    ) -> Self {
        let params = settings.router_params(config);
        let routing = Routing {
            router: Router::new(params),
            statistics: StatisticsKeeper::start(
                config,
                params.namespaces_max,
                store,
                metrics.clone(),
            ),
            transfers: Transfers::new(&config.speculation, reports),
            is_score: config.speculation.router == RouterChoice::Score,
            settings,
            metrics,
        };
        routing.report(0);
        routing
    }

    /// Chooses what each request verifies. The key of a request comes back with its offer.
    pub(crate) fn offer<K>(
        &mut self,
        prospects: Vec<(K, Prospect<NamespaceId>)>,
        frame: Frame,
    ) -> Vec<(K, Offer)> {
        let offers = self.router.offer(prospects, frame);
        if !self.is_score {
            let tokens = offers.iter().map(|(_, offer)| offer.budgeted_tokens());
            let (admitted, rejected) = tokens.fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
            self.metrics.budget(admitted, rejected);
        }
        offers
    }

    /// Takes a step into account as far as it decides what the next one may try.
    pub(crate) fn observe(&mut self, step: Step) {
        let batch = step.batch();
        let gain = &self.metrics.gain;
        gain.step(&step, !self.router.is_off(batch));
        if let Some(verdict) = self.router.observe(step) {
            self.metrics.drafts_in_use(verdict.batch, verdict.in_use);
            if verdict.changed {
                tracing::info!(
                    batch = verdict.batch,
                    in_use = verdict.in_use,
                    gain = verdict.gain,
                    "use of drafts changed"
                );
            }
        }
        if batch > 0 {
            self.report(batch);
        }
    }

    /// Shows how the engine's head does, to metrics and to the scheduler.
    fn report(&self, batch: u32) {
        let status = self.router.head_status(batch);
        if self.is_score {
            self.metrics.threshold(status.threshold);
        }
        let Some(kind) = self.settings.drafter() else {
            return;
        };
        if let Some(length) = status.accepted_length {
            self.metrics.self_draft_accepted_length(kind, length);
        }
        if batch > 0 && self.settings.may_use_head() {
            self.metrics
                .self_draft_gate(kind, status.batch, status.in_use, status.gain);
        }
        self.transfers.report(&status);
    }

    /// Learns from a request's step.
    pub(crate) fn learn(&mut self, namespace: NamespaceId, record: &StepRecord) {
        let Some(offer) = &record.offer else {
            return;
        };
        let outcome = Outcome {
            emitted: &record.step.tokens,
            head_drafted: record.head_drafted,
            head_accepted: record.head_accepted,
        };
        self.router.learn(namespace, offer, &outcome);
        let forced = record.step.forced.map_or(0, |share| share.accepted);
        let mut accepted = record.step.accepted + forced;
        if let (Some(expected), Some(share)) = (offer.expected_of_head, record.step.merged) {
            self.metrics
                .expectation(share.source, expected, record.head_accepted);
            accepted = (accepted + share.accepted).saturating_sub(record.head_accepted);
        }
        if let Some(expected) = offer.expected {
            self.metrics
                .expectation(record.step.source, expected, accepted);
        }
    }

    /// Learns what the last step took, and exchanges statistics with the store. The next step needs neither.
    pub(crate) fn catch_up(&mut self) {
        self.router.learn_step();
        if !self.is_score
            && let Some(error) = self.router.step_cost_error()
        {
            self.metrics.step_cost_error(error);
        }
        self.exchange();
    }

    /// Takes into account that a request begins. Its first step must see the store's answers that arrived while
    /// nothing was decoded, and statistics of a new namespace are requested before it.
    pub(crate) fn request_begins(&mut self, running: &ActiveRequest) {
        let namespace = &running.request.namespace;
        self.statistics
            .meet(running.namespace, namespace, Instant::now());
        self.exchange();
    }

    /// Exchanges acceptance statistics with the store, if it is time.
    fn exchange(&mut self) {
        self.statistics.exchange(&mut self.router, Instant::now());
    }

    /// Saves the statistics that the store does not have yet, because the worker stops.
    pub(crate) async fn finish(&mut self) {
        self.statistics.finish(&mut self.router).await;
    }

    /// Takes into account that a chunk ended.
    pub(crate) fn request_ended(&mut self, running: &ActiveRequest) {
        if running.session.head.self_drafts {
            self.router
                .request_ended(running.start_len(), running.tally.unmatched());
        }
    }

    /// The worker that is the fallback, if a request should go on there.
    pub(crate) fn transfer(&self, running: &ActiveRequest) -> Option<WorkerId> {
        self.transfers.transfer(running, self.router.speeds())
    }
}
