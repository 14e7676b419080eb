//! The waiting requests of one tenant and class, by arrival and by rank.

use super::fit_tree::FitTree;
use super::waiting_request::Place;
use crate::order::Rank;

/// The line of one tenant and class. Requests need KV tokens, see [`FitTree`].
#[derive(Debug, Default)]
pub(super) struct Line {
    by_place: FitTree<Place>,
    by_rank: FitTree<(Rank, Place)>,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.by_place.len()
    }

    pub(super) fn insert(&mut self, rank: Rank, place: Place, kv_tokens: u64) {
        self.by_place.insert(place, kv_tokens);
        self.by_rank.insert((rank, place), kv_tokens);
    }

    pub(super) fn remove(&mut self, rank: Rank, place: Place) {
        self.by_place.remove(place);
        self.by_rank.remove((rank, place));
    }

    /// Gives a request another rank.
    pub(super) fn rerank(&mut self, place: Place, (before, after): (Rank, Rank), kv_tokens: u64) {
        self.by_rank.remove((before, place));
        self.by_rank.insert((after, place), kv_tokens);
    }

    /// The place of the request that arrived first.
    pub(super) fn oldest(&self) -> Option<Place> {
        self.by_place.first()
    }

    /// The places from the oldest to the newest.
    pub(super) fn by_arrival(&self) -> impl Iterator<Item = Place> {
        self.by_place.fitting(u64::MAX)
    }

    /// The places of the requests that fit into `room_tokens`, in the order of service. Equal ranks go by arrival.
    pub(super) fn in_order(&self, room_tokens: u64) -> impl Iterator<Item = Place> {
        self.by_rank.fitting(room_tokens).map(|(_, place)| place)
    }
}
