//! A segment of another replica in a commit: its documents become those of this replica.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use refrain_protocol::{Namespace, NamespaceId};

use crate::log::LogError;
use crate::message::{DocumentPart, PartProperties, StreamChange, StreamMessage};
use crate::record::{DocumentKey, GONE, STATIC, SegmentId, SegmentSlot, StateRecord, segment_key};
use crate::segments::{self, ReceivedSegment, SegmentEntry, SegmentFile};
use crate::writer::edit::Edit;

/// A document that is new here.
struct NewDocument {
    number: u32,
    key: DocumentKey,
    state: StateRecord,
}

impl Edit<'_> {
    /// Puts the segment into use under the number `id`. A document that is known here is joined with what the file
    /// has, as if it had come by the stream, and is marked as gone in the segment.
    pub(in crate::writer) fn adopt_segment(
        &mut self,
        dir: &Path,
        id: SegmentId,
        received: ReceivedSegment,
    ) -> Result<(), LogError> {
        let ReceivedSegment {
            file,
            origin,
            seen,
            gone,
            used_s,
        } = received;
        let corrupt = |why: &str| LogError::Corrupt(format!("a segment of another replica: {why}"));
        let namespace = file.namespace;
        let names = file.names.clone().filter(|names| names.id() == namespace);
        let names = names.ok_or_else(|| corrupt("it does not name its namespace"))?;
        self.introduce(namespace, &names);
        let gone: HashSet<u32> = gone.into_iter().collect();
        let (mut entries, mut new, mut known) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..file.documents() {
            let entry = file.entry_without_text(number);
            let mut entry = entry.map_err(|damage| corrupt(&damage.to_string()))?;
            let used_s = used_s.get(number as usize).copied().unwrap_or(0);
            let state = &mut entry.state;
            state.used_ms = state.used_ms.max(u64::from(used_s) * 1_000);
            state.sequence = self.next_sequence();
            let key = DocumentKey::new(namespace, entry.document);
            let replication = &self.catalog.replication;
            let is_refused = replication.refuses(seen, &names, &entry.head, state.stored_ms);
            if !is_refused && !gone.contains(&number) {
                if self.catalog.document(key).is_some() {
                    known.push(number);
                } else {
                    let state = *state;
                    new.push(NewDocument { number, key, state });
                }
            }
            entries.push(entry);
        }
        for number in known {
            let entry = file.entry(number);
            let entry = entry.map_err(|damage| corrupt(&damage.to_string()))?;
            let message = as_message(origin, seen, &names, entry);
            self.apply_message(0, &message)?;
        }
        if new.is_empty() {
            return segments::discard_received(dir, file);
        }
        let file = Arc::new(segments::adopt(dir, id, file, &entries)?);
        drop(entries);
        self.mount_adopted(namespace, file, new)
    }

    fn mount_adopted(
        &mut self,
        namespace: NamespaceId,
        file: Arc<SegmentFile>,
        mut new: Vec<NewDocument>,
    ) -> Result<(), LogError> {
        let segment = file.id;
        self.writes.put(segment_key(segment), &file.manifest());
        let bytes: Vec<u32> = file.states().map(|(.., state)| state.bytes).collect();
        self.catalog.mount(file.clone());
        let mut is_new = vec![false; bytes.len()];
        // The one used last becomes the most recently used one.
        new.sort_unstable_by_key(|document| document.state.used_ms);
        for NewDocument { number, key, state } in new {
            let slot = SegmentSlot { segment, number };
            let at = number as usize;
            self.catalog.put(key, state, Some(0));
            self.catalog.move_document(key, Some(slot), bytes[at]);
            is_new[at] = true;
            let oldest_ms = self.outcome.oldest_ms.unwrap_or(u64::MAX);
            self.outcome.oldest_ms = Some(oldest_ms.min(state.stored_ms));
        }
        for (number, document, prompt) in file.prompts() {
            if is_new[number as usize] {
                let key = DocumentKey::new(namespace, document);
                self.catalog.set_prompt(key, prompt);
            }
        }
        for number in (0..).take(is_new.len()) {
            if !is_new[number as usize] {
                self.marks.set(SegmentSlot { segment, number }, GONE);
            }
        }
        self.outcome.changed.insert(namespace);
        Ok(())
    }
}

/// A document of a segment as a message of the stream.
fn as_message(origin: u64, seen: u64, names: &Namespace, entry: SegmentEntry) -> StreamMessage {
    let SegmentEntry {
        document,
        state,
        head,
        tokens,
    } = entry;
    let properties = PartProperties {
        names: names.clone(),
        document,
        epoch: state.epoch,
        // Documents with another one do not come by files.
        revision: 0,
        finish: state.finish & !STATIC,
        is_static: state.is_static(),
        stored_ms: state.stored_ms,
        head,
        sequence: state.sequence,
    };
    let parts = DocumentPart::split(&properties, &tokens, 0, usize::MAX);
    let part = parts.into_iter().next();
    StreamMessage {
        origin,
        seen,
        change: part.map_or(StreamChange::Start, |part| {
            StreamChange::Document(Box::new(part))
        }),
    }
}
