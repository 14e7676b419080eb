//! The file of a segment.
//!
//! ```text
//! index     as refrain-suffix-index writes it: text, suffix array, documents in order of their ids
//! records   what else is known about the documents, in the same order (`document_records.rs`)
//! names     the namespace's names, so that a file can be adopted without the log
//! footer    72 bytes: magic, version, segment, namespace, lengths of the above, documents, and xxh3 of
//!           everything after the index
//! ```
//!
//! The index comes first, since its words must be aligned, and it has its own checksum. All integers are
//! little-endian.
//!
//! Besides its tokens a document takes 28 bytes in the index, 4 for each token of its left context, and about 8 to 20
//! bytes of records, and 16 more where the hash of its prompt is known. With a left context of 16 tokens, documents
//! of 33 tokens and more take less than 12 bytes per token (`examples/at_rest.rs` measures it for any length).
//!
//! Each document has its own complete left context. Cutting it to 8 tokens was rejected. It would save 1.5 bytes per
//! token for documents of 21 tokens. But `refrain replay --warm` of recorded calls of that length found 2 % fewer
//! tokens per step with such contexts, and 4 % fewer if only half the output's length was kept.
//!
//! A file of another version is not damaged (version 1 had a record of a hundred bytes per document): the store
//! refuses to start and leaves everything in place. Only version 2 is still read, which lacks the hashes of prompts.
//! Every program must be able to tell such a file from a damaged one. So magic, version, length of the index and
//! checksum have the same positions in the footer in all versions. A new version of the index is a new version of the
//! file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use refrain_protocol::document::DocumentHead;
use refrain_protocol::history::PromptHash;
use refrain_protocol::{DocumentId, Namespace, NamespaceId, TokenId};
use refrain_suffix_index::{DocumentKey as IndexKey, SealedDocument, Segment};

use crate::codec::Damage;
use crate::log::LogError;
use crate::record::{NamespaceRecord, SegmentId, SegmentRecord, StateRecord};
use crate::segments::document_records::DocumentRecords;
use crate::segments::entry::SegmentEntry;
use crate::segments::layout::{FileLayout, check_version, config};
use crate::segments::mapped::{IndexBytes, map};
use crate::segments::paths::{list, path};

/// Bytes of the index per token of output: the token, its suffix array entry, and its share of the fences.
const TOKEN_BYTES: f64 = 8.25;

/// Bytes of the index per document besides its tokens.
const DOCUMENT_BYTES: u32 = 4 + 24;

/// Refuses a directory that has a segment of another version.
///
/// # Errors
/// [`LogError::Refused`], also when the disk refuses. A missing or damaged file is no error.
pub(crate) fn check_versions(dir: &Path) -> Result<(), LogError> {
    for segment in list(dir)?.0 {
        let path = path(dir, segment);
        match map(&path) {
            Ok(map) => check_version(&map, &path)?,
            Err(LogError::Corrupt(_)) => {}
            Err(refused) => return Err(refused),
        }
    }
    Ok(())
}

/// An open segment file.
pub(crate) struct SegmentFile {
    pub(crate) id: SegmentId,
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Option<Namespace>,
    path: PathBuf,
    segment: Segment,
    map: Arc<Mmap>,
    layout: FileLayout,
    records: DocumentRecords,
    /// Tokens of output.
    pub(crate) tokens: u64,
}

impl SegmentFile {
    /// Opens the file of a segment, and checks all of it.
    ///
    /// # Errors
    /// [`LogError::Corrupt`] if it is missing or damaged, [`LogError::Refused`] if it has another version or the disk
    /// refuses.
    pub(crate) fn open(dir: &Path, id: SegmentId) -> Result<SegmentFile, LogError> {
        let path = path(dir, id);
        let file = SegmentFile::open_any(&path)?;
        if file.id != id {
            let why = format!("{}: it belongs to another segment", path.display());
            return Err(LogError::Corrupt(why));
        }
        Ok(file)
    }

    /// Opens a file whatever its segment's number is, and checks all of it.
    ///
    /// # Errors
    /// As [`SegmentFile::open`].
    pub(super) fn open_any(path: &Path) -> Result<SegmentFile, LogError> {
        let map = map(path)?;
        check_version(&map, path)?;
        let corrupt = |why: &str| LogError::Corrupt(format!("{}: {why}", path.display()));
        let (layout, id, namespace) = FileLayout::check(&map).map_err(|why| corrupt(&why))?;
        let bytes = IndexBytes {
            map: map.clone(),
            len: layout.index,
        };
        let segment = Segment::open(bytes).map_err(|error| corrupt(&error.to_string()))?;
        let names = &map[layout.names_at()..][..layout.names];
        let names = match bincode::decode_from_slice::<Option<NamespaceRecord>, _>(names, config())
        {
            Ok((names, _)) => names.map(|NamespaceRecord(names)| names),
            Err(_) => return Err(corrupt("the namespace's names do not decode")),
        };
        if segment.documents() != layout.documents || u32::try_from(layout.documents).is_err() {
            return Err(corrupt(
                "records and index have different numbers of documents",
            ));
        }
        let record_bytes = &map[layout.index..layout.names_at()];
        let records = DocumentRecords::open(record_bytes, layout.documents, layout.version)
            .map_err(|damage| corrupt(&format!("records: {damage}")))?;
        let tokens = segment.iter().map(|document| document.output.len() as u64);
        Ok(SegmentFile {
            id,
            namespace,
            names,
            path: path.to_owned(),
            tokens: tokens.sum(),
            segment,
            map,
            layout,
            records,
        })
    }

