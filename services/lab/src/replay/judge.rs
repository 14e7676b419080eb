//! Chooses the drafts of a step for the whole batch, by one policy, and keeps account of what came of it on the
//! modelled engine.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use refrain_speculation::draft::{Candidate, DraftTree, Expansion, ProposeParams, ProposeRules};
use refrain_speculation::router::{
    Asked, Frame, HeadDraft, HeadParams, HeadState, Offer, Outcome, Outlook,
    Policy as RouterPolicy, Priority, Prospect, Route, Router, RouterParams, Step, StepPart,
    Threshold, TrialParams,
};
use refrain_speculation::statistics::AcceptanceStatistics;
use refrain_suffix_index::Token;
use refrain_worker::{SpeculationConfig, WorkerConfig};

use super::account::Account;
use super::adaptive;
use super::counts::Acceptance;
use super::eagle3::Eagle3;
use super::engine_model::{EngineModel, StepLoad};
use super::mba::{self, Positions};
use super::policy::Policy;

/// Stands for the end of a text, which no draft has: recordings hold no such token.
const END: Token = Token::MAX;

/// The assumed time to find a draft token, seconds. With the measured one no two replays would be the same.
const FIND_TOKEN_S: f64 = 0.5e-6;

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

/// A request that takes part in a step, before a draft is chosen for it.
pub(crate) struct DraftRequest {
    /// The namespace whose acceptance statistics its drafts have.
    pub(crate) namespace: usize,
    /// Tokens of its prompt and output so far.
    pub(crate) context_tokens: usize,
    /// The best suffix draft, if one was looked for and found.
    pub(crate) found: Option<Candidate>,
    /// The price of a draft token at which it was looked for.
    pub(crate) price: Option<f32>,
}

/// The draft of a request in the step.
pub(crate) enum StepDraft {
    /// Nothing is drafted.
    Plain,
    /// This part of the suffix draft is verified.
    Suffix(DraftTree),
    /// The head drafts so many tokens.
    Head(usize),
}

/// A [`DraftRequest`] with the draft that was chosen for it.
pub(crate) struct DraftChoice {
    namespace: usize,
    pub(crate) draft: StepDraft,
    /// Places that are verified: its draft tokens, and those that an engine verifies without any.
    places: usize,
    pub(crate) found: Option<Candidate>,
    /// The expected probability that each drafted token is accepted.
    acceptance_probabilities: Vec<f32>,
    /// Accepted tokens that the whole suffix draft was expected to bring.
    predictability: f32,
    /// The router's offer, if it decided.
    offer: Option<Offer>,
}

/// A [`DraftChoice`] that was verified.
pub(crate) struct VerifiedChoice {
    pub(crate) context_tokens: usize,
    pub(crate) choice: DraftChoice,
    /// The drafted tokens that were accepted, from the root down.
    pub(crate) path: Vec<u32>,
    /// The accepted tokens and the recording's next one.
    pub(crate) emitted: Vec<Token>,
    /// Whether the recording ends with them.
    pub(crate) is_last: bool,
}

impl StepDraft {
    /// Draft tokens to verify.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            StepDraft::Plain => 0,
            StepDraft::Suffix(tree) => tree.len(),
            StepDraft::Head(depth) => *depth,
        }
    }
}

/// The lengths of drafts for which an engine has graphs, under `padded`.
const LENGTHS: [u32; 6] = [0, 2, 4, 8, 16, 32];

/// Longest draft under `adaptive`: vLLM captures graphs for this many places of each request.
const ADAPTIVE_TOKENS_MAX: usize = 32;

/// One length for all drafts of a step.
#[derive(Clone, Copy, Default)]
struct Length {
    places: u32,
    /// The guard holds drafts back.
    is_withheld: bool,
}

