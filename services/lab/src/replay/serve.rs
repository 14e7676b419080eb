//! Serves recorded calls as a worker would: in steps of a batch. Each request drafts from all outputs before the
//! step.

use std::collections::{HashSet, VecDeque};
use std::time::Instant;

use refrain_speculation::draft::{
    Candidate, Lookup, ProposeParams, ProposeRules, Scope, Source, propose_valued,
};
use refrain_speculation::verify::walk;
use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexError, Token};

use super::by_length::AcceptanceByLength;
use super::clock::{Durations, Spent};
use super::counts::{Acceptance, AcceptanceTable};
use super::judge::{DraftChoice, DraftRequest, Judge, StepDraft, VerifiedChoice};
use super::parallel::ReplayProgress;
use super::presets::{self, Drafter, SamRequest};
use super::shared_indexes::{Membership, SharedIndexes};
use crate::logs::RecordedCall;

/// Calls that are read ahead of the running ones, to find calls whose session is free.
const WAITING_MAX: usize = 1024;

const OWN: DocumentKey = DocumentKey(0);

/// How calls are served.
#[derive(Clone, Debug)]
pub(crate) struct Serving {
    pub(crate) drafter: Drafter,
    /// Rules of drafts from suffix indexes.
    pub(crate) rules: ProposeRules,
    /// Draft from the request's own prompt and output.
    pub(crate) request: bool,
    /// Draft from the shared indexes.
    pub(crate) shared: bool,
    /// Whether outputs are kept out of the shared indexes.
    pub(crate) frozen: bool,
    /// Requests in flight at once, at least 1.
    pub(crate) concurrency: usize,
    /// Also count every window of this many calls by itself.
    pub(crate) window: Option<u64>,
}

/// The counts of a replay.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) docs: u64,
    pub(crate) prompt_tokens: u64,
    /// Steps and tokens by the source of the draft.
    pub(crate) table: AcceptanceTable,
    /// Steps with a suffix draft, by the length of its match.
    pub(crate) by_match_len: AcceptanceByLength,
    /// All steps, by the tokens of the output before.
    pub(crate) by_position: AcceptanceByLength,
    /// Calls and counts at the end of each window.
    pub(crate) windows: Vec<(u64, Acceptance)>,
    /// Times of proposals, look-ups included.
    pub(crate) proposing: Durations,
    /// Time to extend the requests' own structures.
    pub(crate) extended: Spent,
}

/// A call that a replay has finished.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedCall {
    /// Its number among the replayed calls, from 0.
    pub(crate) number: u64,
    /// Its part of the modelled time, seconds. The requests of a step share it equally: each waits for all of it.
    pub(crate) engine_s: f64,
}

/// A request in flight.
struct Running {
    /// Its number in the traces.
    number: u64,
    call: RecordedCall,
    membership: Membership,
    /// The prompt and the whole recorded output.
    text: Vec<Token>,
    /// Number of tokens of `text` that are known so far.
    known: usize,
    own: Option<Index>,
    shared: SharedPosition,
    sam: Option<SamRequest>,
    /// Its part of the modelled time so far, seconds.
    engine_s: f64,
}

/// How the request follows the shared indexes.
enum SharedPosition {
    /// Its output is a document in the indexes, which knows its own position.
    Document(DocumentKey),
    /// Nothing is added, so the request keeps its own cursors.
    Cursors { global: Cursor, group: Cursor },
    /// The request does not use the shared indexes.
    Apart,
}

/// Serves all calls. `ended` is called after each.
///
/// Calls begin in the order of the traces, as soon as a slot is free. Calls of one session run one after the other.
pub(super) fn serve(
    calls: &mut impl Iterator<Item = anyhow::Result<RecordedCall>>,
    indexes: &mut SharedIndexes,
    serving: &Serving,
    judge: &mut Judge,
    mut ended: impl FnMut(&Tally, EndedCall),
) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    let mut queue = CallQueue::default();
    let mut batch: Vec<Running> = Vec::new();
    loop {
        while batch.len() < serving.concurrency {
            let Some((number, call)) = queue.next(calls)? else {
                break;
            };
            let running = Running::begin(number, call, indexes, serving, &mut tally)?;
            batch.push(running);
        }
        if batch.is_empty() {
            return Ok(tally);
        }
        // A call may have no output at all.
        let mut going: Vec<&mut Running> = batch
            .iter_mut()
            .filter(|running| !running.is_over())
            .collect();
        let params = judge.propose_params(&serving.rules, going.len());
        let requests = going
            .iter()
            .map(|running| DraftRequest {
                namespace: running.membership.namespace,
                context_tokens: running.known,
                found: running.propose(indexes, serving.drafter, &params, judge, &mut tally),
                price: params.price.filter(|_| serving.drafter == Drafter::Suffix),
            })
            .collect();
        let choices = judge.choose(requests);
        let mut verified = Vec::with_capacity(going.len());
        for (running, choice) in going.iter_mut().zip(choices) {
            verified.push(running.absorb(choice, judge, indexes, &mut tally)?);
        }
        let step_s = judge.settle(&verified);
        let share_s = step_s / going.len().max(1) as f64;
        for running in going {
            running.engine_s += share_s;
        }
        for running in batch.extract_if(.., |running| running.is_over()) {
            let key = match running.shared {
                SharedPosition::Document(key) => Some(key),
                SharedPosition::Cursors { .. } | SharedPosition::Apart => None,
            };
            indexes.leave(&running.membership, key)?;
            queue.end(&running.call);
            tally.docs += 1;
            if serving.window.is_some_and(|calls| tally.docs % calls == 0) {
                tally.windows.push((tally.docs, tally.table.total()));
            }
            let call = EndedCall {
                number: running.number,
                engine_s: running.engine_s,
            };
            ended(&tally, call);
        }
    }
}

