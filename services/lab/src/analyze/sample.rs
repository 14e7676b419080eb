//! Sorts recorded calls by workload and tenant, and keeps a sample of each: whole sessions, evenly over the log.

use std::collections::{BTreeMap, HashMap, HashSet};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::logs::RecordedCall;

/// Sessions whose group is remembered. Further sessions count by themselves.
const GROUPED_SESSIONS_MAX: usize = 100_000;

/// The calls of one workload of one tenant.
#[derive(Debug, Default)]
pub(super) struct TenantWorkload {
    pub(super) workload: Option<String>,
    pub(super) tenant: Option<String>,
    /// Whether it holds the calls of all further workloads, once the number of rows is reached.
    pub(super) is_rest: bool,
    /// The calls that are analyzed, in order.
    pub(super) calls: Vec<RecordedCall>,
    /// For each of these calls, the number of its unit: what is independent of the rest, as a session is.
    pub(super) units: Vec<usize>,
    /// Number of units.
    pub(super) unit_count: usize,
    /// Sessions of these calls; a call without a session is one by itself.
    pub(super) sessions: u64,
    /// Calls that were read.
    pub(super) calls_read: u64,
    /// Output tokens of the calls that were read.
    pub(super) tokens_read: u64,
}

/// Workloads in the order in which they first occur.
pub(super) struct Sampler {
    rows: Vec<RowSample>,
    rows_max: usize,
    calls_max: usize,
    tokens_max: u64,
    /// Kept calls, and their tokens.
    calls: usize,
    tokens: u64,
    calls_read: u64,
    /// First and last beginning of a call that names it, Unix milliseconds.
    span_ms: Option<(u64, u64)>,
    groups_of_sessions: HashMap<u64, u64>,
}

/// A row while calls are read.
#[derive(Default)]
struct RowSample {
    row: TenantWorkload,
    /// The calls of kept units with their numbers in the log, by the hash of the unit. Those with the smallest hashes
    /// are kept, so each unit has the same chance.
    kept: BTreeMap<u64, Vec<(u64, RecordedCall)>>,
    tokens: u64,
    /// The smallest hash that was dropped.
    dropped: Option<u64>,
}

impl Sampler {
    /// Keeps at most `rows_max` workloads and one for the rest, and of all together at most `calls_max` calls with
    /// `tokens_max` tokens.
    pub(super) fn new(rows_max: usize, calls_max: usize, tokens_max: u64) -> Self {
        Sampler {
            rows: Vec::new(),
            rows_max,
            calls_max,
            tokens_max,
            calls: 0,
            tokens: 0,
            calls_read: 0,
            span_ms: None,
            groups_of_sessions: HashMap::new(),
        }
    }

    /// Whether the next call with this head would be kept. Others can be counted without their tokens.
    pub(super) fn keeps(&mut self, head: &RecordedCall) -> bool {
        let unit = self.unit_of(head, self.calls_read);
        let row = self.row_of(head);
        !self.rows[row].has_dropped(unit)
    }

    /// Counts a call that is not kept. Returns its row and its unit.
    pub(super) fn count(&mut self, head: &RecordedCall, output_tokens: u64) -> (usize, u64) {
        let unit = self.unit_of(head, self.calls_read);
        self.calls_read += 1;
        if let Some(at_ms) = head.at_ms {
            let (first, last) = self.span_ms.unwrap_or((at_ms, at_ms));
            self.span_ms = Some((first.min(at_ms), last.max(at_ms)));
        }
        let at = self.row_of(head);
        let row = &mut self.rows[at].row;
        row.calls_read += 1;
        row.tokens_read += output_tokens;
        (at, unit)
    }

    pub(super) fn add(&mut self, call: RecordedCall) {
        let number = self.calls_read;
        let (row, unit) = self.count(&call, call.output.len() as u64);
        let row = &mut self.rows[row];
        if row.has_dropped(unit) {
            return;
        }
        self.calls += 1;
        self.tokens += tokens_of(&call);
        row.tokens += tokens_of(&call);
        row.kept.entry(unit).or_default().push((number, call));
        while self.calls > self.calls_max || self.tokens > self.tokens_max {
            let Some(largest) = self
                .rows
                .iter_mut()
                .max_by_key(|row| (row.tokens, row.kept.len()))
            else {
                return;
            };
            let gone = largest.drop_some();
            if gone.is_empty() {
                return;
            }
            self.calls -= gone.len();
            self.tokens -= gone.iter().map(tokens_of).sum::<u64>();
        }
    }

