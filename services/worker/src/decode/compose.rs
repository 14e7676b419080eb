//! The composition of a step: who moves, how many tokens each may bring, and who gets to draft.

use std::time::Instant;

use refrain_protocol::chunk::Speculation;
use refrain_protocol::engine::{StepItem, StepRequest};
use refrain_speculation::StepFrame;
use refrain_speculation::router::Route;

use super::DecodeLoop;
use crate::chunk::ActiveChunk;
use crate::fallback::ItemKind;
use crate::router::Routed;
use crate::running::{ActiveRequest, EngineLimits, Prospect, Routing};
use refrain_draft_replica::{RemoteDrafts, DraftQuery};

/// A step to be made.
#[derive(Default)]
pub(super) struct Composed {
    pub(super) request: StepRequest,
    /// Whose the items are, in their order.
    pub(super) members: Vec<Member>,
    /// What it took to draft for each that samples.
    pub(super) propose_seconds: Vec<f64>,
}

/// Who moves in a step.
pub(super) struct Movers {
    parts: Vec<Part>,
    /// Most draft tokens beside what they owe.
    room: u32,
    /// Requests that decode.
    pub(super) decoding: u32,
    /// DraftIndex are held back.
    pub(super) withholds: bool,
}

/// Whose an item is, and what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// Place in the batch.
    pub(super) place: usize,
    pub(super) sampled: bool,
    pub(super) kind: ItemKind,
    pub(super) routed: Routed,
    /// Context tokens that it brings.
    pub(super) context: u32,
    pub(super) catch_up_tokens: u32,
}

/// A request that moves.
#[derive(Clone, Copy, Debug)]
struct Part {
    place: usize,
    /// Tokens of what it owes.
    context: u32,
    decodes: bool,
}

impl Composed {
    fn push(&mut self, part: Part, routed: Routed, item: StepItem, entry: &ActiveChunk) {
        self.members.push(Member {
            place: part.place,
            sampled: item.sample,
            kind: if part.decodes {
                decoding_kind(routed)
            } else {
                ItemKind::Prefill
            },
            routed,
            context: item.tokens.len() as u32,
            catch_up_tokens: entry.running.catch_up_tokens(),
        });
        self.request.items.push(item);
    }
}

impl DecodeLoop {
    pub(super) fn limits(&self) -> EngineLimits {
        let capabilities = self.engine.capabilities();
        EngineLimits {
            max_context: capabilities.max_context,
            max_draft_tokens: capabilities.max_draft_tokens,
        }
    }

    /// Every request that can move; the one at `first` comes first.
    pub(super) fn movers(&self, batch: &[ActiveChunk], first: usize) -> Movers {
        let (parts, room) = self.parts(batch, first);
        let decoding = parts.iter().filter(|part| part.decodes).count() as u32;
        let reads_prompt = parts.iter().any(|part| !part.decodes);
        let may_try = !reads_prompt && !self.fallback.is_on_trial(decoding);
        Movers {
            withholds: self.guard.withholds(decoding, may_try),
            parts,
            room,
            decoding,
        }
    }

    /// What to ask the store for: for those that may draft in this step, of namespaces that are not all here.
    pub(super) fn wanted_elsewhere(&self, batch: &[ActiveChunk], movers: &Movers) -> Vec<DraftQuery> {
        let limits = self.limits();
        let context_tokens = self.elsewhere.context_tokens();
        let no_auto = movers.withholds || self.goodput.is_off(movers.decoding);
        let decoding = movers.parts.iter().filter(|part| part.decodes);
        decoding
            .map(|part| &batch[part.place].running)
            .filter(|running| !(no_auto && running.request.speculation == Speculation::Auto))
            .filter(|running| running.draft_max(movers.room, limits) > 0)
            .filter_map(|running| running.wanted_elsewhere(context_tokens))
            .collect()
    }

