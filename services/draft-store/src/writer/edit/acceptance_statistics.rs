//! The acceptance statistics of a namespace: a few records beside its documents. Every commit with a report writes
//! them completely, together with the updates of that commit.
//!
//! They hold counts, not tokens. They belong to the namespace and not to its documents, so no budget and no age
//! evicts them. An erasure removes those of every namespace that it may hit: of its tenant, of its model if it names
//! one, and of everybody if it names no tenant. This holds also for an erasure of one session or a time range only,
//! since nobody can tell which counts came from there. The counts are learnt again.
//!
//! Observations that a worker made before an erasure and reports after it are added to the emptied tables. They span
//! its last reporting interval (`chances_interval_ms`, ten seconds by default), or longer if the store was away.

use refrain_protocol::{Namespace, NamespaceId};
use refrain_speculation::Calibration;

use crate::codec;
use crate::log::{Batch, LogError, RecordLog};
use crate::record::{
    AcceptanceStatisticsRecord, acceptance_statistics_key, acceptance_statistics_range,
};
use crate::writer::edit::Edit;
use crate::writer::requests::StatisticsReport;

/// Bytes of the tables in one record. Compressed or not, the record stays within the limit of a value.
const PART_BYTES: usize = 3_584;

impl Edit<'_> {
    /// Adds observations to the tables, and returns the result.
    pub(in crate::writer) fn add_report(
        &mut self,
        report: &StatisticsReport,
    ) -> Result<Vec<u8>, LogError> {
        self.introduce(report.namespace, &report.names);
        let known = read(&self.batch, &*self.log, report.namespace)?;
        let mut calibration = known.unwrap_or_default();
        calibration.add(&report.observed);
        let tables = calibration.to_bytes();
        self.put_statistics(report.namespace, &tables);
        Ok(tables)
    }

    fn put_statistics(&mut self, namespace: NamespaceId, tables: &[u8]) {
        let mut bytes = 0;
        let parts = tables.chunks(PART_BYTES).count();
        for (part, piece) in tables.chunks(PART_BYTES).enumerate() {
            let key = acceptance_statistics_key(namespace, part as u8);
            let value = codec::seal(&key, &AcceptanceStatisticsRecord(piece.to_vec()));
            bytes += (key.len() + value.len()) as u64;
            self.batch.put(key, value);
        }
        // The tables seldom shrink, only when cells are forgotten.
        for part in parts..self.catalog.statistics_parts(namespace) {
            self.batch
                .remove(acceptance_statistics_key(namespace, part as u8));
        }
        self.catalog.note_statistics(namespace, parts, bytes);
    }

    /// Removes the statistics of the namespaces that an erasure hits.
    pub(in crate::writer) fn erase_statistics(
        &mut self,
        hits: impl Fn(Option<&Namespace>) -> bool,
    ) {
        for (namespace, names) in self.catalog.namespaces() {
            let parts = self.catalog.statistics_parts(namespace);
            if parts > 0 && hits(names.as_ref()) {
                for part in 0..parts {
                    self.batch
                        .remove(acceptance_statistics_key(namespace, part as u8));
                }
                self.catalog.note_statistics(namespace, 0, 0);
            }
        }
    }
}

/// The statistics as they will be once the batch is committed. Damaged records count as none: they are learnt again.
pub(in crate::writer) fn read(
    batch: &Batch,
    log: &dyn RecordLog,
    namespace: NamespaceId,
) -> Result<Option<Calibration>, LogError> {
    let (from, to) = acceptance_statistics_range(namespace);
    let mut bytes = Vec::new();
    for (key, value) in batch.scan_over(log, &from, &to)? {
        match codec::open::<AcceptanceStatisticsRecord>(&key, &value) {
            Ok(AcceptanceStatisticsRecord(part)) => bytes.extend(part),
            Err(_) => break,
        }
    }
    Ok(match Calibration::from_bytes(&bytes) {
        Ok(calibration) => Some(calibration),
        Err(_) if bytes.is_empty() => None,
        Err(error) => {
            tracing::warn!(%error, "acceptance statistics of a namespace are damaged; they are learnt again");
            None
        }
    })
}
