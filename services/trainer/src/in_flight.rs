//! The requests of the listener in flight, from their heads to the ends of their answers, and their aborts.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::metrics::TrainerFamilies;

/// The end of a request, which is the `outcome` label of its metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It has its answer.
    Done,
    /// It was aborted, and has what there was by then as its answer.
    Aborted,
    /// It was refused for what it asks, or because of a limit.
    Refused,
    /// The gateway or the mesh failed.
    Failed,
    /// Its client went away.
    Left,
}

impl Outcome {
    /// All outcomes.
    pub(super) const ALL: [Outcome; 5] = [
        Outcome::Done,
        Outcome::Aborted,
        Outcome::Refused,
        Outcome::Failed,
        Outcome::Left,
    ];

    /// The value of the label.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Outcome::Done => "done",
            Outcome::Aborted => "aborted",
            Outcome::Refused => "refused",
            Outcome::Failed => "failed",
            Outcome::Left => "left",
        }
    }
}

/// The requests in flight.
pub(super) struct InFlight {
    table: Mutex<Table>,
    families: Arc<TrainerFamilies>,
}

#[derive(Default)]
struct Table {
    last_number: u64,
    aborts: HashMap<u64, CancellationToken>,
    /// The numbers of requests by the names that the trainer gave them. Names need not be unique.
    by_name: HashMap<String, Vec<u64>>,
}

/// A request in flight. It counts until it is dropped.
pub(super) struct Entry {
    in_flight: Arc<InFlight>,
    number: u64,
    route: &'static str,
    names: Mutex<Vec<String>>,
    outcome: Mutex<Outcome>,
    /// Cancelled when the trainer aborts the request.
    pub(super) abort: CancellationToken,
}

impl InFlight {
    /// Creates the table, without requests.
    pub(super) fn new(families: Arc<TrainerFamilies>) -> Self {
        InFlight {
            table: Mutex::default(),
            families,
        }
    }

    /// Adds a request whose head has arrived.
    pub(super) fn begin(self: &Arc<Self>, route: &'static str) -> Arc<Entry> {
        let abort = CancellationToken::new();
        let mut table = self.table.lock();
        table.last_number += 1;
        let number = table.last_number;
        table.aborts.insert(number, abort.clone());
        drop(table);
        self.families.in_flight.inc();
        Arc::new(Entry {
            in_flight: self.clone(),
            number,
            route,
            names: Mutex::default(),
            outcome: Mutex::new(Outcome::Left),
            abort,
        })
    }

    /// Number of requests in flight.
    pub(super) fn len(&self) -> usize {
        self.table.lock().aborts.len()
    }

    /// Aborts the requests with one of these names. Returns how many they were.
    pub(super) fn abort(&self, names: &[String]) -> usize {
        let table = self.table.lock();
        let numbers = names.iter().filter_map(|name| table.by_name.get(name));
        let aborts: Vec<_> = numbers
            .flatten()
            .filter_map(|number| table.aborts.get(number).cloned())
            .collect();
        drop(table);
        self.cancel(aborts)
    }

    /// Aborts all requests. Returns how many they were.
    pub(super) fn abort_all(&self) -> usize {
        let aborts = self.table.lock().aborts.values().cloned().collect();
        self.cancel(aborts)
    }

    /// The lock is not held meanwhile, because a request that is woken may end at once.
    fn cancel(&self, aborts: Vec<CancellationToken>) -> usize {
        let fresh = aborts.iter().filter(|abort| !abort.is_cancelled());
        let number = fresh.map(CancellationToken::cancel).count();
        self.families.aborts.inc_by(number as u64);
        number
    }
}

impl Entry {
    /// Notes the names that the trainer gave the request.
    pub(super) fn named(&self, names: &[String]) {
        let mut table = self.in_flight.table.lock();
        for name in names {
            let numbers = table.by_name.entry(name.clone()).or_default();
            numbers.push(self.number);
        }
        drop(table);
        let mut known = self.names.lock();
        known.extend_from_slice(names);
    }

    /// Notes how the request ended, as far as its client can tell.
    pub(super) fn ended(&self, outcome: Outcome) {
        *self.outcome.lock() = outcome;
    }

    /// The outcome of a request that has its answer.
    pub(super) fn answered(&self) -> Outcome {
        match self.abort.is_cancelled() {
            true => Outcome::Aborted,
            false => Outcome::Done,
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let names = std::mem::take(&mut *self.names.lock());
        let mut table = self.in_flight.table.lock();
        table.aborts.remove(&self.number);
        for name in names {
            if let Some(numbers) = table.by_name.get_mut(&name) {
                numbers.retain(|number| *number != self.number);
                if numbers.is_empty() {
                    table.by_name.remove(&name);
                }
            }
        }
        drop(table);
        let families = &self.in_flight.families;
        families.in_flight.dec();
        let outcome = *self.outcome.lock();
        let labels = [self.route, outcome.as_str()];
        families.requests.with_label_values(&labels).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_service_kit::telemetry::Metrics;

    fn in_flight() -> Arc<InFlight> {
        let families = TrainerFamilies::register(Metrics::new().unwrap().registry());
        Arc::new(InFlight::new(families.unwrap().into()))
    }

    #[test]
    fn requests_are_aborted_by_their_names_or_all_at_once() {
        let requests = in_flight();
        let named = |names: &[&str]| {
            let entry = requests.begin("/generate");
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            entry.named(&names);
            entry
        };
        let (first, second, third) = (named(&["a"]), named(&["b", "c"]), named(&["a"]));
        assert_eq!(requests.len(), 3);
        assert_eq!(requests.abort(&["nobody".into()]), 0);
        assert_eq!(requests.abort(&["c".into()]), 1);
        assert!(second.abort.is_cancelled() && !first.abort.is_cancelled());
        assert_eq!(requests.abort(&["a".into(), "c".into()]), 2);
        assert_eq!(first.answered(), Outcome::Aborted);
        let late = requests.begin("/generate");
        assert_eq!(late.answered(), Outcome::Done);
        assert_eq!(requests.abort_all(), 1);
        assert_eq!(requests.abort_all(), 0);
        drop((first, second, third, late));
        assert_eq!(requests.len(), 0);
        assert!(requests.table.lock().by_name.is_empty());
    }
}
