//! The places of this gateway's requests among those in flight.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use redis::Cmd;

use super::script::{Act, Amounts, CountedSubject, call};

/// A request's place: its name, and the subjects that it counts for.
pub(super) struct PlaceCall {
    /// The name, which no other request has, also not one of another gateway.
    pub(super) name: String,
    number: u64,
    subjects: Vec<CountedSubject>,
}

impl PlaceCall {
    /// A call of the script for this place.
    pub(super) fn command(
        &self,
        script: [&str; 2],
        act: Act,
        place_ms: u64,
        amounts: &Amounts,
    ) -> Cmd {
        call(script, act, &self.name, place_ms, &self.subjects, amounts)
    }

    /// The keys of the sets that have the place.
    pub(super) fn places_keys(&self) -> impl Iterator<Item = &str> {
        self.subjects.iter().map(CountedSubject::places_key)
    }

    /// How many subjects there are.
    pub(super) fn subject_count(&self) -> usize {
        self.subjects.len()
    }
}

/// The places that Redis may have.
pub(super) struct Places {
    /// The start of all names.
    gateway: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    held: HashMap<u64, Arc<PlaceCall>>,
}

impl Places {
    pub(super) fn new(gateway: String) -> Self {
        Places {
            gateway,
            state: Mutex::default(),
        }
    }

    /// A new place, which is renewed until it is [ended](Places::end).
    pub(super) fn add(&self, subjects: Vec<CountedSubject>) -> Arc<PlaceCall> {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        let call = Arc::new(PlaceCall {
            name: format!("{}-{number}", self.gateway),
            number,
            subjects,
        });
        state.held.insert(number, call.clone());
        call
    }

    pub(super) fn end(&self, call: &PlaceCall) {
        self.state.lock().held.remove(&call.number);
    }

    pub(super) fn all(&self) -> Vec<Arc<PlaceCall>> {
        self.state.lock().held.values().cloned().collect()
    }
}