impl Tally {
    /// The progress of a replay that has done this share of its work.
    pub(crate) fn progress(&self, share: f64) -> ReplayProgress {
        let total = self.table.total();
        ReplayProgress {
            docs: self.docs,
            steps: total.steps,
            output_tokens: total.emitted,
            share,
        }
    }
}

impl Running {
    fn begin(
        number: u64,
        call: RecordedCall,
        indexes: &mut SharedIndexes,
        serving: &Serving,
        tally: &mut Tally,
    ) -> Result<Self, IndexError> {
        let membership = indexes.enter(&call);
        let prompt = &call.prompt;
        tally.prompt_tokens += prompt.len() as u64;
        let mut own = serving
            .request
            .then(|| Index::new(indexes.index_config().clone()));
        if let Some(own) = &mut own {
            tally.extended.on(prompt.len(), || {
                own.open(OWN, &[])?;
                own.append(OWN, prompt)
            })?;
        }
        let shared = if !serving.shared {
            SharedPosition::Apart
        } else if serving.frozen {
            let start = |index: Option<&Index>| {
                index.map_or_else(Cursor::default, |index| index.start(prompt))
            };
            tally.extended.on(0, || SharedPosition::Cursors {
                global: start(indexes.global(&membership)),
                group: start(indexes.group(&membership)),
            })
        } else {
            SharedPosition::Document(indexes.open(&membership, prompt)?)
        };
        let sam = matches!(serving.drafter, Drafter::Sam(_)).then(|| {
            tally.extended.on(prompt.len(), || {
                let mut sam = SamRequest::default();
                sam.extend(indexes.corpus(&membership), prompt);
                sam
            })
        });
        Ok(Running {
            number,
            text: [&prompt[..], &call.output].concat(),
            known: prompt.len(),
            call,
            membership,
            own,
            shared,
            sam,
            engine_s: 0.0,
        })
    }

    fn is_over(&self) -> bool {
        self.known == self.text.len()
    }

    /// Looks for a draft. The draft must not know how much of the recording is left.
    fn propose(
        &self,
        indexes: &SharedIndexes,
        drafter: Drafter,
        params: &ProposeParams,
        judge: &Judge,
        tally: &mut Tally,
    ) -> Option<Candidate> {
        let start = Instant::now();
        let context = &self.text[..self.known];
        let found = match drafter {
            Drafter::None => return None,
            Drafter::Suffix => self.search(indexes, context, params, judge)?,
            Drafter::Sam(rules) => self
                .sam
                .as_ref()?
                .draft(indexes.corpus(&self.membership), rules),
            Drafter::Pld(draft_tokens) => presets::look_up(context, draft_tokens),
        };
        tally.proposing.add(start.elapsed());
        found
    }

    /// The best draft of all suffix indexes; the outer `None` means that there are no indexes.
    fn search(
        &self,
        indexes: &SharedIndexes,
        context: &[Token],
        params: &ProposeParams,
        judge: &Judge,
    ) -> Option<Option<Candidate>> {
        let (global, group) = (
            indexes.global(&self.membership),
            indexes.group(&self.membership),
        );
        let (at_global, at_group) = match self.shared {
            SharedPosition::Document(key) => (
                global.and_then(|index| index.tip(key)),
                group.and_then(|index| index.tip(key)),
            ),
            SharedPosition::Cursors { global, group } => (Some(global), Some(group)),
            SharedPosition::Apart => (None, None),
        };
        let at_own = self.own.as_ref().and_then(|own| own.tip(OWN));
        let mut lookups = Vec::with_capacity(Scope::ALL.len());
        lookups.extend(lookup(Scope::Request, self.own.as_ref(), at_own, context));
        lookups.extend(lookup(Scope::Group, group, at_group, context));
        lookups.extend(lookup(Scope::Tenant, global, at_global, context));
        let room = params.max_spec_tokens;
        let statistics = judge.statistics(self.membership.namespace);
        (!lookups.is_empty()).then(|| propose_valued(&lookups, params, statistics, room))
    }