    /// One step out of everybody's part.
    pub(super) fn compose(
        &mut self,
        batch: &mut [ActiveChunk],
        movers: Movers,
        found: &RemoteDrafts,
    ) -> Composed {
        let (prospects, propose_seconds) = self.prospects(batch, &movers, found);
        let Movers {
            parts,
            room,
            decoding,
            ..
        } = movers;
        let frame = StepFrame {
            tokens: parts.iter().map(|part| part.context).sum(),
            kv_tokens: parts
                .iter()
                .map(|part| {
                    let running = &batch[part.place].running;
                    u64::from(running.engine_len_with(part.context))
                })
                .sum(),
            slots_max: room,
            batch: decoding,
        };
        let mut allotments = self
            .goodput
            .allot(prospects, frame, &self.router)
            .into_iter();
        let mut composed = Composed {
            propose_seconds,
            ..Composed::default()
        };
        let limits = self.limits();
        let kept = self.fallback.decisions_kept();
        for part in parts {
            let entry = &mut batch[part.place];
            let samples = part.context == entry.running.owed();
            let allotment = if samples { allotments.next() } else { None };
            let routed = allotment.as_ref().map_or(Routed::Prefill, |allotment| {
                Routed::Decided(allotment.decision)
            });
            let item = entry.running.item(part.context, allotment, limits, kept);
            composed.push(part, routed, item, entry);
        }
        composed
    }

    /// Who moves and by how much, and the draft tokens that there is room for beside that.
    ///
    /// Decoding requests are sure of their one token; then come prompts; drafts take what is left over.
    fn parts(&self, batch: &[ActiveChunk], first: usize) -> (Vec<Part>, u32) {
        let capabilities = self.engine.capabilities();
        let now = Instant::now();
        let total = self.step_tokens_max.min(capabilities.max_step_tokens);
        let order = (0..batch.len()).map(|place| (place + first) % batch.len().max(1));
        let movable = order
            .filter(|&place| {
                let entry = &batch[place];
                entry.events.capacity() > 0 && entry.wait_until.is_none_or(|until| until <= now)
            })
            .take(capabilities.max_batch.min(total) as usize);
        let (decoding, prefilling): (Vec<usize>, Vec<usize>) =
            movable.partition(|&place| batch[place].running.is_decoding());
        let mut left = total.saturating_sub(decoding.len() as u32);
        let mut parts: Vec<Part> = decoding
            .into_iter()
            .map(|place| Part {
                place,
                context: 1,
                decodes: true,
            })
            .collect();
        for place in prefilling {
            let owed = batch[place].running.owed();
            let context = owed.min(self.prefill_chunk_tokens).min(left);
            if context == 0 {
                break;
            }
            left -= context;
            parts.push(Part {
                place,
                context,
                decodes: false,
            });
        }
        (parts, left)
    }

    /// What those that sample could draft, in their order, and what it took to find that. The piece that ends a prompt can
    /// verify a draft as well.
    fn prospects(
        &self,
        batch: &[ActiveChunk],
        movers: &Movers,
        found: &RemoteDrafts,
    ) -> (Vec<Prospect>, Vec<f64>) {
        let limits = self.limits();
        let routing = Routing {
            router: &self.router,
            fallback: self.fallback.state(movers.decoding),
            withholds: movers.withholds,
        };
        let parts = movers.parts.iter();
        let sampling = parts
            .map(|part| (part, &batch[part.place].running))
            .filter(|(part, running)| part.context >= running.owed())
            .map(|(_, running)| running);
        let sampling: Vec<&ActiveRequest> = sampling.collect();
        let prospects = self.proposers.map(&sampling, |running| {
            let started = Instant::now();
            let mut prospect = running.prospect(movers.room, limits, routing, started);
            if let Some(candidate) = found.get(&running.document()) {
                prospect.consider(candidate);
            }
            prospect.chances = self.goodput.chances(&prospect);
            (prospect, started.elapsed().as_secs_f64())
        });
        prospects.into_iter().unzip()
    }
}

fn decoding_kind(routed: Routed) -> ItemKind {
    match routed.route() {
        Some(Route::Suffix) => ItemKind::Suffix,
        Some(Route::Fallback) => ItemKind::Fallback,
        Some(Route::Merged) => ItemKind::Merged,
        Some(Route::Plain) => ItemKind::Plain,
        None => ItemKind::Prefill,
    }
}
