//! The totals of this gateway: a plain state that takes records, live ones and those of the journal alike.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use refrain_protocol::usage::{Period, UsageCounts, UsageRow, UsageRowId, UsageTotal, hour_of};
use serde::{Deserialize, Serialize};

/// Those whose usage a row counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct UsageSubject {
    pub(crate) tenant: String,
    /// The public id of the key. Empty for callers without one.
    pub(crate) key: String,
    pub(crate) model: String,
}

/// A record of the journal. Counts of a request are all since it began, so a lost or repeated record does no harm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Record {
    /// A request began.
    Begin { request: u64, subject: UsageSubject },
    /// A request has counted so much at a time.
    Progress {
        request: u64,
        at_ms: u64,
        counts: UsageCounts,
    },
    /// A request ended.
    End {
        request: u64,
        at_ms: u64,
        counts: UsageCounts,
    },
    /// A request ended that has no other record.
    Whole {
        subject: UsageSubject,
        at_ms: u64,
        counts: UsageCounts,
    },
    /// The state of a row, in a file that was rewritten.
    Total {
        hour: u32,
        subject: UsageSubject,
        total: UsageTotal,
    },
    /// A request that ran when the file was rewritten. Its counts are in the totals.
    Running {
        request: u64,
        subject: UsageSubject,
        counts: UsageCounts,
    },
    /// Tokens of rows of a month that were forgotten after they had been sent.
    Forgotten {
        month: u32,
        tenant: String,
        key: String,
        tokens: u64,
    },
    /// The usage of a tenant was erased.
    Erased { tenant: String, at_ms: u64 },
}

/// Where a row is: its hour and whose it is.
type RowKey = (u32, Arc<UsageSubject>);

#[derive(Debug)]
struct Row {
    total: UsageTotal,
    /// The number of its last change.
    change: u64,
}

#[derive(Debug)]
struct Running {
    subject: Arc<UsageSubject>,
    counts: UsageCounts,
}

/// Most rows. Beyond it the oldest are given up, whether or not they were sent.
const ROWS_MAX: usize = 1_000_000;

/// Hours after which rows that were sent are forgotten, if there are no more than [`ROWS_KEPT`]: two months, so that
/// a store that lost its disk gets them again.
const KEPT_HOURS: u32 = 62 * 24;

/// The same if there are more. The budgets of today need the rows of today.
const KEPT_HOURS_MIN: u32 = 48;

const ROWS_KEPT: usize = 100_000;

/// Hours after which rows that could not be sent are given up: the retention of stores.
const GIVEN_UP_HOURS: u32 = 400 * 24;

/// The totals.
#[derive(Debug, Default)]
pub(super) struct Book {
    gateway: u128,
    rows: BTreeMap<RowKey, Row>,
    /// Rows by the number of their last change.
    changes: BTreeMap<u64, RowKey>,
    last_change: u64,
    running: HashMap<u64, Running>,
    /// Tokens of rows that were forgotten, by month, tenant and key. Budgets per month need them.
    forgotten: BTreeMap<(u32, String, String), u64>,
    /// When the usage of tenants was erased.
    erased: HashMap<String, u64>,
}

impl Book {
    /// The book of a gateway, as the records of its journal say. Requests that ran then have ended.
    pub(super) fn recovered(gateway: u128, records: Vec<Record>) -> Self {
        let mut book = Book {
            gateway,
            ..Book::default()
        };
        for record in records {
            book.apply(record);
        }
        book.running.clear();
        book
    }

    /// Number of rows.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether a request has a record.
    pub(super) fn is_running(&self, request: u64) -> bool {
        self.running.contains_key(&request)
    }

    /// Takes a record.
    pub(super) fn apply(&mut self, record: Record) {
        match record {
            Record::Begin { request, subject } => {
                let running = Running {
                    subject: Arc::new(subject),
                    counts: UsageCounts::default(),
                };
                self.running.insert(request, running);
            }
            Record::Running {
                request,
                subject,
                counts,
            } => {
                let running = Running {
                    subject: Arc::new(subject),
                    counts,
                };
                self.running.insert(request, running);
            }
            Record::Progress {
                request,
                at_ms,
                counts,
            } => self.progress(request, at_ms, counts),
            Record::End {
                request,
                at_ms,
                counts,
            } => {
                self.progress(request, at_ms, counts);
                self.running.remove(&request);
            }
            Record::Whole {
                subject,
                at_ms,
                counts,
            } => self.count(Arc::new(subject), at_ms, counts),
            Record::Total {
                hour,
                subject,
                total,
            } => self.change((hour, Arc::new(subject)), |row| *row = row.merge(total)),
            Record::Forgotten {
                month,
                tenant,
                key,
                tokens,
            } => *self.forgotten.entry((month, tenant, key)).or_default() += tokens,
            Record::Erased { tenant, at_ms } => self.erase(tenant, at_ms),
        }
    }

    fn progress(&mut self, request: u64, at_ms: u64, counts: UsageCounts) {
        let Some(running) = self.running.get_mut(&request) else {
            return;
        };
        let more = counts.minus(running.counts);
        running.counts = running.counts.max(counts);
        let subject = running.subject.clone();
        self.count(subject, at_ms, more);
    }

    /// Adds counts to the row of their time.
    fn count(&mut self, subject: Arc<UsageSubject>, at_ms: u64, more: UsageCounts) {
        if more.is_zero() {
            return;
        }
        let erased_ms = self.erased.get(&subject.tenant);
        let began_ms = erased_ms.map_or(at_ms, |erased_ms| at_ms.max(erased_ms + 1));
        self.change((hour_of(at_ms / 1_000), subject), |row| {
            if row.counts.is_zero() {
                row.began_ms = began_ms;
            }
            row.counts = row.counts.plus(more);
        });
    }

