//! Drafts from the real suffix index over recorded tokens, as a worker makes them.
//!
//! A request drafts from its own text at once, and from the samples of its group when the feed has brought them. The
//! lag is the same for samples of the same instance, which is a little less than an instance has.

use std::collections::VecDeque;
use std::sync::Arc;

use refrain_protocol::document::LEFT_CONTEXT_TOKENS;
use refrain_speculation::draft::{
    Candidate, Expansion, Lookup, ProposeParams, ProposeRules, Scope, Setting, Source,
    propose_valued,
};
use refrain_speculation::router::Threshold;
use refrain_speculation::verify::walk;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, Token};

use super::decoding::{Decoding, Drafted};
use super::options::{DraftRule, SimulatedDrafts};
use super::workload::Workload;
use crate::logs::RecordedCall;
use crate::replay::{
    DraftRequest, Eagle3, EngineModel, Judge, Judging, Policy, StepDraft, VerifiedChoice,
    worker_rules,
};

const OWN: DocumentKey = DocumentKey(0);

/// Tokens on their way through the feed.
struct Fed {
    visible_s: f64,
    job: usize,
    tokens: Vec<Token>,
}

/// A request and its own text.
struct Writer {
    call: Arc<RecordedCall>,
    group: usize,
    own: Option<Index>,
    context: Vec<Token>,
}

/// The indexes of all requests and groups.
pub(super) struct TokenDrafts {
    writers: Vec<Writer>,
    groups: Vec<Index>,
    feed: VecDeque<Fed>,
    settings: DraftSettings,
    judges: Vec<Judge>,
    rules: ProposeRules,
}

/// How drafts are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftSettings {
    pub(super) drafts: SimulatedDrafts,
    pub(super) rule: DraftRule,
    /// The length of a draft by the rule `fixed`.
    pub(super) draft_tokens: usize,
    /// Nothing is drafted in steps of more requests than this.
    pub(super) off_above_batch: Option<usize>,
    pub(super) paths: usize,
    pub(super) lag_s: f64,
    /// Time to propose a draft for one request, seconds.
    pub(super) propose_s: f64,
}

impl DraftSettings {
    /// Whether a step of so many requests drafts nothing.
    pub(super) fn is_off(&self, requests: usize) -> bool {
        self.off_above_batch.is_some_and(|most| requests > most)
    }

    /// Time to propose the drafts of a step, seconds. The host proposes when it knows the tokens of the step before.
    pub(super) fn host_s(&self, draft_tokens: usize, decoding: usize) -> f64 {
        match draft_tokens {
            0 => 0.0,
            _ => self.propose_s * decoding as f64,
        }
    }
}

impl TokenDrafts {
    /// `None` where the text of a request is unknown.
    pub(super) fn new(
        workload: &Workload,
        instances: usize,
        engine: &EngineModel,
        settings: DraftSettings,
    ) -> anyhow::Result<Option<Self>> {
        let mut rules = worker_rules();
        if settings.paths > 1 {
            rules.params.expansion = Expansion::Paths(settings.paths);
        }
        if settings.rule == DraftRule::Fixed {
            rules.alpha = Setting::Fixed(0.0);
            rules.min_token_prob = Setting::Fixed(0.0);
            rules.params.offset = settings.draft_tokens as f32;
            rules.params.max_spec_tokens = settings.draft_tokens;
        }
        let config = IndexConfig {
            pattern_tokens_max: rules.params.max_pattern,
            ..IndexConfig::default()
        };
        let mut writers = Vec::with_capacity(workload.jobs.len());
        for job in &workload.jobs {
            let Some(call) = &job.text else {
                return Ok(None);
            };
            writers.push(Writer {
                call: call.clone(),
                group: job.group,
                own: None,
                context: Vec::new(),
            });
        }
        let mut groups: Vec<Index> = (0..workload.groups)
            .map(|_| Index::new(config.clone()))
            .collect();
        if settings.drafts == SimulatedDrafts::History {
            for (index, known) in groups.iter_mut().zip(&workload.known) {
                for (nth, call) in (0u128..).zip(&known.texts) {
                    let key = DocumentKey((1 << 64) + nth);
                    index.open(key, left_context(&call.prompt))?;
                    index.append(key, &call.output)?;
                }
            }
        }
        let judging = Judging {
            policy: match settings.rule {
                DraftRule::Goodput => Policy::Goodput,
                DraftRule::Mba => Policy::Mba,
                DraftRule::Fixed => Policy::Suffix,
            },
            engine: engine.clone(),
            head: Eagle3::absent(),
            seed: 0,
            threshold: Threshold::Auto,
            step_tokens_max: u32::MAX,
        };
        Ok(Some(TokenDrafts {
            writers,
            groups,
            feed: VecDeque::new(),
            settings,
            judges: (0..instances)
                .map(|_| Judge::new(judging.clone()).off_above(settings.off_above_batch))
                .collect(),
            rules,
        }))
    }

    pub(super) fn draft_tokens_max(&self) -> usize {
        self.rules.params.max_spec_tokens
    }