/// A policy at work.
pub(crate) struct Judge {
    judging: Judging,
    /// The worker's router. Every policy uses its statistics to say what it expects; one also follows its offers.
    router: Router<usize>,
    /// The guard holds drafts back in the step under way.
    withholds: bool,
    /// Under `padded`: the length of the drafts in the step under way, and what was chosen for the next one.
    length: Length,
    next_length: Length,
    /// Under `adaptive`: the draft tokens that the next step verifies, and what they are expected to bring.
    next_budget: usize,
    outlook: Outlook,
    /// Nothing is drafted in steps of more requests than this.
    off_above_batch: Option<usize>,
    /// Drafted and accepted tokens of the head.
    head: Acceptance,
    /// How often the token at each position of a draft is accepted, for Seer's rule.
    positions: Positions,
    pub(super) account: Account,
}

impl Judge {
    pub(crate) fn new(judging: Judging) -> Self {
        let WorkerConfig {
            speculation: SpeculationConfig { gain_min, .. },
            replica,
            ..
        } = WorkerConfig::default();
        let namespaces_max = NonZeroUsize::new(replica.namespaces_max);
        let depth = judging.head.acceptance.len() as u32;
        let mut router = Router::new(RouterParams {
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
        // A worker measures such steps before its first request.
        let sizes = (0..u32::BITS).map(|power| 1 << power);
        let sizes = sizes.take_while(|size| *size <= judging.step_tokens_max);
        let step_seconds = |tokens: u32| {
            let load = StepLoad::decoding(1, tokens as usize, 0);
            judging.engine.step_seconds(load)
        };
        let profile: Vec<(u32, f64)> = sizes.map(|size| (size, step_seconds(size))).collect();
        router.start_from_profile(&profile);
        Judge {
            judging,
            router,
            withholds: false,
            length: Length::default(),
            next_length: Length::default(),
            next_budget: 0,
            outlook: Outlook::default(),
            off_above_batch: None,
            head: Acceptance::default(),
            positions: Positions::default(),
            account: Account::default(),
        }
    }

    /// The same judge, which drafts nothing in steps of more requests than this.
    pub(crate) fn off_above(mut self, batch: Option<usize>) -> Self {
        self.off_above_batch = batch;
        self
    }

    /// Whether the head's tokens are right where the output of this call has come so far.
    pub(super) fn head_accepts(&self, call: u64, position: usize, depth: usize) -> usize {
        let Judging { head, seed, .. } = &self.judging;
        head.accepted(*seed, call, position, depth)
    }

    /// The parameters of drafts in a step of so many requests, as a worker has them.
    pub(crate) fn propose_params(&self, rules: &ProposeRules, requests: usize) -> ProposeParams {
        let price = self.router.draft_price(requests as u32);
        match self.judging.policy {
            Policy::Goodput => rules.for_router(price),
            Policy::Padded | Policy::Adaptive => ProposeParams {
                expansion: Expansion::Linear,
                ..rules.padded()
            },
            _ => rules.whole(requests, price),
        }
    }

    /// The acceptance statistics of a namespace, once something was learnt.
    pub(crate) fn statistics(&self, namespace: usize) -> Option<&AcceptanceStatistics> {
        self.router.known_statistics(namespace)
    }

    /// Chooses for all requests of a step together.
    pub(crate) fn choose(&mut self, mut requests: Vec<DraftRequest>) -> Vec<DraftChoice> {
        let batch = requests.len() as u32;
        let is_off = self
            .off_above_batch
            .is_some_and(|most| requests.len() > most);
        let is_routed = self.judging.policy == Policy::Goodput && !is_off;
        self.withholds = is_routed && self.router.withholds(batch, false);
        if self.withholds || is_off {
            // A worker looks for nothing then.
            for request in &mut requests {
                request.found = None;
            }
        }
        if self.judging.policy == Policy::Mba {
            self.cut_by_mba(&mut requests);
        }
        self.length = std::mem::take(&mut self.next_length);
        self.withholds |= self.length.is_withheld;
        let mut room = self.judging.step_tokens_max.saturating_sub(batch);
        let frame = Frame {
            tokens: batch,
            kv_tokens: requests.iter().map(|of| of.context_tokens as u64).sum(),
            slots_max: room,
            batch,
        };
        let prospects: Vec<Prospect<usize>> = requests
            .into_iter()
            .map(|request| self.prospect(request, room))
            .collect();
        if self.judging.policy == Policy::Padded && !is_off {
            self.next_length = self.choose_length(&prospects, frame);
        }
        // Places that are verified, drafted or not.
        let mut places = match self.judging.policy {
            Policy::Padded => vec![self.length.places as usize; prospects.len()],
            Policy::Adaptive => self.admit(&prospects, frame),
            _ => vec![0; prospects.len()],
        }
        .into_iter();
        let mut offers: HashMap<usize, Offer> = match is_routed {
            true => {
                let numbered = prospects.iter().cloned().enumerate().collect();
                self.router.offer(numbered, frame).into_iter().collect()
            }
            false => HashMap::new(),
        };
        let choose_one = |(number, prospect): (usize, Prospect<usize>)| {
            let offer = offers.remove(&number);
            let places = places.next().unwrap_or(0);
            let draft = match &offer {
                Some(offer) => offered(offer),
                None if is_off => StepDraft::Plain,
                None => self.by_itself(prospect.whole().as_deref(), places, room as usize),
            };
            room = room.saturating_sub(draft.tokens() as u32);
            DraftChoice {
                namespace: prospect.namespace,
                places: draft.tokens().max(places),
                acceptance_probabilities: self.acceptance_probabilities(&draft, &prospect),
                draft,
                predictability: prospect.path_probabilities.iter().sum(),
                found: prospect.candidate,
                offer,
            }
        };
        prospects.into_iter().enumerate().map(choose_one).collect()
    }

    /// The length of the next step's drafts, by those of this step.
    fn choose_length(&mut self, prospects: &[Prospect<usize>], frame: Frame) -> Length {
        let drafts = prospects
            .iter()
            .map(|prospect| prospect.path_probabilities.clone());
        let drafts: Vec<Vec<f32>> = drafts.collect();
        let places = self.router.uniform_length(&drafts, &LENGTHS, frame);
        Length {
            places: places.unwrap_or(0),
            is_withheld: places.is_none(),
        }
    }

    /// The draft tokens of each request, as vLLM's adaptive verification admits them.
    fn admit(&mut self, prospects: &[Prospect<usize>], frame: Frame) -> Vec<usize> {
        let paths = prospects.iter().map(|prospect| {
            let paths = &prospect.path_probabilities;
            &paths[..paths.len().min(ADAPTIVE_TOKENS_MAX)]
        });
        let paths: Vec<&[f32]> = paths.collect();
        let budget = std::mem::take(&mut self.next_budget);
        let engine = &self.judging.engine;
        let requests = prospects.len();
        let kv_tokens = frame.kv_tokens as usize;
        self.outlook.learn(&paths, ADAPTIVE_TOKENS_MAX);
        let next = paths.iter().map(|path| self.outlook.next(path).collect());
        let next: Vec<Vec<f32>> = next.collect();
        self.next_budget = adaptive::budget(&next, |draft_tokens| {
            engine.step_seconds(StepLoad::decoding(
                requests,
                requests + draft_tokens,
                kv_tokens,
            ))
        });
        adaptive::admit(&paths, budget)
    }

    /// Cuts all drafts to the length that Seer's rule gives the batch.
    fn cut_by_mba(&self, requests: &mut [DraftRequest]) {
        let kv_tokens = requests.iter().map(|of| of.context_tokens).sum();
        let step_seconds = |tokens: usize| {
            self.judging
                .engine
                .step_seconds(StepLoad::decoding(requests.len(), tokens, kv_tokens))
        };
        let acceptance = self.positions.acceptance();
        let (depth, _) = mba::draft_tokens((requests.len(), 0), &acceptance, step_seconds);
        for request in requests {
            let whole = request.found.take();
            request.found = whole.and_then(|found| mba::within_depth(&found, depth));
        }
    }

    fn prospect(&self, request: DraftRequest, room: u32) -> Prospect<usize> {
        let has_head = !self.judging.head.is_absent() && !self.withholds;
        let mut prospect = Prospect {
            namespace: request.namespace,
            asked: Asked::Auto,
            context_tokens: request.context_tokens as u32,
            draft_max: room,
            tree_max: room,
            candidate: request.found,
            path_probabilities: Vec::new(),
            price: request.price,
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

    /// Decides for a request by itself, as policies other than the router's do. The draft has at most `room` tokens,
    /// and no more than `places` where the engine verifies so many in any case.
    fn by_itself(&self, found: Option<&Candidate>, places: usize, room: usize) -> StepDraft {
        let head = &self.judging.head;
        let room = match self.judging.policy {
            Policy::Padded | Policy::Adaptive => places,
            _ => room,
        };
        let suffix_draft = |found: &Candidate| {
            let mut tree = found.tree.clone();
            tree.truncate(room);
            StepDraft::Suffix(tree)
        };
        let head_draft = || StepDraft::Head(head.acceptance.len().min(room));
        match (self.judging.policy, found) {
            (Policy::Off | Policy::Goodput, _) => StepDraft::Plain,
            (Policy::Eagle3, _) => head_draft(),
            // SAM's matches are long enough to be preferred to the head.
            (Policy::Padded | Policy::Adaptive, _) if room == 0 => StepDraft::Plain,
            (
                Policy::Suffix
                | Policy::Mba
                | Policy::Pld
                | Policy::Sam
                | Policy::Padded
                | Policy::Adaptive,
                Some(found),
            ) => suffix_draft(found),
            (Policy::Sam, None) if !head.is_absent() => head_draft(),
            (Policy::Score | Policy::Paper, _) => match self.route_by_score(found) {
                Route::Suffix => found.map_or(StepDraft::Plain, suffix_draft),
                Route::Fallback | Route::Merged => head_draft(),
                Route::Plain => StepDraft::Plain,
            },
            (_, None) => StepDraft::Plain,
        }
    }

    /// SuffixDecoding's rule, tau being the head's own tokens per step unless it is given.
    fn route_by_score(&self, found: Option<&Candidate>) -> Route {
        let Judging {
            head, threshold, ..
        } = &self.judging;
        let break_even = match head.is_absent() {
            // A plain step brings one token.
            true => Some(1.0),
            false => self.head.accepted_length().map(|length| length as f32),
        };
        match found {
            Some(found) if found.score > threshold.in_force(break_even) => Route::Suffix,
            _ if !head.is_absent() && threshold.allows_fallback() => Route::Fallback,
            _ => Route::Plain,
        }
    }

    /// The expected probability that each token of the draft is accepted.
    fn acceptance_probabilities(
        &mut self,
        draft: &StepDraft,
        prospect: &Prospect<usize>,
    ) -> Vec<f32> {
        match (draft, &prospect.candidate) {
            (StepDraft::Suffix(part), Some(whole)) => {
                probabilities_of_part(&whole.tree, part, &prospect.path_probabilities)
            }
            (StepDraft::Head(depth), _) => self
                .router
                .statistics(prospect.namespace)
                .head_path_probabilities(prospect.context_tokens, *depth as u32)
                .collect(),
            (StepDraft::Plain | StepDraft::Suffix(_), _) => Vec::new(),
        }
    }

    /// Learns from a step, charges it, and returns its modelled seconds.
    pub(crate) fn settle(&mut self, verified: &[VerifiedChoice]) -> f64 {
        let mut load = StepLoad::default();
        let mut depths = Vec::new();
        for one in verified {
            let choice = &one.choice;
            load.requests += 1;
            load.tokens += 1 + choice.places;
            load.kv_tokens += one.context_tokens;
            for (node, probability) in (0..).zip(&choice.acceptance_probabilities) {
                self.account.record(*probability, one.path.contains(&node));
            }
            if let StepDraft::Head(depth) = choice.draft {
                depths.push(depth);
                self.head += Acceptance::of_step(depth, one.path.len(), one.emitted.len());
            }
            if let StepDraft::Suffix(tree) = &choice.draft {
                self.positions.record(tree, one.path.len());
            }
            self.account.bonus_tokens += (one.emitted.len() - one.path.len()) as u64;
            self.learn(one);
        }
        if load.requests == 0 {
            return 0.0;
        }
        let engine = &self.judging.engine;
        let step_s = engine.step_seconds(load);
        let head_s = self.judging.head.draft_seconds(engine, &depths);
        self.account.engine_s += step_s + head_s;
        self.account.head_s += head_s;
        self.account.head_steps += depths.len() as u64;
        let found = verified.iter().filter_map(|one| one.choice.found.as_ref());
        let found_tokens = found.map(|found| found.tree.len()).sum::<usize>();
        let step = Step {
            items: verified.iter().map(|one| self.item(one)).collect(),
            seconds: step_s + head_s,
            draft_seconds: head_s,
            compose_seconds: found_tokens as f64 * FIND_TOKEN_S,
            found_tokens: found_tokens as u32,
            withheld: self.withholds,
        };
        self.router.observe(step);
        self.router.learn_step();
        step_s + head_s
    }

    /// The item of a step that the router observes.
    fn item(&self, verified: &VerifiedChoice) -> StepPart {
        let choice = &verified.choice;
        let draft_tokens = choice.places as u32;
        let (route, head) = match choice.draft {
            StepDraft::Plain if draft_tokens > 0 => (Route::Suffix, None),
            StepDraft::Plain => (Route::Plain, None),
            StepDraft::Suffix(_) => (Route::Suffix, None),
            StepDraft::Head(_) => {
                let asked = HeadDraft {
                    depth: draft_tokens,
                    tokens_max: draft_tokens,
                };
                (Route::Fallback, Some(asked))
            }
        };
        StepPart {
            route: Some(route),
            is_auto: true,
            may_use_head: true,
            predictability: choice.predictability,
            context_tokens: 1,
            text_tokens: verified.context_tokens as u32,
            draft_tokens,
            head,
            head_drafted: head.map_or(0, |asked| asked.tokens_max),
            read_tokens: 0,
            emitted: Some(verified.emitted.len() as u32),
        }
    }

    fn learn(&mut self, verified: &VerifiedChoice) {
        let choice = &verified.choice;
        let mut emitted = verified.emitted.clone();
        emitted.extend(verified.is_last.then_some(END));
        let head_accepted = match choice.draft {
            StepDraft::Head(_) => verified.path.len() as u32,
            StepDraft::Plain | StepDraft::Suffix(_) => 0,
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
        if let StepDraft::Head(depth) = choice.draft {
            let context_tokens = verified.context_tokens as u32;
            statistics.observe_head(context_tokens, depth as u32, head_accepted);
        }
        if let Some(found) = &choice.found {
            statistics.observe(found, &emitted);
        }
    }
}

/// The part of the router's offer that the modelled engine carries out: it has no merged drafts.
fn offered(offer: &Offer) -> StepDraft {
    match (offer.head(), offer.suffix()) {
        (Some(head), _) => StepDraft::Head(head.depth as usize),
        (None, Some(part)) => StepDraft::Suffix(part.tree.clone()),
        (None, None) => StepDraft::Plain,
    }
}

/// The probabilities of the nodes of a part of a tree, in the order of the part. Both have parents before children.
fn probabilities_of_part(whole: &DraftTree, part: &DraftTree, probabilities: &[f32]) -> Vec<f32> {
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
