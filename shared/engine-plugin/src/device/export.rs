//! The actor that writes segments for the devices.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_draft_replica::{DraftReplica, NamespaceReplica};
use refrain_protocol::NamespaceId;
use refrain_service_kit::actors;
use refrain_suffix_index::{MountedSegment, SearchWords};

use super::DeviceIndex;
use super::part::{Part, PartFile};

/// Looks take at most one part in so many of the time.
const PAUSE_OF_WORK: u32 = 10;

/// A part, the text that it was made of, and its file until the devices have it.
struct Written<T> {
    of: T,
    part: Part,
    file: Option<Arc<PartFile>>,
}

/// The parts of one namespace.
#[derive(Default)]
struct Known {
    sealed: Vec<Written<MountedSegment>>,
    /// Outputs that are not sealed yet, by their stamp.
    settled: Option<Written<u64>>,
}

/// Writes what the devices lack.
pub(crate) struct DeviceExport {
    index: Arc<DeviceIndex>,
    replica: Arc<DraftReplica>,
    known: HashMap<NamespaceId, Known>,
}

impl DeviceExport {
    pub(crate) fn new(index: Arc<DeviceIndex>, replica: Arc<DraftReplica>) -> Self {
        DeviceExport {
            index,
            replica,
            known: HashMap::new(),
        }
    }

    /// Looks again and again.
    pub(crate) async fn run(mut self) {
        let pause_min = Duration::from_millis(self.index.config.refresh_ms);
        loop {
            let begun = Instant::now();
            self = actors::blocking(move || {
                self.look();
                self
            })
            .await;
            let pause = (begun.elapsed() * PAUSE_OF_WORK).max(pause_min);
            tokio::time::sleep(pause).await;
        }
    }

    /// Brings the parts of all namespaces in use up to date. No more is written than the devices have room for.
    pub(crate) fn look(&mut self) {
        let in_use = self.index.namespaces();
        self.known.retain(|id, _| in_use.contains(id));
        let mut words_left = self.index.config.words_max();
        for id in in_use {
            match self.replica.followed(id) {
                Some(namespace) => self.refresh(id, &namespace, &mut words_left),
                None => {
                    self.known.remove(&id);
                    self.index.publish(id, Vec::new());
                }
            }
        }
    }

    fn refresh(&mut self, id: NamespaceId, namespace: &NamespaceReplica, words_left: &mut u64) {
        let (sealed, stamp) = {
            let drafts = namespace.read();
            (drafts.index().mounted().to_vec(), drafts.settled_stamp())
        };
        let Known {
            sealed: mut before,
            settled,
        } = self.known.remove(&id).unwrap_or_default();
        // New outputs are worth most.
        let settled = match settled {
            Some(written) if written.of == stamp && self.index.is_kept(&written.part) => {
                Some(written)
            }
            _ => self.write_settled(namespace, stamp),
        };
        if let Some(written) = &settled {
            *words_left = words_left.saturating_sub(written.part.words());
        }
        let mut now = Known {
            sealed: Vec::new(),
            settled,
        };
        for mounted in sealed.into_iter().rev() {
            if mounted.search_words_max() as u64 > *words_left {
                continue;
            }
            let same = before.iter().position(|written| {
                written.of.is_same(&mounted) && self.index.is_kept(&written.part)
            });
            let written = match same {
                Some(at) => Some(before.swap_remove(at)),
                None => self
                    .write(&mounted.search_words())
                    .map(|(part, file)| Written {
                        of: mounted,
                        part,
                        file: Some(file),
                    }),
            };
            if let Some(written) = written {
                *words_left = words_left.saturating_sub(written.part.words());
                now.sealed.push(written);
            }
        }
        let parts = now.settled.iter().map(|written| &written.part);
        let parts = parts.chain(now.sealed.iter().map(|written| &written.part));
        self.index.publish(id, parts.cloned().collect());
        for written in &mut now.sealed {
            self.index.let_go(&written.part, &mut written.file);
        }
        if let Some(written) = &mut now.settled {
            self.index.let_go(&written.part, &mut written.file);
        }
        self.known.insert(id, now);
    }

    /// Seals a copy of the outputs that are not sealed; `None` if there are none.
    fn write_settled(&mut self, namespace: &NamespaceReplica, stamp: u64) -> Option<Written<u64>> {
        let builder = namespace.read().copy_settled();
        if builder.documents() == 0 {
            return None;
        }
        let segment = builder.build();
        let segment = segment.inspect_err(
            |error| tracing::warn!(%error, "outputs cannot be drafted from on the device yet"),
        );
        let mounted = MountedSegment::without(Arc::new(segment.ok()?), []);
        let (part, file) = self.write(&mounted.search_words())?;
        Some(Written {
            of: stamp,
            part,
            file: Some(file),
        })
    }

    /// Writes a part. A disk that is full costs drafts, and is tried again.
    fn write(&mut self, words: &SearchWords) -> Option<(Part, Arc<PartFile>)> {
        let number = self.index.next_part();
        let file = self.index.folder.write(number, words);
        let file = file.inspect_err(|error| {
            tracing::warn!(%error, "device.folder: a segment cannot be written");
        });
        let file = file.ok()?;
        Some((Part::new(number, words, &file), file))
    }
}
