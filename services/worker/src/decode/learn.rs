//! Learning from a step: the part that the next step needs at once, and the part that waits until the next step is
//! under way.

use refrain_protocol::chunk::Speculation;
use refrain_protocol::engine::{StepResponse, StepResult};
use refrain_speculation::router::{Offer, Step, StepPart};

use super::DecodeLoop;
use super::member::Member;
use super::step::{Movers, Part};
use crate::running::ActiveRequest;

impl DecodeLoop {
    /// Tells the router of a step, as far as it decides what the next step tries. The requests have not absorbed
    /// their results yet.
    pub(super) fn observe(
        &mut self,
        response: &StepResponse,
        movers: &Movers,
        compose_seconds: f64,
        batch: &[Member],
    ) {
        let members = movers
            .parts
            .iter()
            .map(|part| (part, &batch[part.place].chunk.running));
        let behind = members
            .clone()
            .map(|(_, running)| running.step.catch_up_tokens);
        let read = read_in_step(behind, self.engine.capabilities().max_step_tokens);
        let items = members
            .clone()
            .zip(&response.results)
            .zip(read)
            .map(|(((part, running), result), read)| step_item(part, result, read, running));
        self.routing.observe(Step {
            items: items.collect(),
            seconds: response.step_s,
            draft_seconds: response.draft_s,
            compose_seconds,
            found_tokens: members.map(|(_, running)| found_tokens(running)).sum(),
            withheld: movers.withholds,
        });
    }

    /// Does the work of the last step that the next one does not need, while that one is under way or no request can
    /// move.
    pub(super) fn catch_up(&mut self, batch: &mut [Member]) {
        for member in batch {
            self.settle(member);
        }
        self.routing.catch_up();
    }

    /// Learns from a request's last step, and passes it on to store and metrics.
    pub(super) fn settle(&mut self, member: &mut Member) {
        if let Some(record) = member.unsettled.take() {
            let running = &member.chunk.running;
            self.routing.learn(running.namespace, &record);
            self.shared.sink.record_step(running, record);
        }
    }

    /// Counts the decisions and searches of a step that is under way.
    pub(super) fn count(&self, parts: &[Part], propose_seconds: &[f64], batch: &[Member]) {
        let metrics = &self.shared.metrics;
        for part in parts {
            let offer = batch[part.place].chunk.running.step.offer.as_ref();
            let decision = offer.map(|offer| offer.decision);
            metrics.decision(self.routing.settings.labels(decision));
        }
        for seconds in propose_seconds {
            metrics.families.propose_seconds.observe(*seconds);
        }
    }
}

/// Tokens of the draft that was found for a request.
fn found_tokens(running: &ActiveRequest) -> u32 {
    let offer = running.step.offer.as_ref();
    offer.map_or(0, Offer::found_tokens)
}

/// The item of a step that the router observes. The head read `read_tokens` for it.
fn step_item(
    part: &Part,
    result: &StepResult,
    read_tokens: u32,
    running: &ActiveRequest,
) -> StepPart {
    let step = &running.step;
    let offer = step.offer.as_ref();
    let output = result.as_ref().ok();
    // Nodes that the head drafted and that were sent as well took it as long.
    let drafted = output.map_or(0, |output| {
        output.self_drafted + output.agreed_nodes.len() as u32
    });
    let self_drafted = output.map_or(0, |output| output.self_drafted);
    StepPart {
        route: offer
            .filter(|_| part.decodes)
            .map(|offer| offer.decision.route),
        is_auto: running.request.speculation == Speculation::Auto,
        may_use_head: running.may_fall_back(),
        predictability: offer.map_or(0.0, |offer| offer.predictability),
        // Tokens in the engine's prompt cache were not computed.
        context_tokens: step
            .context_tokens
            .saturating_sub(output.map_or(0, |output| output.cached_tokens)),
        text_tokens: output.map_or(0, |output| output.text_len),
        draft_tokens: offer.map_or(0, Offer::sent_tokens) + self_drafted,
        head: offer.and_then(Offer::head),
        head_drafted: drafted,
        read_tokens,
        emitted: output.map(|output| output.emitted.len() as u32),
    }
}

/// The tokens that the head reads of each text that it is behind with: together no more than a step holds, the first
/// texts first. It reads the rest in later steps, and drafts then.
fn read_in_step(
    behind: impl Iterator<Item = u32>,
    step_tokens_max: u32,
) -> impl Iterator<Item = u32> {
    behind.scan(step_tokens_max, |left, behind| {
        let read = behind.min(*left);
        *left -= read;
        Some(read)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_reads_no_more_in_a_step_than_the_engine_takes() {
        let read = |behind: &[u32], most| -> Vec<u32> {
            read_in_step(behind.iter().copied(), most).collect()
        };
        assert_eq!(read(&[0, 40, 0, 7], 64), [0, 40, 0, 7]);
        assert_eq!(read(&[40, 40, 7], 64), [40, 24, 0]);
    }
}
