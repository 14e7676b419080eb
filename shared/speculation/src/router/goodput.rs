//! The goodput policy: the drafts of a whole batch, chosen by what they are expected to bring and what the step is
//! expected to take. Both are learnt from the steps that were made.
//!
//! Per namespace it keeps the [`AcceptanceStatistics`] and the trials of the head; for the engine, the time that
//! steps take ([`StepCost`], [`HeadCost`]) and the worth of a token ([`TimeValue`]). [`divide`] does the choosing.

mod head_trials;
mod readings;

use std::collections::HashMap;
use std::hash::Hash;

use lru::LruCache;

use self::head_trials::HeadTrials;
use self::readings::Readings;
use super::budget::{BudgetRequest, BudgetStep, HeadOption, Share, divide};
use super::cost::{HeadCost, STEP_SECONDS_MIN, StepCost};
use super::merged::{Rescue, pooled};
use super::score::{Fallback, Found, route_by_score};
use super::time_value::TimeValue;
use super::{
    Decision, Draft, Frame, HeadDraft, HeadWork, Offer, Outcome, Prospect, Route, RouteReason,
    RouterParams, Step,
};
use crate::DecayedRatio;
use crate::draft::Candidate;
use crate::statistics::AcceptanceStatistics;

/// The figures that are learnt for one namespace.
#[derive(Clone, Debug, Default)]
struct Learnt {
    statistics: AcceptanceStatistics,
    head_trials: HeadTrials,
    readings: Readings,
    rescue: Rescue,
}

/// The goodput policy of one engine.
#[derive(Clone, Debug)]
pub(super) struct Goodput<N: Hash + Eq> {
    params: RouterParams,
    namespaces: LruCache<N, Learnt>,
    cost: StepCost,
    head_cost: HeadCost,
    time_value: TimeValue,
    cost_error: DecayedRatio,
}

/// The worth of the nodes of a suffix draft beside a draft of the head.
#[derive(Clone, Debug, Default)]
struct Beside {
    worth: Vec<f32>,
    /// The same in an order in which nodes can be admitted one by one: see [`pooled`].
    pooled: Vec<f32>,
}

impl<N: Copy + Hash + Eq> Goodput<N> {
    pub(super) fn new(params: RouterParams) -> Self {
        Goodput {
            params,
            namespaces: LruCache::new(params.namespaces_max),
            cost: StepCost::new(),
            head_cost: HeadCost::default(),
            time_value: TimeValue::default(),
            cost_error: DecayedRatio::default(),
        }
    }

    /// See [`Router::start_from_profile`](super::Router::start_from_profile).
    pub(super) fn start_from_profile(&mut self, profile: &[(u32, f64)]) {
        if !self.cost.is_known() {
            self.cost = StepCost::from_profile(profile);
        }
    }

    pub(super) fn statistics(&mut self, namespace: N) -> &mut AcceptanceStatistics {
        &mut self.learnt(namespace).statistics
    }

    fn learnt(&mut self, namespace: N) -> &mut Learnt {
        self.namespaces
            .get_or_insert_mut(namespace, Learnt::default)
    }

    /// f of each node of a draft. It only reads, so that many drafts are estimated at once.
    pub(super) fn path_probabilities(&self, namespace: N, candidate: &Candidate) -> Vec<f32> {
        match self.namespaces.peek(&namespace) {
            Some(learnt) => learnt.statistics.path_probabilities(candidate),
            None => AcceptanceStatistics::new().path_probabilities(candidate),
        }
    }

    /// Chooses for requests that leave it to the router. `frame` has the tokens and the room that are left beside
    /// those with an explicit mode.
    pub(super) fn offer(
        &mut self,
        prospects: Vec<Prospect<N>>,
        frame: Frame,
        fallback: Fallback,
    ) -> Vec<Offer> {
        let heads: Vec<Option<HeadDraft>> = prospects
            .iter()
            .map(|prospect| self.head_draft(prospect, fallback))
            .collect();
        let mut shares = vec![Share::Plain; prospects.len()];
        let (on_trial, frame) = self.try_heads(&prospects, &heads, frame);
        let open: Vec<usize> = (0..prospects.len()).filter(|at| !on_trial[*at]).collect();
        let beside: Vec<Beside> = open
            .iter()
            .map(|at| self.beside(&prospects[*at], heads[*at]))
            .collect();
        let options = self.share(&prospects, &heads, &open, &beside, frame, &mut shares);
        let mut beside = beside.into_iter().zip(options);
        let mut offers = Vec::with_capacity(prospects.len());
        for (at, prospect) in prospects.into_iter().enumerate() {
            if on_trial[at] {
                offers.push(head_offer(prospect, heads[at], RouteReason::Probe, None));
                continue;
            }
            let (beside, option) = beside.next().unwrap_or_default();
            let expected_of_head = option.map(|option| option.gain);
            offers.push(match std::mem::replace(&mut shares[at], Share::Plain) {
                Share::Plain => without_draft(prospect, heads[at], fallback, &self.params),
                Share::Tree(nodes) => suffix_offer(prospect, &nodes),
                Share::Head => head_offer(
                    prospect,
                    heads[at],
                    RouteReason::WithinBudget,
                    expected_of_head,
                ),
                Share::Merged(nodes) => {
                    merged_offer(prospect, &nodes, heads[at], expected_of_head, &beside.worth)
                }
            });
        }
        offers
    }

