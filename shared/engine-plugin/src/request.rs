//! One request of the engine: its text, its own index, and its document in the memory.

use std::time::Instant;

use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason, LEFT_CONTEXT_TOKENS};
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_speculation::{
    Calibration, Candidate, DraftNode, Lookup, ProposeParams, Scope, Source, propose,
};

use crate::background::{Ended, Event, Lack};
use crate::metrics::{INDEX, InEngineMetrics};
use crate::own::Own;
use crate::place::{Place, Placed};

/// Most documents remembered as used between two pieces.
const TOUCHED_MAX: usize = 64;

/// What a request is that is not running: enough to go on where it stopped.
pub(crate) struct Paused {
    namespace: Option<NamespaceId>,
    text: Vec<u32>,
    prompt_len: usize,
    /// The piece that is told next, apart from its tokens.
    update: DocumentUpdate,
    /// What the memory was brought of its output, and the group's. It is brought nothing twice: what was removed there
    /// meanwhile stays away.
    merged: Merged,
    group_merged: Merged,
    /// Whoever named the document writes it to the store: a worker knows more of an output than its engine does, such as
    /// where a stop string cut it and whose session it is of.
    is_named: bool,
}

/// How far a copy of the drafts was brought an output, tokens.
#[derive(Clone, Copy, Default)]
struct Merged {
    len: usize,
    /// Nothing that an earlier attempt said stands behind that.
    is_alone: bool,
}

/// Which document a request's output is.
pub(crate) struct Output {
    pub(crate) document: DocumentId,
    pub(crate) epoch: u64,
    /// Tokens of it at the end of the prompt.
    pub(crate) written: usize,
    pub(crate) is_named: bool,
}

impl Paused {
    /// A request that begins.
    pub(crate) fn new(
        text: Vec<u32>,
        output: &Output,
        namespace: Option<NamespaceId>,
        head: DocumentHead,
    ) -> Self {
        let prompt_len = text.len().saturating_sub(output.written);
        let from = prompt_len.saturating_sub(LEFT_CONTEXT_TOKENS);
        let head = DocumentHead {
            left_context: text[from..prompt_len].to_vec(),
            ..head
        };
        Paused {
            namespace,
            prompt_len,
            text,
            update: DocumentUpdate {
                document: output.document,
                epoch: output.epoch,
                prev_len: 0,
                tokens: Vec::new(),
                head,
                finish: None,
            },
            merged: Merged::default(),
            group_merged: Merged::default(),
            is_named: output.is_named,
        }
    }

    /// Whether the other one, which begins, is this one again: the engine brings the same prompt, in the same namespace, and
    /// whoever names an output names the same.
    pub(crate) fn began_as(&self, other: &Paused) -> bool {
        self.text.starts_with(&other.text)
            && self.prompt_len == other.prompt_len
            && self.namespace == other.namespace
            && self.is_named == other.is_named
            && (!self.is_named || self.update.document == other.update.document)
    }

    /// Length of its text, tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.text.len()
    }

    pub(crate) fn text(&self) -> &[u32] {
        &self.text
    }

    pub(crate) fn output(&self) -> &[u32] {
        &self.text[self.prompt_len..]
    }

    pub(crate) fn document(&self) -> DocumentId {
        self.update.document
    }

    /// The output from there on, as an update.
    fn piece(&mut self, from: usize) -> &DocumentUpdate {
        let output = &self.text[self.prompt_len..];
        self.update.prev_len = from as u32;
        self.update.tokens.clear();
        self.update.tokens.extend_from_slice(&output[from..]);
        &self.update
    }

    fn lack(&mut self, merged: Merged) -> Lack {
        Lack {
            piece: self.piece(merged.len).clone(),
            is_alone: merged.is_alone,
        }
    }

    /// The same, going on. What the store was told to have ended goes on under a higher epoch.
    pub(crate) fn again(mut self) -> Self {
        if !self.is_named {
            self.update.epoch = self.update.epoch.saturating_add(1);
        }
        self.update.finish = None;
        // What it lacked when it stopped may be there by now.
        self.merged.is_alone = false;
        self.group_merged.is_alone = false;
        self
    }
}

/// A request that runs.
pub(crate) struct Request {
    is: Paused,
    placed: Placed,
    own: Own,
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
    pub(crate) fn new(is: Paused, placed: Placed, own: Own) -> Self {
        Request {
            told: is.output().len(),
            is,
            placed,
            own,
            found: None,
            is_offered: false,
            rival: Vec::new(),
            touched: Vec::new(),
        }
    }

