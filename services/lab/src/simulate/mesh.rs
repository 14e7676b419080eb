//! The simulated mesh: requests, the scheduler's core, and instances, driven by events in order of their time.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use anyhow::{Context, bail};

use super::desk::{Desk, Granted, InstanceReport, chunk_end};
use super::drafting::Drafting;
use super::instance::{Instance, InstanceLimits};
use super::job_progress::Progress;
use super::options::SimulatedPolicy;
use super::seat::Seat;
use super::shape::Shape;
use super::workload::Workload;
use crate::replay::EngineModel;

/// Nanoseconds, so that times have an order.
type TimeNs = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The run of an instance ends, unless a later plan has replaced it.
    Run { instance: usize, generation: u64 },
    /// A request arrives.
    Arrival { job: usize },
    /// The scheduler looks at what has waited for long.
    Tick,
    /// An instance reports to the scheduler.
    Report { instance: usize },
}

/// The counts over all instances.
#[derive(Clone, Debug, Default)]
pub(super) struct MeshCounts {
    /// Context tokens that came from the pool.
    pub(super) moved_tokens: u64,
    pub(super) chunks: u64,
    /// Contexts that were read for the first time, tokens.
    pub(super) prompt_tokens: u64,
}

/// The mesh.
pub(super) struct Mesh<'a> {
    workload: &'a Workload,
    shape: &'a Shape,
    engine: EngineModel,
    desk: Option<Desk>,
    drafting: Drafting,
    pub(super) instances: Vec<Instance>,
    pub(super) jobs: Vec<Progress>,
    pub(super) counts: MeshCounts,
    events: BinaryHeap<Reverse<(TimeNs, u64, Event)>>,
    next_event: u64,
    now_s: f64,
    unfinished: usize,
    /// Conversations that have not begun, in order.
    sessions: Vec<usize>,
}

impl<'a> Mesh<'a> {
    pub(super) fn new(
        workload: &'a Workload,
        shape: &'a Shape,
        (engine, prefill_tokens): (EngineModel, u32),
        desk: Option<Desk>,
        drafting: Drafting,
    ) -> Self {
        let limits = InstanceLimits {
            slots: shape.slots,
            kv_tokens: shape.kv_tokens,
            prefill_tokens,
        };
        Mesh {
            workload,
            shape,
            engine,
            desk,
            drafting,
            instances: (0..shape.instances)
                .map(|number| Instance::new(number, limits.clone()))
                .collect(),
            jobs: vec![Progress::default(); workload.jobs.len()],
            counts: MeshCounts::default(),
            events: BinaryHeap::new(),
            next_event: 0,
            now_s: 0.0,
            unfinished: workload.jobs.len(),
            sessions: Vec::new(),
        }
    }

    fn at(&mut self, time_s: f64, event: Event) {
        let number = self.next_event;
        self.next_event += 1;
        let time_ns = (time_s * 1e9).ceil() as TimeNs;
        self.events.push(Reverse((time_ns, number, event)));
    }

    /// Serves all samples of groups, which arrive together.
    pub(super) fn serve_groups(
        &mut self,
        policy: SimulatedPolicy,
        progress: impl FnMut(usize),
    ) -> anyhow::Result<()> {
        if policy == SimulatedPolicy::GroupFifo {
            let workload = self.workload;
            let ranks = self.shape.ranks;
            let engines = self.instances.len() / ranks;
            let mut seated = vec![0; engines];
            for (job, of) in workload.jobs.iter().enumerate() {
                let engine = of.group % engines;
                let instance = engine * ranks + seated[engine] % ranks;
                seated[engine] += 1;
                let left = of.output_tokens;
                self.seat(job, instance, (left, of.prompt_tokens, 0), 0.0);
            }
            for instance in 0..self.instances.len() {
                self.plan(instance)?;
            }
        } else {
            for job in 0..self.workload.jobs.len() {
                self.submit(job, None)?;
            }
        }
        self.open()?;
        self.run(progress)
    }

