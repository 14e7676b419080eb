//! The data directory: opening it, and what to do when it cannot be believed.
//!
//! ```text
//! <data_dir>/log/              sled
//! <data_dir>/manifest.json     identity beside sled: tells when sled came up empty or went back in time
//! <data_dir>/quarantine-<ms>/  a log that was not believed; kept for people, never deleted from here
//! ```
//!
//! sled 0.34 may answer damage with an error, with a panic, or with an empty database. The first two move
//! the log to quarantine; so does a log without the record that is made durable before the manifest is
//! first written. What still decodes is copied into the new log, under a new generation, so that followers
//! start over.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::catalog::{Catalog, Loaded, load};
use crate::codec;
use crate::log::sled::{SledLog, sync_directory};
use crate::log::{Batch, LogError, RecordLog};
use crate::record::{Kind, StoreRecord, store_key};

/// Records copied in one commit.
const COPY_BATCH: usize = 512;
/// A log is rewritten at start when it takes this much, and [`REWRITE_FROM_RATIO`] times what is in it.
const REWRITE_FROM_BYTES: u64 = 1 << 30;
const REWRITE_FROM_RATIO: u64 = 4;

/// An open store.
pub(crate) struct Opened {
    pub(crate) log: Arc<dyn RecordLog>,
    pub(crate) store: StoreRecord,
    pub(crate) loaded: Loaded,
    /// Where the log before this one was moved, if it was not believed.
    pub(crate) quarantined: Option<PathBuf>,
}

/// What is known of the log without opening it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    generation: u64,
    sequence_reserved: u64,
    /// The last change at the time of writing.
    head: u64,
    documents: u64,
    /// Nothing was written to the log afterwards.
    closed: bool,
}

impl Manifest {
    pub(crate) fn new(store: StoreRecord, catalog: &Catalog, closed: bool) -> Self {
        Manifest {
            generation: store.generation,
            sequence_reserved: store.sequence_reserved,
            head: catalog.head(),
            documents: catalog.totals().documents,
            closed,
        }
    }

    /// Whether the log lacks something that was durable when this was written.
    fn disagrees(&self, store: StoreRecord, loaded: &Loaded) -> bool {
        // Damaged states were told apart already: they are removed with a tombstone each.
        let documents = loaded.catalog.totals().documents + loaded.damaged.len() as u64;
        self.generation == store.generation
            && (self.sequence_reserved > store.sequence_reserved
                || (self.head > loaded.catalog.head() && loaded.damaged_records == 0)
                || (self.closed && self.documents != documents))
    }

    /// Writes it, whole or not at all.
    pub(crate) fn write(&self, dir: &Path) -> Result<(), LogError> {
        let (path, temporary) = (dir.join("manifest.json"), dir.join("manifest.json.new"));
        let write = || -> std::io::Result<()> {
            let file = std::fs::File::create(&temporary)?;
            serde_json::to_writer(&file, self)?;
            file.sync_all()?;
            std::fs::rename(&temporary, &path)?;
            sync_directory(dir)
        };
        write().map_err(|error| refused("write", &path, &error))
    }
}

fn refused(what: &str, path: &Path, error: &std::io::Error) -> LogError {
    LogError::Refused(format!("cannot {what} {}: {error}", path.display()))
}

fn random() -> Result<u64, LogError> {
    getrandom::u64().map_err(|error| LogError::Refused(format!("no random numbers: {error}")))
}

/// Opens the store in `dir`, whatever state it is in.
///
/// # Errors
/// [`LogError::Refused`] when the disk refuses or another process holds the directory: nothing was changed.
pub(crate) fn open(dir: &Path, cache_bytes: u64, now_ms: u64) -> Result<Opened, LogError> {
    std::fs::create_dir_all(dir).map_err(|error| refused("create", dir, &error))?;
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        sync_directory(parent).map_err(|error| refused("sync", parent, &error))?;
    }
    finish_rewrite(dir)?;
    let opened = match open_believed(dir, cache_bytes) {
        Err(LogError::Corrupt(why)) => {
            let moved = quarantine(dir, now_ms)?;
            tracing::error!(why, moved_to = %moved.display(), "draft store log quarantined");
            let log = SledLog::open(&dir.join("log"), cache_bytes)?;
            let store = create(&log)?;
            let salvaged = salvage(&moved, &log, cache_bytes)?;
            tracing::warn!(records = salvaged, "draft store records salvaged");
            let loaded = load(&log, store, random()? as u32)?;
            Opened {
                log: Arc::new(log),
                store,
                loaded,
                quarantined: Some(moved),
            }
        }
        other => other?,
    };
    Manifest::new(opened.store, &opened.loaded.catalog, false).write(dir)?;
    Ok(opened)
}

