//! Exports in progress. Each shows one moment, whatever happens meanwhile.
//!
//! The naive way copies everything first, or blocks all writers. Here an export begins with a list, made under one
//! lock: the segments with a bit for each live document, and the state of each document in the log. Segments never
//! change, so keeping their files is enough. A document in the log is read when its turn comes, up to its listed
//! length. Later appends are beyond that length, and sealing and merging move a text without changing it. Only a
//! commit that cuts or removes such a document first puts a copy aside.
//!
//! Copies in memory and kept files of deleted segments are bounded; beyond the bounds the export ends. An erasure
//! ends the exports of the namespaces that it hits, when it begins and again before it is answered. So nothing keeps
//! erased text, and no complete export contains it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{DocumentId, Namespace, NamespaceId};

use crate::config::DraftStoreConfig;
use crate::record::{DocumentKey, SegmentId, StateRecord, finish_of};
use crate::segments::{LiveDocuments, SegmentFile};

/// The limits of an export; see [`crate::DraftStoreConfig`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExportLimits {
    pub(crate) exports_max: usize,
    pub(crate) held_bytes_max: u64,
    pub(crate) disk_bytes_max: u64,
    pub(crate) idle: Duration,
}

impl From<&DraftStoreConfig> for ExportLimits {
    fn from(config: &DraftStoreConfig) -> Self {
        ExportLimits {
            exports_max: config.tuning.exports_max,
            held_bytes_max: config.export_held_bytes_max,
            disk_bytes_max: config.export_disk_bytes_max,
            idle: Duration::from_secs(config.tuning.export_idle_s),
        }
    }
}

impl ExportLimits {
    /// No limits, for a store that nobody else uses and that does not change.
    pub(crate) const NONE: ExportLimits = ExportLimits {
        exports_max: usize::MAX,
        held_bytes_max: u64::MAX,
        disk_bytes_max: u64::MAX,
        idle: Duration::MAX,
    };
}

/// Why an export ended before it was complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExportEnd {
    /// Part of it was erased.
    Erased,
    /// Too much had to be put aside for it.
    Held,
    /// Its list is longer than it may hold, so it has not begun.
    List,
    /// Too many bytes of deleted segments were kept for it.
    Disk,
}

/// Where the export reads a document from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ExportSource {
    /// Index of the segment in the list, and the document's number in it.
    Sealed(u32, u32),
    /// Index among the documents that were in the log.
    Unsealed(u32),
}

/// The documents of one namespace in an export.
pub(crate) struct ExportedNamespace {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    pub(super) sealed: Vec<(Arc<SegmentFile>, LiveDocuments)>,
    /// Documents that were in the log, in order of their ids.
    unsealed: Vec<(DocumentId, StateRecord)>,
    order: OnceLock<Vec<(u64, ExportSource)>>,
}

impl ExportedNamespace {
    pub(super) fn new(
        namespace: NamespaceId,
        names: Namespace,
        unsealed: Vec<(DocumentId, StateRecord)>,
    ) -> Self {
        ExportedNamespace {
            namespace,
            names,
            sealed: Vec::new(),
            unsealed,
            order: OnceLock::new(),
        }
    }

    /// Its documents in order of their last change. The first call reads all records of its segments.
    pub(crate) fn order(&self) -> &[(u64, ExportSource)] {
        self.order.get_or_init(|| {
            let sealed = (0..).zip(&self.sealed).flat_map(|(at, (sealed, live))| {
                let states = sealed.states().filter(|(number, ..)| live.has(*number));
                states.map(move |(number, _, state)| {
                    (state.sequence, ExportSource::Sealed(at, number))
                })
            });
            let unsealed = (0..).zip(&self.unsealed);
            let unsealed =
                unsealed.map(|(at, (_, state))| (state.sequence, ExportSource::Unsealed(at)));
            let mut order: Vec<_> = sealed.chain(unsealed).collect();
            order.sort_unstable();
            order
        })
    }

    pub(crate) fn segment(&self, at: u32) -> Option<&SegmentFile> {
        Some(&*self.sealed.get(at as usize)?.0)
    }