    /// The unit that a call belongs to: its group of samples, else its session, else the call itself. The whole
    /// session of a call with a group belongs to that group.
    fn unit_of(&mut self, call: &RecordedCall, number: u64) -> u64 {
        let hash = |name: &str, seed| xxh3_64_with_seed(name.as_bytes(), seed);
        let session = call.session.as_deref().map(|name| hash(name, 1));
        match (call.group.as_deref().map(|name| hash(name, 2)), session) {
            (Some(group), session) => {
                if self.groups_of_sessions.len() < GROUPED_SESSIONS_MAX {
                    self.groups_of_sessions
                        .extend(session.map(|session| (session, group)));
                }
                group
            }
            (None, Some(session)) => *self.groups_of_sessions.get(&session).unwrap_or(&session),
            (None, None) => xxh3_64_with_seed(&number.to_le_bytes(), 3),
        }
    }

    /// The row of a call, which is made if it is new. The rest comes last.
    fn row_of(&mut self, call: &RecordedCall) -> usize {
        let is_of = |of: &RowSample| {
            !of.row.is_rest && (&of.row.workload, &of.row.tenant) == (&call.workload, &call.tenant)
        };
        if let Some(found) = self.rows.iter().position(is_of) {
            return found;
        }
        if self.rows.len() <= self.rows_max {
            let is_rest = self.rows.len() == self.rows_max;
            let name = |name: &Option<String>| name.clone().filter(|_| !is_rest);
            let row = TenantWorkload {
                workload: name(&call.workload),
                tenant: name(&call.tenant),
                is_rest,
                ..TenantWorkload::default()
            };
            self.rows.push(RowSample {
                row,
                ..RowSample::default()
            });
        }
        self.rows.len() - 1
    }

    /// Seconds between the first and the last call, if calls say when they began.
    pub(super) fn span_s(&self) -> Option<f64> {
        self.span_ms
            .map(|(first, last)| (last - first) as f64 / 1e3)
    }

    pub(super) fn into_workloads(self) -> Vec<TenantWorkload> {
        self.rows.into_iter().map(RowSample::finish).collect()
    }
}

impl RowSample {
    /// Whether calls of this unit are not kept.
    fn has_dropped(&self, unit: u64) -> bool {
        self.dropped.is_some_and(|dropped| unit >= dropped)
    }

    /// Drops the unit with the greatest hash, or the last call of the only unit. Returns the calls that went.
    fn drop_some(&mut self) -> Vec<RecordedCall> {
        let gone: Vec<(u64, RecordedCall)> = if self.kept.len() > 1 {
            let (hash, calls) = self.kept.pop_last().unwrap_or_default();
            self.dropped = Some(hash);
            calls
        } else {
            let only = self.kept.values_mut().next();
            only.and_then(Vec::pop).into_iter().collect()
        };
        let gone: Vec<RecordedCall> = gone.into_iter().map(|(_, call)| call).collect();
        self.tokens -= gone.iter().map(tokens_of).sum::<u64>();
        gone
    }

    fn finish(self) -> TenantWorkload {
        let mut row = self.row;
        row.unit_count = self.kept.len();
        let units = self.kept.into_values().enumerate();
        let mut calls: Vec<(u64, usize, RecordedCall)> = units
            .flat_map(|(unit, calls)| {
                calls
                    .into_iter()
                    .map(move |(number, call)| (number, unit, call))
            })
            .collect();
        calls.sort_by_key(|(number, ..)| *number);
        let named = calls
            .iter()
            .filter_map(|(.., call)| call.session.as_deref());
        let nameless = calls
            .iter()
            .filter(|(.., call)| call.session.is_none())
            .count();
        row.sessions = (named.collect::<HashSet<_>>().len() + nameless) as u64;
        (row.units, row.calls) = calls
            .into_iter()
            .map(|(_, unit, call)| (unit, call))
            .unzip();
        row
    }
}

fn tokens_of(call: &RecordedCall) -> u64 {
    (call.prompt.len() + call.output.len()) as u64
}

impl TenantWorkload {
    /// Its name in tables.
    pub(super) fn name(&self) -> String {
        match (&self.workload, &self.tenant) {
            _ if self.is_rest => "(others)".into(),
            (None, None) => "(unnamed)".into(),
            (Some(workload), None) => workload.clone(),
            (None, Some(tenant)) => format!("(unnamed) / {tenant}"),
            (Some(workload), Some(tenant)) => format!("{workload} / {tenant}"),
        }
    }

