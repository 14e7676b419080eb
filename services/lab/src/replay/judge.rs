//! Chooses the drafts of a step for the whole batch, by one policy, and keeps account of what came of it on the
//! modelled engine.

use std::num::NonZeroUsize;

use refrain_speculation::draft::{Candidate, DraftTree};
use refrain_speculation::router::{
    Asked, Frame, HeadDraft, HeadParams, HeadState, Offer, Outcome, Policy as RouterPolicy,
    Priority, Prospect, Route, Router, RouterParams, Step, StepItem, Threshold, TrialParams,
};
use refrain_suffix_index::Token;
use refrain_worker::{SpeculationConfig, WorkerConfig};

use super::account::Account;
use super::counts::Acceptance;
use super::eagle3::Eagle3;
use super::engine_model::{EngineModel, StepLoad};
use super::policy::Policy;

/// Stands for the end of a text, which no draft has: recordings hold no such token.
const END: Token = Token::MAX;

/// The settings by which drafts are chosen.
#[derive(Clone, Debug)]
pub(crate) struct Judging {
    pub(crate) policy: Policy,
    pub(crate) engine: EngineModel,
    pub(crate) head: Eagle3,
    pub(crate) seed: u64,
    pub(crate) threshold: Threshold,
    /// Most tokens of a step, the requests' own and those of drafts.
    pub(crate) step_tokens_max: u32,
}

/// A request that takes part in a step.
pub(super) struct Turn {
    /// The namespace whose acceptance statistics its drafts have.
    pub(super) namespace: usize,
    /// Tokens of its prompt and output so far.
    pub(super) context_tokens: usize,
    /// The best suffix draft, if one was looked for and found.
    pub(super) found: Option<Candidate>,
}

/// The draft of a request in the step.
pub(super) enum Draft {
    /// Nothing is drafted.
    Plain,
    /// This part of the suffix draft is verified.
    Suffix(DraftTree),
    /// The head drafts so many tokens.
    Head(usize),
}

/// The decision of a policy other than the router's for a request.
enum Routed {
    Plain,
    /// All of the suffix draft.
    Whole,
    Head,
}

/// A [`Turn`] with the draft that was chosen for it.
pub(super) struct Choice {
    namespace: usize,
    pub(super) draft: Draft,
    pub(super) found: Option<Candidate>,
    /// The acceptance probability of each drafted token.
    chances: Vec<f32>,
    /// The router's offer, if it decided.
    offer: Option<Offer>,
}

/// A [`Choice`] that was verified.
pub(super) struct Verified {
    pub(super) context_tokens: usize,
    pub(super) choice: Choice,
    /// The drafted tokens that were accepted, from the root down.
    pub(super) path: Vec<u32>,
    /// The emitted tokens: the accepted ones and the recording's next one.
    pub(super) said: Vec<Token>,
    /// Whether the recording ends with them.
    pub(super) is_last: bool,
}

impl Draft {
    /// Draft tokens to verify.
    pub(super) fn tokens(&self) -> usize {
        match self {
            Draft::Plain => 0,
            Draft::Suffix(tree) => tree.len(),
            Draft::Head(depth) => *depth,
        }
    }
}

/// A policy at work.
pub(super) struct Judge {
    judging: Judging,
    /// The worker's router. Every policy uses its statistics to say what it expects; one also follows its offers.
    router: Router<usize>,
    /// The guard holds drafts back in the step under way.
    withholds: bool,
    /// Drafted and accepted tokens of the head.
    head: Acceptance,
    pub(super) account: Account,
}

impl Judge {
    pub(super) fn new(judging: Judging) -> Self {
        let WorkerConfig {
            speculation: SpeculationConfig { gain_min, .. },
            memory,
            ..
        } = WorkerConfig::default();
        let namespaces_max = NonZeroUsize::new(memory.namespaces_max);
        let depth = judging.head.acceptance.len() as u32;
        let router = Router::new(RouterParams {
            policy: RouterPolicy::Goodput,
            threshold: Threshold::Auto,
            gain_min,
            off_above_batch: None,
            namespaces_max: namespaces_max.unwrap_or(NonZeroUsize::MIN),
            head: (depth > 0).then_some(HeadParams {
                depth,
                tokens_max: depth,
                merges: false,
            }),
            head_trials: TrialParams::default(),
        });
        Judge {
            judging,
            router,
            withholds: false,
            head: Acceptance::default(),
            account: Account::default(),
        }
    }

    /// Whether the head's tokens are right where the output of this call has come so far.
    pub(super) fn head_accepts(&self, call: u64, position: usize, depth: usize) -> usize {
        let Judging { head, seed, .. } = &self.judging;
        head.accepted(*seed, call, position, depth)
    }