    pub(crate) fn document(&self, at: u32) -> Option<(DocumentId, StateRecord)> {
        self.unsealed.get(at as usize).copied()
    }

    /// The state of a document that was in the log.
    fn unsealed(&self, document: DocumentId) -> Option<&StateRecord> {
        let at = self.unsealed.binary_search_by_key(&document, |(id, _)| *id);
        Some(&self.unsealed.get(at.ok()?)?.1)
    }

    /// Memory that it takes, in bytes, including the order.
    fn bytes(&self) -> u64 {
        let live: u64 = self
            .sealed
            .iter()
            .map(|(sealed, _)| u64::from(sealed.documents()))
            .sum();
        let unsealed = self.unsealed.len() * size_of::<(DocumentId, StateRecord)>();
        let order = (live + self.unsealed.len() as u64) * size_of::<(u64, ExportSource)>() as u64;
        live / 8 + unsealed as u64 + order
    }
}

/// One moment of some namespaces.
pub(crate) struct ExportSnapshot {
    /// In order of the namespaces.
    pub(crate) namespaces: Vec<ExportedNamespace>,
    limits: ExportLimits,
    held: Mutex<ExportHoldings>,
}

/// Texts that an export holds besides its list, and their sizes.
#[derive(Default)]
struct ExportHoldings {
    texts: HashMap<DocumentKey, DocumentUpdate>,
    bytes: u64,
    /// Bytes of segments that are no longer in use.
    disk_bytes: u64,
}

impl ExportSnapshot {
    fn part(&self, namespace: NamespaceId) -> Option<&ExportedNamespace> {
        let at = self
            .namespaces
            .binary_search_by_key(&namespace, |part| part.namespace);
        self.namespaces.get(at.ok()?)
    }

    /// The copy of a document that was put aside.
    pub(crate) fn put_aside(&self, key: DocumentKey) -> Option<DocumentUpdate> {
        self.held.lock().texts.get(&key).cloned()
    }

    fn wants(&self, key: DocumentKey) -> bool {
        let is_listed = self
            .part(key.namespace)
            .and_then(|part| part.unsealed(key.document));
        is_listed.is_some() && !self.held.lock().texts.contains_key(&key)
    }

    /// Puts aside a document as it was when the export began, made from what it is now.
    fn keep(&self, key: DocumentKey, now: &DocumentUpdate) -> Result<(), ExportEnd> {
        let part = self.part(key.namespace);
        let Some(then) = part.and_then(|part| part.unsealed(key.document)) else {
            return Ok(());
        };
        let mut held = self.held.lock();
        held.bytes += u64::from(then.len) * 4 + size_of::<DocumentUpdate>() as u64;
        held.texts
            .entry(key)
            .or_insert_with(|| as_of(now.clone(), then));
        match held.bytes > self.limits.held_bytes_max {
            true => Err(ExportEnd::Held),
            false => Ok(()),
        }
    }

    fn unmounted(&self, segment: SegmentId, bytes: u64) -> Result<(), ExportEnd> {
        let mut sealed = self.namespaces.iter().flat_map(|part| &part.sealed);
        if !sealed.any(|(sealed, _)| sealed.id == segment) {
            return Ok(());
        }
        let mut held = self.held.lock();
        held.disk_bytes += bytes;
        match held.disk_bytes > self.limits.disk_bytes_max {
            true => Err(ExportEnd::Disk),
            false => Ok(()),
        }
    }
}

/// A document as it was in an earlier state, given what appends have made of it since.
pub(crate) fn as_of(mut update: DocumentUpdate, then: &StateRecord) -> DocumentUpdate {
    update.tokens.truncate(then.len as usize);
    update.epoch = then.epoch;
    update.finish = finish_of(then.finish);
    update
}

struct ExportEntry {
    snapshot: Result<Arc<ExportSnapshot>, ExportEnd>,
    used: Instant,
}

fn live(known: &BTreeMap<u64, ExportEntry>) -> impl Iterator<Item = &Arc<ExportSnapshot>> {
    let all = known.values();
    all.filter_map(|known| known.snapshot.as_ref().ok())
}

