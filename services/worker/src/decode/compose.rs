//! The composition of a step: which requests move, how many tokens each of them brings, and which draft it verifies.

use std::collections::HashMap;
use std::time::Instant;

use refrain_protocol::NamespaceId;
use refrain_protocol::chunk::Speculation;
use refrain_protocol::engine::StepRequest;
use refrain_speculation::router::{Frame, Offer, Prospect};

use super::DecodeLoop;
use super::member::Member;
use super::step::{Movers, Part};
use crate::orders::{Fate, Gate};
use crate::running::ActiveRequest;

impl DecodeLoop {
    /// Every request that can move, beginning with the one at `first`.
    ///
    /// Decoding requests are sure of their one token. Prompts come next, and drafts take what is left.
    pub(super) fn movers(&self, gate: &Gate, batch: &[Member], first: usize) -> Movers {
        let capabilities = self.engine.capabilities();
        let now = Instant::now();
        let config = &self.shared.config;
        let total = config.step_tokens_max.min(capabilities.max_step_tokens);
        let order = (0..batch.len()).map(|place| (place + first) % batch.len().max(1));
        let movable = order
            .filter(|&place| {
                let watch = &batch[place].chunk.watch;
                watch.reader.has_room()
                    && batch[place].room.paused_until(now).is_none()
                    && watch.fate(gate) == Fate::Runs
            })
            .take(capabilities.max_batch.min(total) as usize);
        let (decoding, prefilling): (Vec<usize>, Vec<usize>) =
            movable.partition(|&place| batch[place].chunk.running.owed() == 1);
        let mut room = total.saturating_sub(decoding.len() as u32);
        let mut parts: Vec<Part> = decoding
            .into_iter()
            .map(|place| Part {
                place,
                context: 1,
                decodes: true,
            })
            .collect();
        for place in prefilling {
            let owed = batch[place].chunk.running.owed();
            let context = owed.min(config.prefill_chunk_tokens).min(room);
            if context == 0 {
                break;
            }
            room -= context;
            parts.push(Part {
                place,
                context,
                decodes: false,
            });
        }
        let decoding = parts.iter().filter(|part| part.decodes).count() as u32;
        let reads_prompt = parts.iter().any(|part| !part.decodes);
        Movers {
            withholds: self.routing.router.withholds(decoding, reads_prompt),
            parts,
            room,
            decoding,
        }
    }

    /// Composes the step of all movers. Returns it with the seconds of the search for each draft.
    pub(super) fn compose(
        &mut self,
        batch: &mut [Member],
        movers: &Movers,
    ) -> (StepRequest, Vec<f64>) {
        let (prospects, propose_seconds) = self.prospects(batch, movers);
        let parts = &movers.parts;
        let kv_tokens = |part: &Part| {
            let running = &batch[part.place].chunk.running;
            u64::from(running.session.len_with(part.context, running.text.len()))
        };
        let frame = Frame {
            tokens: parts.iter().map(|part| part.context).sum(),
            kv_tokens: parts.iter().map(kv_tokens).sum(),
            slots_max: movers.room,
            batch: movers.decoding,
        };
        let offers = self.routing.offer(prospects, frame);
        let mut offers: HashMap<usize, Offer> = offers.into_iter().collect();
        let items = parts.iter().map(|part| {
            let running = &mut batch[part.place].chunk.running;
            let offer = offers.remove(&part.place);
            let head = offer.as_ref().and_then(Offer::head);
            let self_draft = head.and_then(|head| self.routing.settings.self_draft(head));
            running.item(part.context, offer, self_draft)
        });
        let items = items.collect();
        (StepRequest { items }, propose_seconds)
    }

    /// The prospects of the requests that sample, by their places in the batch, and the seconds of each search. The
    /// piece that ends a prompt can verify a draft as well.
    fn prospects(
        &self,
        batch: &[Member],
        movers: &Movers,
    ) -> (Vec<(usize, Prospect<NamespaceId>)>, Vec<f64>) {
        let router = &self.routing.router;
        let price = router.draft_price(movers.decoding);
        let sampling: Vec<(usize, &ActiveRequest)> = movers
            .parts
            .iter()
            .map(|part| (part, &batch[part.place].chunk.running))
            .filter(|(part, running)| running.samples_after(part.context))
            .map(|(part, running)| (part.place, running))
            .collect();
        let prospects = self.proposers.map(&sampling, |(place, running)| {
            let started = Instant::now();
            let rules = running.rules(&self.routing.settings.rules);
            let is_divided = router.divides() && running.request.speculation == Speculation::Auto;
            let params = match is_divided {
                true => rules.for_router(price),
                false => rules.whole(movers.decoding as usize, price),
            };
            let statistics = router.known_statistics(running.namespace);
            let mut prospect =
                running.prospect(movers.room, &params, statistics, movers.withholds, started);
            // The router prices the drafts that it divides.
            prospect.price = params.price.filter(|_| !is_divided);
            prospect.path_probabilities = self.routing.router.estimate(&prospect);
            ((*place, prospect), started.elapsed().as_secs_f64())
        });
        prospects.into_iter().unzip()
    }
}