    /// The draft that the head could make for a request; `None` where it may not.
    fn head_draft(&self, prospect: &Prospect<N>, fallback: Fallback) -> Option<HeadDraft> {
        let may_use = !prospect.withheld
            && matches!(fallback.of(prospect.head), Fallback::InUse { .. })
            && self.params.threshold.allows_fallback();
        self.params
            .head
            .filter(|_| may_use)?
            .within(prospect.draft_max)
    }

    /// Has requests try the head where no request of their namespace has had it for long, first those without a
    /// suffix draft. Returns which requests do, and what is left of the step.
    fn try_heads(
        &mut self,
        prospects: &[Prospect<N>],
        heads: &[Option<HeadDraft>],
        mut frame: Frame,
    ) -> (Vec<bool>, Frame) {
        let mut on_trial = vec![false; prospects.len()];
        if !self.may_try_heads(prospects, heads) {
            return (on_trial, frame);
        }
        let mut order: Vec<(usize, HeadDraft)> = (0..prospects.len())
            .filter_map(|at| Some((at, heads[at]?)))
            .collect();
        order.sort_by_key(|(at, _)| prospects[*at].candidate.is_some());
        let mut offered: HashMap<N, u32> = HashMap::new();
        for (at, _) in &order {
            *offered.entry(prospects[*at].namespace).or_default() += 1;
        }
        let step_seconds = self.cost.seconds(frame.tokens, frame.kv_tokens);
        // Requests of each namespace that may still try it.
        let mut left: HashMap<N, u32> = HashMap::new();
        for (at, head) in order {
            let namespace = prospects[at].namespace;
            if head.tokens_max > frame.slots_max {
                continue;
            }
            let is_first = !left.contains_key(&namespace);
            if is_first {
                let trials = self.learnt(namespace).head_trials;
                let width = trials.width().min(offered[&namespace]);
                let cost = self.head_cost.seconds(width, head.depth) / step_seconds;
                left.insert(namespace, if trials.is_due(cost) { width } else { 0 });
            }
            let left = left.entry(namespace).or_default();
            if *left == 0 {
                continue;
            }
            *left -= 1;
            if is_first {
                let learnt = self.learnt(namespace);
                learnt.head_trials.tried();
                learnt.readings.tried();
            }
            frame.slots_max -= head.tokens_max;
            frame.tokens += head.tokens_max;
            on_trial[at] = true;
        }
        (on_trial, frame)
    }

    /// Whether a trial would be due in any namespace if it took no time. In most steps none is.
    fn may_try_heads(&self, prospects: &[Prospect<N>], heads: &[Option<HeadDraft>]) -> bool {
        let with_head = prospects
            .iter()
            .zip(heads)
            .filter(|(_, head)| head.is_some());
        // Requests of one namespace often stand together.
        let mut last = None;
        let mut namespaces = with_head
            .map(|(prospect, _)| prospect.namespace)
            .filter(|namespace| last.replace(*namespace) != Some(*namespace));
        namespaces.any(|namespace| {
            let learnt = self.namespaces.peek(&namespace);
            learnt.is_some_and(|learnt| learnt.head_trials.is_due(0.0))
        })
    }

