//! Which draft each request of a step verifies.
//!
//! One [`Router`] belongs to one engine. Before a step it turns what each request could verify ([`Prospect`]) into an
//! [`Offer`]; after the step it is told what the engine did ([`Step`]) and what each request got ([`Outcome`]), and
//! learns. Two policies stand behind it. [`Policy::Score`] is the hybrid rule of SuffixDecoding, for each request by
//! itself. [`Policy::Goodput`] divides a step among all requests of the batch by what drafts are expected to bring
//! and what the step is expected to take. A guard compares steps with and without drafts under either, and turns
//! drafting off where it loses.
//!
//! ```text
//! Prospect --score, or goodput (budget)--> Offer --engine--> Step, Outcome --> statistics, costs, trials
//! ```
//!
//! There is no clock and no I/O here. The worker runs a router before a real engine, and `refrain replay` runs the
//! same one before a modelled engine. Two parts of learning are cheap and decide what the next step may try
//! ([`Router::observe`]). The rest may wait until the next step is under way ([`Router::learn`],
//! [`Router::learn_step`]).
//!
//! | file | holds |
//! |---|---|
//! | `prospect.rs`, `offer.rs`, `step.rs`, `decision.rs` | the values that go in and come out |
//! | `score.rs` | SCORE > tau |
//! | `goodput.rs`, `budget.rs` | the division of a step, and what it learns from |
//! | `cost.rs`, `time_value.rs`, `merged.rs` | the price of a step, the worth of time and of merged drafts |
//! | `trials.rs`, `guard.rs`, `head.rs` | trials of a way of drafting against doing without it |
//! | `gain.rs` | what drafts gain, for operators |
//! | `uniform.rs` | one length for all drafts of a step |
//! | `urgency.rs` | priorities and `tpot_ms` |
//! | `transfer.rs` | whether a request is better off at another worker |

mod budget;
mod cost;
mod decision;
mod gain;
mod goodput;
mod guard;
mod head;
mod merged;
mod offer;
mod params;
mod prospect;
mod score;
mod step;
mod time_value;
mod transfer;
mod trials;
mod uniform;
mod urgency;

use std::hash::Hash;

pub use cost::StepCost;
pub use decision::{Asked, Decision, HeadDraft, HeadState, Route, RouteReason};
pub use gain::{GainEstimator, GainParams, GainReading, GainSample, GainSide};
pub use guard::Verdict;
pub use head::{HeadStatus, Speeds};
pub use offer::Offer;
pub use params::{HeadParams, Policy, RouterParams};
pub use prospect::{Frame, Prospect};
pub use score::{ACCEPTED_LENGTH_PRIOR, Threshold};
pub use step::{Outcome, Step, StepPart};
pub use transfer::{Candidacy, RecentRoutes, should_transfer};
pub use trials::{TrialParams, batch_bucket};
pub use uniform::Outlook;
pub use urgency::{Pace, Priority};

use crate::statistics::AcceptanceStatistics;
use goodput::Goodput;
use guard::{Guard, Guarded};
use head::HeadMonitor;
use score::Fallback;

/// The router of one engine, by namespaces `N`. The module documentation has the method.
#[derive(Clone, Debug)]
pub struct Router<N: Hash + Eq> {
    params: RouterParams,
    goodput: Goodput<N>,
    head: HeadMonitor,
    guard: Option<Guard>,
    /// The last step, until [`learn_step`](Self::learn_step) takes it.
    unlearnt: Option<Step>,
}

impl<N: Copy + Hash + Eq> Router<N> {
    /// Creates a router that has observed nothing.
    pub fn new(params: RouterParams) -> Self {
        let guarded = match params.policy {
            Policy::Score => Guarded::SuffixDrafts,
            Policy::Goodput => Guarded::AllDrafts,
        };
        Router {
            goodput: Goodput::new(params),
            head: HeadMonitor::new(&params),
            guard: (params.gain_min > 0.0).then(|| Guard::new(params.gain_min, guarded)),
            params,
            unlearnt: None,
        }
    }

    /// Starts from measured steps: the tokens of each, and its seconds with next to no KV. Steps that were observed
    /// before are worth more and are kept instead.
    pub fn start_from_profile(&mut self, profile: &[(u32, f64)]) {
        self.goodput.start_from_profile(profile);
    }

    /// The acceptance statistics of a namespace, if any were learnt and not evicted since.
    pub fn known_statistics(&self, namespace: N) -> Option<&AcceptanceStatistics> {
        self.goodput.known_statistics(namespace)
    }

    /// The acceptance statistics of a namespace, empty ones if it is new. The namespace then counts as just used.
    pub fn statistics(&mut self, namespace: N) -> &mut AcceptanceStatistics {
        self.goodput.statistics(namespace)
    }

    /// Whether `auto` requests draft nothing in a step that decodes for `batch` requests, because the batch is too
    /// large.
    pub fn is_off(&self, batch: u32) -> bool {
        self.params.off_above_batch.is_some_and(|most| batch > most)
    }

    /// Whether the guard holds back the drafts of `auto` requests in a step that decodes for `batch` requests. The
    /// caller then looks for no suffix drafts, and says so in [`Step::withheld`]. A step that also reads a prompt is
    /// no trial: it would pay for one and be no evidence.
    pub fn withholds(&self, batch: u32, reads_prompt: bool) -> bool {
        let may_try = !reads_prompt && !self.head.is_on_trial(batch);
        self.guard
            .as_ref()
            .is_some_and(|guard| guard.withholds(batch, may_try))
    }