    /// Output tokens of the calls that are analyzed.
    pub(super) fn output_tokens(&self) -> u64 {
        self.calls.iter().map(|call| call.output.len() as u64).sum()
    }

    /// By how much the sample is smaller than the log, in output tokens.
    pub(super) fn weight(&self) -> f64 {
        self.tokens_read as f64 / self.output_tokens().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(workload: &str, tenant: &str) -> RecordedCall {
        RecordedCall {
            workload: Some(workload.into()),
            tenant: Some(tenant.into()),
            output: vec![1, 2],
            ..RecordedCall::default()
        }
    }

    #[test]
    fn calls_are_sorted_and_workloads_and_calls_are_limited() {
        let mut rows = Sampler::new(2, 6, 1000);
        for (workload, tenant) in [
            ("a", "x"),
            ("a", "y"),
            ("a", "x"),
            ("b", "x"),
            ("a", "x"),
            ("c", "x"),
            ("a", "y"),
        ] {
            rows.add(named(workload, tenant));
        }
        let found: Vec<_> = rows
            .into_workloads()
            .iter()
            .map(|row| (row.name(), row.calls.len(), row.calls_read, row.tokens_read))
            .collect();
        let row = |name: &str, kept, read, tokens| (name.to_owned(), kept, read, tokens);
        assert_eq!(
            found,
            [
                row("a / x", 2, 3, 6),
                row("a / y", 2, 2, 4),
                row("(others)", 2, 2, 4)
            ]
        );
    }

    #[test]
    fn a_workload_and_a_tenant_of_the_same_name_are_different() {
        let mut rows = Sampler::new(3, 1, 1000);
        let x = Some("x".to_owned());
        for (workload, tenant) in [(&x, &None), (&None, &x), (&None, &None)] {
            rows.add(RecordedCall {
                workload: workload.clone(),
                tenant: tenant.clone(),
                ..RecordedCall::default()
            });
        }
        let names: Vec<_> = rows
            .into_workloads()
            .iter()
            .map(TenantWorkload::name)
            .collect();
        assert_eq!(names, ["x", "(unnamed) / x", "(unnamed)"]);
    }

    /// A log of `sessions` sessions of five calls each, a call of each session in turns.
    fn sampled(sessions: u32, calls_max: usize, tokens_max: u64) -> TenantWorkload {
        let mut rows = Sampler::new(1, calls_max, tokens_max);
        for call in 0..5 * sessions {
            rows.add(RecordedCall {
                session: Some((call % sessions).to_string()),
                output: vec![call; 10],
                ..RecordedCall::default()
            });
        }
        rows.into_workloads().remove(0)
    }

    #[test]
    fn whole_sessions_are_kept_in_the_order_of_the_log() {
        let row = sampled(1000, 200, u64::MAX);
        assert!(
            (150..=200).contains(&row.calls.len()),
            "{}",
            row.calls.len()
        );
        assert_eq!(row.calls.len() as u64, 5 * row.sessions);
        assert_eq!(row.unit_count as u64, row.sessions);
        assert!(row.calls.is_sorted_by_key(|call| call.output[0]));
        let late = row
            .calls
            .iter()
            .filter(|call| call.output[0] % 1000 >= 500)
            .count();
        assert!((50..150).contains(&late), "{late}");
        assert_eq!((row.calls_read, row.tokens_read), (5000, 50_000));
        assert!((row.weight() - 5000.0 / row.calls.len() as f64).abs() < 1e-9);
        // Tokens are limited as calls are, and of a single session the first calls stay.
        assert!((400..=500).contains(&sampled(1000, 10_000, 500).output_tokens()));
        let one = sampled(1, 3, u64::MAX);
        assert_eq!((one.calls.len(), one.calls[2].output[0]), (3, 2));
    }

    #[test]
    fn samples_of_a_group_and_their_sessions_are_one_unit() {
        let mut rows = Sampler::new(1, 100, 1000);
        for (session, group) in [("a", Some("g")), ("b", Some("g")), ("a", None), ("c", None)] {
            rows.add(RecordedCall {
                session: Some(session.into()),
                group: group.map(str::to_owned),
                at_ms: Some(1000),
                ..RecordedCall::default()
            });
        }
        assert_eq!(rows.span_s(), Some(0.0));
        let row = rows.into_workloads().remove(0);
        assert_eq!((row.unit_count, row.sessions), (2, 3));
        assert_eq!(row.units[..3], [row.units[0]; 3]);
    }
}