    /// Divides the step among the `open` requests. Returns what the budget knew of the head for each of them.
    fn share(
        &mut self,
        prospects: &[Prospect<N>],
        heads: &[Option<HeadDraft>],
        open: &[usize],
        beside: &[Beside],
        frame: Frame,
        shares: &mut [Share],
    ) -> Vec<Option<HeadOption>> {
        let options: Vec<Option<HeadOption>> = open
            .iter()
            .map(|at| Some(self.head_option(&prospects[*at], heads[*at]?)))
            .collect();
        let weights = self.weights(prospects, open, frame.batch);
        let step_seconds = self.cost.seconds(frame.tokens, frame.kv_tokens);
        let requests: Vec<BudgetRequest<'_>> = open
            .iter()
            .zip(options.iter().zip(beside))
            .enumerate()
            .map(|(number, (at, (head, beside)))| {
                let prospect = &prospects[*at];
                let due = prospect.pace.map(|pace| pace.due_tokens(step_seconds));
                BudgetRequest {
                    weight: weights
                        .as_ref()
                        .map_or_else(|| prospect.priority.weight(), |weights| weights[number]),
                    due_tokens: due.unwrap_or(0.0),
                    tree: &prospect.path_probabilities,
                    head: *head,
                    beside: &beside.pooled,
                }
            })
            .collect();
        let step = BudgetStep {
            tokens: frame.tokens,
            slots_max: frame.slots_max,
            // Each second of the step is a second of every request in it.
            rate: weights.is_some().then(|| f64::from(frame.batch)),
        };
        let head_cost = &self.head_cost;
        let divided = divide(
            &requests,
            &step,
            self.cost.at_kv(frame.kv_tokens),
            |requests, depth| head_cost.seconds(requests, depth),
        );
        // By namespace whose head could have drafted: whether it was chosen.
        let mut chosen: HashMap<N, bool> = HashMap::new();
        for ((at, share), head) in open.iter().zip(divided.shares).zip(&options) {
            if head.is_some() {
                let is_chosen = matches!(share, Share::Head | Share::Merged(_));
                *chosen.entry(prospects[*at].namespace).or_default() |= is_chosen;
            }
            shares[*at] = share;
        }
        for (namespace, is_chosen) in chosen {
            self.learnt(namespace).head_trials.offered(is_chosen);
        }
        options
    }

    /// The weight of a token of each open request: the seconds that it saves, times the request's priority over the
    /// mean priority. `None` until enough steps were seen.
    fn weights(&self, prospects: &[Prospect<N>], open: &[usize], batch: u32) -> Option<Vec<f32>> {
        let priority = |at: &usize| prospects[*at].priority.weight();
        // Over the mean, so that nothing changes where all requests have the same priority.
        let mean = open.iter().map(priority).sum::<f32>() / open.len().max(1) as f32;
        let weight = |at: &usize| {
            let predictability: f32 = prospects[*at].path_probabilities.iter().sum();
            let seconds = self.time_value.seconds_per_token(batch, predictability)?;
            Some(priority(at) / mean * seconds as f32)
        };
        open.iter().map(weight).collect()
    }

    fn head_option(&mut self, prospect: &Prospect<N>, head: HeadDraft) -> HeadOption {
        let reading_seconds = self.head_cost.reading_seconds(prospect.unread_tokens());
        let slots = self.head_cost.tokens(head.tokens_max);
        let learnt = self.learnt(prospect.namespace);
        HeadOption {
            depth: head.depth,
            gain: learnt
                .statistics
                .expected_of_head(prospect.context_tokens, head.depth),
            slots,
            slots_max: head.tokens_max,
            own_seconds: reading_seconds * learnt.readings.share(),
        }
    }

    /// The worth of the nodes of the suffix draft beside the head's draft.
    fn beside(&mut self, prospect: &Prospect<N>, head: Option<HeadDraft>) -> Beside {
        let probabilities = &prospect.path_probabilities;
        let candidate = prospect.candidate.as_ref();
        let candidate = candidate.filter(|of| of.tree.len() == probabilities.len());
        let merges = self.params.head.is_some_and(|head| head.merges);
        let (Some(candidate), Some(head)) = (candidate, head.filter(|_| merges)) else {
            return Beside::default();
        };
        let learnt = self.learnt(prospect.namespace);
        let paths: Vec<f32> = learnt
            .statistics
            .head_path_probabilities(prospect.context_tokens, head.depth)
            .collect();
        let worth = learnt.rescue.beside(candidate, probabilities, &paths);
        Beside {
            pooled: pooled(candidate.tree.nodes(), &worth),
            worth,
        }
    }

    /// See [`Router::learn`](super::Router::learn).
    pub(super) fn learn(&mut self, namespace: N, offer: &Offer, outcome: &Outcome<'_>) {
        let Outcome {
            emitted,
            head_drafted,
            head_accepted,
        } = *outcome;
        let learnt = self.learnt(namespace);
        if let (Some(found), Some(_)) = (&offer.found, offer.head()) {
            let probabilities = learnt.statistics.path_probabilities(found);
            learnt
                .rescue
                .observe(found, &probabilities, emitted, head_accepted);
        }
        // A head on trial was not chosen by what it costs.
        if offer.head().is_some() && offer.expected.is_some() && head_drafted {
            learnt
                .readings
                .drafted(offer.context_tokens, offer.unread_tokens);
        }
        if let Some(found) = &offer.found {
            learnt.statistics.observe(found, emitted);
        }
        if let Some(head) = offer.head() {
            learnt
                .statistics
                .observe_head(offer.context_tokens, head.depth, head_accepted);
        }
    }

