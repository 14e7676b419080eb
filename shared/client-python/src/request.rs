//! One request of the engine: its text, its own index, and its document in the memory.

use std::sync::Arc;
use std::time::Instant;

use refrain_draft_memory::{Membership, NamespaceMemory};
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason, LEFT_CONTEXT_TOKENS};
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_speculation::{Calibration, Candidate, Lookup, ProposeParams, Scope, Source, propose};
use refrain_suffix_index::{DocumentKey, Index, IndexConfig};

use crate::background::Event;
use crate::metrics::ClientMetrics;

/// The request's own text in its own index.
const OWN: DocumentKey = DocumentKey(0);
/// Most documents remembered as used between two pieces.
const TOUCHED_MAX: usize = 64;

/// What a request is that is not running: enough to go on where it stopped.
pub(crate) struct Paused {
    memory: Option<Arc<NamespaceMemory>>,
    text: Vec<u32>,
    prompt_len: usize,
    /// Output that the memory was brought.
    merged: usize,
    /// The piece that is told next, apart from its tokens.
    update: DocumentUpdate,
}

impl Paused {
    /// A request that begins. The last `written` tokens of its text are output of it, from before.
    pub(crate) fn new(
        text: Vec<u32>,
        written: usize,
        document: DocumentId,
        epoch: u64,
        memory: Option<Arc<NamespaceMemory>>,
        head: DocumentHead,
    ) -> Self {
        let prompt_len = text.len().saturating_sub(written);
        let from = prompt_len.saturating_sub(LEFT_CONTEXT_TOKENS);
        let head = DocumentHead {
            left_context: text[from..prompt_len].to_vec(),
            ..head
        };
        Paused {
            memory,
            prompt_len,
            text,
            merged: 0,
            update: DocumentUpdate {
                document,
                epoch,
                prev_len: 0,
                tokens: Vec::new(),
                head,
                finish: None,
            },
        }
    }

    /// Whether the other one, which begins, is this one again: the engine brings the same prompt, in the same namespace.
    pub(crate) fn began_as(&self, other: &Paused) -> bool {
        let namespace = |paused: &Paused| paused.memory.as_ref().map(|memory| memory.id());
        self.text.starts_with(&other.text)
            && self.prompt_len == other.prompt_len
            && namespace(self) == namespace(other)
    }

    /// Length of its text, tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.text.len()
    }

    pub(crate) fn document(&self) -> DocumentId {
        self.update.document
    }

    /// The same, going on.
    pub(crate) fn again(mut self) -> Self {
        self.update.epoch = self.update.epoch.saturating_add(1);
        self.update.finish = None;
        self
    }
}

/// A request that runs.
pub(crate) struct Request {
    is: Paused,
    group: Option<Membership>,
    /// `None` where the text is too long for one.
    own: Option<Index>,
    /// Output that was handed on.
    told: usize,
    /// What was found for the step in progress, and whether the engine was offered it.
    found: Option<Candidate>,
    is_offered: bool,
    /// What the engine itself drafted for it, where that is known.
    rival: Vec<u32>,
    touched: Vec<DocumentId>,
}

impl Request {
    /// Reads the text, which takes as long as that is.
    pub(crate) fn new(is: Paused, group: Option<Membership>, index: IndexConfig) -> Self {
        let mut own = Index::new(index);
        let read = own.open(OWN, &[]).and_then(|()| own.append(OWN, &is.text));
        Request {
            own: read.is_ok().then_some(own),
            told: is.text.len() - is.prompt_len,
            is,
            group,
            found: None,
            is_offered: false,
            rival: Vec::new(),
            touched: Vec::new(),
        }
    }

    /// What is to be told of its beginning.
    pub(crate) fn began(&self) -> Option<Event> {
        let memory = self.is.memory.clone()?;
        Some(Event::Began(memory, self.is.update.document))
    }

    fn output(&self) -> &[u32] {
        &self.is.text[self.is.prompt_len..]
    }

    /// Takes what the engine said, and finds out what it made of the last offer. The table learns from what was found,
    /// and from what the engine had drafted, whichever was verified.
    pub(crate) fn extend(
        &mut self,
        said: &[u32],
        learns: Option<&mut Calibration>,
        metrics: &ClientMetrics,
    ) {
        metrics.said.inc_by(said.len() as u64);
        if let Some(table) = learns {
            if let Some(found) = &self.found {
                table.observe(found, said);
            }
            // Of what it drafted beyond what was said nothing is known.
            let depth = self.rival.len().min(said.len());
            let agreed = self.rival.iter().zip(said).take_while(|(a, b)| a == b);
            let agreed = agreed.count() as u32;
            table.observe_head(self.is.text.len() as u32, depth as u32, agreed);
        }
        self.rival.clear();
        let was_offered = std::mem::take(&mut self.is_offered);
        if let Some(offered) = self.found.take().filter(|_| was_offered) {
            let nodes = offered.tree.nodes();
            let agreed = nodes.iter().zip(said);
            let agreed = agreed.take_while(|(node, said)| node.token == **said);
            // The last one said is the target's own, whatever was offered.
            let accepted = agreed.count().min(said.len().saturating_sub(1));
            metrics.accepted.inc_by(accepted as u64);
            if offered.scope != Scope::Request {
                self.touch(&nodes[..accepted]);
            }
        }
        self.is.text.extend_from_slice(said);
        if let Some(own) = &mut self.own
            && own.append(OWN, said).is_err()
        {
            self.own = None;
        }
        self.merge(metrics);
    }