    /// Checks the file again.
    pub(crate) fn check(&self) -> Result<(), LogError> {
        let Some(dir) = self.path.parent().and_then(Path::parent) else {
            return Err(LogError::Refused(
                "the segment file has no directory".into(),
            ));
        };
        let again = SegmentFile::open(dir, self.id)?;
        if again.layout.checksum != self.layout.checksum {
            let why = format!("{}: the file was replaced", self.path.display());
            return Err(LogError::Corrupt(why));
        }
        Ok(())
    }

    pub(crate) fn documents(&self) -> u32 {
        self.layout.documents as u32
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// The record that names this file in the log.
    pub(crate) fn manifest(&self) -> SegmentRecord {
        SegmentRecord {
            namespace: self.namespace.0,
            checksum: self.layout.checksum,
        }
    }

    /// Length of the index in words of 32 bits, the unit in which workers take it over.
    pub(crate) fn index_words(&self) -> u64 {
        self.layout.index as u64 / 4
    }

    /// A piece of the index.
    pub(crate) fn index_piece(&self, offset: u64, words_max: usize) -> Vec<u32> {
        let from = usize::try_from(offset.min(self.index_words())).unwrap_or_default() * 4;
        let to = self.layout.index.min(from.saturating_add(words_max * 4));
        let words = self.map.get(from..to).unwrap_or_default().chunks_exact(4);
        words
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect()
    }

    /// A piece of the file.
    pub(crate) fn piece(&self, offset: u64, bytes_max: usize) -> &[u8] {
        let len = self.map.len();
        let from = usize::try_from(offset).map_or(len, |offset| offset.min(len));
        let to = len.min(from.saturating_add(bytes_max));
        self.map.get(from..to).unwrap_or_default()
    }

    /// The path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Length of the index in bytes.
    pub(super) fn index_bytes(&self) -> usize {
        self.layout.index
    }

    /// The ids of all documents, in order of their numbers.
    pub(crate) fn ids(&self) -> impl Iterator<Item = DocumentId> {
        self.segment
            .iter()
            .map(|document| DocumentId(document.key.0))
    }

    /// A document's output.
    pub(crate) fn text(&self, document: DocumentId) -> Option<&[TokenId]> {
        Some(self.segment.get(IndexKey(document.0))?.output)
    }

    fn record_bytes(&self) -> &[u8] {
        let records = self.layout.index..self.layout.names_at();
        self.map.get(records).unwrap_or_default()
    }

    /// The head of the document with this number.
    pub(crate) fn head(&self, number: u32) -> Result<DocumentHead, Damage> {
        let document = self.segment.document(number as usize);
        self.head_of(number, &document.ok_or(Damage::Short)?)
    }

    fn head_of(&self, number: u32, document: &SealedDocument<'_>) -> Result<DocumentHead, Damage> {
        let left_context = document.left_context;
        self.records
            .head(self.record_bytes(), number as usize, left_context)
    }

    /// All documents by number, with their state at the time of sealing.
    pub(crate) fn states(&self) -> impl Iterator<Item = (u32, DocumentId, StateRecord)> {
        let documents = (0u32..).zip(self.segment.iter());
        documents.filter_map(|(number, document)| {
            let state = self.state_of(number, &document).ok()?;
            Some((number, DocumentId(document.key.0), state))
        })
    }

    /// The documents whose prompts are known, by number.
    pub(crate) fn prompts(&self) -> impl Iterator<Item = (u32, DocumentId, PromptHash)> {
        (0u32..).zip(self.ids()).filter_map(|(number, document)| {
            let prompt = self.records.prompt(self.record_bytes(), number as usize);
            Some((number, document, prompt.ok()??))
        })
    }

    /// The complete document with this number.
    pub(crate) fn entry(&self, number: u32) -> Result<SegmentEntry, Damage> {
        let document = self.segment.document(number as usize);
        let tokens = document.ok_or(Damage::Short)?.output.to_vec();
        let entry = self.entry_without_text(number)?;
        Ok(SegmentEntry { tokens, ..entry })
    }

    /// The document with this number, without its tokens.
    pub(crate) fn entry_without_text(&self, number: u32) -> Result<SegmentEntry, Damage> {
        let document = self.segment.document(number as usize);
        let document = document.ok_or(Damage::Short)?;
        Ok(SegmentEntry {
            document: DocumentId(document.key.0),
            state: self.state_of(number, &document)?,
            head: self.head_of(number, &document)?,
            tokens: Vec::new(),
        })
    }

    fn state_of(&self, number: u32, document: &SealedDocument<'_>) -> Result<StateRecord, Damage> {
        let SealedDocument {
            left_context,
            output,
            ..
        } = document;
        let text_bytes = left_context.len() as f64 * 4.0 + output.len() as f64 * TOKEN_BYTES;
        // Each document gets an equal share, whether it has names of its own or not.
        let record_bytes = self.layout.records.div_ceil(self.layout.documents.max(1));
        let len = output.len() as u32;
        let state = self
            .records
            .state(self.record_bytes(), number as usize, len)?;
        Ok(StateRecord {
            bytes: text_bytes as u32 + record_bytes as u32 + DOCUMENT_BYTES,
            ..state
        })
    }
}