    /// See [`Router::learn_step`](super::Router::learn_step).
    pub(super) fn learn_step(&mut self, step: &Step) {
        let seconds = step.seconds - step.draft_seconds;
        let failed = step.items.iter().any(|item| item.emitted.is_none());
        if failed || !(seconds.is_finite() && seconds >= STEP_SECONDS_MIN) {
            // The work that was done for a failed request is not known.
            return;
        }
        // A request that brings nothing has the pass over its last token done.
        let tokens = step
            .items
            .iter()
            .map(|item| item.context_tokens.max(1) + item.draft_tokens);
        let tokens: u32 = tokens.sum();
        let kv_tokens = step
            .items
            .iter()
            .map(|item| u64::from(item.text_tokens))
            .sum();
        if self.cost.is_known() {
            let expected = self.cost.seconds(tokens, kv_tokens);
            self.cost_error.add((expected / seconds - 1.0).abs(), 1.0);
        }
        self.cost.observe(tokens, kv_tokens, seconds);
        let mut head = HeadWork::default();
        for work in step.items.iter().filter_map(|item| item.head) {
            head.requests += work.requests;
            head.depth = head.depth.max(work.depth);
            head.tokens_max += work.tokens_max;
            head.drafted += work.drafted;
        }
        self.head_cost
            .observe(head, step.read_tokens(), step.draft_seconds);
        if step.is_clean() && step.items.iter().all(|item| item.is_auto) {
            self.time_value.observe(step);
        }
    }

    pub(super) fn step_cost_error(&self) -> Option<f64> {
        self.cost_error.value()
    }
}

/// The reason why the budget has no draft for a request.
fn without_draft<N>(
    prospect: Prospect<N>,
    head: Option<HeadDraft>,
    fallback: Fallback,
    params: &RouterParams,
) -> Offer {
    let fallback = match head {
        Some(_) => fallback.of(prospect.head),
        None => Fallback::Absent,
    };
    let by_itself = route_by_score(prospect.asked, prospect.found(), params.threshold, fallback);
    let nothing_found = !matches!(prospect.found(), Found::Score(_));
    let reason = match by_itself.route {
        Route::Plain if nothing_found => by_itself.reason,
        _ => RouteReason::OverBudget,
    };
    Offer::plain(reason, prospect)
}

/// These nodes of the suffix draft.
fn suffix_offer<N>(prospect: Prospect<N>, nodes: &[u32]) -> Offer {
    let probabilities = &prospect.path_probabilities;
    let expected = nodes.iter().map(|node| probabilities[*node as usize]).sum();
    let draft = prospect
        .candidate
        .as_ref()
        .map(|found| Draft::Suffix(part(found, nodes)));
    let decision = Decision {
        route: Route::Suffix,
        reason: RouteReason::WithinBudget,
    };
    let mut offer = Offer::new(decision, draft.unwrap_or_default(), prospect);
    offer.expected = Some(expected);
    offer
}

/// A draft of the head, which is expected to bring so many tokens; `None` for a trial.
fn head_offer<N>(
    prospect: Prospect<N>,
    head: Option<HeadDraft>,
    reason: RouteReason,
    expected: Option<f32>,
) -> Offer {
    let decision = Decision {
        route: Route::Fallback,
        reason,
    };
    let draft = head.map(Draft::Head).unwrap_or_default();
    let mut offer = Offer::new(decision, draft, prospect);
    offer.expected = expected;
    offer
}

/// These nodes of the suffix draft beside a draft of the head, to which each adds its `worth`.
fn merged_offer<N>(
    prospect: Prospect<N>,
    nodes: &[u32],
    head: Option<HeadDraft>,
    expected_of_head: Option<f32>,
    worth: &[f32],
) -> Offer {
    let decision = Decision {
        route: Route::Merged,
        reason: RouteReason::WithinBudget,
    };
    let draft = prospect.candidate.as_ref().zip(head).map(|(found, head)| {
        let mut found = part(found, nodes);
        let room = prospect.tree_max.saturating_sub(head.tokens_max);
        found.tree.truncate(room as usize);
        match found.tree.is_empty() {
            true => Draft::Head(head),
            false => Draft::Merged(found, head),
        }
    });
    let mut offer = Offer::new(decision, draft.unwrap_or_default(), prospect);
    offer.expected = Some(nodes.iter().map(|node| worth[*node as usize]).sum());
    offer.expected_of_head = expected_of_head;
    offer
}

/// These nodes of a suffix draft.
fn part(found: &Candidate, nodes: &[u32]) -> Candidate {
    let is_in = |node: usize| nodes.binary_search(&(node as u32)).is_ok();
    let tree = found.tree.select(is_in);
    Candidate {
        score: tree.score(),
        tree,
        ..*found
    }
}

#[cfg(test)]
mod tests;
