//! The goodput router: what each request of a step verifies, decided for all of them by what drafts are worth and what
//! steps take, both learnt from the steps that were made.
//!
//! No clock and no I/O: the decode loop says what each step was made of and what came of it.

mod head_trials;

use std::collections::HashMap;
use std::num::NonZeroUsize;

use lru::LruCache;
use refrain_protocol::NamespaceId;
use refrain_protocol::chunk::StepMessage;
use refrain_protocol::engine::SelfDraft;
use refrain_speculation::{
    Asked, BudgetRequest, BudgetStep, Budgeted, Calibration, Candidate, Decision, Fallback,
    GoingRate, HeadCost, HeadDrafted, HeadOffer, Route, RouteReason, STEP_SECONDS_MIN, Share,
    StepCost, divide, route,
};

use self::head_trials::HeadTrials;
use crate::config::{RouterChoice, WorkerConfig};
use crate::fallback::Recent;
use crate::metrics::WorkerMetrics;
use crate::router::Router;
use crate::running::{Allotment, Lesson, Offer, Prospect};

/// Steps that a text is taken to serve the head once it has read it.
const READ_ONCE_STEPS: f64 = 8.0;

/// The step around the drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepFrame {
    /// Tokens that are computed whatever is drafted.
    pub(crate) tokens: u32,
    /// Tokens of all texts in it.
    pub(crate) kv_tokens: u64,
    /// Most draft tokens.
    pub(crate) room: u32,
    /// Requests that decode.
    pub(crate) batch: u32,
}

/// A step that was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepTaken {
    pub(crate) batched_tokens: u32,
    pub(crate) kv_tokens: u64,
    /// What the engine took.
    pub(crate) seconds: f64,
    /// Of them, seconds of the head.
    pub(crate) draft_seconds: f64,
    /// What the worker took beside that to find drafts and to compose it.
    pub(crate) compose_seconds: f64,
    /// What the head was asked for in all, and drafted.
    pub(crate) head: HeadWork,
    /// Tokens that the step emitted for so many requests, if the router decided for all and none read a prompt.
    pub(crate) routed: Option<(u32, u32)>,
}

/// What the head did in a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadWork {
    pub(crate) requests: u32,
    pub(crate) depth: u32,
    pub(crate) drafted: HeadDrafted,
}

/// What is known of a namespace.
#[derive(Default)]
struct Known {
    /// What drafts are worth.
    calibration: Calibration,
    head_trials: HeadTrials,
}

/// See the module. One per engine.
pub(crate) struct Goodput {
    choice: RouterChoice,
    off_above_batch: Option<u32>,
    /// The one unused longest goes first.
    namespaces: LruCache<NamespaceId, Known>,
    cost: StepCost,
    head_cost: HeadCost,
    going_rate: GoingRate,
    cost_error: Recent,
    metrics: WorkerMetrics,
}

impl Goodput {
    pub(crate) fn new(config: &WorkerConfig, metrics: WorkerMetrics) -> Self {
        let speculation = &config.speculation;
        let namespaces = NonZeroUsize::new(config.memory.namespaces_max);
        Goodput {
            choice: speculation.router,
            off_above_batch: Some(speculation.off_above_batch).filter(|batch| *batch > 0),
            namespaces: LruCache::new(namespaces.unwrap_or(NonZeroUsize::MIN)),
            cost: StepCost::new(),
            head_cost: HeadCost::new(),
            going_rate: GoingRate::default(),
            cost_error: Recent::default(),
            metrics,
        }
    }

    /// What each request verifies, in their order.
    pub(crate) fn allot(
        &mut self,
        prospects: Vec<Prospect>,
        frame: StepFrame,
        router: &Router,
    ) -> Vec<Allotment> {
        match self.choice {
            RouterChoice::Score => by_score(prospects, frame.room, router),
            RouterChoice::Goodput => self.by_goodput(prospects, frame, router),
        }
    }

