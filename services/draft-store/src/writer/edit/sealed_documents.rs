//! Sealed documents in a commit: their marks, their return to the log, and the installation of a new segment.

use refrain_protocol::document::DocumentUpdate;

use crate::background::seal::{IncludedDocument, NewSegment};
use crate::codec::{self, Damage};
use crate::log::LogError;
use crate::reading::document_text::{self, TextError};
use crate::record::{
    DocumentKey, GONE, HeadRecord, MARKS_DOCUMENTS, MarksRecord, RecordKind, SegmentId,
    SegmentSlot, StateRecord, document_key, finish_of, marks_key, piece_key, segment_key,
};
use crate::segments::{chunk_of, mark_of};
use crate::writer::edit::Edit;
use crate::writer::edit::text_pieces::{pieces, store_text};

impl Edit<'_> {
    /// Records a mark of a sealed document.
    pub(in crate::writer) fn mark_sealed(
        &mut self,
        slot: SegmentSlot,
        mark: u32,
    ) -> Result<(), LogError> {
        let (chunk, _) = chunk_of(slot);
        if !self.marks.chunks.contains_key(&chunk) {
            let key = marks_key(chunk.0, chunk.1);
            let stored = self.writes.log.get(&key)?;
            // Damaged marks were removed at start. If they break now, a restart brings some removed documents back,
            // and some times of use are older.
            if let Some(Ok(MarksRecord(stored))) =
                stored.map(|value| codec::open::<MarksRecord>(&key, &value))
            {
                self.marks.chunks.insert(chunk, stored);
            }
        }
        self.marks.set(slot, mark);
        Ok(())
    }

    /// Adds the marks to the writes.
    pub(in crate::writer) fn write_marks(&mut self) {
        for ((segment, chunk), marks) in std::mem::take(&mut self.marks.chunks) {
            // A segment that was merged meanwhile needs no marks.
            if self.catalog.segments().get(segment).is_some() {
                let key = marks_key(segment, chunk);
                self.writes.put(key, &MarksRecord(marks));
            }
        }
    }

    pub(in crate::writer) fn state(&self, key: DocumentKey) -> Result<StateRecord, TextError> {
        let known = self.catalog.document(key).ok_or(Damage::Short)?;
        Ok(known.state)
    }

    /// Moves a sealed document back into the log, because it continues.
    pub(in crate::writer) fn unseal(&mut self, key: DocumentKey) -> Result<(), TextError> {
        let Some(slot) = self.catalog.document(key).and_then(|known| known.slot) else {
            return Ok(());
        };
        let mut state = self.state(key)?;
        let tokens = document_text::read(self.catalog, &*self.writes.log, key, 0, state.len)?;
        let head = document_text::head(self.catalog, &*self.writes.log, key)?;
        let head_key = document_key(RecordKind::Head, key);
        state.bytes = self.writes.put(head_key, &HeadRecord(head));
        (state.len, state.tail_start, state.tail_pieces) = (0, 0, 0);
        store_text(&mut self.writes, key, &mut state, 0, &tokens)?;
        self.mark_sealed(slot, GONE)?;
        self.catalog.move_document(key, None, state.bytes);
        self.catalog.put(key, state, None);
        self.states.insert(key);
        Ok(())
    }

    /// Puts a document aside for the exports that list it, before it is cut or removed.
    pub(in crate::writer) fn keep_for_exports(&mut self, key: DocumentKey) -> Result<(), LogError> {
        if !self.catalog.exports.want(key) {
            return Ok(());
        }
        match self.current_document(key) {
            Ok(now) => self.catalog.exports.keep(key, &now),
            Err(TextError::Log(error)) => return Err(error),
            // A damaged document could not have been exported anyway.
            Err(TextError::Damaged(_)) => {}
        }
        Ok(())
    }

    /// The complete document, including the writes of this commit.
    pub(super) fn current_document(&self, key: DocumentKey) -> Result<DocumentUpdate, TextError> {
        let state = self.state(key)?;
        let (tokens, head) = if self.catalog.sealed(key).is_some() {
            let tokens = document_text::read(self.catalog, &*self.writes.log, key, 0, state.len)?;
            (
                tokens,
                document_text::head(self.catalog, &*self.writes.log, key)?,
            )
        } else {
            let pieces = pieces(&self.writes, key, piece_key(key, 0), state.len)?;
            let from = document_key(RecordKind::Head, key);
            let value = self.writes.get(&from)?.ok_or(Damage::Short)?;
            let HeadRecord(head) = codec::open(&from, &value)?;
            let tokens = pieces.into_iter().flat_map(|piece| piece.tokens);
            (tokens.collect(), head)
        };
        Ok(DocumentUpdate {
            document: key.document,
            epoch: state.epoch,
            prev_len: 0,
            tokens,
            head,
            finish: finish_of(state.finish),
        })
    }

    /// Puts a segment into use, and forgets its sources. A document that changed since it was read stays where it is.
    pub(in crate::writer) fn install(&mut self, segment: NewSegment) -> Result<(), LogError> {
        let NewSegment {
            file,
            documents,
            sources,
            namespace,
            damaged: _,
        } = segment;
        if let Some(file) = file {
            let segment = file.id;
            self.writes.put(segment_key(segment), &file.manifest());
            let states: Vec<u32> = file.states().map(|(.., state)| state.bytes).collect();
            self.catalog.mount(file);
            for ((number, included), bytes) in (0..).zip(&documents).zip(states) {
                let slot = SegmentSlot { segment, number };
                let key = DocumentKey::new(namespace, included.document);
                let mark = if self.moves(key, included, &sources) {
                    self.move_document(key, included, slot, bytes)
                } else {
                    Some(GONE)
                };
                if let Some(mark) = mark {
                    self.marks.set(slot, mark);
                }
            }
        }
        for source in sources {
            self.forget_segment(source);
        }
        Ok(())
    }

    /// Whether a document is still as it was read.
    fn moves(&self, key: DocumentKey, included: &IncludedDocument, sources: &[SegmentId]) -> bool {
        let Some(known) = self.catalog.document(key) else {
            return false;
        };
        let (now, then) = (&known.state, &included.state);
        let from = known.slot.map(|slot| slot.segment);
        let is_there = match from {
            None => sources.is_empty(),
            Some(segment) => sources.contains(&segment),
        };
        is_there
            && (
                now.sequence,
                now.epoch,
                now.epoch_start,
                now.len,
                now.finish,
            ) == (
                then.sequence,
                then.epoch,
                then.epoch_start,
                then.len,
                then.finish,
            )
    }

    /// Moves a document to its position in the new segment. Returns its mark, if it needs one.
    fn move_document(
        &mut self,
        key: DocumentKey,
        included: &IncludedDocument,
        slot: SegmentSlot,
        bytes: u32,
    ) -> Option<u32> {
        if self.catalog.sealed(key).is_none() {
            for start in &included.pieces {
                self.writes.remove(piece_key(key, *start));
            }
            self.writes.remove(document_key(RecordKind::State, key));
            self.writes.remove(document_key(RecordKind::Head, key));
        }
        self.catalog.move_document(key, Some(slot), bytes);
        let known = self.catalog.document_mut(key)?;
        let used_ms = known.state.used_ms;
        known.used_ms_stored = used_ms;
        (used_ms != included.state.used_ms).then(|| mark_of(used_ms))
    }

    /// Forgets the segments whose last document this commit removed. Their space comes back without a merge.
    pub(in crate::writer) fn forget_emptied(&mut self) {
        let mut emptied: Vec<SegmentId> = self
            .marks
            .chunks
            .keys()
            .map(|(segment, _)| *segment)
            .collect();
        emptied.dedup();
        let segments = self.catalog.segments();
        emptied.retain(|segment| {
            let mounted = segments.get(*segment);
            mounted.is_some_and(|mounted| mounted.live_documents == 0)
        });
        for segment in &emptied {
            self.forget_segment(*segment);
        }
        self.outcome.emptied = emptied;
    }

    fn forget_segment(&mut self, segment: SegmentId) {
        let mounted = self.catalog.segments().get(segment);
        let documents = mounted.map_or(0, |mounted| mounted.file.documents());
        if let Some(mounted) = mounted {
            let bytes = mounted.file.file_bytes();
            self.catalog.exports.unmounted(segment, bytes);
        }
        for chunk in 0..documents.div_ceil(MARKS_DOCUMENTS) {
            self.writes.remove(marks_key(segment, chunk));
        }
        self.writes.remove(segment_key(segment));
        self.catalog.unmount(segment);
    }
}
