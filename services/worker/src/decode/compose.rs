//! The composition of a step: who moves, how many tokens each may bring, and who gets to draft.

use std::time::Instant;

use refrain_protocol::engine::{StepItem, StepRequest};
use refrain_speculation::Route;

use super::DecodeLoop;
use super::entry::Entry;
use crate::fallback::ItemKind;
use crate::router::Routed;
use crate::running::{EngineLimits, Room, Routing};

/// A step to be made.
#[derive(Default)]
pub(super) struct Composed {
    pub(super) request: StepRequest,
    /// Whose the items are, in their order.
    pub(super) members: Vec<Member>,
    /// Suffix drafts were held back.
    pub(super) withholds_suffix: bool,
}

/// Whose an item is, and what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// Place in the batch.
    pub(super) place: usize,
    pub(super) sampled: bool,
    pub(super) kind: ItemKind,
    /// Context tokens that it brings.
    pub(super) context: u32,
    pub(super) catch_up_tokens: u32,
}

impl Composed {
    fn push(&mut self, place: usize, kind: ItemKind, item: StepItem, entry: &Entry) {
        self.members.push(Member {
            place,
            sampled: item.sample,
            kind,
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

    /// One step out of every request that can move; the one at `first` comes first.
    pub(super) fn compose(&self, batch: &mut [Entry], first: usize) -> Composed {
        let limits = self.limits();
        let capabilities = self.engine.capabilities();
        let now = Instant::now();
        let order = (0..batch.len()).map(|place| (place + first) % batch.len().max(1));
        let total = self.step_tokens_max.min(capabilities.max_step_tokens);
        let movable: Vec<usize> = order
            .filter(|&place| {
                let entry = &batch[place];
                entry.events.capacity() > 0 && entry.wait_until.is_none_or(|until| until <= now)
            })
            .take(capabilities.max_batch.min(total) as usize)
            .collect();
        // Decoding requests first: each is sure of its one token, drafts come out of what is left over.
        let (decoding, prefilling): (Vec<usize>, Vec<usize>) = movable
            .into_iter()
            .partition(|&place| batch[place].running.is_decoding());
        let decoding_count = decoding.len() as u32;
        let withholds_suffix = self
            .guard
            .withholds(decoding_count, self.fallback.is_on_trial(decoding_count));
        let routing = Routing {
            router: &self.router,
            fallback: self.fallback.state(decoding_count),
            withholds_suffix,
            decisions_kept: self.fallback.decisions_kept(),
        };
        let mut left = total.saturating_sub(decoding.len() as u32);
        // One prompt moves in every step, however many drafts there are.
        let reserve = if prefilling.is_empty() {
            0
        } else {
            self.prefill_chunk_tokens.min(left)
        };
        left -= reserve;
        let mut composed = Composed {
            withholds_suffix,
            ..Composed::default()
        };
        for place in decoding {
            let entry = &mut batch[place];
            let started = Instant::now();
            let room = Room {
                context: 1,
                draft: left,
            };
            let (item, routed) = entry.running.item(room, limits, routing);
            self.metrics
                .propose_seconds
                .observe(started.elapsed().as_secs_f64());
            self.metrics.decision(routed);
            left -= entry.running.offered_tokens_max().min(left);
            composed.push(place, decoding_kind(routed), item, entry);
        }
        left += reserve;
        for place in prefilling {
            let entry = &mut batch[place];
            let context = left.min(self.prefill_chunk_tokens);
            if context == 0 {
                break;
            }
            // The piece that ends the prompt samples, so it can verify a draft as well.
            let draft = left - context;
            let room = Room { context, draft };
            let (item, routed) = entry.running.item(room, limits, routing);
            self.metrics.decision(routed);
            let taken = item.tokens.len() as u32 + entry.running.offered_tokens_max();
            left -= taken.min(left);
            composed.push(place, ItemKind::Prefill, item, entry);
        }
        composed
    }
}

fn decoding_kind(routed: Routed) -> ItemKind {
    match routed.route() {
        Some(Route::Suffix) => ItemKind::Suffix,
        Some(Route::Fallback) => ItemKind::Fallback,
        Some(Route::Plain) => ItemKind::Plain,
        None => ItemKind::Prefill,
    }
}
