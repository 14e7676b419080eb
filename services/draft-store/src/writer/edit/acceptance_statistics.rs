//! The acceptance statistics of a namespace: a few records beside its documents, replaced as a whole.
//!
//! They hold counts and weights, not tokens. They belong to the namespace and not to its documents, so no budget and
//! no age evicts them. An erasure removes those of every namespace that it may hit: of its tenant, of its model if it
//! names one, and of everybody if it names no tenant. This holds also for an erasure of one session or a time range
//! only, since nobody can tell which counts came from there. The counts are learnt again.
//!
//! A worker keeps counts in memory, too. Each table has a number, and an update names the table that it continues. So
//! counts from before an erasure are refused, except those of a worker that has never exchanged any.

use refrain_protocol::acceptance::AcceptanceStatsReply;
use refrain_protocol::{Namespace, NamespaceId};

use crate::codec;
use crate::log::LogError;
use crate::record::{
    AcceptanceStatisticsRecord, acceptance_statistics_key, acceptance_statistics_range,
};
use crate::writer::edit::Edit;
use crate::writer::edit::pending_writes::PendingWrites;
use crate::writer::requests::{SavedStatistics, StatisticsUpdate};

/// Bytes of the statistics in one record. Compressed or not, the record stays within the limit of a value.
const PART_BYTES: usize = 3_584;

impl Edit<'_> {
    /// Replaces the statistics of a namespace.
    pub(in crate::writer) fn save_statistics(
        &mut self,
        update: &StatisticsUpdate,
    ) -> Result<SavedStatistics, LogError> {
        let kept = read(&self.writes, update.namespace)?;
        let kept = kept.map(|kept| kept.table);
        if update.continues != 0 && kept != Some(update.continues) {
            return Ok(SavedStatistics::Erased);
        }
        self.introduce(update.namespace, &update.names);
        let table = kept.unwrap_or(update.new_table);
        let record = [&table.to_le_bytes()[..], &update.statistics].concat();
        self.put_statistics(update.namespace, &record);
        Ok(SavedStatistics::Table(table))
    }

    fn put_statistics(&mut self, namespace: NamespaceId, record: &[u8]) {
        let mut bytes = 0;
        let parts = record.chunks(PART_BYTES).count();
        for (part, piece) in record.chunks(PART_BYTES).enumerate() {
            let key = acceptance_statistics_key(namespace, part as u8);
            let record = AcceptanceStatisticsRecord(piece.to_vec());
            bytes += u64::from(self.writes.put(key, &record));
        }
        // They seldom shrink, only when cells are forgotten.
        for part in parts..self.catalog.statistics.parts(namespace) {
            self.writes
                .remove(acceptance_statistics_key(namespace, part as u8));
        }
        self.catalog.statistics.note(namespace, parts, bytes);
    }

    /// Removes the statistics of the namespaces that an erasure hits.
    pub(in crate::writer) fn erase_statistics(
        &mut self,
        hits: impl Fn(Option<&Namespace>) -> bool,
    ) {
        for (namespace, names) in self.catalog.namespaces() {
            let parts = self.catalog.statistics.parts(namespace);
            if parts > 0 && hits(names.as_ref()) {
                for part in 0..parts {
                    self.writes
                        .remove(acceptance_statistics_key(namespace, part as u8));
                }
                self.catalog.statistics.note(namespace, 0, 0);
                self.outcome.leaves_remains = true;
            }
        }
    }
}

/// The statistics as they will be once the batch is committed. A damaged record counts as none: they are learnt
/// again.
pub(in crate::writer) fn read(
    writes: &PendingWrites,
    namespace: NamespaceId,
) -> Result<Option<AcceptanceStatsReply>, LogError> {
    let (from, to) = acceptance_statistics_range(namespace);
    let mut bytes = Vec::new();
    for (key, value) in writes.scan(&from, &to)? {
        match codec::open::<AcceptanceStatisticsRecord>(&key, &value) {
            Ok(AcceptanceStatisticsRecord(part)) => bytes.extend(part),
            Err(error) => {
                tracing::warn!(%error, "acceptance statistics of a namespace are damaged; they are learnt again");
                return Ok(None);
            }
        }
    }
    Ok(bytes
        .split_first_chunk()
        .map(|(table, statistics)| AcceptanceStatsReply {
            table: u64::from_le_bytes(*table),
            statistics: statistics.to_vec(),
        }))
}
