//! One simulated engine: a batch of requests, their KV blocks, and the time of its steps.
//!
//! Steps are planned in runs, as long as the batch does not change. A request that arrives during a run cuts it at
//! the next step. A step reads parts of contexts, at most `prefill_tokens` with the decoded ones.
//!
//! When the next step would not fit into the KV cache, what is kept for requests that may come back goes first. Then
//! the request that came last is preempted: its blocks are freed, and it reads all of its context again later.

use std::collections::{HashSet, VecDeque};

use lru::LruCache;
use refrain_protocol::prefix::{PrefixHash, mark};

use super::decoding::Decoding;
use super::drafting::Drafting;
use super::plan::Plan;
use super::seat::{BLOCK_TOKENS, Seat, blocks};
use crate::replay::{EngineModel, StepLoad};

/// The rest of a chunk of fractional steps at its end.
const NOTHING: f64 = 1e-6;

/// The limits of an instance.
#[derive(Clone, Debug)]
pub(super) struct InstanceLimits {
    pub(super) slots: usize,
    pub(super) kv_tokens: u64,
    pub(super) prefill_tokens: u32,
}

/// The contexts that an instance keeps for requests that are not in its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kept {
    /// The context of a request between two chunks.
    Job(usize),
    /// The part of a conversation between two marks.
    Prefix(PrefixHash),
}

/// The blocks of a kept context, and the prefix before it.
#[derive(Clone, Copy, Debug)]
struct Keeping {
    blocks: u64,
    shorter: Option<PrefixHash>,
}

/// The result of a run.
#[derive(Debug, Default)]
pub(super) struct Advanced {
    /// Requests whose chunk is over.
    pub(super) ended: Vec<Seat>,
    /// Requests that got their first token, and when.
    pub(super) first: Vec<(usize, f64)>,
}

/// The counts of one run of steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Span {
    pub(super) start_s: f64,
    pub(super) end_s: f64,
    /// Requests in the batch.
    pub(super) requests: u32,
    /// Blocks of the KV cache that the batch had at the start.
    pub(super) blocks: u64,
    /// As in the counts.
    pub(super) request_steps: f64,
    pub(super) decoded_tokens: f64,
}

impl Span {
    /// The columns of a division of time that it reaches into, and the seconds within each.
    pub(super) fn columns(
        &self,
        column_s: f64,
        count: usize,
    ) -> impl Iterator<Item = (usize, f64)> + '_ {
        let first = (self.start_s / column_s) as usize;
        let last = ((self.end_s / column_s) as usize).min(count.saturating_sub(1));
        (first..=last).map(move |at| {
            let from_s = self.start_s.max(at as f64 * column_s);
            let to_s = self.end_s.min((at + 1) as f64 * column_s);
            (at, (to_s - from_s).max(0.0))
        })
    }
}

/// The counts of an instance.
#[derive(Clone, Debug, Default)]
pub(super) struct InstanceCounts {
    pub(super) preemptions: u64,
    pub(super) read_tokens: u64,
    /// Steps and tokens, counted for each decoding request.
    pub(super) request_steps: f64,
    pub(super) decoded_tokens: f64,
    /// Requests in the batch, times seconds.
    pub(super) busy_s: f64,
    pub(super) spans: Vec<Span>,
    /// Most blocks that were in use by the batch.
    pub(super) blocks_max: u64,
}

/// An instance.
#[derive(Debug)]
pub(super) struct Instance {
    number: usize,
    limits: InstanceLimits,
    seats: Vec<Seat>,
    waiting: VecDeque<Seat>,
    kept: LruCache<Kept, Keeping>,
    kept_blocks: u64,
    plan: Option<Plan>,
    /// Grows with each plan, so that an event of an earlier plan is known as such.
    pub(super) generation: u64,
    /// When the way to the pool is free.
    pub(super) pool_free_s: f64,
    pub(super) counts: InstanceCounts,
}

impl Instance {
    pub(super) fn new(number: usize, limits: InstanceLimits) -> Self {
        Instance {
            number,
            limits,
            seats: Vec::new(),
            waiting: VecDeque::new(),
            kept: LruCache::unbounded(),
            kept_blocks: 0,
            plan: None,
            generation: 0,
            pool_free_s: 0.0,
            counts: InstanceCounts::default(),
        }
    }

