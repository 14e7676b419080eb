//! The goodput policy: the drafts of a whole batch, chosen by what they are expected to bring and what the step is
//! expected to take. Both are learnt from the steps that were made.
//!
//! Per namespace it keeps the [`AcceptanceStatistics`] and the trials of the head; for the engine, the time that
//! steps take ([`StepCost`], [`HeadCost`]) and the worth of a token ([`TimeValue`]). [`divide`] does the choosing.

mod explore_heads;
mod head_exploration;
mod readings;

use std::collections::HashMap;
use std::hash::Hash;

use lru::LruCache;

use self::head_exploration::HeadExploration;
use self::readings::Readings;
use super::budget::{BudgetRequest, BudgetStep, HeadOption, Share, divide};
use super::cost::{HeadCost, STEP_SECONDS_MIN, StepCost};
use super::merged::{AcceptanceAfterHead, pooled};
use super::offer::{OfferedDraft, SuffixDraft};
use super::score::{Fallback, Found, route_by_score};
use super::time_value::TimeValue;
use super::uniform::{Outlook, best_length};
use super::{
    Frame, HeadDraft, Offer, Outcome, Pace, Prospect, Route, RouteReason, RouterParams, Step,
};
use crate::DecayedRatio;
use crate::candidate::Candidate;
use crate::statistics::AcceptanceStatistics;

/// The figures that are learnt for one namespace.
#[derive(Clone, Debug, Default)]
struct Learnt {
    statistics: AcceptanceStatistics,
    head_exploration: HeadExploration,
    readings: Readings,
    after_head: AcceptanceAfterHead,
}

/// The goodput policy of one engine.
#[derive(Clone, Debug)]
pub(super) struct Goodput<N: Hash + Eq> {
    params: RouterParams,
    namespaces: LruCache<N, Learnt>,
    cost: StepCost,
    head_cost: HeadCost,
    time_value: TimeValue,
    outlook: Outlook,
    /// Seconds of looking for drafts, over the tokens that were found.
    finding: DecayedRatio,
    cost_error: DecayedRatio,
}

/// Draft tokens of a request over which their price is averaged. The first ones are often free, since a step reads
/// all weights anyway; a draft that pays is about as long as this.
const PRICE_TOKENS: u32 = 16;

/// A request that leaves the choice to the router.
struct Asking<K, N> {
    /// The caller's key.
    key: K,
    prospect: Prospect<N>,
    /// The draft that the head could make for it.
    head: Option<HeadDraft>,
    /// It tries the head in this step.
    is_on_trial: bool,
}

/// A request whose draft the budget chooses, and the draft that the head could make for it.
type Open<'a, N> = (&'a Prospect<N>, Option<HeadDraft>);

/// The choice for a request.
struct Choice {
    share: Share,
    /// Accepted tokens that the head is expected to bring.
    expected_of_head: Option<f32>,
    /// The worth of each node of the suffix draft beside a draft of the head.
    worth: Vec<f32>,
}

/// The worth of the nodes of a suffix draft beside a draft of the head.
#[derive(Clone, Debug, Default)]
struct MergedGains {
    worth: Vec<f32>,
    /// The same in an order in which nodes can be admitted one by one: see [`pooled`].
    pooled: Vec<f32>,
}