    /// Whether it divides each step among its `auto` requests, whose drafts it then cuts.
    pub fn divides(&self) -> bool {
        self.params.policy == Policy::Goodput
    }

    /// The cost of a draft token in a step that decodes for `batch` requests, as a share of the worth of a token: the
    /// time to find it and to verify it, which all requests of the step spend. `None` while it is not known. See
    /// [`ProposeRules::for_router`](crate::draft::ProposeRules::for_router).
    pub fn draft_price(&self, batch: u32) -> Option<f64> {
        self.goodput.draft_price(batch)
    }

    /// The path probability of each node of the prospect's suffix draft, for [`Prospect::path_probabilities`]; empty
    /// where nothing is chosen by them. It only reads, so that many requests are estimated at once.
    pub fn estimate(&self, prospect: &Prospect<N>) -> Vec<f32> {
        let is_divided = self.divides() && prospect.asked == Asked::Auto;
        let is_used = is_divided || prospect.price.is_some();
        match prospect.candidate.as_ref().filter(|_| is_used) {
            Some(candidate) => self
                .goodput
                .path_probabilities(prospect.namespace, candidate),
            None => Vec::new(),
        }
    }

    /// Chooses what each request verifies. The caller's key of a request comes back with its offer; their order is
    /// not kept.
    pub fn offer<K>(
        &mut self,
        prospects: Vec<(K, Prospect<N>)>,
        mut frame: Frame,
    ) -> Vec<(K, Offer)> {
        let fallback = self.head.fallback(frame.batch);
        // Requests with an explicit mode are served first; the others share what is left.
        let is_divided = self.divides();
        let (open, settled): (Vec<_>, Vec<_>) = prospects.into_iter().partition(|(_, prospect)| {
            is_divided && prospect.asked == Asked::Auto && prospect.draft_max > 0
        });
        let settle = |(key, prospect)| (key, self.settle(prospect, fallback, &mut frame));
        let mut offers: Vec<(K, Offer)> = settled.into_iter().map(settle).collect();
        if self.is_off(frame.batch) {
            let plain = |(key, of)| (key, Offer::plain(RouteReason::LargeBatch, of));
            offers.extend(open.into_iter().map(plain));
        } else if !open.is_empty() {
            self.goodput.offer(open, frame, fallback, &mut offers);
        }
        offers
    }

    /// The best of these lengths for the drafts of a step that verifies as many places of each request. `None` if the
    /// guard holds drafts back. `frame.tokens` are those without drafts.
    ///
    /// The drafts are those that are known while the length is chosen, which may be those of the step before. Each is
    /// given by the probabilities that its first token is accepted, that its first two are, and so on.
    pub fn uniform_length(
        &mut self,
        drafts: &[Vec<f32>],
        lengths: &[u32],
        frame: Frame,
    ) -> Option<u32> {
        if self.withholds(frame.batch, false) {
            return None;
        }
        Some(match self.is_off(frame.batch) {
            true => 0,
            false => self.goodput.uniform_length(drafts, lengths, frame),
        })
    }

    /// Decides for one request by itself, and takes its tokens out of the frame.
    fn settle(&self, prospect: Prospect<N>, fallback: Fallback, frame: &mut Frame) -> Offer {
        let offer = Offer::by_score(prospect, frame.slots_max, fallback, &self.params);
        let taken = offer.tokens_max();
        frame.slots_max -= taken.min(frame.slots_max);
        frame.tokens += taken;
        offer
    }

    /// Takes a step into account as far as it decides what the next one may try. Returns the guard's verdict, if the
    /// step was evidence. Call [`learn_step`](Self::learn_step) after it, while the next step is under way.
    pub fn observe(&mut self, step: Step) -> Option<Verdict> {
        let batch = step.batch();
        let guard_tries = self
            .guard
            .as_ref()
            .is_some_and(|guard| guard.is_on_trial(batch));
        self.head.observe(&step, guard_tries);
        let head = self.head.phase(batch).unwrap_or_default();
        let verdict = self
            .guard
            .as_mut()
            .and_then(|guard| guard.observe(&step, head));
        self.unlearnt = Some(step);
        verdict
    }

    /// Learns what the last step took. The next step does not need it.
    pub fn learn_step(&mut self) {
        if let Some(step) = self.unlearnt.take() {
            self.goodput.learn_step(&step);
        }
    }

    /// Learns what the offer brought its request.
    pub fn learn(&mut self, namespace: N, offer: &Offer, outcome: &Outcome<'_>) {
        self.goodput.learn(namespace, offer, outcome);
    }

    /// Takes into account that a request ended which the head could have served: the length of its context at the
    /// start, and the tokens that steps without a suffix draft emitted for it.
    pub fn request_ended(&mut self, context_tokens: u32, unmatched_tokens: u32) {
        self.head.request_ended(context_tokens, unmatched_tokens);
    }

    /// How the engine's head does in steps that decode for `batch` requests.
    pub fn head_status(&self, batch: u32) -> HeadStatus {
        self.head.status(batch)
    }

    /// Tokens per second that were measured, for the decision on a transfer.
    pub fn speeds(&self) -> Speeds {
        self.head.speeds()
    }

    /// Mean distance of expected from measured step times, as a share of the latter.
    pub fn step_cost_error(&self) -> Option<f64> {
        self.goodput.step_cost_error()
    }
}

#[cfg(test)]
mod tests;