    /// Chooses for all requests of a step together.
    pub(super) fn choose(&mut self, mut turns: Vec<Turn>) -> Vec<Choice> {
        let batch = turns.len() as u32;
        let policy = self.judging.policy;
        self.withholds = policy == Policy::Goodput && self.router.withholds(batch, false);
        if self.withholds {
            // A worker looks for nothing then.
            for turn in &mut turns {
                turn.found = None;
            }
        }
        let mut room = self.judging.step_tokens_max.saturating_sub(batch);
        let kv_tokens = turns.iter().map(|turn| turn.context_tokens as u64).sum();
        let prospects: Vec<Prospect<usize>> = turns
            .into_iter()
            .map(|turn| self.prospect(turn, room))
            .collect();
        if policy == Policy::Goodput {
            let frame = Frame {
                tokens: batch,
                kv_tokens,
                slots_max: room,
                batch,
            };
            let known: Vec<_> = prospects
                .iter()
                .map(|of| {
                    (
                        (of.namespace, of.context_tokens),
                        of.candidate.clone(),
                        of.path_probabilities.clone(),
                    )
                })
                .collect();
            let offers = self.router.offer(prospects, frame);
            return known
                .into_iter()
                .zip(offers)
                .map(|((place, found, probabilities), offer)| {
                    self.by_offer(place, found, &probabilities, offer)
                })
                .collect();
        }
        prospects
            .into_iter()
            .map(|prospect| {
                let choice = self.by_itself(prospect, room);
                room -= choice.draft.tokens() as u32;
                choice
            })
            .collect()
    }

    fn prospect(&self, turn: Turn, room: u32) -> Prospect<usize> {
        let has_head = !self.judging.head.is_absent() && !self.withholds;
        let mut prospect = Prospect {
            namespace: turn.namespace,
            asked: Asked::Auto,
            context_tokens: turn.context_tokens as u32,
            draft_max: room,
            tree_max: room,
            candidate: turn.found,
            path_probabilities: Vec::new(),
            withheld: self.withholds,
            // It reads what it missed in its first pass.
            head: match has_head {
                true => HeadState::Ready { unread_tokens: 0 },
                false => HeadState::Absent,
            },
            priority: Priority::Normal,
            pace: None,
        };
        prospect.path_probabilities = self.router.estimate(&prospect);
        prospect
    }

    /// Carries out the router's offer to a request of a namespace and with a context of so many tokens. `found` is the
    /// whole suffix draft with its path probabilities.
    fn by_offer(
        &mut self,
        (namespace, context_tokens): (usize, u32),
        found: Option<Candidate>,
        probabilities: &[f32],
        offer: Offer,
    ) -> Choice {
        let (draft, chances) = match (offer.head(), offer.suffix()) {
            (None, None) => (Draft::Plain, Vec::new()),
            (None, Some(part)) => {
                let tree = part.tree.clone();
                let chances = found.as_ref().map_or_else(Vec::new, |found| {
                    chances_of_part(&found.tree, &tree, probabilities)
                });
                (Draft::Suffix(tree), chances)
            }
            (Some(head), _) => {
                let depth = head.depth as usize;
                (
                    Draft::Head(depth),
                    self.head_chances(namespace, context_tokens, depth),
                )
            }
        };
        Choice {
            namespace,
            draft,
            found,
            chances,
            offer: Some(offer),
        }
    }

    /// Decides for a request by itself, as policies other than the router's do, and drafts at most `room` tokens.
    fn by_itself(&mut self, prospect: Prospect<usize>, room: u32) -> Choice {
        let depth = self.judging.head.acceptance.len().min(room as usize);
        let (draft, mut chances) =
            match (self.route(prospect.candidate.as_ref()), &prospect.candidate) {
                (Routed::Whole, Some(found)) => {
                    let mut tree = found.tree.clone();
                    tree.truncate(room as usize);
                    (Draft::Suffix(tree), prospect.path_probabilities)
                }
                (Routed::Head, _) => {
                    let chances =
                        self.head_chances(prospect.namespace, prospect.context_tokens, depth);
                    (Draft::Head(depth), chances)
                }
                (Routed::Plain | Routed::Whole, _) => (Draft::Plain, Vec::new()),
            };
        chances.truncate(draft.tokens());
        Choice {
            namespace: prospect.namespace,
            draft,
            found: prospect.candidate,
            chances,
            offer: None,
        }
    }

    fn route(&self, found: Option<&Candidate>) -> Routed {
        match self.judging.policy {
            Policy::Off | Policy::Goodput => Routed::Plain,
            Policy::Eagle3 => Routed::Head,
            Policy::Suffix | Policy::Pld => found.map_or(Routed::Plain, |_| Routed::Whole),
            // SAM's matches are long enough to be preferred to the head.
            Policy::Sam => match (found, self.judging.head.is_absent()) {
                (Some(_), _) => Routed::Whole,
                (None, true) => Routed::Plain,
                (None, false) => Routed::Head,
            },
            Policy::Score | Policy::Paper => self.by_score(found),
        }
    }