impl<N: Copy + Hash + Eq> Goodput<N> {
    pub(super) fn new(params: RouterParams) -> Self {
        Goodput {
            params,
            namespaces: LruCache::new(params.namespaces_max),
            cost: StepCost::default(),
            head_cost: HeadCost::default(),
            time_value: TimeValue::default(),
            outlook: Outlook::default(),
            finding: DecayedRatio::default(),
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

    pub(super) fn known_statistics(&self, namespace: N) -> Option<&AcceptanceStatistics> {
        let learnt = self.namespaces.peek(&namespace)?;
        Some(&learnt.statistics)
    }

    fn learnt(&mut self, namespace: N) -> &mut Learnt {
        self.namespaces
            .get_or_insert_mut(namespace, Learnt::default)
    }

    /// The path probability of each node of a draft. It only reads, so that many drafts are estimated at once.
    pub(super) fn path_probabilities(&self, namespace: N, candidate: &Candidate) -> Vec<f32> {
        match self.namespaces.peek(&namespace) {
            Some(learnt) => learnt.statistics.path_probabilities(candidate),
            None => AcceptanceStatistics::default().path_probabilities(candidate),
        }
    }

    /// See [`Router::draft_price`](super::Router::draft_price).
    pub(super) fn draft_price(&self, batch: u32) -> Option<f64> {
        let batch = batch.max(1);
        let worth = self.time_value.mean_seconds_per_token(batch)?;
        let more = PRICE_TOKENS.saturating_mul(batch);
        let seconds = self.cost.at_kv(0);
        let verifying = seconds(batch.saturating_add(more)).seconds - seconds(batch).seconds;
        let price = verifying / f64::from(more) + self.finding.value().unwrap_or_default();
        // Each second of a step is a second of every request in it.
        Some(f64::from(batch) * price / worth)
    }

    /// See [`Router::uniform_length`](super::Router::uniform_length).
    pub(super) fn uniform_length(
        &mut self,
        drafts: &[Vec<f32>],
        lengths: &[u32],
        frame: Frame,
    ) -> u32 {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        self.outlook.learn(drafts, longest as usize);
        let per_token = self.time_value.seconds_per_token(frame.batch);
        let weight = |draft: &Vec<f32>| match &per_token {
            Some(per_token) => per_token(draft.iter().sum()),
            None => 1.0,
        };
        let weights: Vec<f64> = drafts.iter().map(weight).collect();
        let seconds = self.cost.at_kv(frame.kv_tokens);
        let seconds = |length: u32| {
            seconds(
                frame
                    .tokens
                    .saturating_add(length.saturating_mul(frame.batch)),
            )
            .seconds
        };
        let worth = |length| {
            let tokens = drafts
                .iter()
                .map(|draft| 1.0 + f64::from(self.outlook.expected(draft, length)));
            tokens
                .zip(&weights)
                .map(|(tokens, weight)| tokens * weight)
                .sum()
        };
        let rate = per_token.is_some().then(|| f64::from(frame.batch));
        best_length(lengths, rate, worth, seconds)
    }

    /// Chooses for requests that leave it to the router, and adds their offers. `frame` has the tokens and the room
    /// that are left beside those with an explicit mode.
    pub(super) fn offer<K>(
        &mut self,
        prospects: Vec<(K, Prospect<N>)>,
        frame: Frame,
        fallback: Fallback,
        offers: &mut Vec<(K, Offer)>,
    ) {
        let asking = prospects.into_iter().map(|(key, prospect)| Asking {
            key,
            head: self.head_draft(&prospect, fallback),
            prospect,
            is_on_trial: false,
        });
        let mut asking: Vec<Asking<K, N>> = asking.collect();
        let frame = self.explore_heads(&mut asking, frame);
        let (tried, open): (Vec<_>, Vec<_>) = asking.into_iter().partition(|of| of.is_on_trial);
        offers.extend(tried.into_iter().map(|of| {
            let draft = of.head.map(OfferedDraft::Head);
            let (route, reason) = (Route::Fallback, RouteReason::Probe);
            (of.key, Offer::new(route, reason, draft, of.prospect))
        }));
        let options: Vec<Open<'_, N>> = open.iter().map(|of| (&of.prospect, of.head)).collect();
        let choices = self.choose(&options, frame);
        offers.extend(open.into_iter().zip(choices).map(|(of, choice)| {
            let offer = self.carry_out(choice, of.prospect, of.head, fallback);
            (of.key, offer)
        }));
    }

    /// Divides the step among the requests that are not on trial. Returns a choice for each, in their order.
    fn choose(&mut self, open: &[Open<'_, N>], frame: Frame) -> Vec<Choice> {
        let gains: Vec<MergedGains> = open.iter().map(|open| self.merged_gains(*open)).collect();
        let options: Vec<Option<HeadOption>> =
            open.iter().map(|open| self.head_option(*open)).collect();
        let shares = self.share(open, &options, &gains, frame);
        let choices = shares.into_iter().zip(options).zip(gains);
        choices
            .map(|((share, option), gains)| Choice {
                share,
                expected_of_head: option.map(|option| option.gain),
                worth: gains.worth,
            })
            .collect()
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

    /// The share of each request in the step, in their order.
    fn share(
        &mut self,
        open: &[Open<'_, N>],
        options: &[Option<HeadOption>],
        gains: &[MergedGains],
        frame: Frame,
    ) -> Vec<Share> {
        let weights = self.weights(open, frame.batch);
        let step_seconds = self.cost.seconds(frame.tokens, frame.kv_tokens);
        let request = |number: usize| {
            let (prospect, _) = open[number];
            let due = |pace: Pace| pace.due_tokens(step_seconds);
            BudgetRequest {
                weight: match &weights {
                    Some(weights) => weights[number],
                    None => prospect.priority.weight(),
                },
                due_tokens: prospect.pace.map_or(0.0, due),
                tree: &prospect.path_probabilities,
                head: options[number],
                merged: &gains[number].pooled,
            }
        };
        let requests: Vec<BudgetRequest<'_>> = (0..open.len()).map(request).collect();
        let step = BudgetStep {
            tokens: frame.tokens,
            slots_max: frame.slots_max,
            // Each second of the step is a second of every request in it.
            rate: weights.is_some().then(|| f64::from(frame.batch)),
        };
        let seconds = self.cost.at_kv(frame.kv_tokens);
        let head_seconds = |requests, depth| self.head_cost.seconds(requests, depth);
        let shares = divide(&requests, &step, seconds, head_seconds);
        // By namespace whose head could have drafted: whether it was chosen.
        let with_head = open
            .iter()
            .zip(&shares)
            .filter(|((_, head), _)| head.is_some());
        let with_head: Vec<(N, bool)> = with_head
            .map(|((prospect, _), share)| {
                let is_chosen = matches!(share, Share::Head | Share::Merged(_));
                (prospect.namespace, is_chosen)
            })
            .collect();
        let mut chosen: HashMap<N, bool> = HashMap::new();
        // Requests of one namespace often stand together.
        for run in with_head.chunk_by(|a, b| a.0 == b.0) {
            *chosen.entry(run[0].0).or_default() |= run.iter().any(|(_, is_chosen)| *is_chosen);
        }
        for (namespace, is_chosen) in chosen {
            self.learnt(namespace).head_exploration.offered(is_chosen);
        }
        shares
    }

    /// The weight of a token of each open request: the seconds that it saves, times the request's priority over the
    /// mean priority. `None` until enough steps were seen.
    fn weights(&self, open: &[Open<'_, N>], batch: u32) -> Option<Vec<f32>> {
        let priorities = open.iter().map(|(prospect, _)| prospect.priority.weight());
        // Over the mean, so that nothing changes where all requests have the same priority.
        let mean = priorities.sum::<f32>() / open.len().max(1) as f32;
        let seconds_per_token = self.time_value.seconds_per_token(batch)?;
        let weight = |(prospect, _): &Open<'_, N>| {
            let seconds = seconds_per_token(prospect.predictability());
            prospect.priority.weight() / mean * seconds as f32
        };
        Some(open.iter().map(weight).collect())
    }

    fn head_option(&mut self, (prospect, head): Open<'_, N>) -> Option<HeadOption> {
        let head = head?;
        let reading_seconds = self.head_cost.reading_seconds(prospect.unread_tokens());
        let slots = self.head_cost.tokens(head.tokens_max);
        let learnt = self.learnt(prospect.namespace);
        let paths = learnt
            .statistics
            .head_path_probabilities(prospect.context_tokens, head.depth);
        Some(HeadOption {
            depth: head.depth,
            gain: paths.sum(),
            slots,
            slots_max: head.tokens_max,
            own_seconds: reading_seconds * learnt.readings.share(),
        })
    }

    /// The worth of the nodes of the suffix draft beside the head's draft.
    fn merged_gains(&mut self, (prospect, head): Open<'_, N>) -> MergedGains {
        let probabilities = &prospect.path_probabilities;
        let candidate = prospect.candidate.as_ref();
        let candidate = candidate.filter(|of| of.tree.len() == probabilities.len());
        let merges = self.params.head.is_some_and(|head| head.merges);
        let (Some(candidate), Some(head)) = (candidate, head.filter(|_| merges)) else {
            return MergedGains::default();
        };
        let learnt = self.learnt(prospect.namespace);
        let paths: Vec<f32> = learnt
            .statistics
            .head_path_probabilities(prospect.context_tokens, head.depth)
            .collect();
        let worth = learnt
            .after_head
            .merged_gains(candidate, probabilities, &paths);
        MergedGains {
            pooled: pooled(candidate.tree.nodes(), &worth),
            worth,
        }
    }

    /// Offers what a share of the step has room for.
    fn carry_out(
        &self,
        choice: Choice,
        prospect: Prospect<N>,
        head: Option<HeadDraft>,
        fallback: Fallback,
    ) -> Offer {
        let Choice {
            share,
            expected_of_head,
            worth,
        } = choice;
        let sum = |nodes: &[u32], of: &[f32]| nodes.iter().map(|node| of[*node as usize]).sum();
        let found = prospect.candidate.as_ref();
        let within = RouteReason::WithinBudget;
        match share {
            Share::Plain => without_draft(prospect, head, fallback, &self.params),
            Share::Tree(nodes) => {
                let expected = sum(&nodes, &prospect.path_probabilities);
                let draft = found.map(|found| OfferedDraft::Suffix(SuffixDraft::of(found, &nodes)));
                Offer {
                    expected: Some(expected),
                    ..Offer::new(Route::Suffix, within, draft, prospect)
                }
            }
            Share::Head => Offer {
                expected: expected_of_head,
                ..Offer::new(
                    Route::Fallback,
                    within,
                    head.map(OfferedDraft::Head),
                    prospect,
                )
            },
            Share::Merged(nodes) => {
                let draft = found.zip(head).map(|(found, head)| {
                    let mut part = found.part(&nodes);
                    let room = prospect.tree_max.saturating_sub(head.tokens_max);
                    part.tree.truncate(room as usize);
                    match part.tree.is_empty() {
                        true => OfferedDraft::Head(head),
                        false => OfferedDraft::Merged(SuffixDraft::Part(part), head),
                    }
                });
                Offer {
                    expected: Some(sum(&nodes, &worth)),
                    expected_of_head,
                    ..Offer::new(Route::Merged, within, draft, prospect)
                }
            }
        }
    }

    /// See [`Router::learn`](super::Router::learn).
    pub(super) fn learn(&mut self, namespace: N, offer: &Offer, outcome: &Outcome<'_>) {
        let Outcome {
            emitted,
            head_drafted,
            head_accepted,
        } = *outcome;
        // Nothing else asks what a suffix draft adds to the head's.
        let merges = self.params.head.is_some_and(|head| head.merges);
        let learnt = self.learnt(namespace);
        if let (Some(found), Some(_), true) = (&offer.found, offer.head(), merges) {
            let probabilities = learnt.statistics.path_probabilities(found);
            learnt
                .after_head
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
        let tokens = step.tokens();
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
        if step.found_tokens > 0 {
            self.finding
                .add(step.compose_seconds, step.found_tokens.into());
        }
        self.head_cost
            .observe(step.head_work(), step.read_tokens(), step.draft_seconds);
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
    let found = prospect.found(prospect.candidate.as_ref());
    let by_itself = route_by_score(prospect.asked, found, params.threshold, fallback);
    let nothing_found = !matches!(found, Found::Score(_));
    let reason = match by_itself.route {
        Route::Plain if nothing_found => by_itself.reason,
        _ => RouteReason::OverBudget,
    };
    Offer::plain(reason, prospect)
}

#[cfg(test)]
mod tests;
