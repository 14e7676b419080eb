//! The routers at work in the decode loop: what requests could verify, put to the goodput router or to the score router, and
//! what is granted, made into offers to the engine. The goodput router itself is [`refrain_speculation::Goodput`].

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::engine::SelfDraft;
use refrain_protocol::{NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_speculation::{Goodput as Rule, GoodputParams, Grant, HeadWish, StepFrame, StepTaken, Wish};
use refrain_speculation::draft::Candidate;
use refrain_speculation::router::{Asked, Decision, Fallback, Route, RouteReason, route_by_score};

use crate::chances::Chances;
use crate::config::{RouterChoice, WorkerConfig};
use crate::metrics::WorkerMetrics;
use crate::router::Router;
use crate::running::{Allotment, Lesson, Offer, Prospect, StepRecord};

/// See the module. One per engine.
pub(crate) struct Goodput {
    choice: RouterChoice,
    rule: Rule<NamespaceId>,
    chances: Chances,
    metrics: WorkerMetrics,
}

impl Goodput {
    pub(crate) fn new(
        config: &WorkerConfig,
        store: Arc<dyn DraftStore>,
        metrics: WorkerMetrics,
    ) -> Self {
        let speculation = &config.speculation;
        let namespaces_max = NonZeroUsize::new(config.memory.namespaces_max);
        let namespaces_max = namespaces_max.unwrap_or(NonZeroUsize::MIN);
        let is_shared =
            speculation.router == RouterChoice::Goodput && speculation.chances_interval_ms > 0;
        let interval = is_shared.then(|| Duration::from_millis(speculation.chances_interval_ms));
        Goodput {
            choice: speculation.router,
            rule: Rule::new(GoodputParams {
                namespaces_max,
                off_above_batch: Some(speculation.off_above_batch).filter(|batch| *batch > 0),
            }),
            chances: Chances::start(interval, namespaces_max, store, metrics.clone()),
            metrics,
        }
    }

    /// Goes on from steps that were measured: tokens and seconds of each.
    pub(crate) fn start_from(&mut self, profile: &[(u32, f64)]) {
        self.rule.start_from(profile);
    }

    /// A request of this namespace begins.
    pub(crate) fn meet(&mut self, id: NamespaceId, namespace: &SignedNamespace) {
        self.chances.meet(id, namespace, Instant::now());
    }

    /// Exchanges with the store what drafts are worth, if it is time.
    pub(crate) fn exchange(&mut self) {
        self.chances.exchange(&mut self.rule, Instant::now());
    }

    /// Returns when there is something to exchange; not before, and never if there is not.
    pub(crate) async fn wait_to_exchange(&self) {
        self.chances.wait(&self.rule).await;
    }

    /// Tells the store what is not told yet: nothing is decoded any more.
    pub(crate) async fn finish(mut self) {
        self.chances.finish(&mut self.rule).await;
    }

    /// f of each node of what was found for a request: none where nothing goes by it. Asked for many requests at once.
    pub(crate) fn chances(&self, prospect: &Prospect) -> Vec<f32> {
        let is_divided = self.choice == RouterChoice::Goodput && prospect.asked == Asked::Auto;
        match prospect.candidate.as_ref().filter(|_| is_divided) {
            Some(found) => self.rule.chances(prospect.namespace, found),
            None => Vec::new(),
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
            RouterChoice::Score => by_score(prospects, frame.slots_max, router),
            RouterChoice::Goodput => self.by_goodput(prospects, frame, router),
        }
    }

    fn by_goodput(
        &mut self,
        prospects: Vec<Prospect>,
        mut frame: StepFrame,
        router: &Router,
    ) -> Vec<Allotment> {
        // Who asked for one way gets it; the rest is divided among the others.
        let mut allotments: Vec<Option<Allotment>> = Vec::with_capacity(prospects.len());
        let mut open = Vec::new();
        for (at, prospect) in prospects.into_iter().enumerate() {
            if prospect.asked == Asked::Auto && prospect.draft_max > 0 {
                open.push((at, prospect));
                allotments.push(None);
            } else {
                let settled = router.by_score(prospect, frame.slots_max);
                let taken = settled.offer.tokens_max();
                frame.slots_max -= taken.min(frame.slots_max);
                frame.tokens += taken;
                allotments.push(Some(settled));
            }
        }
        let wishes: Vec<Wish<'_, NamespaceId>> = open
            .iter()
            .map(|(_, prospect)| Wish {
                namespace: prospect.namespace,
                priority: prospect.priority,
                pace: prospect.pace,
                context_tokens: prospect.context_tokens,
                found: prospect.candidate.as_ref(),
                chances: &prospect.chances,
                head: head_wish(prospect, router),
            })
            .collect();
        let granted = self.rule.divide(&wishes, frame);
        self.metrics.budget(granted.admitted, granted.refused);
        let is_off = self.is_off(frame.batch);
        for ((at, prospect), grant) in open.into_iter().zip(granted.grants) {
            allotments[at] = Some(match grant {
                Grant::Plain if is_off => Allotment::plain(RouteReason::LargeBatch, prospect),
                Grant::Plain => without_draft(prospect, router),
                Grant::Tree(nodes) => within_budget(prospect, &nodes),
                Grant::Head { gain } => {
                    let mut allotment = by_head(prospect, RouteReason::WithinBudget, router);
                    allotment.lesson.expected = Some(gain);
                    allotment
                }
                Grant::Merged {
                    nodes,
                    gain,
                    beside,
                } => merged(prospect, &nodes, [gain, beside], router),
                Grant::HeadTrial => by_head(prospect, RouteReason::Probe, router),
            });
        }
        allotments.into_iter().flatten().collect()
    }

    /// Whether nothing is drafted for `auto` requests where so many decode, whoever decides for them.
    pub(crate) fn is_off(&self, batch: u32) -> bool {
        self.rule.is_off(batch)
    }

    /// A request's step came to this.
    pub(crate) fn learn(&mut self, namespace: NamespaceId, heard: &StepRecord) {
        if self.choice == RouterChoice::Score {
            return;
        }
        let StepRecord { lesson, step, .. } = heard;
        let tokens = &heard.tokens;
        if let (Some(found), Some(asked)) = (&lesson.found, lesson.asked_head) {
            self.rule
                .observe_beside(namespace, found, tokens, asked.accepted);
        }
        // One on trial was not chosen for what it costs.
        if let (Some(asked), Some(_)) = (lesson.asked_head, lesson.expected)
            && asked.drafted
        {
            self.rule
                .head_drafted(namespace, asked.context_tokens, asked.unread_tokens);
        }
        let calibration = self.rule.calibration(namespace);
        if let Some(found) = &lesson.found {
            calibration.observe(found, tokens);
        }
        if let Some(asked) = lesson.asked_head {
            calibration.observe_head(asked.context_tokens, asked.depth, asked.accepted);
        }
        let mut accepted = step.accepted;
        if let (Some(expected), Some(share), Some(asked)) =
            (lesson.expected_of_head, step.merged, lesson.asked_head)
        {
            self.metrics
                .expectation(share.source, expected, asked.accepted);
            accepted = step.accepted + share.accepted - asked.accepted;
        }
        if let Some(expected) = lesson.expected {
            self.metrics.expectation(step.source, expected, accepted);
        }
    }

    /// Takes a step into account.
    pub(crate) fn step_done(&mut self, step: &StepTaken) {
        if self.choice == RouterChoice::Score {
            return;
        }
        self.rule.step_done(step);
        if let Some(error) = self.rule.step_cost_error() {
            self.metrics.step_cost_error(error);
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

/// What the head could draft for the request; `None` where it is not in use.
fn head_wish(prospect: &Prospect, router: &Router) -> Option<HeadWish> {
    if !may_use_head(prospect, router) {
        return None;
    }
    let SelfDraft {
        depth, tokens_max, ..
    } = router.self_draft(prospect.draft_max)?;
    Some(HeadWish {
        depth,
        tokens_max,
        unread_tokens: prospect.unread_tokens,
        merges: router.merges,
    })
}

fn by_head(prospect: Prospect, reason: RouteReason, router: &Router) -> Allotment {
    let decision = Decision {
        route: Route::Fallback,
        reason,
    };
    let draft_max = prospect.draft_max;
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

/// These nodes of a suffix draft.
fn part(found: &Candidate, nodes: &[u32]) -> Candidate {
    let tree = found
        .tree
        .select(|node| nodes.binary_search(&(node as u32)).is_ok());
    Candidate {
        score: tree.score(),
        tree,
        ..*found
    }
}

/// The part of a suffix draft that is worth it.
fn within_budget(prospect: Prospect, nodes: &[u32]) -> Allotment {
    let f = &prospect.chances;
    let offer = prospect.candidate.as_ref();
    let offer = offer.map(|found| Offer::Suffix(part(found, nodes)));
    Allotment {
        decision: Decision {
            route: Route::Suffix,
            reason: RouteReason::WithinBudget,
        },
        offer: offer.unwrap_or_default(),
        lesson: Lesson {
            found: prospect.candidate,
            expected: Some(nodes.iter().map(|node| f[*node as usize]).sum()),
            ..Lesson::default()
        },
    }
}

/// Those nodes of it beside a draft of the head, which is expected to bring `gain` tokens, and the nodes `beside` more.
fn merged(
    mut prospect: Prospect,
    nodes: &[u32],
    [gain, beside]: [f32; 2],
    router: &Router,
) -> Allotment {
    let found = prospect.candidate.take();
    prospect.candidate = found.as_ref().map(|found| part(found, nodes));
    let decision = Decision {
        route: Route::Merged,
        reason: RouteReason::WithinBudget,
    };
    let draft_max = prospect.draft_max;
    let mut allotment = router.carry_out(decision, prospect, draft_max);
    allotment.lesson.found = found;
    allotment.lesson.expected = Some(beside);
    allotment.lesson.expected_of_head = Some(gain);
    allotment
}