    pub(super) fn blocks(&self) -> u64 {
        self.limits.kv_tokens / BLOCK_TOKENS
    }

    fn used_blocks(&self) -> u64 {
        self.seats.iter().map(|seat| seat.blocks_after(0.0)).sum()
    }

    /// Adds a request. It joins the batch when there is a slot and room.
    pub(super) fn enqueue(&mut self, seat: Seat) {
        self.waiting.push_back(seat);
    }

    /// Takes the kept context of a request back, if it is still there.
    pub(super) fn take_kept(&mut self, job: usize) -> bool {
        let Some(kept) = self.kept.pop(&Kept::Job(job)) else {
            return false;
        };
        self.kept_blocks -= kept.blocks;
        true
    }

    /// Keeps the context of a request that may come back.
    pub(super) fn keep_job(&mut self, job: usize, context: f64) {
        let kept = Keeping {
            blocks: blocks(context),
            shorter: None,
        };
        self.keep(Kept::Job(job), kept);
    }

    /// Keeps a conversation, as far as it is hashed. The longest prefix is the first to go.
    pub(super) fn keep_prefixes(&mut self, prefixes: &[PrefixHash]) {
        for (nth, prefix) in prefixes.iter().enumerate().rev() {
            let before = nth.checked_sub(1);
            let tokens = mark(nth) - before.map_or(0, mark);
            let kept = Keeping {
                blocks: blocks(f64::from(tokens)),
                shorter: before.map(|before| prefixes[before]),
            };
            self.keep(Kept::Prefix(*prefix), kept);
        }
    }

    /// The tokens of the longest prefix that is kept.
    pub(super) fn held_tokens(&mut self, prefixes: &[PrefixHash]) -> u32 {
        let held = prefixes
            .iter()
            .take_while(|prefix| self.kept.contains(&Kept::Prefix(**prefix)))
            .count();
        for prefix in prefixes[..held].iter().rev() {
            self.kept.promote(&Kept::Prefix(*prefix));
        }
        held.checked_sub(1).map_or(0, mark)
    }

