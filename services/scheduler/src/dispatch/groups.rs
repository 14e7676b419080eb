//! The groups of rollouts: what is known about their lengths, and which request of each is the probe.
//!
//! The table is bounded. Groups with members that wait or run are kept, since their number is bounded by the queue
//! and the slots; of the others the least recently used ones are forgotten. A group that comes back after that, or
//! after a restart of the scheduler, starts anew: its next request is a probe.

use std::collections::{BTreeMap, HashMap};

use lru::LruCache;
use refrain_protocol::RequestId;

use super::fair_queue::Place;
use super::group_key::GroupKey;
use crate::order::GroupLengths;

/// Members of a group whose estimates are remembered. The others do not count for the trust in estimates.
const MEMBERS_TRACKED_MAX: usize = 1_024;

#[derive(Debug, Default)]
struct Group {
    lengths: GroupLengths,
    probe: Option<RequestId>,
    waiting: BTreeMap<Place, WaitingMember>,
    /// Members that have begun to wait for their first chunk, since none of the group waited or ran.
    arrivals: u32,
    running: usize,
    /// The members that have started and not finished.
    started: HashMap<RequestId, Started>,
    /// Members that have started since the group is known.
    starts: u32,
    /// The lengths of finished members whose sibling has not finished, by the number of the pair.
    half_pairs: HashMap<u32, u32>,
}

/// A member that waits.
#[derive(Clone, Copy, Debug)]
struct WaitingMember {
    request: RequestId,
    /// Members that arrived before it.
    number: u32,
}

/// The facts about a group that tell the rank of a waiting member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Membership {
    pub(super) lengths: GroupLengths,
    pub(super) is_probe: bool,
    /// Members that arrived before it.
    pub(super) number: u32,
}

/// A member that has started.
#[derive(Clone, Copy, Debug)]
struct Started {
    /// The estimate by which it was ordered; `None` where there was none.
    estimate: Option<u32>,
    /// Members that started before it. The first two are siblings, and so on.
    number: u32,
}

/// The facts that the end of a member tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemberFinish {
    /// The estimate by which it was ordered when it started.
    pub(super) estimate: Option<u32>,
    /// The lengths of two siblings, if the other one had finished before, in the order of their starts.
    pub(super) siblings: Option<(u32, u32)>,
    /// Estimates of others have changed.
    pub(super) others_change: bool,
}

impl Group {
    fn is_active(&self) -> bool {
        self.running > 0 || !self.waiting.is_empty()
    }

    /// Whether estimates of its members may have changed from `before`.
    fn differs(&self, before: (GroupLengths, Option<RequestId>)) -> bool {
        let (lengths, probe) = before;
        let longest = |lengths: GroupLengths| {
            let finished = lengths.finished_max;
            finished.map(|finished| finished.max(lengths.running_max))
        };
        longest(lengths) != longest(self.lengths) || probe != self.probe
    }

    /// The lengths of a finished member and of its sibling, in the order of their starts, once both are known.
    fn pair(&mut self, number: u32, tokens: u32) -> Option<(u32, u32)> {
        let pair = number / 2;
        if let Some(other) = self.half_pairs.remove(&pair) {
            return Some(match number.is_multiple_of(2) {
                true => (tokens, other),
                false => (other, tokens),
            });
        }
        if self.half_pairs.len() < MEMBERS_TRACKED_MAX {
            self.half_pairs.insert(pair, tokens);
        }
        None
    }

    fn others_waiting(&self, left: RequestId) -> impl Iterator<Item = RequestId> {
        let waiting = self.waiting.values().map(|member| member.request);
        waiting.filter(move |request| *request != left)
    }

    /// Makes another waiting member the probe, if the group still needs one.
    fn replace_probe(&mut self, left: RequestId) {
        if self.probe == Some(left) {
            self.probe = match self.lengths.finished_max {
                None => self.others_waiting(left).next(),
                Some(_) => None,
            };
        }
    }
}

/// All groups, by key.
#[derive(Debug)]
pub(super) struct GroupTable {
    groups: LruCache<GroupKey, Group>,
    groups_max: usize,
}

