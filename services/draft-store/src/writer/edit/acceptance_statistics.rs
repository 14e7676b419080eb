//! What drafts are worth in a namespace, kept beside its documents: a few records, rewritten whole with every commit in
//! which somebody tells something; updates that come at the same time are in it, too.
//!
//! They hold counts and no token. They belong to the namespace and not to its documents, so no budget and no age removes
//! them. An erasure does, of every namespace that it may hit: all of its tenant's, of its model if it names one, and
//! everybody's where it names no tenant; also where it is of one session or some time only, since nobody can tell
//! what of the counts came from there. They are learnt again. What a worker observed before an erasure and tells after it
//! is added to the emptied tables: counts of the last interval (`chances_interval_ms`, ten seconds unless the worker is
//! told otherwise; longer where the store was away meanwhile).

use refrain_protocol::{Namespace, NamespaceId};
use refrain_speculation::Calibration;

use crate::codec;
use crate::log::{Batch, LogError, RecordLog};
use crate::record::{
    AcceptanceStatisticsRecord, acceptance_statistics_key, acceptance_statistics_range,
};
use crate::writer::edit::Edit;
use crate::writer::requests::StatisticsReport;

/// Bytes of the tables that stand in one record, so that it is no larger than a value may be, compressed or not.
const PART_BYTES: usize = 3_584;

impl Edit<'_> {
    /// Adds what was observed to the tables, which it answers with.
    pub(in crate::writer) fn add_report(
        &mut self,
        told: &StatisticsReport,
    ) -> Result<Vec<u8>, LogError> {
        self.introduce(told.namespace, &told.names);
        let known = read(&self.batch, &*self.log, told.namespace)?;
        let mut calibration = known.unwrap_or_default();
        calibration.add(&told.observed);
        let tables = calibration.to_bytes();
        self.put_statistics(told.namespace, &tables);
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
        // Tables seldom shrink, when cells are forgotten.
        for part in parts..self.catalog.statistics_parts(namespace) {
            self.batch
                .remove(acceptance_statistics_key(namespace, part as u8));
        }
        self.catalog.note_statistics(namespace, parts, bytes);
    }

    /// Removes what is known of the namespaces that an erasure names.
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

/// What is known once a batch is committed. Damaged records are nothing known: it is learnt again.
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
            tracing::warn!(%error, "what drafts are worth in a namespace is learnt anew");
            None
        }
    })
}
