//! Recorded calls, served as a worker would: in steps of a batch, each request drafting from what all of them
//! said before the step.

use std::collections::{HashSet, VecDeque};

use refrain_speculation::{
    AcceptanceTable, Candidate, DraftTree, Lookup, ProposeParams, Scope, Source, propose,
};
use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexError, Token};

use super::clock::{Durations, Spent};
use super::memory::{Home, Memory};
use super::trace::Call;

/// Calls read ahead of those that run, to find some whose session is free.
const WAITING_MAX: usize = 1024;

const OWN: DocumentKey = DocumentKey(0);

/// How calls are served.
#[derive(Clone, Debug)]
pub(super) struct Serving {
    pub(super) params: ProposeParams,
    /// Draft from the request's own prompt and output.
    pub(super) request: bool,
    /// Outputs are not added to the shared indexes.
    pub(super) frozen: bool,
    /// Requests under way at once, at least 1.
    pub(super) concurrency: usize,
}

/// What was counted.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) docs: u64,
    pub(super) prompt_tokens: u64,
    /// Steps and tokens, by what the draft was read from.
    pub(super) table: AcceptanceTable,
    /// One call of `propose` with the look-ups it needs.
    pub(super) proposing: Durations,
    /// Growing the requests' own structures.
    pub(super) extended: Spent,
}

/// A request under way.
struct Running {
    call: Call,
    home: Home,
    /// Prompt, and the whole recorded output.
    text: Vec<Token>,
    /// How much of it is known so far.
    known: usize,
    own: Option<Index>,
    shared: Shared,
    draft: Option<Candidate>,
}

/// Where the request stands in the shared indexes.
enum Shared {
    /// Its output is a document there, which knows its own place.
    Document(DocumentKey),
    /// Nothing is added, so it follows by itself.
    Cursors { global: Cursor, group: Cursor },
}

/// Serves all calls. `ended` is told after each.
///
/// Calls begin in the order in which they come, as soon as a place is free; those of one session one after the
/// other.
pub(super) fn serve(
    calls: &mut impl Iterator<Item = anyhow::Result<Call>>,
    memory: &mut Memory,
    serving: &Serving,
    mut ended: impl FnMut(&Tally),
) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    let mut queue = Queue::default();
    let mut batch: Vec<Running> = Vec::new();
    loop {
        while batch.len() < serving.concurrency {
            let Some(call) = queue.next(calls)? else {
                break;
            };
            let running = Running::begin(call, memory, serving, &mut tally)?;
            batch.push(running);
        }
        if batch.is_empty() {
            return Ok(tally);
        }
        for running in &mut batch {
            running.propose(memory, &serving.params, &mut tally);
        }
        for running in &mut batch {
            running.absorb(memory, &mut tally)?;
        }
        for running in batch.extract_if(.., |running| running.known == running.text.len()) {
            let key = match running.shared {
                Shared::Document(key) => Some(key),
                Shared::Cursors { .. } => None,
            };
            memory.leave(&running.home, key)?;
            queue.end(&running.call);
            tally.docs += 1;
            ended(&tally);
        }
    }
}

impl Running {
    fn begin(
        call: Call,
        memory: &mut Memory,
        serving: &Serving,
        tally: &mut Tally,
    ) -> Result<Self, IndexError> {
        let home = memory.enter(&call);
        let prompt = &call.prompt;
        tally.prompt_tokens += prompt.len() as u64;
        let mut own = serving
            .request
            .then(|| Index::new(memory.index_config().clone()));
        if let Some(own) = &mut own {
            tally.extended.on(prompt.len(), || {
                own.open(OWN, &[])?;
                own.append(OWN, prompt)
            })?;
        }
        let shared = if serving.frozen {
            let start = |index: Option<&Index>| {
                index.map_or_else(Cursor::default, |index| index.start(prompt))
            };
            tally.extended.on(0, || Shared::Cursors {
                global: start(memory.global(&home)),
                group: start(memory.group(&home)),
            })
        } else {
            Shared::Document(memory.open(&home, prompt)?)
        };
        Ok(Running {
            text: [&prompt[..], &call.output].concat(),
            known: prompt.len(),
            call,
            home,
            own,
            shared,
            draft: None,
        })
    }