    fn change(&mut self, key: RowKey, change: impl FnOnce(&mut UsageTotal)) {
        self.last_change += 1;
        let row = self.rows.entry(key.clone()).or_insert(Row {
            total: UsageTotal::default(),
            change: 0,
        });
        change(&mut row.total);
        self.changes.remove(&row.change);
        row.change = self.last_change;
        self.changes.insert(row.change, key);
    }

    fn erase(&mut self, tenant: String, at_ms: u64) {
        self.drop_rows(|(_, subject), row| subject.tenant == tenant && row.total.began_ms <= at_ms);
        self.forgotten.retain(|(_, of, _), _| *of != tenant);
        let erased_ms = self.erased.entry(tenant).or_default();
        *erased_ms = at_ms.max(*erased_ms);
    }

    /// Whether an erasure says something new.
    pub(super) fn is_new_erasure(&self, tenant: &str, at_ms: u64) -> bool {
        self.erased
            .get(tenant)
            .is_none_or(|known_ms| *known_ms < at_ms)
    }

    /// Forgets rows that are old and have not changed since change `sent`. Returns the number of rows that had to be
    /// given up although they were not sent.
    pub(super) fn forget(&mut self, now_hour: u32, sent: u64) -> u64 {
        let kept_hours = match self.rows.len() {
            ..=ROWS_KEPT => KEPT_HOURS,
            _ => KEPT_HOURS_MIN,
        };
        let first_hour = now_hour.saturating_sub(kept_hours);
        let last_resort_hour = now_hour.saturating_sub(GIVEN_UP_HOURS);
        self.erased
            .retain(|_, at_ms| hour_of(*at_ms / 1_000) >= last_resort_hour);
        self.forget_before(first_hour, last_resort_hour, now_hour, sent)
    }

    fn forget_before(
        &mut self,
        first_hour: u32,
        last_resort_hour: u32,
        now_hour: u32,
        sent: u64,
    ) -> u64 {
        let mut excess = self.rows.len().saturating_sub(ROWS_MAX);
        let (mut lost, mut forgotten) = (0, Vec::new());
        self.drop_rows(|(hour, subject), row| {
            let is_sent = row.change <= sent;
            let is_old = *hour < first_hour && is_sent || *hour < last_resort_hour || excess > 0;
            if is_old {
                excess = excess.saturating_sub(1);
                lost += u64::from(!is_sent);
                forgotten.push((*hour, subject.clone(), row.total.counts.tokens()));
            }
            is_old
        });
        for (hour, subject, tokens) in forgotten {
            let key = (
                Period::Month.number(hour),
                subject.tenant.clone(),
                subject.key.clone(),
            );
            *self.forgotten.entry(key).or_default() += tokens;
        }
        let month = Period::Month.number(now_hour);
        self.forgotten
            .retain(|(of, _, _), _| *of >= month.saturating_sub(1));
        lost
    }

    /// Tokens of rows that were forgotten, with their month, tenant and key.
    pub(super) fn forgotten(&self) -> impl Iterator<Item = (u32, &str, &str, u64)> {
        let all = self.forgotten.iter();
        all.map(|((month, tenant, key), tokens)| (*month, &**tenant, &**key, *tokens))
    }

    fn drop_rows(&mut self, mut is_dropped: impl FnMut(&RowKey, &Row) -> bool) {
        let changes = &mut self.changes;
        self.rows.retain(|key, row| {
            let is_dropped = is_dropped(key, row);
            if is_dropped {
                changes.remove(&row.change);
            }
            !is_dropped
        });
    }

    /// Rows that changed after change `after`, at most `rows_max`, and the last of their changes.
    pub(super) fn changed(&self, after: u64, rows_max: usize) -> (Vec<UsageRow>, u64) {
        let later = self.changes.range(after.saturating_add(1)..).take(rows_max);
        let (mut rows, mut last) = (Vec::new(), after);
        for (change, key) in later {
            last = *change;
            rows.extend(self.rows.get(key).map(|row| self.row(key, row)));
        }
        (rows, last)
    }

    /// Number of rows that changed after a change.
    pub(super) fn changed_count(&self, after: u64) -> usize {
        self.changes.range(after.saturating_add(1)..).count()
    }

    /// All rows.
    pub(super) fn rows(&self) -> impl Iterator<Item = UsageRow> {
        self.rows.iter().map(|(key, row)| self.row(key, row))
    }

    fn row(&self, (hour, subject): &RowKey, row: &Row) -> UsageRow {
        let UsageSubject { tenant, key, model } = (**subject).clone();
        UsageRow {
            id: UsageRowId {
                hour: *hour,
                tenant,
                key,
                model,
                gateway: self.gateway,
            },
            total: row.total,
        }
    }

    /// The fewest records from which the same book comes.
    pub(super) fn records(&self) -> impl Iterator<Item = Record> {
        let erased = self.erased.iter().map(|(tenant, at_ms)| Record::Erased {
            tenant: tenant.clone(),
            at_ms: *at_ms,
        });
        let totals = self
            .rows
            .iter()
            .map(|((hour, subject), row)| Record::Total {
                hour: *hour,
                subject: (**subject).clone(),
                total: row.total,
            });
        let running = self
            .running
            .iter()
            .map(|(request, running)| Record::Running {
                request: *request,
                subject: (*running.subject).clone(),
                counts: running.counts,
            });
        let forgotten = self.forgotten();
        let forgotten = forgotten.map(|(month, tenant, key, tokens)| Record::Forgotten {
            month,
            tenant: tenant.to_owned(),
            key: key.to_owned(),
            tokens,
        });
        erased.chain(forgotten).chain(totals).chain(running)
    }
}

#[cfg(test)]
mod tests;