    fn touch(&mut self, accepted: &[refrain_speculation::DraftNode]) {
        for place in accepted.iter().filter_map(|node| node.origin.place) {
            let document = DocumentId(place.document.0);
            let is_new = document != self.is.update.document && !self.touched.contains(&document);
            if is_new && self.touched.len() < TOUCHED_MAX {
                self.touched.push(document);
            }
        }
    }

    /// Lets others draft from the output. What the memory is too busy for now it gets with the next step.
    fn merge(&mut self, metrics: &ClientMetrics) {
        let Some(memory) = self.is.memory.clone() else {
            return;
        };
        let Some(mut drafts) = memory.try_lock() else {
            metrics.busy.inc();
            return;
        };
        self.take_piece(self.is.merged);
        self.is.merged = self.output().len();
        if let Err(error) = drafts.merge(&self.is.update, Instant::now()) {
            tracing::warn!(%error, "index took no more tokens");
        }
        drop(drafts);
        if let Some(member) = &self.group {
            member.group().merge(&self.is.update);
        }
    }

    /// Puts the output from there on into the update.
    fn take_piece(&mut self, from: usize) {
        let Paused {
            text,
            prompt_len,
            update,
            ..
        } = &mut self.is;
        update.prev_len = from as u32;
        update.tokens.clear();
        update.tokens.extend_from_slice(&text[*prompt_len + from..]);
    }

    /// Output tokens that were not handed on.
    pub(crate) fn untold(&self) -> usize {
        match self.is.memory {
            Some(_) => self.output().len() - self.told,
            None => 0,
        }
    }

    /// Hands on what was said since the last time.
    pub(crate) fn tell(&mut self) -> Option<Event> {
        let memory = self.is.memory.clone()?;
        self.take_piece(self.told);
        self.told = self.output().len();
        let touched = std::mem::take(&mut self.touched);
        Some(Event::Said(memory, self.is.update.clone(), touched))
    }

    /// Ends it. The memory's part, then the store's.
    pub(crate) fn end(mut self) -> (Paused, Option<[Event; 2]>) {
        self.is.update.finish = Some(FinishReason::Stop);
        let Some(memory) = self.is.memory.clone() else {
            return (self.is, None);
        };
        self.take_piece(self.is.merged);
        self.is.merged = self.output().len();
        let ended = Event::Ended(memory, self.is.update.clone(), self.group.take());
        let told = self.tell();
        (self.is, told.map(|told| [ended, told]))
    }

    /// The best draft of at most `room` tokens.
    pub(crate) fn propose(
        &mut self,
        params: &ProposeParams,
        room: usize,
        metrics: &ClientMetrics,
    ) -> Option<&Candidate> {
        let Paused {
            memory,
            text,
            prompt_len,
            update,
            ..
        } = &self.is;
        let output_len = (text.len() - prompt_len) as u32;
        let drafts = memory.as_ref().map(|memory| memory.try_lock());
        let group = self.group.as_ref().map(|member| member.group().try_lock());
        for held in [
            drafts.as_ref().map(Option::is_none),
            group.as_ref().map(Option::is_none),
        ] {
            metrics.busy.inc_by(u64::from(held == Some(true)));
        }
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context: text,
        };
        let own = self.own.as_ref().and_then(|own| Some((own, own.tip(OWN)?)));
        let own = own.map(|(own, tip)| lookup(Scope::Request, own, tip));
        // Alone in its group it would read its own output again.
        let group = group.as_ref().and_then(Option::as_ref);
        let group = group.filter(|group| group.index().documents() > 1);
        let group = group.map(|group| {
            let cursor = group.cursor(update.document, output_len, text);
            lookup(Scope::Group, group.index(), cursor)
        });
        let tenant = drafts.as_ref().and_then(Option::as_ref).map(|drafts| {
            let cursor = drafts.cursor(update.document, output_len, text);
            lookup(Scope::Tenant, drafts.index(), cursor)
        });
        // At most three, on the stack.
        let lookups = [own, group, tenant];
        let found = match lookups {
            [Some(own), Some(group), Some(tenant)] => propose(&[own, group, tenant], params, room),
            [Some(own), None, Some(tenant)] => propose(&[own, tenant], params, room),
            _ => propose(&Vec::from_iter(lookups.into_iter().flatten()), params, room),
        };
        self.found = found;
        self.found.as_ref()
    }

    /// Offers the engine what was found.
    pub(crate) fn offer(&mut self, metrics: &ClientMetrics) -> Option<&Candidate> {
        let found = self.found.as_ref()?;
        self.is_offered = true;
        metrics.drafts.inc();
        metrics.drafted.inc_by(found.tree.len() as u64);
        Some(found)
    }

    /// Whether what was found is expected to bring more tokens than what the engine drafted itself, as far as drafts of
    /// both kinds were worth their while before.
    pub(crate) fn beats(&mut self, rival: Vec<u32>, table: &Calibration) -> bool {
        self.rival = rival;
        let context_tokens = self.is.text.len() as u32;
        let rivals = table.expect_head(context_tokens, self.rival.len() as u32);
        let found = self.found.as_ref().map(|found| table.expect(found));
        found.is_some_and(|nodes| nodes.iter().sum::<f32>() > rivals)
    }

    /// Whose drafts it is drafted for from.
    pub(crate) fn namespace(&self) -> Option<NamespaceId> {
        Some(self.is.memory.as_ref()?.id())
    }
}