    fn output(&self) -> &[u32] {
        self.is.output()
    }

    /// Takes what the engine said, and finds out what it made of the last offer. The table learns from what was found,
    /// and from what the engine had drafted, whichever was verified.
    pub(crate) fn extend(
        &mut self,
        said: &[u32],
        learns: Option<&mut Calibration>,
        metrics: &InEngineMetrics,
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
        self.own.catch_up(&self.is.text);
        self.merge(metrics);
    }

    fn touch(&mut self, accepted: &[DraftNode]) {
        for place in accepted.iter().filter_map(|node| node.origin.place) {
            let document = DocumentId(place.document.0);
            let is_new = document != self.is.update.document && !self.touched.contains(&document);
            if is_new && self.touched.len() < TOUCHED_MAX {
                self.touched.push(document);
            }
        }
    }

    /// Lets others draft from the output. What the memory or the group is too busy for now it gets with a later step.
    fn merge(&mut self, metrics: &InEngineMetrics) {
        let len = self.output().len();
        let Some(Place { memory, group }) = self.placed.place_or_count(metrics) else {
            return;
        };
        if let Some(mut drafts) = memory.try_lock() {
            let Merged {
                len: from,
                is_alone,
            } = self.is.merged;
            let merged = drafts.merge_said(self.is.piece(from), is_alone, Instant::now());
            let is_alone = merged.unwrap_or_else(|_| {
                metrics.rejected(INDEX);
                is_alone
            });
            self.is.merged = Merged { len, is_alone };
        } else {
            metrics.busy.inc();
        }
        if let Some(member) = group {
            let Merged {
                len: from,
                is_alone,
            } = self.is.group_merged;
            let merged = member.group().try_merge_said(self.is.piece(from), is_alone);
            match merged {
                Some(is_alone) => self.is.group_merged = Merged { len, is_alone },
                None => metrics.busy.inc(),
            }
        }
    }

    /// Output tokens that were not handed on.
    pub(crate) fn untold(&self) -> usize {
        match self.is.namespace {
            Some(_) if !self.is.is_named => self.output().len() - self.told,
            _ => 0,
        }
    }

    /// Hands on what was said since the last time.
    pub(crate) fn tell(&mut self) -> Option<Event> {
        let memory = self.placed.place()?.memory.clone();
        let update = self.is.piece(self.told).clone();
        self.told = self.output().len();
        Some(Event::Said(
            memory,
            update,
            std::mem::take(&mut self.touched),
        ))
    }

    /// Ends it, maybe only for now.
    pub(crate) fn end(mut self, finish: FinishReason) -> (Paused, Option<Box<Ended>>) {
        self.is.update.finish = Some(finish);
        if matches!(self.placed, Placed::Nowhere) {
            return (self.is, None);
        }
        let is_told = !self.is.is_named;
        let may_have_group = !matches!(self.placed, Placed::At(Place { group: None, .. }));
        let (merged, group_merged) = (self.is.merged, self.is.group_merged);
        let ended = Ended {
            placed: self.placed,
            lack: self.is.lack(merged),
            group_lack: may_have_group.then(|| self.is.lack(group_merged)),
            tell: is_told.then(|| self.is.piece(self.told).clone()),
            touched: self.touched,
        };
        (self.is, Some(Box::new(ended)))
    }

    /// The best draft of at most `room` tokens.
    pub(crate) fn propose(
        &mut self,
        params: &ProposeParams,
        room: usize,
        metrics: &InEngineMetrics,
    ) -> Option<&Candidate> {
        self.own.catch_up(&self.is.text);
        let place = self.placed.place_or_count(metrics);
        let Paused {
            text,
            prompt_len,
            update,
            ..
        } = &self.is;
        let output_len = (text.len() - prompt_len) as u32;
        let drafts = place.map(|place| place.memory.try_read());
        let member = place.and_then(|place| place.group.as_ref());
        let group = member.map(|member| member.group().try_read());
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
        let own = self
            .own
            .search()
            .map(|(own, tip)| lookup(Scope::Request, own, tip));
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
    pub(crate) fn offer(&mut self, metrics: &InEngineMetrics) -> Option<&Candidate> {
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
        self.is.namespace
    }
}