impl GroupTable {
    pub(super) fn new(groups_max: usize) -> Self {
        GroupTable {
            groups: LruCache::unbounded(),
            groups_max,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.groups.len()
    }

    /// The facts about a group and its member that waits at this place.
    pub(super) fn look_up(&self, key: &GroupKey, request: RequestId, place: Place) -> Membership {
        let group = self.groups.peek(key);
        group.map_or_else(Membership::default, |group| Membership {
            lengths: group.lengths,
            is_probe: group.probe == Some(request),
            number: group.waiting.get(&place).map_or(0, |of| of.number),
        })
    }

    /// The places of the members that wait.
    pub(super) fn waiting(&self, key: &GroupKey) -> impl Iterator<Item = Place> {
        let group = self.groups.peek(key);
        group
            .into_iter()
            .flat_map(|group| group.waiting.keys().copied())
    }

    /// A member waits. Returns whether estimates of others have changed.
    pub(super) fn waits(
        &mut self,
        key: &GroupKey,
        request: RequestId,
        place: Place,
        generated_tokens: u32,
    ) -> bool {
        let group = self.groups.get_or_insert_mut(key.clone(), Group::default);
        let before = (group.lengths, group.probe);
        if !group.is_active() {
            group.arrivals = 0;
        }
        let number = group.arrivals;
        group.arrivals += u32::from(generated_tokens == 0);
        group
            .waiting
            .insert(place, WaitingMember { request, number });
        group.lengths.running_max = group.lengths.running_max.max(generated_tokens);
        if group.probe.is_none() && group.lengths.finished_max.is_none() {
            group.probe = Some(request);
        }
        let differs = group.differs(before);
        self.forget_idle();
        differs
    }

    /// A member starts to run. `estimate` is the one by which it was ordered.
    pub(super) fn starts(
        &mut self,
        key: &GroupKey,
        request: RequestId,
        place: Place,
        estimate: Option<u32>,
    ) {
        if let Some(group) = self.groups.get_mut(key) {
            group.waiting.remove(&place);
            group.running += 1;
            if group.started.len() < MEMBERS_TRACKED_MAX {
                let number = group.starts;
                group.started.entry(request).or_insert_with(|| {
                    group.starts = number.wrapping_add(1);
                    Started { estimate, number }
                });
            }
        }
    }

    /// A waiting member is taken out of the queue. Returns whether estimates of others have changed.
    pub(super) fn withdraws(&mut self, key: &GroupKey, request: RequestId, place: Place) -> bool {
        self.change(key, |group| {
            group.waiting.remove(&place);
            group.replace_probe(request);
        })
    }

    /// A member's chunk is over, whatever comes next.
    pub(super) fn stops(&mut self, key: &GroupKey) {
        if let Some(group) = self.groups.get_mut(key) {
            group.running = group.running.saturating_sub(1);
        }
    }

    /// A member goes on beyond `tokens`. Returns whether estimates of others have changed.
    pub(super) fn grows(&mut self, key: &GroupKey, tokens: u32) -> bool {
        self.change(key, |group| {
            group.lengths.running_max = group.lengths.running_max.max(tokens);
        })
    }

    /// A member is given up or aborted. Its length says nothing. Returns whether estimates of others have changed.
    pub(super) fn leaves(&mut self, key: &GroupKey, request: RequestId) -> bool {
        self.change(key, |group| {
            if let Some(started) = group.started.remove(&request) {
                group.half_pairs.remove(&(started.number / 2));
            }
            group.replace_probe(request);
        })
    }

    /// A member has finished with `tokens`.
    pub(super) fn finishes(
        &mut self,
        key: &GroupKey,
        request: RequestId,
        tokens: u32,
    ) -> MemberFinish {
        let (mut estimate, mut siblings) = (None, None);
        let others_change = self.change(key, |group| {
            if let Some(started) = group.started.remove(&request) {
                estimate = started.estimate;
                siblings = group.pair(started.number, tokens);
            }
            group.lengths.finished_max = group.lengths.finished_max.max(Some(tokens));
            group.probe = None;
        });
        MemberFinish {
            estimate,
            siblings,
            others_change,
        }
    }

    fn change(&mut self, key: &GroupKey, change: impl FnOnce(&mut Group)) -> bool {
        let Some(group) = self.groups.get_mut(key) else {
            return false;
        };
        let before = (group.lengths, group.probe);
        change(group);
        group.differs(before)
    }

    fn forget_idle(&mut self) {
        let mut kept = 0;
        while self.groups.len() > self.groups_max && kept < 8 {
            let Some((key, group)) = self.groups.peek_lru() else {
                return;
            };
            let (key, is_active) = (key.clone(), group.is_active());
            if is_active {
                self.groups.promote(&key);
                kept += 1;
            } else {
                self.groups.pop(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fair_queue::{Arrival, LeaseCallId};
    use super::*;

    fn key(group: &str) -> GroupKey {
        GroupKey::new("m", "t", "acme", group)
    }

    fn place(nth: u64) -> Place {
        let call = LeaseCallId(nth);
        let arrival = Arrival { ms: nth, call };
        Place { arrival, call }
    }

    #[test]
    fn the_first_member_is_the_probe_until_one_has_finished() {
        let (mut table, key) = (GroupTable::new(10), key("g"));
        assert!(table.waits(&key, RequestId(1), place(1), 0));
        assert!(!table.waits(&key, RequestId(2), place(2), 0));
        let of = |table: &GroupTable, nth: u64| {
            table.look_up(&key, RequestId(u128::from(nth)), place(nth))
        };
        let [first, second] = [1, 2].map(|nth| of(&table, nth));
        assert_eq!((first.is_probe, first.number), (true, 0));
        assert_eq!((second.is_probe, second.number), (false, 1));
        table.starts(&key, RequestId(1), place(1), None);
        // The probe is aborted, so the next member is the probe.
        table.stops(&key);
        assert!(table.leaves(&key, RequestId(1)));
        assert!(of(&table, 2).is_probe);
        table.starts(&key, RequestId(2), place(2), None);
        table.stops(&key);
        let finish = |estimate, siblings| MemberFinish {
            estimate,
            siblings,
            others_change: true,
        };
        assert_eq!(table.finishes(&key, RequestId(2), 70), finish(None, None));
        assert!(!table.waits(&key, RequestId(3), place(3), 0));
        let third = of(&table, 3);
        assert_eq!(
            (third.lengths.finished_max, third.is_probe, third.number),
            (Some(70), false, 0)
        );
        // The estimate that counts is the one of the start, not of the end.
        table.starts(&key, RequestId(3), place(3), Some(70));
        assert!(table.grows(&key, 90));
        assert_eq!(
            table.finishes(&key, RequestId(3), 95),
            finish(Some(70), None)
        );
        assert!(!table.grows(&key, 80));
    }

    #[test]
    fn siblings_are_paired_by_their_starts_whichever_finishes_first() {
        let (mut table, key) = (GroupTable::new(10), key("g"));
        for nth in 0..6 {
            table.waits(&key, RequestId(nth), place(nth as u64), 0);
        }
        for nth in 0..6 {
            table.starts(&key, RequestId(nth), place(nth as u64), None);
        }
        // The second one is aborted, so the first one has no sibling.
        table.leaves(&key, RequestId(1));
        let mut pairs = Vec::new();
        for nth in [3, 0, 5, 4, 2] {
            let finish = table.finishes(&key, RequestId(nth), 10 * nth as u32);
            pairs.extend(finish.siblings);
        }
        assert_eq!(pairs, [(40, 50), (20, 30)]);
    }

    #[test]
    fn idle_groups_are_forgotten_and_active_ones_are_not() {
        let mut table = GroupTable::new(2);
        table.waits(&key("waits"), RequestId(1), place(1), 0);
        for nth in 2..9 {
            let key = key(&format!("g{nth}"));
            table.waits(&key, RequestId(u128::from(nth)), place(nth), 0);
            table.withdraws(&key, RequestId(u128::from(nth)), place(nth));
        }
        assert!(table.len() <= 3, "{}", table.len());
        assert_eq!(table.waiting(&key("waits")).count(), 1);
    }
}