    fn by_goodput(
        &mut self,
        prospects: Vec<Prospect>,
        frame: StepFrame,
        router: &Router,
    ) -> Vec<Allotment> {
        let mut frame = frame;
        // Who asked for one way gets it; the rest is divided among the others.
        let mut allotments: Vec<Option<Allotment>> = Vec::with_capacity(prospects.len());
        let mut open = Vec::new();
        let is_off = self.is_off(frame.batch);
        for (at, prospect) in prospects.into_iter().enumerate() {
            let decided = if is_off && prospect.asked == Asked::Auto && prospect.draft_max > 0 {
                Some(Allotment::plain(RouteReason::LargeBatch, prospect))
            } else if self.probes_head(&prospect, frame.room, router) {
                self.known(prospect.namespace).head_trials.tried();
                Some(by_head(prospect, RouteReason::Probe, frame.room, router))
            } else if prospect.asked != Asked::Auto || prospect.draft_max == 0 {
                Some(router.by_score(prospect, frame.room))
            } else {
                open.push((at, prospect));
                None
            };
            let taken = decided.as_ref().map_or(0, |of| of.offer.tokens_max());
            frame.room -= taken.min(frame.room);
            frame.tokens += taken;
            allotments.push(decided);
        }
        let chances: Vec<Vec<f32>> = open
            .iter()
            .map(|(_, prospect)| match &prospect.candidate {
                Some(candidate) => self.known(prospect.namespace).calibration.expect(candidate),
                None => Vec::new(),
            })
            .collect();
        let heads: Vec<Option<HeadOffer>> = open
            .iter()
            .map(|(_, prospect)| self.head_offer(prospect, router))
            .collect();
        let budgeted = self.divide(&chances, &heads, frame);
        self.metrics.budget(budgeted.admitted, budgeted.refused);
        // By namespace whose head could have drafted: whether it is to.
        let mut heads_chosen: HashMap<NamespaceId, bool> = HashMap::new();
        let shares = budgeted.shares.into_iter().zip(chances).zip(heads);
        for ((at, prospect), ((share, f), head)) in open.into_iter().zip(shares) {
            if head.is_some() {
                *heads_chosen.entry(prospect.namespace).or_default() |= share == Share::Head;
            }
            let allotment = match share {
                Share::Plain => without_draft(prospect, router),
                Share::Tree(nodes) => within_budget(prospect, &nodes, &f),
                Share::Head => {
                    let reason = RouteReason::WithinBudget;
                    let mut allotment = by_head(prospect, reason, frame.room, router);
                    allotment.lesson.expected = head.map(|head| head.gain);
                    allotment
                }
            };
            allotments[at] = Some(allotment);
        }
        for (namespace, chosen) in heads_chosen {
            self.known(namespace).head_trials.offered(chosen);
        }
        allotments.into_iter().flatten().collect()
    }

    /// Whether this request tries the head, because nobody of its namespace has for long.
    fn probes_head(&self, prospect: &Prospect, room: u32, router: &Router) -> bool {
        let known = self.namespaces.peek(&prospect.namespace);
        known.is_some_and(|known| known.head_trials.is_due())
            && prospect.draft_max.min(room) > 0
            && may_use_head(prospect, router)
    }

    fn divide(
        &self,
        chances: &[Vec<f32>],
        heads: &[Option<HeadOffer>],
        frame: StepFrame,
    ) -> Budgeted {
        let requests: Vec<BudgetRequest<'_>> = chances
            .iter()
            .zip(heads)
            .map(|(tree, head)| BudgetRequest {
                weight: 1.0,
                tree,
                head: *head,
            })
            .collect();
        let step = BudgetStep {
            tokens: frame.tokens,
            slots_max: frame.room,
            rate: self.going_rate.tokens_per_s(frame.batch),
        };
        divide(
            &requests,
            &step,
            self.cost.at_kv(frame.kv_tokens),
            |requests, depth| self.head_cost.seconds(requests, depth),
        )
    }

    /// Whether nothing is drafted for `auto` requests where so many decode, whoever decides for them.
    pub(crate) fn is_off(&self, batch: u32) -> bool {
        self.off_above_batch.is_some_and(|most| batch > most)
    }

    fn known(&mut self, namespace: NamespaceId) -> &mut Known {
        self.namespaces.get_or_insert_mut(namespace, Known::default)
    }

    /// What the head could draft for the request; `None` where it is not in use.
    fn head_offer(&mut self, prospect: &Prospect, router: &Router) -> Option<HeadOffer> {
        if !may_use_head(prospect, router) {
            return None;
        }
        let SelfDraft {
            depth, tokens_max, ..
        } = router.self_draft(prospect.draft_max)?;
        let calibration = &self.known(prospect.namespace).calibration;
        let gain = calibration.expect_head(prospect.context_tokens, depth);
        Some(HeadOffer {
            depth,
            gain,
            slots: self.head_cost.tokens(tokens_max),
            slots_max: tokens_max,
            own_seconds: self.head_cost.reading_seconds(prospect.unread_tokens) / READ_ONCE_STEPS,
        })
    }