    /// Makes and verifies the drafts of one step.
    pub(super) fn plan(
        &mut self,
        instance: usize,
        now_s: f64,
        decoding: &[Decoding],
    ) -> anyhow::Result<Drafted> {
        self.feed_until(now_s)?;
        let params = self.judges[instance].propose_params(&self.rules, decoding.len());
        let mut requests = Vec::with_capacity(decoding.len());
        for one in decoding {
            self.catch_up(now_s, one)?;
            let writer = &self.writers[one.job];
            requests.push(DraftRequest {
                namespace: 0,
                context_tokens: one.context_tokens,
                found: self.search(writer, &params, instance),
                price: params.price,
            });
        }
        let judge = &mut self.judges[instance];
        let mut drafted = Drafted {
            gains: Vec::with_capacity(decoding.len()),
            draft_tokens: 0,
            host_s: 0.0,
            steps_max: 1,
        };
        let mut verified = Vec::with_capacity(decoding.len());
        for (one, choice) in decoding.iter().zip(judge.choose(requests)) {
            let recorded = &self.writers[one.job].call.output[one.known as usize..];
            let path = match &choice.draft {
                StepDraft::Suffix(tree) => {
                    walk(tree, |_, path| recorded.get(path.len()).copied()).accepted
                }
                StepDraft::Plain | StepDraft::Head(_) => Vec::new(),
            };
            let emitted = &recorded[..(path.len() + 1).min(recorded.len())];
            drafted.gains.push(emitted.len() as f64);
            drafted.draft_tokens += choice.draft.tokens();
            verified.push(VerifiedChoice {
                context_tokens: one.context_tokens,
                emitted: emitted.to_vec(),
                is_last: emitted.len() == recorded.len(),
                path,
                choice,
            });
        }
        judge.settle(&verified);
        drafted.host_s = self.settings.host_s(drafted.draft_tokens, decoding.len());
        Ok(drafted)
    }

    /// Brings a request's own text up to what it has decoded, and sends that to the others.
    fn catch_up(&mut self, now_s: f64, one: &Decoding) -> anyhow::Result<()> {
        let writer = &mut self.writers[one.job];
        let call = writer.call.clone();
        if writer.own.is_none() {
            let mut own = Index::new(IndexConfig {
                pattern_tokens_max: self.rules.params.max_pattern,
                ..IndexConfig::default()
            });
            own.open(OWN, &[])?;
            own.append(OWN, &call.prompt)?;
            writer.own = Some(own);
            writer.context.clone_from(&call.prompt);
            let index = &mut self.groups[writer.group];
            index.open(DocumentKey(one.job as u128), left_context(&call.prompt))?;
        }
        let from = writer.context.len() - call.prompt.len();
        let new = &call.output[from..one.known as usize];
        if new.is_empty() {
            return Ok(());
        }
        writer.context.extend_from_slice(new);
        if let Some(own) = &mut writer.own {
            own.append(OWN, new)?;
        }
        self.feed.push_back(Fed {
            visible_s: now_s + self.settings.lag_s,
            job: one.job,
            tokens: new.to_vec(),
        });
        Ok(())
    }

    fn feed_until(&mut self, now_s: f64) -> anyhow::Result<()> {
        while self.feed.front().is_some_and(|fed| fed.visible_s <= now_s)
            && let Some(fed) = self.feed.pop_front()
        {
            let index = &mut self.groups[self.writers[fed.job].group];
            index.append(DocumentKey(fed.job as u128), &fed.tokens)?;
        }
        Ok(())
    }

    fn search(
        &self,
        writer: &Writer,
        params: &ProposeParams,
        instance: usize,
    ) -> Option<Candidate> {
        let own = writer.own.as_ref()?;
        let group = &self.groups[writer.group];
        let context = &writer.context[..];
        let tail = &context[context.len().saturating_sub(params.max_pattern as usize)..];
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context: tail,
        };
        let mut lookups = vec![lookup(Scope::Request, own, own.tip(OWN)?)];
        if self.settings.drafts != SimulatedDrafts::Request {
            lookups.push(lookup(Scope::Group, group, group.start(tail)));
        }
        let statistics = self.judges[instance].statistics(0);
        propose_valued(&lookups, params, statistics, params.max_spec_tokens)
    }

    /// Sends the rest of a finished output, and forgets the request's own index.
    pub(super) fn finished(&mut self, job: usize) {
        let writer = &mut self.writers[job];
        if writer.own.take().is_none() {
            return;
        }
        let from = writer.context.len() - writer.call.prompt.len();
        let visible_s = self.feed.back().map_or(0.0, |fed| fed.visible_s);
        self.feed.push_back(Fed {
            visible_s,
            job,
            tokens: writer.call.output[from..].to_vec(),
        });
        writer.context = Vec::new();
    }
}

/// The end of the prompt, into which patterns may reach.
fn left_context(prompt: &[Token]) -> &[Token] {
    &prompt[prompt.len().saturating_sub(LEFT_CONTEXT_TOKENS)..]
}
