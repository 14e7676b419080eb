//! Damaged logs and segments: moving them to quarantine, and salvaging what can still be read.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::codec;
use crate::log::journal::{self, ScannedBatch};
use crate::log::journaled::{catalog_beside, is_of_earlier_version};
use crate::log::sled::SledCatalog;
use crate::log::{Batch, LogError, refused, sync_directory};
use crate::record::{DocumentKey, RecordKind, document_key, document_of};

/// Prefix of the names of quarantine directories.
const PREFIX: &str = "quarantine-";

/// A file that marks a quarantine of which everything was salvaged.
const WHOLE: &str = "salvaged-whole";

/// Records copied in one commit.
const COPY_BATCH: usize = 512;

/// The path of a new quarantine directory.
fn free_name(dir: &Path, now_ms: u64) -> PathBuf {
    let mut to = dir.join(format!("{PREFIX}{now_ms}"));
    let mut suffix = 1;
    while to.exists() {
        to = dir.join(format!("{PREFIX}{now_ms}-{suffix}"));
        suffix += 1;
    }
    to
}

/// Moves files to a new quarantine.
pub(super) fn quarantine_files(
    dir: &Path,
    files: &[PathBuf],
    now_ms: u64,
) -> Result<PathBuf, LogError> {
    let to = free_name(dir, now_ms);
    std::fs::create_dir(&to).map_err(|error| refused("create", &to, &error))?;
    for from in files {
        if let Some(name) = from.file_name() {
            std::fs::rename(from, to.join(name)).map_err(|error| refused("move", from, &error))?;
        }
    }
    sync_directory(&to).map_err(|error| refused("sync", &to, &error))?;
    sync_directory(dir).map_err(|error| refused("sync", dir, &error))?;
    Ok(to)
}

/// Moves a log to a new quarantine.
pub(super) fn quarantine(dir: &Path, from: &Path, now_ms: u64) -> Result<PathBuf, LogError> {
    let to = free_name(dir, now_ms);
    std::fs::rename(from, &to).map_err(|error| refused("move", from, &error))?;
    sync_directory(dir).map_err(|error| refused("sync", dir, &error))?;
    Ok(to)
}

/// The kinds of records that are salvaged, in order. Followers start over, so nobody needs the feed. Text comes
/// before the states that describe it, so an interrupted copy leaves no state without text.
const KEPT: [RecordKind; 12] = [
    RecordKind::Erasure,
    RecordKind::Erased,
    RecordKind::Namespace,
    RecordKind::Segment,
    RecordKind::Marks,
    RecordKind::Piece,
    RecordKind::Head,
    RecordKind::State,
    RecordKind::Statistics,
    RecordKind::Tenant,
    RecordKind::UsageErasure,
    RecordKind::Usage,
];

/// The result of copying a quarantined log.
pub(super) struct Salvaged {
    pub(super) records: u64,
    /// Whether every record could be read.
    pub(super) is_whole: bool,
}

/// Receives the records of a new log.
type Put<'a> = &'a mut dyn FnMut(&Batch) -> Result<(), LogError>;

/// Passes on every record that still decodes: first what sled can read, then what the journal says. Damage stops
/// neither.
///
/// # Errors
/// The disk refuses.
pub(super) fn salvage(from: &Path, put: Put, cache_bytes: u64) -> Result<Salvaged, LogError> {
    let mut salvaged = Salvaged {
        records: 0,
        is_whole: true,
    };
    unmark_whole(from)?;
    let has_journal = journal::is_in(from)?;
    // Records of another journal mean nothing here.
    let name = match has_journal {
        true => journal::scan(from, 0, &mut |_| Ok(()))
            .ok()
            .and_then(|found| found.name),
        false => None,
    };
    let covered = salvage_sled(from, name, put, cache_bytes, &mut salvaged)?;
    salvaged.is_whole |= has_journal;
    if has_journal {
        salvage_journal(from, put, &covered, &mut salvaged)?;
    }
    if salvaged.is_whole {
        mark_whole(from)?;
    }
    Ok(salvaged)
}

/// The part of a log that sled has.
#[derive(Default)]
struct Covered {
    /// Everything up to here in the journal.
    end: u64,
    /// Text as well: earlier versions had it there.
    has_text: bool,
}

/// Passes on what sled can read.
fn salvage_sled(
    from: &Path,
    journal: Option<u64>,
    put: Put,
    cache_bytes: u64,
    salvaged: &mut Salvaged,
) -> Result<Covered, LogError> {
    let has_text = is_of_earlier_version(from);
    let path = match has_text {
        true => Some(from.to_owned()),
        false => catalog_beside(from, journal)?,
    };
    let Some(path) = path else {
        return Ok(Covered::default());
    };
    let opened = SledCatalog::open(&path, cache_bytes)
        .or_else(|_| SledCatalog::open_without_snapshots(&path, cache_bytes));
    let sled = match opened {
        Ok(sled) => sled,
        Err(error) => {
            tracing::warn!(%error, "quarantined catalogue cannot be opened");
            salvaged.is_whole = false;
            return Ok(Covered::default());
        }
    };
    let mut is_whole = true;
    for kind in KEPT {
        is_whole &= copy(&sled, put, kind, &mut salvaged.records)?;
    }
    salvaged.is_whole = is_whole;
    let position = sled.position().ok().flatten();
    let position = position.filter(|position| is_whole && Some(position.journal) == journal);
    Ok(Covered {
        end: position.map_or(0, |position| position.end),
        has_text,
    })
}

