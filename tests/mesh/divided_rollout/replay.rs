//! The scheduler's events once more, with each grant compared to the order that `context` promises.
//!
//! The reckoning is this file's own: Algorithm 2 of Seer (arXiv 2511.14617). One request of each group is its probe
//! until an output of the group is finished. Probes go first, those with the fewest tokens before others. All other
//! rollouts go by the longest estimate: the longest output of their group, or their limit while none is finished.

use std::cmp::Reverse;
use std::collections::HashMap;

use anyhow::{Context, ensure};
use e2e::SchedulingEvent;

/// A rollout's place in the order. The smallest goes first.
type Rank = (u8, u64, Reverse<u64>);

/// A request that waits or runs.
#[derive(Clone, Debug)]
struct Request {
    /// `None` for an interactive request.
    group: Option<String>,
    generated_tokens: u64,
    max_new_tokens: u64,
    /// By its gateway's clock.
    age_ms: u64,
    /// Chunks of others that ended while it waited.
    ends_waited: usize,
    /// Interactive requests that waited when it asked.
    interactive_ahead: usize,
}

/// A group's probe.
#[derive(Debug, Default, PartialEq)]
enum Probe {
    /// The next member that asks, unless an output is finished.
    #[default]
    None,
    Request(String),
    /// The probe went away while other members waited. One of them is the probe, and the events name it when it gets
    /// a chunk: those that asked within the same millisecond may have any order.
    AnyThatWaits,
}

#[derive(Debug, Default)]
struct Group {
    probe: Probe,
    finished_max: Option<u64>,
    running_max: u64,
}

/// Counts of what the events showed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// Chunks of probes.
    pub(super) probes: usize,
    /// Grants of rollouts while another one waited whose rank was another.
    pub(super) choices: usize,
    /// Those of them that went by a known length.
    pub(super) by_estimate: usize,
    /// Interactive requests.
    pub(super) interactive: usize,
    /// Those of them that waited for a slot.
    pub(super) interactive_waited: usize,
    /// Those of them that waited for more than one end of a chunk, and one more for each interactive request ahead.
    pub(super) interactive_waited_longer: usize,
}

/// How many of the events come before a chunk that a fault has ended: a worker is lost because it was killed, or
/// because its heartbeats are late on a busy machine. The slots are fewer from there on.
pub(super) fn undisturbed(events: &[SchedulingEvent]) -> usize {
    let first = events.iter().position(|event| match event {
        SchedulingEvent::Ended { outcome, .. } => !PROGRESS.contains(&outcome.as_str()),
        _ => false,
    });
    first.unwrap_or(events.len())
}

/// The outcomes of chunks that no fault has ended.
const PROGRESS: [&str; 2] = ["continues", "finished"];

/// The state of the queue after some events.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// Slots that rollouts keep. Beyond them, interactive requests go first.
    kept_slots: usize,
    waiting: HashMap<String, Request>,
    /// By lease.
    running: HashMap<String, (String, Request)>,
    groups: HashMap<String, Group>,
    pub(super) seen: Seen,
}

impl Replay {
    /// The state before all events of a mesh whose workers have `slots` together. Rollouts keep a quarter of them.
    pub(super) fn new(slots: usize) -> Self {
        Replay {
            kept_slots: slots / 4,
            ..Replay::default()
        }
    }

    /// Applies an event.
    ///
    /// # Errors
    /// A grant goes to another request than the first in line, or says something else about it.
    pub(super) fn apply(&mut self, event: &SchedulingEvent) -> anyhow::Result<()> {
        match event {
            SchedulingEvent::Asked {
                request,
                class,
                group,
                generated_tokens,
                max_new_tokens,
                age_ms,
            } => {
                // A request may ask once more, if the first call is slow. The older call counts no more.
                match self.waiting.get(request) {
                    Some(waiting) if *age_ms < waiting.age_ms => return Ok(()),
                    Some(_) => self.leaves(request),
                    None => self.running.retain(|_, (running, _)| running != request),
                }
                let group = group.clone().filter(|_| class == "rollout");
                if let Some(name) = &group {
                    let group = self.groups.entry(name.clone()).or_default();
                    group.running_max = group.running_max.max(*generated_tokens);
                    if group.finished_max.is_none() && group.probe == Probe::None {
                        group.probe = Probe::Request(request.clone());
                    }
                }
                let interactive = self.waiting.values().filter(|other| other.group.is_none());
                let asked = Request {
                    interactive_ahead: interactive.count(),
                    group,
                    generated_tokens: *generated_tokens,
                    max_new_tokens: *max_new_tokens,
                    age_ms: *age_ms,
                    ends_waited: 0,
                };
                self.waiting.insert(request.clone(), asked);
            }
            SchedulingEvent::Withdrawn { request } => self.leaves(request),
            SchedulingEvent::Granted {
                request,
                lease,
                probe,
                estimated_tokens,
                ..
            } => {
                let granted = self.waiting.remove(request).context("it did not ask")?;
                if let Some(group) = self.group_mut(&granted)
                    && group.probe == Probe::AnyThatWaits
                    && *probe
                {
                    group.probe = Probe::Request(request.clone());
                }
                match &granted.group {
                    None => self.interactive_granted(&granted),
                    Some(_) => {
                        let facts = (*probe, *estimated_tokens);
                        self.rollout_granted(request, &granted, facts)?;
                    }
                }
                let of_lease = (request.clone(), granted);
                self.running.insert(lease.clone(), of_lease);
            }
            SchedulingEvent::Ended {
                lease,
                outcome,
                emitted_tokens,
            } => {
                // A repeat is harmless.
                if let Some((_, ended)) = self.running.remove(lease) {
                    self.ended(&ended, outcome, *emitted_tokens)?;
                }
            }
        }
        Ok(())
    }

