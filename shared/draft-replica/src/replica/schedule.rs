//! When the store is asked for which scopes: a value without I/O, to which times come as parameters.
//!
//! All scopes of a shard are in one call, except for the busy ones, which apply news, are taken over or pause after
//! a refusal. A scope that is ready again before the call is answered is not in it. Then the call is given up, and
//! another one has both; at most once in an interval, because that costs a connection.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::time::{Duration, Instant};

use refrain_protocol::NamespaceId;
use refrain_protocol::pull::Scope;
use refrain_service_kit::backoff::Backoff;

use super::take_over::store_backoff;

/// Most scopes of one call. Further ones take turns.
const SCOPES_MAX: usize = 512;

/// A namespace, or a group of one.
pub(super) type ScopeKey = (NamespaceId, Scope);

/// The key before all others.
const FIRST: ScopeKey = (NamespaceId(0), Scope::Namespace);

/// A call that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) shard: u32,
    /// The number of the call.
    number: u64,
    /// Its scopes, in the order in which they are answered.
    pub(super) scopes: Vec<ScopeKey>,
    /// Further scopes wait for their turn.
    pub(super) is_partial: bool,
}

/// The next thing to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A call. It takes the place of one of its shard that is not answered yet.
    Ask(Ask),
    /// Nothing, until this time or until something changes.
    Wait(Option<Instant>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Busy,
    Idle,
    /// It is in the call of this number.
    Asked(u64),
}

#[derive(Debug)]
struct Entry {
    shard: u32,
    phase: Phase,
}

/// The calls of one shard.
#[derive(Debug)]
struct Shard {
    /// When the call that is not answered yet was made; with whether it has all scopes.
    asked: Option<(Instant, bool)>,
    not_before: Instant,
    /// The next call begins with the scope after this one.
    served: ScopeKey,
    backoff: Backoff,
}

/// All scopes, and the calls for them.
#[derive(Debug)]
pub(super) struct Schedule {
    interval: Duration,
    scopes: BTreeMap<ScopeKey, Entry>,
    shards: BTreeMap<u32, Shard>,
    calls: u64,
}

impl Schedule {
    /// A schedule without scopes. An answer and the next call are `interval` apart, so that news gather.
    pub(super) fn new(interval: Duration) -> Self {
        Schedule {
            interval,
            scopes: BTreeMap::new(),
            shards: BTreeMap::new(),
            calls: 0,
        }
    }

    /// Leaves a scope out of calls until it is idle.
    pub(super) fn set_busy(&mut self, scope: &ScopeKey) {
        if let Some(entry) = self.scopes.get_mut(scope) {
            entry.phase = Phase::Busy;
        }
    }

    /// Has a scope in the next call to its shard.
    pub(super) fn set_idle(&mut self, scope: ScopeKey, shard: u32) {
        let phase = Phase::Idle;
        self.scopes.insert(scope, Entry { shard, phase });
    }

    /// Has a scope asked for at another shard.
    pub(super) fn set_shard(&mut self, scope: &ScopeKey, shard: u32) {
        if let Some(entry) = self.scopes.get_mut(scope) {
            entry.shard = shard;
        }
    }

    /// Forgets a scope.
    pub(super) fn remove(&mut self, scope: &ScopeKey) {
        self.scopes.remove(scope);
    }

    /// Tells the next thing to do. A call that is returned counts as made.
    pub(super) fn next(&mut self, now: Instant) -> Next {
        let idle = self.scopes.values();
        let idle = idle.filter(|entry| entry.phase == Phase::Idle);
        let waiting: BTreeSet<u32> = idle.map(|entry| entry.shard).collect();
        let mut wait: Option<Instant> = None;
        for number in waiting {
            let shard = self.shards.entry(number).or_insert_with(|| Shard {
                asked: None,
                not_before: now,
                served: FIRST,
                backoff: store_backoff(),
            });
            let due = match shard.asked {
                None => shard.not_before,
                Some((at, true)) => shard.not_before.max(at + self.interval),
                // It is answered soon, and the others have their turn.
                Some((_, false)) => continue,
            };
            if due <= now {
                return Next::Ask(self.ask(number, now));
            }
            wait = Some(wait.map_or(due, |wait| wait.min(due)));
        }
        Next::Wait(wait)
    }

    fn ask(&mut self, shard: u32, now: Instant) -> Ask {
        self.calls += 1;
        let number = self.calls;
        let served = self.shards.get(&shard).map(|of| of.served.clone());
        let served = served.unwrap_or(FIRST);
        let later = self.scopes.range((Excluded(&served), Unbounded));
        let in_turn = later.chain(self.scopes.range(..=&served));
        let is_ready =
            |(_, entry): &(_, &Entry)| entry.shard == shard && entry.phase != Phase::Busy;
        let mut ready = in_turn.filter(is_ready);
        let scopes: Vec<ScopeKey> = ready
            .by_ref()
            .take(SCOPES_MAX)
            .map(|(scope, _)| scope.clone())
            .collect();
        let is_partial = ready.next().is_some();
        for scope in &scopes {
            if let Some(entry) = self.scopes.get_mut(scope) {
                entry.phase = Phase::Asked(number);
            }
        }
        if let Some(shard) = self.shards.get_mut(&shard) {
            shard.asked = Some((now, !is_partial));
        }
        Ask {
            shard,
            number,
            scopes,
            is_partial,
        }
    }

    /// Whether an answer to a call concerns this scope. It does not if the scope was forgotten meanwhile, or is
    /// another one of its name.
    pub(super) fn is_asked(&self, scope: &ScopeKey, ask: &Ask) -> bool {
        let entry = self.scopes.get(scope);
        entry.is_some_and(|entry| entry.phase == Phase::Asked(ask.number))
    }

    /// Notes an answer, in which `last` is the position of the last scope with news. All its scopes are idle then.
    pub(super) fn record_answer(
        &mut self,
        ask: &Ask,
        is_full: bool,
        last: Option<usize>,
        now: Instant,
    ) {
        self.release(ask);
        let Some(shard) = self.shards.get_mut(&ask.shard) else {
            return;
        };
        shard.asked = None;
        shard.backoff.reset();
        shard.not_before = if is_full { now } else { now + self.interval };
        // Where not all fit, those that were left out come first the next time.
        let served = match is_full {
            true => last.and_then(|last| ask.scopes.get(last)),
            false if ask.is_partial => ask.scopes.last(),
            false => None,
        };
        if let Some(served) = served {
            shard.served = served.clone();
        }
    }

    /// Notes that a call failed. The shard is asked again after a pause that grows.
    pub(super) fn record_failure(&mut self, ask: &Ask, now: Instant) {
        self.release(ask);
        if let Some(shard) = self.shards.get_mut(&ask.shard) {
            shard.asked = None;
            shard.not_before = now + shard.backoff.pause();
        }
    }

    fn release(&mut self, ask: &Ask) {
        for scope in &ask.scopes {
            if let Some(entry) = self.scopes.get_mut(scope)
                && entry.phase == Phase::Asked(ask.number)
            {
                entry.phase = Phase::Idle;
            }
        }
    }
}

#[cfg(test)]
mod tests;
