//! What a step teaches, and what else it leaves to be done: what the next step goes by at once, and what waits until that
//! one is under way.

use refrain_protocol::chunk::Speculation;
use refrain_protocol::engine::{StepResponse, StepResult};
use refrain_speculation::{HeadUse, StepTaken};
use refrain_speculation::router::HeadWork;

use super::compose::Member;
use super::{DecodeLoop, HowComposed};
use crate::chunk::ActiveChunk;
use crate::fallback::{ItemDone, StepDone};

impl DecodeLoop {
    /// Lets what the step took and brought tell how the ways of drafting do, as far as that decides what the next one tries.
    /// The rest of what there is to learn from it.
    pub(super) fn observe(
        &mut self,
        response: &StepResponse,
        members: &[Member],
        composed: HowComposed,
        batch: &[ActiveChunk],
    ) -> StepTaken {
        let read = read_in_step(
            members.iter().map(|member| member.catch_up_tokens),
            self.engine.capabilities().max_step_tokens,
        );
        let done = |((member, result), read_tokens): ((&Member, &StepResult), u32)| ItemDone {
            kind: member.kind,
            is_auto: batch[member.place].running.request.speculation == Speculation::Auto,
            eligible: batch[member.place].running.may_fall_back(),
            // What the engine had in its cache was not read.
            context: member
                .context
                .saturating_sub(result.as_ref().map_or(0, |output| output.cached_tokens)),
            catch_up_tokens: read_tokens,
            emitted: result
                .as_ref()
                .ok()
                .map(|output| output.emitted.len() as u32),
        };
        let answered = members.iter().zip(&response.results);
        let items: Vec<ItemDone> = answered.zip(read).map(done).collect();
        let step = StepDone {
            items: &items,
            seconds: response.step_s,
            draft_seconds: response.draft_s,
        };
        self.elsewhere.record_step(response.step_s);
        let taken = StepTaken {
            compose_seconds: composed.seconds,
            ..taken(&step, &response.results, members, batch)
        };
        let batch = step.batch();
        self.fallback
            .step_done(&step, self.guard.is_on_trial(batch));
        let head = HeadUse {
            on_trial: self.fallback.is_on_trial(batch),
            in_use: self.fallback.is_in_use(batch),
        };
        // Doing without drafts also saves what it takes to find them.
        let step = StepDone {
            seconds: step.seconds + composed.seconds,
            ..step
        };
        self.guard.step_done(&step, composed.withholds, head);
        taken
    }

    /// Does what a step left to be done that the next one does not need, while that one is made or nobody can move.
    pub(super) fn catch_up(&mut self, batch: &mut [ActiveChunk], taken: Option<StepTaken>) {
        for entry in batch {
            self.settle(entry);
        }
        if let Some(taken) = taken {
            self.goodput.step_done(&taken);
        }
        self.goodput.exchange();
    }

    /// Learns from what a request's last step brought, and lets store and figures have it.
    pub(super) fn settle(&mut self, entry: &mut ActiveChunk) {
        if let Some(heard) = entry.unsettled.take() {
            self.goodput.learn(entry.running.namespace, &heard);
            self.sink.record_step(&entry.running, heard);
        }
    }

    /// The figures of a step that is under way.
    pub(super) fn count(&self, members: &[Member], propose_seconds: &[f64]) {
        for member in members {
            self.metrics.decision(self.router.labels(member.routed));
        }
        for seconds in propose_seconds {
            self.metrics.propose_seconds.observe(*seconds);
        }
    }
}

/// What the head reads of the texts that it is behind with: all of them together no more than a step takes, the first ones
/// first. What is left it reads in the steps to come, and drafts then.
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

/// What the engine had to do in a step, as far as the answer tells.
fn taken(
    step: &StepDone<'_>,
    results: &[StepResult],
    members: &[Member],
    batch: &[ActiveChunk],
) -> StepTaken {
    let mut head = HeadWork::default();
    let (mut batched_tokens, mut kv_tokens) = (0, 0);
    for ((item, result), member) in step.items.iter().zip(results).zip(members) {
        let Ok(output) = result else {
            // What was done for it is not known.
            return StepTaken::default();
        };
        let running = &batch[member.place].running;
        // A request that brings nothing has the pass over its last token done.
        batched_tokens += item.context.max(1) + running.offered_tree_tokens() + output.self_drafted;
        kv_tokens += u64::from(output.text_len);
        if let Some(asked) = running.asked_head() {
            head.requests += 1;
            head.depth = head.depth.max(asked.depth);
            head.drafted.asked_tokens += asked.tokens_max;
            // What it drafted and was there already took it as long.
            head.drafted.tokens += output.self_drafted + output.agreed_nodes.len() as u32;
            head.drafted.read_tokens += item.catch_up_tokens;
        }
    }
    let routed = step.is_clean() && step.items.iter().all(|item| item.is_auto);
    let figures = step.figures(None);
    StepTaken {
        batched_tokens,
        kv_tokens,
        seconds: step.seconds,
        draft_seconds: step.draft_seconds,
        head,
        routed: routed.then_some((figures.batch, figures.tokens)),
        ..StepTaken::default()
    }
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