    /// Looks for a draft in all sources. How much of the recording is left is not for the draft to know.
    fn propose(&mut self, memory: &Memory, params: &ProposeParams, tally: &mut Tally) {
        if self.known == self.text.len() {
            return;
        }
        let (global, group) = (memory.global(&self.home), memory.group(&self.home));
        let start = std::time::Instant::now();
        let context = &self.text[..self.known];
        let (at_global, at_group) = match self.shared {
            Shared::Document(key) => (
                global.and_then(|index| index.tip(key)),
                group.and_then(|index| index.tip(key)),
            ),
            Shared::Cursors { global, group } => (Some(global), Some(group)),
        };
        let at_own = self.own.as_ref().and_then(|own| own.tip(OWN));
        let mut lookups = Vec::with_capacity(Scope::ALL.len());
        lookups.extend(lookup(Scope::Request, self.own.as_ref(), at_own, context));
        lookups.extend(lookup(Scope::Group, group, at_group, context));
        lookups.extend(lookup(Scope::Tenant, global, at_global, context));
        self.draft = propose(&lookups, params, params.max_spec_tokens);
        drop(lookups);
        tally.proposing.add(start.elapsed());
    }

    /// Takes what the recorded model would have said to the draft.
    fn absorb(&mut self, memory: &mut Memory, tally: &mut Tally) -> Result<(), IndexError> {
        let recorded = &self.text[self.known..];
        if recorded.is_empty() {
            return Ok(());
        }
        let draft = self.draft.take();
        let accepted = draft
            .as_ref()
            .map_or(0, |draft| accepted(&draft.tree, recorded));
        // Where the recording ends, nobody knows the model's next token.
        let emitted = &recorded[..(accepted + 1).min(recorded.len())];
        let cell = match &draft {
            Some(draft) => tally.table.get_mut(draft.source, draft.scope),
            None => tally.table.get_mut(Source::None, Scope::Request),
        };
        let drafted = draft.map_or(0, |draft| draft.tree.len());
        cell.record(drafted, accepted, emitted.len());
        if let Some(own) = &mut self.own {
            tally
                .extended
                .on(emitted.len(), || own.append(OWN, emitted))?;
        }
        match &mut self.shared {
            Shared::Document(key) => memory.append(&self.home, *key, emitted)?,
            Shared::Cursors { global, group } => {
                // The tokens are counted where the request's own index grows, if it has one.
                let tokens = if self.own.is_some() { 0 } else { emitted.len() };
                tally.extended.on(tokens, || {
                    for (index, cursor) in [
                        (memory.global(&self.home), global),
                        (memory.group(&self.home), group),
                    ] {
                        let Some(index) = index else { continue };
                        for &token in emitted {
                            index.advance(cursor, token);
                        }
                    }
                });
            }
        }
        self.known += emitted.len();
        Ok(())
    }
}

/// A look-up in an index that is there, at a place that is known.
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

/// How many tokens of the tree the recording went along with.
fn accepted(tree: &DraftTree, recorded: &[Token]) -> usize {
    let mut at = None;
    for (depth, &token) in recorded.iter().enumerate() {
        match tree.child(at, token) {
            Some(child) => at = Some(child),
            None => return depth,
        }
    }
    recorded.len()
}

/// Calls that were read and have not begun.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<Call>,
    /// Sessions of the calls that run.
    busy: HashSet<SessionKey>,
}

type SessionKey = (Option<String>, String);

fn session(call: &Call) -> Option<SessionKey> {
    Some((call.tenant.clone(), call.session.clone()?))
}

impl Queue {
    /// The first call whose session is free; it is not free any more then.
    fn next(
        &mut self,
        calls: &mut impl Iterator<Item = anyhow::Result<Call>>,
    ) -> anyhow::Result<Option<Call>> {
        let mut at = 0;
        loop {
            if at == self.waiting.len() {
                let next = if at < WAITING_MAX { calls.next() } else { None };
                match next.transpose()? {
                    Some(call) => self.waiting.push_back(call),
                    None => return Ok(None),
                }
            }
            let key = session(&self.waiting[at]);
            if key.as_ref().is_none_or(|key| !self.busy.contains(key)) {
                self.busy.extend(key);
                return Ok(self.waiting.remove(at));
            }
            at += 1;
        }
    }

    fn end(&mut self, call: &Call) {
        if let Some(key) = session(call) {
            self.busy.remove(&key);
        }
    }
}