    /// A request is taken out of the queue.
    fn leaves(&mut self, request: &str) {
        let Some(left) = self.waiting.remove(request) else {
            return;
        };
        let siblings_wait = self.waiting.values().any(|other| other.group == left.group);
        if let Some(group) = self.group_mut(&left)
            && group.probe == Probe::Request(request.to_owned())
        {
            group.probe = match siblings_wait {
                true => Probe::AnyThatWaits,
                false => Probe::None,
            };
        }
    }

    fn interactive_granted(&mut self, granted: &Request) {
        // Those ahead of it get a slot each before it does.
        let is_long = granted.ends_waited > granted.interactive_ahead + 1;
        self.seen.interactive += 1;
        self.seen.interactive_waited += usize::from(granted.ends_waited > 0);
        self.seen.interactive_waited_longer += usize::from(is_long);
    }

    fn rollout_granted(
        &mut self,
        request: &str,
        granted: &Request,
        facts: (bool, Option<u64>),
    ) -> anyhow::Result<()> {
        let own = self.rank(request, granted);
        ensure!(
            facts == (self.is_probe(request, granted), self.estimate(granted)),
            "the event says {facts:?} about {granted:?}"
        );
        let others = self
            .waiting
            .iter()
            .filter(|(_, other)| other.group.is_some());
        let mut is_choice = false;
        for (id, other) in others {
            let rank = self.rank(id, other);
            ensure!(
                own <= rank,
                "{granted:?} was granted with rank {own:?}, before {other:?} with {rank:?}"
            );
            is_choice |= own < rank;
        }
        let interactive = self.waiting.values().any(|other| other.group.is_none());
        let running = self.running.values();
        let rollouts = running.filter(|(_, other)| other.group.is_some()).count();
        ensure!(
            !interactive || rollouts < self.kept_slots,
            "a rollout was granted beside {rollouts} others while an interactive request waited"
        );
        self.seen.probes += usize::from(facts.0);
        self.seen.choices += usize::from(is_choice);
        self.seen.by_estimate += usize::from(is_choice && facts.1.is_some());
        Ok(())
    }

    fn ended(&mut self, ended: &Request, outcome: &str, emitted_tokens: u64) -> anyhow::Result<()> {
        ensure!(PROGRESS.contains(&outcome), "a chunk ended as {outcome}");
        for waiting in self.waiting.values_mut() {
            waiting.ends_waited += 1;
        }
        let tokens = ended.generated_tokens + emitted_tokens;
        if let Some(group) = self.group_mut(ended) {
            match outcome {
                "finished" => {
                    group.finished_max = group.finished_max.max(Some(tokens));
                    group.probe = Probe::None;
                }
                _ => group.running_max = group.running_max.max(tokens),
            }
        }
        Ok(())
    }

    fn group_of(&self, request: &Request) -> Option<&Group> {
        self.groups.get(request.group.as_ref()?)
    }

    fn group_mut(&mut self, request: &Request) -> Option<&mut Group> {
        self.groups.get_mut(request.group.as_ref()?)
    }

    fn is_probe(&self, id: &str, request: &Request) -> bool {
        let group = self.group_of(request);
        group.is_some_and(|group| group.probe == Probe::Request(id.to_owned()))
    }

    fn estimate(&self, request: &Request) -> Option<u64> {
        let group = self.group_of(request)?;
        let longest = group.finished_max?.max(group.running_max);
        Some(
            longest
                .max(request.generated_tokens)
                .min(request.max_new_tokens),
        )
    }

    fn rank(&self, id: &str, request: &Request) -> Rank {
        match self.is_probe(id, request) {
            true => (0, request.generated_tokens, Reverse(0)),
            false => {
                let known = self.estimate(request);
                (1, 0, Reverse(known.unwrap_or(request.max_new_tokens)))
            }
        }
    }
}