    /// SuffixDecoding's rule, tau being the head's own tokens per step unless it is given.
    fn by_score(&self, found: Option<&Candidate>) -> Routed {
        let Judging {
            head, threshold, ..
        } = &self.judging;
        let break_even = match head.is_absent() {
            // A plain step brings one token.
            true => Some(1.0),
            false => self.head.accepted_length().map(|length| length as f32),
        };
        match found {
            Some(found) if found.score > threshold.in_force(break_even) => Routed::Whole,
            _ if !head.is_absent() && threshold.allows_fallback() => Routed::Head,
            _ => Routed::Plain,
        }
    }

    /// The probability that each token of the head's draft is accepted.
    fn head_chances(&mut self, namespace: usize, context_tokens: u32, depth: usize) -> Vec<f32> {
        let statistics = self.router.statistics(namespace);
        statistics
            .head_path_probabilities(context_tokens, depth as u32)
            .collect()
    }

    /// Learns from a step, and charges it.
    pub(super) fn settle(&mut self, verified: &[Verified]) {
        let mut load = StepLoad::default();
        let mut depths = Vec::new();
        for one in verified {
            let choice = &one.choice;
            load.requests += 1;
            load.tokens += 1 + choice.draft.tokens();
            load.kv_tokens += one.context_tokens;
            for (at, chance) in choice.chances.iter().enumerate() {
                self.account
                    .record(*chance, one.path.contains(&(at as u32)));
            }
            if let Draft::Head(depth) = choice.draft {
                depths.push(depth);
                self.head.record(depth, one.path.len(), one.said.len());
            }
            self.account.bonus_tokens += (one.said.len() - one.path.len()) as u64;
            self.learn(one);
        }
        if load.requests == 0 {
            return;
        }
        let engine = &self.judging.engine;
        let step_s = engine.step_seconds(load);
        let head_s = self.judging.head.draft_seconds(engine, &depths);
        self.account.engine_s += step_s + head_s;
        self.account.head_s += head_s;
        self.account.head_steps += depths.len() as u64;
        if self.judging.policy == Policy::Goodput {
            let step = Step {
                items: verified.iter().map(item).collect(),
                seconds: step_s + head_s,
                draft_seconds: head_s,
                compose_seconds: 0.0,
                withheld: self.withholds,
            };
            self.router.observe(step);
            self.router.learn_step();
        }
    }

    fn learn(&mut self, verified: &Verified) {
        let choice = &verified.choice;
        let mut emitted = verified.said.clone();
        emitted.extend(verified.is_last.then_some(END));
        let head_accepted = match choice.draft {
            Draft::Head(_) => verified.path.len() as u32,
            Draft::Plain | Draft::Suffix(_) => 0,
        };
        if let Some(offer) = &choice.offer {
            let outcome = Outcome {
                emitted: &emitted,
                head_drafted: offer.head().is_some(),
                head_accepted,
            };
            self.router.learn(choice.namespace, offer, &outcome);
            return;
        }
        let statistics = self.router.statistics(choice.namespace);
        if let Draft::Head(depth) = choice.draft {
            let context_tokens = verified.context_tokens as u32;
            statistics.observe_head(context_tokens, depth as u32, head_accepted);
        }
        if let Some(found) = &choice.found {
            statistics.observe(found, &emitted);
        }
    }
}

/// The item of a step that the router observes.
fn item(verified: &Verified) -> StepItem {
    let choice = &verified.choice;
    let draft_tokens = choice.draft.tokens() as u32;
    let (route, head) = match choice.draft {
        Draft::Plain => (Route::Plain, None),
        Draft::Suffix(_) => (Route::Suffix, None),
        Draft::Head(_) => {
            let asked = HeadDraft {
                depth: draft_tokens,
                tokens_max: draft_tokens,
            };
            (Route::Fallback, Some(asked))
        }
    };
    StepItem {
        route: Some(route),
        is_auto: true,
        may_use_head: true,
        predictability: choice
            .offer
            .as_ref()
            .map_or(0.0, |offer| offer.predictability),
        context_tokens: 1,
        text_tokens: verified.context_tokens as u32,
        draft_tokens,
        head,
        head_drafted: head.map_or(0, |asked| asked.tokens_max),
        read_tokens: 0,
        emitted: Some(verified.said.len() as u32),
    }
}

/// The probabilities of the nodes of a part of a tree, in the order of the part. Both have parents before children.
fn chances_of_part(whole: &DraftTree, part: &DraftTree, probabilities: &[f32]) -> Vec<f32> {
    let mut places: Vec<u32> = Vec::with_capacity(part.len());
    for node in part.nodes() {
        let parent = node.parent.map(|parent| places[parent as usize]);
        // Every node of the part stands in the whole.
        places.push(whole.child(parent, node.token).unwrap_or_default());
    }
    places
        .iter()
        .map(|place| probabilities[*place as usize])
        .collect()
}
