//! The goodput router: what each request of a step verifies, decided for all of them by what drafts are worth and what
//! steps take, both learnt from the steps that were made.
//!
//! No clock and no I/O: the decode loop says what each step was made of and what came of it.

use std::num::NonZeroUsize;

use lru::LruCache;
use refrain_protocol::NamespaceId;
use refrain_protocol::chunk::StepMessage;
use refrain_protocol::engine::SelfDraft;
use refrain_speculation::{
    Asked, BudgetRequest, BudgetStep, Budgeted, Calibration, Candidate, Decision, Fallback,
    GoingRate, HeadCost, HeadDrafted, HeadOffer, Route, RouteReason, Share, StepCost, divide,
    route,
};

use crate::config::{RouterChoice, WorkerConfig};
use crate::fallback::Recent;
use crate::metrics::WorkerMetrics;
use crate::router::Router;
use crate::running::{Allotment, Lesson, Offer, Prospect};

/// Steps that a text is taken to serve the head once it has read it.
const READ_ONCE_STEPS: f64 = 8.0;
/// Times that the budget may refuse a head in a row before the head is tried again, since what it brings is only seen by
/// asking it: at most, and for each draft that was seen of it. A few drafts are soon doubted, many are not.
const HEAD_REFUSALS_MAX: u32 = 512;
const HEAD_REFUSALS_PER_DRAFT: u32 = 4;

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
    pub(crate) seconds: f64,
    /// Of them, seconds of the head.
    pub(crate) draft_seconds: f64,
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

/// See the module. One per engine.
pub(crate) struct Goodput {
    choice: RouterChoice,
    off_above_batch: Option<u32>,
    /// What drafts are worth, by namespace; the one unused longest goes first.
    calibrations: LruCache<NamespaceId, Calibration>,
    cost: StepCost,
    head_cost: HeadCost,
    /// Times in a row that the head could have drafted and something else was better.
    head_refusals: u32,
    /// Drafts that it made, of requests that leave it to the router.
    head_drafts: u32,
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
            calibrations: LruCache::new(namespaces.unwrap_or(NonZeroUsize::MIN)),
            cost: StepCost::new(),
            head_cost: HeadCost::new(),
            head_refusals: 0,
            head_drafts: 0,
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
        for (at, prospect) in prospects.into_iter().enumerate() {
            let decided = if self.probes_head(&prospect, frame, router) {
                self.head_refusals = 0;
                self.head_drafts = self.head_drafts.saturating_add(1);
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
                Some(candidate) => self.calibration(prospect.namespace).expect(candidate),
                None => Vec::new(),
            })
            .collect();
        let heads: Vec<Option<HeadOffer>> = open
            .iter()
            .map(|(_, prospect)| self.head_offer(prospect, router))
            .collect();
        let budgeted = self.divide(&chances, &heads, frame);
        self.metrics.budget(budgeted.admitted, budgeted.refused);
        let shares = budgeted.shares.into_iter().zip(chances).zip(heads);
        for ((at, prospect), ((share, f), head)) in open.into_iter().zip(shares) {
            if share == Share::Head {
                self.head_refusals = 0;
                self.head_drafts = self.head_drafts.saturating_add(1);
            } else if head.is_some() {
                self.head_refusals = self.head_refusals.saturating_add(1);
            }
            let allotment = match share {
                Share::Plain => self.without_draft(prospect, frame.batch, router),
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
        allotments.into_iter().flatten().collect()
    }

    /// Whether this request tries the head, because nobody has for long.
    fn probes_head(&self, prospect: &Prospect, frame: StepFrame, router: &Router) -> bool {
        let patience = HEAD_REFUSALS_PER_DRAFT.saturating_mul(self.head_drafts.saturating_add(1));
        self.head_refusals >= patience.min(HEAD_REFUSALS_MAX)
            && frame.room > 0
            && !self.is_off(frame.batch)
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
        // What counts is who decodes, not who leaves it to the router.
        let off_above_batch = self.is_off(frame.batch).then_some(0);
        let step = BudgetStep {
            tokens: frame.tokens,
            slots_max: frame.room,
            rate: self.going_rate.tokens_per_s(frame.batch),
            off_above_batch,
        };
        divide(
            &requests,
            &step,
            self.cost.at_kv(frame.kv_tokens),
            |requests, depth| self.head_cost.seconds(requests, depth),
        )
    }

    fn is_off(&self, batch: u32) -> bool {
        self.off_above_batch.is_some_and(|most| batch > most)
    }

    fn calibration(&mut self, namespace: NamespaceId) -> &mut Calibration {
        self.calibrations
            .get_or_insert_mut(namespace, Calibration::new)
    }

    /// What the head could draft for the request; `None` where it is not in use.
    fn head_offer(&mut self, prospect: &Prospect, router: &Router) -> Option<HeadOffer> {
        if !may_use_head(prospect, router) {
            return None;
        }
        let SelfDraft {
            depth, tokens_max, ..
        } = router.self_draft(prospect.draft_max)?;
        let calibration = self.calibration(prospect.namespace);
        Some(HeadOffer {
            depth,
            gain: calibration.expect_head(prospect.context_tokens, depth),
            slots: self.head_cost.tokens(tokens_max),
            slots_max: tokens_max,
            own_seconds: self.head_cost.reading_seconds(prospect.unread_tokens) / READ_ONCE_STEPS,
        })
    }

    fn without_draft(&self, prospect: Prospect, batch: u32, router: &Router) -> Allotment {
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
            _ if self.is_off(batch) => RouteReason::LargeBatch,
            Route::Plain if prospect.candidate.is_none() => by_itself.reason,
            _ => RouteReason::OverBudget,
        };
        Allotment::plain(reason, prospect)
    }

    /// A request's step came to this.
    pub(crate) fn learn(&mut self, namespace: NamespaceId, lesson: &Lesson, said: &StepMessage) {
        if self.choice == RouterChoice::Score {
            return;
        }
        let calibration = self.calibration(namespace);
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
        if !(seconds.is_finite() && seconds > 0.0) || self.choice == RouterChoice::Score {
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
            self.going_rate.observe(batch, emitted, step.seconds);
        }
    }
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