fn open_believed(dir: &Path, cache_bytes: u64) -> Result<Opened, LogError> {
    let manifest = read_manifest(dir);
    let path = dir.join("log");
    let mut log = SledLog::open(&path, cache_bytes)?;
    let mut store = match log.get(&store_key())? {
        Some(value) => match codec::open::<StoreRecord>(&store_key(), &value) {
            Ok(store) => store,
            Err(damage) => {
                tracing::error!(%damage, "draft store identity is damaged");
                create(&log)?
            }
        },
        None if manifest.is_none() && log.is_empty()? => create(&log)?,
        None => return Err(LogError::Corrupt("the log has lost its identity".into())),
    };
    let mut loaded = load(&log, store, random()? as u32)?;
    let bytes_max = REWRITE_FROM_BYTES.max(REWRITE_FROM_RATIO * loaded.catalog.totals().bytes);
    if log.disk_bytes() > bytes_max {
        log = rewrite(dir, log, cache_bytes)?;
        loaded = load(&log, store, random()? as u32)?;
    }
    if let Some(manifest) = manifest
        && manifest.disagrees(store, &loaded)
    {
        // What followers hold may be gone here; a new generation makes them start over.
        tracing::error!("draft store log went back in time");
        store = create(&log)?;
        loaded = load(&log, store, random()? as u32)?;
    }
    Ok(Opened {
        log: Arc::new(log),
        store,
        loaded,
        quarantined: None,
    })
}

/// A new identity.
fn create(log: &SledLog) -> Result<StoreRecord, LogError> {
    let store = StoreRecord {
        generation: random()?,
        sequence_reserved: 0,
    };
    let mut batch = Batch::default();
    batch.put(store_key(), codec::seal(&store_key(), &store));
    log.commit(&batch)?;
    Ok(store)
}

fn quarantine(dir: &Path, now_ms: u64) -> Result<PathBuf, LogError> {
    let from = dir.join("log");
    let mut to = dir.join(format!("quarantine-{now_ms}"));
    let mut suffix = 1;
    while to.exists() {
        to = dir.join(format!("quarantine-{now_ms}-{suffix}"));
        suffix += 1;
    }
    std::fs::rename(&from, &to).map_err(|error| refused("move", &from, &error))?;
    sync_directory(dir).map_err(|error| refused("sync", dir, &error))?;
    Ok(to)
}

/// Copies every document record that still decodes. Answers how many; damage ends the copy, not the start.
fn salvage(from: &Path, to: &SledLog, cache_bytes: u64) -> Result<u64, LogError> {
    let old = match SledLog::open(from, cache_bytes) {
        Ok(old) => old,
        Err(error) => {
            tracing::warn!(%error, "quarantined log does not open");
            return Ok(0);
        }
    };
    let mut copied = 0;
    // Text before the states that count on it: a copy that breaks off leaves no state without text.
    for kind in [Kind::Namespace, Kind::Piece, Kind::Head, Kind::State] {
        match copy(&old, to, kind) {
            Ok(count) => copied += count,
            Err(CopyError::From(error)) => {
                tracing::warn!(%error, "quarantined log breaks off");
            }
            Err(CopyError::To(error)) => return Err(error),
        }
    }
    Ok(copied)
}

enum CopyError {
    From(LogError),
    To(LogError),
}

/// Copies the records of one kind whose checksums hold.
fn copy(from: &SledLog, to: &SledLog, kind: Kind) -> Result<u64, CopyError> {
    let (mut at, end) = kind.range();
    let mut copied = 0;
    loop {
        let mut batch = Batch::default();
        let mut last = None;
        let scanned = from.scan(&at, &end, &mut |key, value| {
            last = Some(key.to_vec());
            if codec::check(key, value).is_ok() {
                batch.put(key.to_vec(), value.to_vec());
            }
            batch.len() < COPY_BATCH
        });
        to.commit(&batch).map_err(CopyError::To)?;
        copied += batch.len() as u64;
        scanned.map_err(CopyError::From)?;
        match last {
            // The least key above the last one read.
            Some(mut key) if batch.len() == COPY_BATCH => {
                key.push(0);
                at = key;
            }
            _ => return Ok(copied),
        }
    }
}

/// sled never gives space back, so a log that has grown far past its contents is copied at start.
fn rewrite(dir: &Path, log: SledLog, cache_bytes: u64) -> Result<SledLog, LogError> {
    let (path, new, old) = (dir.join("log"), dir.join("log.new"), dir.join("log.old"));
    let before_bytes = log.disk_bytes();
    let target = SledLog::open(&new, cache_bytes)?;
    for kind in [
        Kind::Store,
        Kind::Namespace,
        Kind::Feed,
        Kind::Head,
        Kind::Piece,
        Kind::State,
        Kind::Tombstone,
    ] {
        copy(&log, &target, kind).map_err(|error| match error {
            CopyError::From(error) | CopyError::To(error) => error,
        })?;
    }
    let after_bytes = target.disk_bytes();
    drop((log, target));
    let moved = |error: std::io::Error| refused("swap", &path, &error);
    std::fs::rename(&path, &old).map_err(moved)?;
    std::fs::rename(&new, &path).map_err(moved)?;
    sync_directory(dir).map_err(moved)?;
    std::fs::remove_dir_all(&old).map_err(moved)?;
    tracing::info!(before_bytes, after_bytes, "draft store log rewritten");
    SledLog::open(&path, cache_bytes)
}