/// Removes the documents from a batch of which some writes may be lost. New text under an old state, or the reverse,
/// would be a wrong text. A document that the batch no longer touches stays as it was before.
pub(super) fn without_uncertain(mut scanned: ScannedBatch) -> Batch {
    // A head never changes, so a lost one is noticed when it is missing.
    let kinds = [RecordKind::State, RecordKind::Piece];
    let is_of_document = |key: &[u8]| RecordKind::of(key).is_some_and(|kind| kinds.contains(&kind));
    let written = scanned.batch.writes().map(|(key, _)| key);
    let documents: BTreeSet<DocumentKey> = written
        .filter(|key| is_of_document(key))
        .filter_map(|key| document_of(key))
        .collect();
    for key in documents {
        let may_lack = |kind: RecordKind| {
            let prefix = document_key(kind, key);
            scanned.gaps.iter().any(|gap| gap.may_hide(&prefix))
        };
        if kinds.into_iter().any(may_lack) {
            scanned.batch.remove(document_key(RecordKind::State, key));
        }
    }
    scanned.batch
}

/// Passes on what the journal has and sled has not.
fn salvage_journal(
    from: &Path,
    put: Put,
    covered: &Covered,
    salvaged: &mut Salvaged,
) -> Result<(), LogError> {
    // The records that stay in memory are in no catalogue.
    let start = if covered.has_text { covered.end } else { 0 };
    let mut refused = None;
    let scanned = journal::scan(from, start, &mut |scanned| {
        let is_new = scanned.end > covered.end;
        let is_kept = |key: &[u8]| {
            let is_kind_kept = RecordKind::of(key).is_some_and(|kind| KEPT.contains(&kind));
            is_kind_kept && (is_new || RecordKind::is_short_lived(key))
        };
        let mut batch = Batch::default();
        for (key, value) in without_uncertain(scanned).writes() {
            match value {
                Some(value) if is_kept(key) && codec::check(key, value).is_ok() => {
                    batch.put(key.clone(), value.clone());
                }
                None if is_kept(key) => batch.remove(key.clone()),
                _ => {}
            }
        }
        salvaged.records += batch.len() as u64;
        put(&batch).inspect_err(|error| refused = Some(error.clone()))
    });
    match (scanned, refused) {
        (_, Some(error)) => return Err(error),
        (Ok(found), _) => salvaged.is_whole &= found.damage.is_empty(),
        (Err(error), None) => {
            tracing::warn!(%error, "quarantined journal cannot be read to its end");
            salvaged.is_whole = false;
        }
    }
    Ok(())
}

/// Copies the records of one kind whose checksums hold, and counts them. Returns whether all could be read.
///
/// # Errors
/// The disk of the new log refuses.
fn copy(
    from: &SledCatalog,
    put: Put,
    kind: RecordKind,
    records: &mut u64,
) -> Result<bool, LogError> {
    let (mut at, end) = kind.range();
    let mut is_whole = true;
    loop {
        let mut batch = Batch::default();
        let mut last = None;
        let scanned = from.scan(&at, &end, &mut |key, value| {
            last = Some(key.to_vec());
            match codec::check(key, value) {
                Ok(_) => batch.put(key.to_vec(), value.to_vec()),
                Err(_) => is_whole = false,
            }
            batch.len() < COPY_BATCH
        });
        put(&batch)?;
        *records += batch.len() as u64;
        if let Err(error) = scanned {
            tracing::warn!(%error, "quarantined catalogue cannot be read to its end");
            return Ok(false);
        }
        match last {
            // The lowest key above the last one read.
            Some(mut key) if batch.len() == COPY_BATCH => {
                key.push(0);
                at = key;
            }
            _ => return Ok(is_whole),
        }
    }
}

/// Removes the mark, for another attempt.
fn unmark_whole(quarantine: &Path) -> Result<(), LogError> {
    let mark = quarantine.join(WHOLE);
    match std::fs::remove_file(&mark) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(refused("delete", &mark, &error))
        }
        _ => Ok(()),
    }
}

/// Marks a quarantine of which everything was salvaged.
fn mark_whole(quarantine: &Path) -> Result<(), LogError> {
    let mark = quarantine.join(WHOLE);
    std::fs::write(&mark, []).map_err(|error| refused("create", &mark, &error))
}

/// All quarantine directories.
fn quarantines(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Number of quarantines that hold something unreadable.
pub(crate) fn count_quarantines(dir: &Path) -> u64 {
    let found = quarantines(dir).unwrap_or_default();
    found
        .iter()
        .filter(|path| !path.join(WHOLE).exists())
        .count() as u64
}

/// Numbers of quarantines that an erasure deleted and kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cleared {
    pub(crate) deleted: u64,
    /// Quarantines with something unreadable, which still exist.
    pub(crate) kept: u64,
}

/// Deletes the quarantines of which everything was salvaged, and with `all` every other one, too. The content of the
/// others cannot be attributed to a tenant.
pub(crate) fn clear_quarantines(dir: &Path, all: bool) -> Result<Cleared, LogError> {
    let failed = |error: std::io::Error| refused("clear", dir, &error);
    let mut cleared = Cleared::default();
    for path in quarantines(dir).map_err(failed)? {
        if all || path.join(WHOLE).exists() {
            std::fs::remove_dir_all(&path).map_err(failed)?;
            cleared.deleted += 1;
        } else {
            cleared.kept += 1;
        }
    }
    sync_directory(dir).map_err(failed)?;
    Ok(cleared)
}