    /// Serves conversations, so many at once; `first_turns` begin them.
    pub(super) fn serve_conversations(
        &mut self,
        first_turns: &[usize],
        at_once: usize,
        progress: impl FnMut(usize),
    ) -> anyhow::Result<()> {
        self.open()?;
        for instance in 0..self.instances.len() {
            // Samples of groups have no prefixes, and there is one tenant. So only conversations need reports.
            self.at(1.0, Event::Report { instance });
        }
        self.sessions = first_turns.iter().rev().copied().collect();
        for nth in 0..at_once.min(first_turns.len()) {
            if let Some(job) = self.sessions.pop() {
                // They begin one after the other within a second.
                self.at(nth as f64 / at_once as f64, Event::Arrival { job });
            }
        }
        self.run(progress)
    }

    /// The instances report to the scheduler.
    fn open(&mut self) -> anyhow::Result<()> {
        let Some(desk) = &mut self.desk else {
            return Ok(());
        };
        let granted = desk.open(self.instances.len())?;
        self.at(1.0, Event::Tick);
        self.carry_out(granted, None)
    }

    fn run(&mut self, mut progress: impl FnMut(usize)) -> anyhow::Result<()> {
        while self.unfinished > 0 {
            let Some(Reverse((time_ns, _, event))) = self.events.pop() else {
                bail!(
                    "{} requests wait for ever: this is a fault of the simulator",
                    self.unfinished
                );
            };
            self.now_s = self.now_s.max(time_ns as f64 / 1e9);
            match event {
                Event::Run {
                    instance,
                    generation,
                } => {
                    if self.instances[instance].generation == generation {
                        self.advance(instance)?;
                        progress(self.jobs.len() - self.unfinished);
                    }
                }
                Event::Arrival { job } => self.submit(job, None)?,
                Event::Tick => {
                    if let Some(desk) = &mut self.desk {
                        let granted = desk.tick(self.now_s)?;
                        self.carry_out(granted, None)?;
                    }
                    self.at(self.now_s + 1.0, Event::Tick);
                }
                Event::Report { instance } => self.report(instance)?,
            }
        }
        Ok(())
    }

    fn report(&mut self, instance: usize) -> anyhow::Result<()> {
        let Some(desk) = &mut self.desk else {
            return Ok(());
        };
        let of = &self.instances[instance];
        let prefixes_of = |job: usize| {
            let turn = self.workload.jobs[job].turn.as_ref();
            turn.map_or(&[][..], |turn| &turn.before)
        };
        let (running_tokens, kept_tokens) = of.kv_tokens();
        let state = InstanceReport {
            running: of.jobs().filter_map(|job| self.jobs[job].lease).collect(),
            running_tokens,
            kept_tokens,
            held: Some(of.longest_prefixes(prefixes_of)),
        };
        let (granted, next_in_s) = desk.report(instance, state, self.now_s)?;
        self.at(self.now_s + next_in_s, Event::Report { instance });
        self.carry_out(granted, None)
    }

    /// Ends the run of an instance, answers what has ended, and plans the next run.
    fn advance(&mut self, instance: usize) -> anyhow::Result<()> {
        let advanced = self.instances[instance].advance();
        for (job, first_s) in advanced.first {
            self.jobs[job].first_s.get_or_insert(first_s);
        }
        for seat in advanced.ended {
            self.ended(instance, &seat)?;
        }
        self.plan(instance)
    }

    fn ended(&mut self, instance: usize, seat: &Seat) -> anyhow::Result<()> {
        let (workload, job) = (self.workload, seat.job);
        let of = &workload.jobs[job];
        let emitted = seat.emitted.round() as u32;
        let state = &mut self.jobs[job];
        let lease = state.lease.take();
        let context_before = of.prompt_tokens + state.generated;
        state.generated += emitted;
        let is_finished = state.generated >= of.output_tokens;
        let read = u32::try_from(seat.read_tokens).unwrap_or(u32::MAX);
        let cached_tokens = context_before.saturating_sub(read);
        if is_finished {
            state.finished_s = Some(self.now_s);
            self.unfinished -= 1;
            self.drafting.finished(job);
            if let Some(turn) = &of.turn {
                self.instances[instance].keep_prefixes(&turn.after);
                match turn.next {
                    Some((next, pause_s)) => {
                        self.at(self.now_s + pause_s, Event::Arrival { job: next });
                    }
                    None => {
                        if let Some(next) = self.sessions.pop() {
                            self.at(self.now_s, Event::Arrival { job: next });
                        }
                    }
                }
            }
        } else {
            self.instances[instance].keep_job(job, seat.context);
        }
        let Some(desk) = &mut self.desk else {
            return Ok(());
        };
        let lease = lease.context("a chunk ended without a lease")?;
        let accepted = (seat.emitted - seat.steps).round().max(0.0) as u32;
        let ended = chunk_end(lease, (emitted, accepted), cached_tokens, is_finished);
        if is_finished {
            let granted = desk.finish(ended, self.now_s)?;
            self.carry_out(granted, Some(instance))
        } else {
            let granted = desk.submit(job, of, &self.jobs[job], Some(ended), self.now_s)?;
            self.carry_out(granted, Some(instance))
        }
    }

