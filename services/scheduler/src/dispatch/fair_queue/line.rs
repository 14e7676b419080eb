//! The waiting requests of one tenant and class, by arrival and by rank.

use std::collections::BTreeSet;

use super::waiting_request::Place;
use crate::order::Rank;

/// The line of one tenant and class.
#[derive(Debug, Default)]
pub(super) struct Line {
    by_place: BTreeSet<Place>,
    by_rank: BTreeSet<(Rank, Place)>,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.by_place.len()
    }

    pub(super) fn insert(&mut self, rank: Rank, place: Place) {
        self.by_place.insert(place);
        self.by_rank.insert((rank, place));
    }

    pub(super) fn remove(&mut self, rank: Rank, place: Place) {
        self.by_place.remove(&place);
        self.by_rank.remove(&(rank, place));
    }

    /// The place of the request that arrived first.
    pub(super) fn oldest(&self) -> Option<Place> {
        self.by_place.first().copied()
    }

    /// The places from the oldest to the newest.
    pub(super) fn by_arrival(&self) -> impl Iterator<Item = Place> {
        self.by_place.iter().copied()
    }

    /// The places in the order of service: by rank, or by arrival where the estimates behind ranks are worthless.
    pub(super) fn in_order(&self, trusts_ranks: bool) -> impl Iterator<Item = Place> {
        let by_rank = self.by_rank.iter().map(|(_, place)| *place);
        let by_place = self.by_place.iter().copied();
        let ranked = trusts_ranks.then_some(by_rank).into_iter().flatten();
        let arrived = (!trusts_ranks).then_some(by_place).into_iter().flatten();
        ranked.chain(arrived)
    }
}