/// Ends a rewrite that a crash broke off: the new log counts only if the old one was moved away.
fn finish_rewrite(dir: &Path) -> Result<(), LogError> {
    let (path, new, old) = (dir.join("log"), dir.join("log.new"), dir.join("log.old"));
    let cleared = |error: std::io::Error| refused("clear up", dir, &error);
    if new.exists() {
        if path.exists() {
            std::fs::remove_dir_all(&new).map_err(cleared)?;
        } else {
            std::fs::rename(&new, &path).map_err(cleared)?;
        }
        sync_directory(dir).map_err(cleared)?;
    }
    if old.exists() {
        std::fs::remove_dir_all(&old).map_err(cleared)?;
    }
    Ok(())
}

fn read_manifest(dir: &Path) -> Option<Manifest> {
    let bytes = std::fs::read(dir.join("manifest.json")).ok()?;
    let manifest = serde_json::from_slice(&bytes);
    if let Err(error) = &manifest {
        tracing::warn!(%error, "draft store manifest is not readable");
    }
    manifest.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{NamespaceRecord, namespace_key};
    use refrain_protocol::NamespaceId;

    const CACHE_BYTES: u64 = 4 << 20;

    /// A closed store with `count` records.
    fn filled(dir: &Path, count: u128) -> StoreRecord {
        let opened = open(dir, CACHE_BYTES, 1).unwrap();
        let mut batch = Batch::default();
        for id in 0..count {
            let key = namespace_key(Kind::Namespace, NamespaceId(id));
            let [tenant, model, tokenizer] = ["a", "m", "t"].map(str::to_owned);
            let value = codec::seal(
                &key,
                &NamespaceRecord {
                    tenant,
                    model,
                    tokenizer,
                },
            );
            batch.put(key, value);
        }
        opened.log.commit(&batch).unwrap();
        opened.store
    }

    fn count(log: &dyn RecordLog) -> usize {
        let mut count = 0;
        log.scan(&[0], &[255], &mut |_, _| {
            count += 1;
            true
        })
        .unwrap();
        count
    }

    #[test]
    fn a_rewritten_log_has_every_record() {
        let dir = tempfile::tempdir().unwrap();
        let store = filled(dir.path(), 1200);
        let log = SledLog::open(&dir.path().join("log"), CACHE_BYTES).unwrap();
        let log = rewrite(dir.path(), log, CACHE_BYTES).unwrap();
        assert_eq!(count(&log), 1201);
        drop(log);
        let opened = open(dir.path(), CACHE_BYTES, 2).unwrap();
        assert_eq!((opened.store, opened.quarantined), (store, None));
        assert_eq!(count(&*opened.log), 1201);
    }

    #[test]
    fn a_rewrite_that_broke_off_changes_nothing() {
        let moves: [fn(&Path); 3] = [
            // Before the swap: the new log is not complete.
            |dir| std::fs::create_dir(dir.join("log.new")).unwrap(),
            // Between the two renames: the new one is.
            |dir| std::fs::rename(dir.join("log"), dir.join("log.new")).unwrap(),
            // After them.
            |dir| std::fs::create_dir(dir.join("log.old")).unwrap(),
        ];
        for broken_off in moves {
            let dir = tempfile::tempdir().unwrap();
            let store = filled(dir.path(), 10);
            broken_off(dir.path());
            let opened = open(dir.path(), CACHE_BYTES, 2).unwrap();
            assert_eq!((opened.store, opened.quarantined), (store, None));
            assert_eq!(count(&*opened.log), 11);
            assert!(!dir.path().join("log.new").exists() && !dir.path().join("log.old").exists());
        }
    }

    #[test]
    fn a_log_behind_its_manifest_gets_a_new_generation() {
        let dir = tempfile::tempdir().unwrap();
        let store = filled(dir.path(), 1);
        let catalog = Catalog::new(store.generation, 5);
        Manifest::new(store, &catalog, false)
            .write(dir.path())
            .unwrap();
        let opened = open(dir.path(), CACHE_BYTES, 2).unwrap();
        assert_ne!(opened.store.generation, store.generation);
        assert_eq!(opened.quarantined, None);
        let again = opened.store;
        drop(opened);
        assert_eq!(open(dir.path(), CACHE_BYTES, 3).unwrap().store, again);
    }
}