    fn submit(&mut self, job: usize, at_instance: Option<usize>) -> anyhow::Result<()> {
        self.jobs[job].submitted_s = self.now_s;
        let Some(desk) = &mut self.desk else {
            return Ok(());
        };
        let workload = self.workload;
        let of = &workload.jobs[job];
        let granted = desk.submit(job, of, &self.jobs[job], None, self.now_s)?;
        self.carry_out(granted, at_instance)
    }

    /// Gives granted requests to their instances. The `busy` one plans its next run by itself.
    fn carry_out(&mut self, granted: Vec<Granted>, busy: Option<usize>) -> anyhow::Result<()> {
        let mut reached = BTreeSet::new();
        for Granted {
            job,
            lease,
            instance,
            chunk_tokens,
        } in granted
        {
            let workload = self.workload;
            let of = &workload.jobs[job];
            let state = &mut self.jobs[job];
            state.lease = Some(lease);
            let left = of.output_tokens - state.generated;
            let left = chunk_tokens.map_or(left, |chunk| left.min(chunk));
            let context = of.prompt_tokens + state.generated;
            let before = state.instance.filter(|before| *before != instance);
            let mut ready_s = 0.0;
            let unread = if let Some(turn) = &of.turn {
                // A token has to be computed in any case.
                let held = self.instances[instance].held_tokens(&turn.before);
                context - held.min(context - 1)
            } else if self.instances[instance].take_kept(job) {
                0
            } else if self.shape.pool_gb_per_s > 0.0 && state.generated > 0 {
                let bytes = f64::from(context) * self.engine.kv_bytes_per_token;
                let seconds = bytes / (self.shape.pool_gb_per_s * 1e9);
                let free_s = &mut self.instances[instance].pool_free_s;
                *free_s = free_s.max(self.now_s) + seconds;
                ready_s = *free_s;
                self.counts.moved_tokens += u64::from(context);
                0
            } else {
                context
            };
            if let Some(before) = before {
                self.instances[before].take_kept(job);
            }
            let shared = if of.turn.is_some() {
                context - unread
            } else {
                0
            };
            self.seat(job, instance, (left, unread, shared), ready_s);
            reached.insert(instance);
        }
        for instance in reached {
            if busy == Some(instance) {
                continue;
            }
            match self.instances[instance].interrupt(self.now_s) {
                Some(end_s) => self.next_run(instance, end_s),
                None => self.plan(instance)?,
            }
        }
        Ok(())
    }

    /// Gives a request to an instance: tokens that are left, that have to be read, and that are shared with others.
    fn seat(
        &mut self,
        job: usize,
        instance: usize,
        (left, unread, shared): (u32, u32, u32),
        ready_s: f64,
    ) {
        let of = &self.workload.jobs[job];
        let state = &mut self.jobs[job];
        state.instance = Some(instance);
        state.chunks += 1;
        self.counts.chunks += 1;
        if state.chunks == 1 {
            self.counts.prompt_tokens += u64::from(unread);
        }
        self.instances[instance].enqueue(Seat {
            job,
            context: f64::from(of.prompt_tokens + state.generated),
            unread,
            shared: f64::from(shared),
            left: f64::from(left),
            emitted: 0.0,
            steps: 0.0,
            generated: state.generated,
            ready_s,
            read_tokens: 0,
        });
    }

    fn plan(&mut self, instance: usize) -> anyhow::Result<()> {
        let planned =
            self.instances[instance].plan(self.now_s, &self.engine, &mut self.drafting)?;
        if let Some(end_s) = planned {
            self.next_run(instance, end_s);
        }
        Ok(())
    }

    fn next_run(&mut self, instance: usize, end_s: f64) {
        let generation = self.instances[instance].generation;
        self.at(
            end_s,
            Event::Run {
                instance,
                generation,
            },
        );
    }
}
