//! What drafts are worth in a namespace, kept beside its documents: a few records, rewritten whole with every call that
//! tells something.
//!
//! They hold counts and no token. They belong to the namespace and not to its documents, so no budget and no age removes
//! them. An erasure does, of every namespace that it may hit: all of its tenant's, of its model if it names one, and
//! everybody's where it names no tenant; also where it is of one session or some time only, since nobody can tell
//! what of the counts came from there. They are learnt again.

use refrain_protocol::{Namespace, NamespaceId};
use refrain_speculation::{Calibration, Observed};

use super::edit::Edit;
use super::{Core, Outcome};
use crate::catalog::Catalog;
use crate::codec;
use crate::log::{LogError, RecordLog};
use crate::record::{ChancesRecord, chances_key, chances_range};

/// Bytes of the tables that stand in one record, so that it is no larger than a value may be, compressed or not.
const PART_BYTES: usize = 3_584;

/// What a worker tells.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    /// Empty to ask only.
    pub(crate) observed: Observed,
}

impl Core {
    /// Adds what was observed. The tables after it, as bytes; none where nothing was ever observed, and `None` when one
    /// namespace more would be too many.
    pub(crate) fn tell_chances(
        &mut self,
        catalog: &mut Catalog,
        told: &Told,
        now_ms: u64,
    ) -> Result<(Option<Vec<u8>>, Outcome), LogError> {
        let known = read(&*self.log, told.namespace)?;
        if told.observed.is_empty() {
            let tables = known.as_ref().map_or_else(Vec::new, Calibration::to_bytes);
            return Ok((Some(tables), Outcome::default()));
        }
        if !catalog.has_room_for(told.namespace, self.config.namespaces_max) {
            return Ok((None, Outcome::default()));
        }
        let mut calibration = known.unwrap_or_default();
        calibration.add(&told.observed);
        let tables = calibration.to_bytes();
        let mut edit = self.edit(catalog, now_ms);
        edit.introduce(told.namespace, &told.names);
        edit.put_chances(told.namespace, &tables);
        Ok((Some(tables), self.commit(edit, now_ms)?))
    }
}

impl Edit<'_> {
    fn put_chances(&mut self, namespace: NamespaceId, tables: &[u8]) {
        let mut bytes = 0;
        let parts = tables.chunks(PART_BYTES).count();
        for (part, piece) in tables.chunks(PART_BYTES).enumerate() {
            let key = chances_key(namespace, part as u8);
            let value = codec::seal(&key, &ChancesRecord(piece.to_vec()));
            bytes += (key.len() + value.len()) as u64;
            self.batch_mut().put(key, value);
        }
        // Tables seldom shrink, when cells are forgotten.
        for part in parts..self.catalog.chances_parts(namespace) {
            self.batch_mut().remove(chances_key(namespace, part as u8));
        }
        self.catalog.note_chances(namespace, parts, bytes);
    }

    /// Removes what is known of the namespaces that an erasure names.
    pub(super) fn erase_chances(&mut self, hits: impl Fn(Option<&Namespace>) -> bool) {
        for (namespace, names) in self.catalog.namespaces() {
            let parts = self.catalog.chances_parts(namespace);
            if parts > 0 && hits(names.as_ref()) {
                for part in 0..parts {
                    self.batch_mut().remove(chances_key(namespace, part as u8));
                }
                self.catalog.note_chances(namespace, 0, 0);
            }
        }
    }
}

/// What is known. Damaged records are nothing known: it is learnt again.
fn read(log: &dyn RecordLog, namespace: NamespaceId) -> Result<Option<Calibration>, LogError> {
    let (from, to) = chances_range(namespace);
    let mut bytes = Vec::new();
    log.scan(&from, &to, &mut |key, value| {
        let part = codec::open::<ChancesRecord>(key, value);
        let is_whole = part.is_ok();
        bytes.extend(part.map_or_else(|_| Vec::new(), |part| part.0));
        is_whole
    })?;
    Ok(match Calibration::from_bytes(&bytes) {
        Ok(calibration) => Some(calibration),
        Err(_) if bytes.is_empty() => None,
        Err(error) => {
            tracing::warn!(%error, "what drafts are worth in a namespace is learnt anew");
            None
        }
    })
}
