//! Usage in a commit: rows of gateways, their end of time, and erasures.

use std::collections::BTreeMap;

use refrain_protocol::usage::{UsageRow, UsageTotal, hour_of};

use crate::catalog::UsageState;
use crate::codec;
use crate::log::LogError;
use crate::record::RecordKind;
use crate::record::usage::{
    UsageErasureRecord, UsageRecord, usage_erasure_key, usage_hour_key, usage_key, usage_of,
};
use crate::writer::edit::pending_writes::PendingWrites;

/// A part of the rows of a tenant was erased.
#[derive(Debug, Default)]
pub(crate) struct ErasedUsagePart {
    /// Rows that are gone.
    pub(crate) rows: u64,
    /// Where to go on. `None` at the end.
    pub(crate) next: Option<Vec<u8>>,
}

/// The parts of a commit that rows of usage change.
pub(in crate::writer) struct UsageRows<'e> {
    pub(super) usage: &'e mut UsageState,
    pub(super) writes: &'e mut PendingWrites,
}

impl UsageRows<'_> {
    /// Merges rows into those of the log, but for those of erased usage and those before an hour. `false` if there
    /// would be more rows than `rows_max`: the rows up to there are merged.
    pub(in crate::writer) fn record(
        self,
        rows: &[UsageRow],
        first_hour: u32,
        rows_max: u64,
    ) -> Result<bool, LogError> {
        let mut merged: BTreeMap<Vec<u8>, UsageTotal> = BTreeMap::new();
        for row in rows {
            let erased_ms = self.usage.erased_at(&row.id.tenant);
            let is_erased = erased_ms.is_some_and(|erased_ms| row.total.began_ms <= erased_ms);
            if is_erased || row.id.hour < first_hour {
                continue;
            }
            let key = usage_key(&row.id);
            let known = match merged.get(&key) {
                Some(known) => Some(*known),
                None => self.usage_total(&key)?,
            };
            let total = known.unwrap_or_default().merge(row.total);
            if known == Some(total) {
                continue;
            }
            if known.is_none() && self.usage.rows() >= rows_max {
                return Ok(false);
            }
            let bytes = self.writes.put(key.clone(), &UsageRecord::from(total));
            if known.is_none() {
                self.usage.add_row(row.id.hour, u64::from(bytes));
            }
            // A row that began anew replaces one that was erased, so nothing of it was counted.
            let before = known.filter(|known| known.began_ms == total.began_ms);
            let before = before.map_or(0, |before| before.counts.tokens());
            let more = total.counts.tokens().saturating_sub(before);
            self.usage.spend(&row.id, more);
            merged.insert(key, total);
        }
        Ok(true)
    }

    /// The state of a row. A damaged record counts as none: its gateway sends it again with the next change.
    fn usage_total(&self, key: &[u8]) -> Result<Option<UsageTotal>, LogError> {
        let value = self.writes.log.get(key)?;
        let record = value.and_then(|value| codec::open::<UsageRecord>(key, &value).ok());
        Ok(record.map(UsageTotal::from))
    }

    /// Removes rows before an hour, at most `rows_max` of them. Returns whether there may be more.
    pub(in crate::writer) fn expire(
        self,
        first_hour: u32,
        rows_max: usize,
    ) -> Result<bool, LogError> {
        let earliest = self.usage.earliest_hour();
        if earliest.is_none_or(|earliest| earliest >= first_hour) {
            return Ok(false);
        }
        let (from, above) = RecordKind::Usage.range();
        let mut old = Vec::new();
        let mut next = None;
        self.writes.log.scan(&from, &above, &mut |key, value| {
            let hour = usage_of(key).map_or(0, |row| row.hour);
            if hour >= first_hour || old.len() >= rows_max {
                next = Some(hour);
                return false;
            }
            old.push((key.to_vec(), (key.len() + value.len()) as u64));
            true
        })?;
        for (key, bytes) in old {
            self.writes.remove(key);
            self.usage.remove_row(bytes);
        }
        self.usage.begins_at(next);
        Ok(next.is_some_and(|next| next < first_hour))
    }

    /// Forgets erasures before a time: nobody has rows from before them any more.
    pub(in crate::writer) fn forget_erasures(self, before_ms: u64) {
        for tenant in self.usage.forget_erasures(before_ms) {
            self.writes.remove(usage_erasure_key(&tenant));
        }
    }

    /// Notes that the usage of a tenant is erased, so that nothing that was counted until now comes back.
    pub(in crate::writer) fn mark_erased(self, tenant: &str, at_ms: u64) {
        let key = usage_erasure_key(tenant);
        self.writes.put(key, &UsageErasureRecord { at_ms });
        self.usage.erase(tenant.to_owned(), at_ms);
    }

    /// Removes rows of a tenant that began to count until a time, among at most `rows_max` rows from a key on.
    pub(in crate::writer) fn erase(
        self,
        tenant: &str,
        at_ms: u64,
        from: &[u8],
        rows_max: usize,
    ) -> Result<ErasedUsagePart, LogError> {
        let (_, above) = RecordKind::Usage.range();
        let (mut seen, mut hit, mut next) = (0, Vec::new(), None);
        self.writes.log.scan(from, &above, &mut |key, value| {
            if seen >= rows_max {
                next = Some(key.to_vec());
                return false;
            }
            seen += 1;
            let began_ms = || {
                let record = codec::open::<UsageRecord>(key, value);
                record.map_or(0, |record| UsageTotal::from(record).began_ms)
            };
            if usage_of(key).is_some_and(|row| row.tenant == tenant) && began_ms() <= at_ms {
                hit.push((key.to_vec(), (key.len() + value.len()) as u64));
            }
            true
        })?;
        let rows = hit.len() as u64;
        for (key, bytes) in hit {
            self.writes.remove(key);
            self.usage.remove_row(bytes);
        }
        Ok(ErasedUsagePart { rows, next })
    }
}

/// The first hour that is kept.
pub(in crate::writer) fn first_hour(now_ms: u64, retention_days: u32) -> u32 {
    hour_of(now_ms / 1_000).saturating_sub(retention_days.saturating_mul(24))
}

/// The lowest key of all rows.
pub(crate) fn usage_start() -> Vec<u8> {
    usage_hour_key(0)
}