    /// A request's step came to this.
    pub(crate) fn learn(&mut self, namespace: NamespaceId, lesson: &Lesson, said: &StepMessage) {
        if self.choice == RouterChoice::Score {
            return;
        }
        let calibration = &mut self.known(namespace).calibration;
        if let Some(found) = &lesson.found {
            calibration.observe(found, &said.tokens);
        }
        if let Some(asked) = lesson.asked_head {
            calibration.observe_head(asked.context_tokens, asked.depth, said.accepted);
        }
        if let Some(expected) = lesson.expected {
            self.metrics
                .expectation(said.source, expected, said.accepted);
        }
    }

    /// Takes a step into account.
    pub(crate) fn step_done(&mut self, step: &StepTaken) {
        let seconds = step.seconds - step.draft_seconds;
        let is_time = seconds.is_finite() && seconds >= STEP_SECONDS_MIN;
        if !is_time || self.choice == RouterChoice::Score {
            return;
        }
        if self.cost.is_known() {
            let expected = self.cost.seconds(step.batched_tokens, step.kv_tokens);
            self.cost_error.add((expected / seconds - 1.0).abs(), 1.0);
            if let Some(error) = self.cost_error.value() {
                self.metrics.step_cost_error(error);
            }
        }
        self.cost
            .observe(step.batched_tokens, step.kv_tokens, seconds);
        let head = step.head;
        if head.requests > 0 {
            let HeadWork {
                requests,
                depth,
                drafted,
            } = head;
            self.head_cost
                .observe(requests, depth, drafted, step.draft_seconds);
        }
        if let Some((batch, emitted)) = step.routed {
            let seconds = step.seconds + step.compose_seconds;
            self.going_rate.observe(batch, emitted, seconds);
        }
    }
}

fn without_draft(prospect: Prospect, router: &Router) -> Allotment {
    let by_itself = route(
        prospect.asked,
        prospect.found(),
        router.threshold,
        if may_use_head(&prospect, router) {
            prospect.fallback
        } else {
            Fallback::Absent
        },
    );
    let reason = match by_itself.route {
        Route::Plain if prospect.candidate.is_none() => by_itself.reason,
        _ => RouteReason::OverBudget,
    };
    Allotment::plain(reason, prospect)
}

/// Whether the head may draft for a request that leaves it to the router.
fn may_use_head(prospect: &Prospect, router: &Router) -> bool {
    prospect.asked == Asked::Auto
        && !prospect.withheld
        && matches!(prospect.fallback, Fallback::InUse { .. })
        && router.threshold.allows_fallback()
}

fn by_head(prospect: Prospect, reason: RouteReason, room: u32, router: &Router) -> Allotment {
    let decision = Decision {
        route: Route::Fallback,
        reason,
    };
    let draft_max = prospect.draft_max.min(room);
    router.carry_out(decision, prospect, draft_max)
}

/// Each by itself, as long as there is room.
fn by_score(prospects: Vec<Prospect>, mut room: u32, router: &Router) -> Vec<Allotment> {
    let mut next = |prospect| {
        let allotment = router.by_score(prospect, room);
        room -= allotment.offer.tokens_max().min(room);
        allotment
    };
    prospects.into_iter().map(&mut next).collect()
}

/// The part of a suffix draft that is worth it; `f` of each of its nodes.
fn within_budget(prospect: Prospect, nodes: &[u32], f: &[f32]) -> Allotment {
    let offer = prospect.candidate.as_ref().map(|found| {
        let tree = found
            .tree
            .select(|node| nodes.binary_search(&(node as u32)).is_ok());
        Offer::Suffix(Candidate {
            score: tree.score(),
            tree,
            ..*found
        })
    });
    Allotment {
        decision: Decision {
            route: Route::Suffix,
            reason: RouteReason::WithinBudget,
        },
        offer: offer.unwrap_or_default(),
        lesson: Lesson {
            found: prospect.candidate,
            asked_head: None,
            expected: Some(nodes.iter().map(|node| f[*node as usize]).sum()),
        },
    }
}