    /// Verifies the draft against the recording, and takes in the emitted tokens.
    fn absorb(
        &mut self,
        choice: DraftChoice,
        judge: &Judge,
        indexes: &mut SharedIndexes,
        tally: &mut Tally,
    ) -> Result<VerifiedChoice, IndexError> {
        let recorded = &self.text[self.known..];
        let emitted_before = self.known - self.call.prompt.len();
        let (source, scope, path) = match &choice.draft {
            StepDraft::Plain => (Source::None, Scope::Request, Vec::new()),
            StepDraft::Suffix(tree) => {
                let scope = choice
                    .found
                    .as_ref()
                    .map_or(Scope::Request, |found| found.scope);
                let walk = walk(tree, |_, path| recorded.get(path.len()).copied());
                (Source::Suffix, scope, walk.accepted)
            }
            StepDraft::Head(depth) => {
                let accepted = judge.head_accepts(self.number, emitted_before, *depth);
                let path = (0..accepted.min(recorded.len()) as u32).collect();
                (Source::Eagle3, Scope::Request, path)
            }
        };
        // Beyond the end of the recording, the model's next token is unknown.
        let emitted = &recorded[..(path.len() + 1).min(recorded.len())];
        let drafted = choice.draft.tokens();
        let counts = Acceptance::of_step(drafted, path.len(), emitted.len());
        tally.table.record((source, scope), counts);
        tally.by_position.record(emitted_before as u64, counts);
        if let (StepDraft::Suffix(_), Some(found)) = (&choice.draft, &choice.found) {
            let len = u64::from(found.match_len);
            tally.by_match_len.record(len, counts);
        }
        if let Some(own) = &mut self.own {
            tally
                .extended
                .on(emitted.len(), || own.append(OWN, emitted))?;
        }
        if let Some(sam) = &mut self.sam {
            let corpus = indexes.corpus(&self.membership);
            tally
                .extended
                .on(emitted.len(), || sam.extend(corpus, emitted));
        }
        match &mut self.shared {
            SharedPosition::Document(key) => indexes.append(&self.membership, *key, emitted)?,
            SharedPosition::Cursors { global, group } => {
                // The tokens are counted where the request's own index grows, if it has one.
                let tokens = if self.own.is_some() { 0 } else { emitted.len() };
                tally.extended.on(tokens, || {
                    for (index, cursor) in [
                        (indexes.global(&self.membership), global),
                        (indexes.group(&self.membership), group),
                    ] {
                        let Some(index) = index else { continue };
                        for &token in emitted {
                            index.advance(cursor, token);
                        }
                    }
                });
            }
            SharedPosition::Apart => {}
        }
        let verified = VerifiedChoice {
            context_tokens: self.known,
            emitted: emitted.to_vec(),
            is_last: emitted.len() == recorded.len(),
            path,
            choice,
        };
        self.known += emitted.len();
        Ok(verified)
    }
}

/// A look-up, if the index exists and the cursor is known.
fn lookup<'a>(
    scope: Scope,
    index: Option<&'a Index>,
    cursor: Option<Cursor>,
    context: &'a [Token],
) -> Option<Lookup<'a>> {
    Some(Lookup {
        source: Source::Suffix,
        scope,
        index: index?,
        cursor: cursor?,
        context,
    })
}

/// Calls that were read and have not begun yet.
#[derive(Default)]
struct CallQueue {
    /// Calls read so far.
    read: u64,
    /// Waiting calls with their numbers in the traces.
    waiting: VecDeque<(u64, RecordedCall)>,
    /// Sessions of the running calls.
    busy: HashSet<SessionKey>,
}

type SessionKey = (Option<String>, String);

fn session(call: &RecordedCall) -> Option<SessionKey> {
    Some((call.tenant.clone(), call.session.clone()?))
}

impl CallQueue {
    /// Takes the first call whose session is free, and marks the session as busy.
    fn next(
        &mut self,
        calls: &mut impl Iterator<Item = anyhow::Result<RecordedCall>>,
    ) -> anyhow::Result<Option<(u64, RecordedCall)>> {
        let mut at = 0;
        loop {
            if at == self.waiting.len() {
                let next = if at < WAITING_MAX { calls.next() } else { None };
                match next.transpose()? {
                    Some(call) => {
                        self.waiting.push_back((self.read, call));
                        self.read += 1;
                    }
                    None => return Ok(None),
                }
            }
            let key = session(&self.waiting[at].1);
            if key.as_ref().is_none_or(|key| !self.busy.contains(key)) {
                self.busy.extend(key);
                return Ok(self.waiting.remove(at));
            }
            at += 1;
        }
    }

    fn end(&mut self, call: &RecordedCall) {
        if let Some(key) = session(call) {
            self.busy.remove(&key);
        }
    }
}