/// All exports in progress, and the reasons why others ended.
#[derive(Default)]
pub(crate) struct Exports {
    known: Mutex<BTreeMap<u64, ExportEntry>>,
}

impl Exports {
    /// Begins an export with this number; `list` returns its namespaces in order, as they are now. `None` if the
    /// limit of exports is reached, and [`ExportEnd::List`] if the list alone is too long.
    pub(crate) fn begin(
        &self,
        number: u64,
        list: impl FnOnce() -> Vec<ExportedNamespace>,
        limits: ExportLimits,
    ) -> Option<Result<Arc<ExportSnapshot>, ExportEnd>> {
        self.expire(limits.idle);
        if self.sizes().0 >= limits.exports_max {
            return None;
        }
        let namespaces = list();
        let bytes = namespaces.iter().map(ExportedNamespace::bytes).sum();
        if bytes > limits.held_bytes_max {
            return Some(Err(ExportEnd::List));
        }
        let snapshot = Arc::new(ExportSnapshot {
            namespaces,
            limits,
            held: Mutex::new(ExportHoldings {
                bytes,
                ..ExportHoldings::default()
            }),
        });
        let known = ExportEntry {
            snapshot: Ok(snapshot.clone()),
            used: Instant::now(),
        };
        // Checks the limit again: others may have begun while this export was listed.
        let mut all = self.known.lock();
        if live(&all).count() >= limits.exports_max {
            return None;
        }
        all.insert(number, known);
        Some(Ok(snapshot))
    }

    /// An export in progress, or why it ended. `None` if it is unknown or forgotten.
    pub(crate) fn get(&self, number: u64) -> Option<Result<Arc<ExportSnapshot>, ExportEnd>> {
        let mut known = self.known.lock();
        let known = known.get_mut(&number)?;
        known.used = Instant::now();
        Some(known.snapshot.clone())
    }

    /// Forgets an export that is complete, or whose caller knows why it ended.
    pub(crate) fn forget(&self, number: u64) {
        self.known.lock().remove(&number);
    }

    /// Forgets exports that nobody asked for during `idle`.
    pub(crate) fn expire(&self, idle: Duration) {
        self.known
            .lock()
            .retain(|_, known| known.used.elapsed() < idle);
    }

    /// Number of exports in progress, and the bytes of memory and of deleted files held for them.
    pub(crate) fn sizes(&self) -> (usize, u64, u64) {
        let known = self.known.lock();
        live(&known).fold((0, 0, 0), |(count, bytes, disk_bytes), snapshot| {
            let held = snapshot.held.lock();
            (count + 1, bytes + held.bytes, disk_bytes + held.disk_bytes)
        })
    }

    /// Ends the exports for which `ends` returns an error, and frees what they hold.
    fn end(&self, ends: impl Fn(&ExportSnapshot) -> Result<(), ExportEnd>) {
        for known in self.known.lock().values_mut() {
            if let Ok(snapshot) = &known.snapshot
                && let Err(why) = ends(snapshot)
            {
                known.snapshot = Err(why);
            }
        }
    }

    /// Whether a document must be put aside before it is cut or removed.
    pub(crate) fn want(&self, key: DocumentKey) -> bool {
        let known = self.known.lock();
        live(&known).any(|snapshot| snapshot.wants(key))
    }

    /// Puts a document aside, as it is now.
    pub(crate) fn keep(&self, key: DocumentKey, now: &DocumentUpdate) {
        self.end(|snapshot| match snapshot.wants(key) {
            true => snapshot.keep(key, now),
            false => Ok(()),
        });
    }

    /// Ends the exports of a namespace of which something is erased.
    pub(crate) fn erased(&self, namespace: NamespaceId) {
        self.end(|snapshot| match snapshot.part(namespace) {
            Some(_) => Err(ExportEnd::Erased),
            None => Ok(()),
        });
    }

    /// Counts a segment of `bytes` bytes that is no longer in use, and ends the exports for which that is too much.
    pub(crate) fn unmounted(&self, segment: SegmentId, bytes: u64) {
        self.end(|snapshot| snapshot.unmounted(segment, bytes));
    }
}