    /// The longest prefix of each conversation that is kept or runs.
    pub(super) fn longest_prefixes<'a>(
        &self,
        prefixes_of: impl Fn(usize) -> &'a [PrefixHash],
    ) -> Vec<PrefixHash> {
        let kept = self.kept.iter().filter_map(|(key, kept)| match key {
            Kept::Prefix(prefix) => Some((*prefix, kept.shorter)),
            Kept::Job(_) => None,
        });
        let shorter: HashSet<PrefixHash> =
            kept.clone().filter_map(|(_, shorter)| shorter).collect();
        let running = self.seats.iter().filter(|seat| seat.unread == 0);
        let running = running.filter_map(|seat| prefixes_of(seat.job).last().copied());
        let kept = kept.map(|(prefix, _)| prefix).chain(running);
        kept.filter(|prefix| !shorter.contains(prefix)).collect()
    }

    /// The requests that it has.
    pub(super) fn jobs(&self) -> impl Iterator<Item = usize> {
        self.seats.iter().chain(&self.waiting).map(|seat| seat.job)
    }

    /// KV tokens of running requests, and those that are kept for others.
    pub(super) fn kv_tokens(&self) -> (u64, u64) {
        (
            self.used_blocks() * BLOCK_TOKENS,
            self.kept_blocks * BLOCK_TOKENS,
        )
    }

    fn keep(&mut self, key: Kept, kept: Keeping) {
        self.kept_blocks += kept.blocks;
        if let Some(before) = self.kept.put(key, kept) {
            self.kept_blocks -= before.blocks;
        }
        let room = self.blocks().saturating_sub(self.used_blocks());
        while self.kept_blocks > room && self.evict() {}
    }

    fn evict(&mut self) -> bool {
        let Some((_, kept)) = self.kept.pop_lru() else {
            return false;
        };
        self.kept_blocks -= kept.blocks;
        true
    }

    /// Carries out the plan up to its end.
    pub(super) fn advance(&mut self) -> Advanced {
        let mut advanced = Advanced::default();
        let Some(plan) = self.plan.take() else {
            return advanced;
        };
        let (end_s, steps) = (plan.end_s(), f64::from(plan.steps));
        let requests = self.seats.len() as u32;
        self.counts.busy_s += f64::from(requests) * (end_s - plan.start_s);
        let mut span = Span {
            start_s: plan.start_s,
            end_s,
            requests,
            blocks: self.used_blocks(),
            ..Span::default()
        };
        if plan.idle_until_s.is_some() {
            self.counts.spans.push(span);
            return advanced;
        }
        let first_s = plan.after(1);
        for (seat, gain) in self.seats.iter_mut().zip(&plan.gains) {
            if *gain > 0.0 {
                let tokens = (gain * steps).min(seat.left);
                let is_first = seat.generated == 0 && seat.emitted == 0.0;
                seat.left -= tokens;
                seat.emitted += tokens;
                seat.steps += steps;
                seat.context += tokens;
                span.request_steps += steps;
                span.decoded_tokens += tokens;
                if is_first {
                    advanced.first.push((seat.job, first_s));
                }
            }
        }
        for (at, tokens) in plan.reads {
            let seat = &mut self.seats[at];
            seat.unread -= tokens;
            seat.read_tokens += u64::from(tokens);
            self.counts.read_tokens += u64::from(tokens);
            if seat.unread == 0 {
                // The step that reads the last token of a context also emits a token, or the rest of one: drafts
                // bring fractions of tokens, on average.
                let token = seat.left.min(1.0);
                if seat.generated == 0 && seat.emitted == 0.0 {
                    advanced.first.push((seat.job, end_s));
                }
                seat.left -= token;
                seat.emitted += token;
                seat.steps += 1.0;
                seat.context += token;
                span.request_steps += 1.0;
                span.decoded_tokens += token;
            }
        }
        self.counts.request_steps += span.request_steps;
        self.counts.decoded_tokens += span.decoded_tokens;
        self.counts.spans.push(span);
        let ended = self.seats.extract_if(.., |seat| seat.left <= NOTHING);
        advanced.ended.extend(ended);
        advanced
    }

    /// Cuts the run at the end of the step under way, since a request has arrived. Returns when that is; `None`
    /// without a run.
    pub(super) fn interrupt(&mut self, now_s: f64) -> Option<f64> {
        let plan = self.plan.as_mut()?;
        match &mut plan.idle_until_s {
            Some(until_s) => *until_s = until_s.min(now_s),
            None => plan.steps = plan.steps_until(now_s),
        }
        self.generation += 1;
        Some(plan.end_s())
    }

    /// Lets requests join while there is room for the `most_tokens` of their first step.
    fn admit(&mut self, most_tokens: f64) {
        while let Some(next) = self.waiting.front() {
            if self.seats.len() >= self.limits.slots {
                return;
            }
            let needed = next.blocks_after(most_tokens);
            let used: u64 = self
                .seats
                .iter()
                .map(|seat| seat.blocks_after(most_tokens))
                .sum();
            if used + needed > self.blocks() {
                return;
            }
            while used + needed + self.kept_blocks > self.blocks() && self.evict() {}
            self.seats.extend(self.waiting.pop_front());
        }
    }

    /// Plans the next run. Returns when it ends; `None` if there is nothing to do.
    pub(super) fn plan(
        &mut self,
        now_s: f64,
        engine: &EngineModel,
        drafting: &mut Drafting,
    ) -> anyhow::Result<Option<f64>> {
        self.generation += 1;
        let most_tokens = drafting.most_tokens();
        self.admit(most_tokens);
        if self.seats.is_empty() {
            return Ok(None);
        }
        loop {
            let needed: u64 = self
                .seats
                .iter()
                .map(|seat| seat.blocks_after(most_tokens))
                .sum();
            if needed + self.kept_blocks <= self.blocks() || self.seats.len() == 1 {
                break;
            }
            if !self.evict() {
                self.preempt();
            }
        }
        // Times of events are rounded to nanoseconds.
        let is_ready = |seat: &Seat| seat.ready_s <= now_s + 1e-8;
        let awaited_s = self.seats.iter().filter(|seat| !is_ready(seat));
        let awaited_s = awaited_s
            .map(|seat| seat.ready_s)
            .fold(f64::INFINITY, f64::min);
        let decodes = |seat: &Seat| is_ready(seat) && seat.unread == 0;
        let decoding: Vec<Decoding> = self
            .seats
            .iter()
            .filter(|seat| decodes(seat))
            .map(|seat| Decoding {
                job: seat.job,
                known: seat.generated + seat.emitted as u32,
                context_tokens: seat.context as usize,
            })
            .collect();
        let mut budget = self
            .limits
            .prefill_tokens
            .saturating_sub(decoding.len() as u32)
            .max(1);
        let mut reads = Vec::new();
        for (at, seat) in self.seats.iter().enumerate() {
            if seat.unread > 0 && is_ready(seat) && budget > 0 {
                let tokens = seat.unread.min(budget);
                budget -= tokens;
                reads.push((at, tokens));
            }
        }
        let mut plan = Plan {
            start_s: now_s,
            steps: 1,
            step_s: 0.0,
            growth_s: 0.0,
            gains: vec![0.0; self.seats.len()],
            idle_until_s: None,
            reads,
        };
        if decoding.is_empty() && plan.reads.is_empty() {
            plan.idle_until_s = Some(awaited_s);
            self.plan = Some(plan);
            return Ok(Some(awaited_s));
        }
        let read_tokens: u32 = plan.reads.iter().map(|(_, tokens)| tokens).sum();
        let load = StepLoad {
            requests: decoding.len() + plan.reads.len(),
            tokens: decoding.len() + read_tokens as usize,
            kv_tokens: self.seats.iter().map(|seat| seat.context as usize).sum(),
            queries: 1.0,
        };
        let drafted = drafting.plan(self.number, now_s, &decoding, load, engine)?;
        let load = load.with_drafts(drafted.draft_tokens, decoding.len());
        plan.step_s = engine.step_seconds(load) + drafted.host_s;
        plan.growth_s = drafted.gains.iter().sum::<f64>() * engine.kv_token_seconds(load.queries);
        let mut gains = drafted.gains.into_iter();
        for (seat, gain) in self.seats.iter().zip(&mut plan.gains) {
            if decodes(seat) {
                *gain = gains.next().unwrap_or(1.0);
            }
        }
        if plan.reads.is_empty() {
            let seats = self
                .seats
                .iter()
                .zip(&plan.gains)
                .filter(|(_, gain)| **gain > 0.0);
            let until_end = seats.map(|(seat, gain)| (seat.left / gain - NOTHING).ceil().max(1.0));
            let until_end = until_end.fold(f64::from(drafted.steps_max), f64::min);
            plan.steps = self.steps_that_fit(&plan.gains, until_end as u32);
            if awaited_s < plan.end_s() {
                plan.steps = plan.steps_until(awaited_s);
            }
        }
        self.counts.blocks_max = self
            .counts
            .blocks_max
            .max(self.blocks_after(&plan.gains, plan.steps));
        let end_s = plan.end_s();
        self.plan = Some(plan);
        Ok(Some(end_s))
    }

    fn blocks_after(&self, gains: &[f64], steps: u32) -> u64 {
        let seats = self.seats.iter().zip(gains);
        seats
            .map(|(seat, gain)| seat.blocks_after(gain * f64::from(steps)))
            .sum()
    }

    /// Most steps, up to `most`, whose tokens fit beside what is kept; at least 1.
    fn steps_that_fit(&mut self, gains: &[f64], most: u32) -> u32 {
        let fits = |own: &Self, steps: u32| {
            own.blocks_after(gains, steps) + own.kept_blocks <= own.blocks()
        };
        while !fits(self, 1) && self.evict() {}
        if fits(self, most) {
            return most;
        }
        let (mut low, mut high) = (1, most);
        while low + 1 < high {
            let middle = (low + high) / 2;
            if fits(self, middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Takes the request that came last out of the batch.
    fn preempt(&mut self) {
        if let Some(mut seat) = self.seats.pop() {
            self.counts.preemptions += 1;
            seat.unread = seat.context.ceil() as u32;
            seat.shared = 0.0;
            self.waiting.push_front(seat);
        }
    }
}
