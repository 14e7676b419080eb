//! Segments: immutable files that hold sealed documents, outside the log.
//!
//! A segment is one file with documents of one namespace. It holds the text and the suffix array in the form that
//! the index searches directly, and packed records of everything else that is known about each document.
//!
//! A sealed document can still be used, evicted, erased, or continued (which moves it back into the log). These
//! changes are *marks* (`marks.rs`). Marks live in the log, 512 documents to a record of at most 2 KiB, so that they
//! become durable in the same commit as the tombstone or the text that belongs to them. A side file per segment was
//! rejected: it would need its own journal to stay consistent with the tombstones. Marks of ten million documents
//! take 40 MB in the log before compression.
//!
//! Read `file.rs` first, which describes the file and opens it. Then:
//!
//! * `layout.rs`, `mapped.rs`: the footer and its checks, and the memory map (the only unsafe code of this crate)
//! * `document_records.rs`, `packed_columns.rs`, `name_table.rs`: the packed records, from the whole to its parts
//! * `write.rs`, `entry.rs`: writing a file from documents
//! * `adopt.rs`: taking over a file of another replica
//! * `paths.rs`, `discovery.rs`: which files exist, and which of them are in use at start
//! * `mounted.rs`: the segments in use, and the documents that are in none
//! * `policy.rs`: which documents to seal and which segments to merge, as pure functions
//!
//! `background/seal.rs` does the sealing and merging.

mod adopt;
mod discovery;
mod document_records;
mod entry;
mod file;
mod layout;
mod mapped;
mod marks;
mod mounted;
mod name_table;
mod packed_columns;
mod paths;
mod policy;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use adopt::{
    ReceivedSegment, adopt, clear_received, create_received, discard_received, is_there,
    open_received,
};
pub(crate) use discovery::{FoundSegments, find};
pub(crate) use entry::SegmentEntry;
pub(crate) use file::{SegmentFile, check_versions};
pub(crate) use marks::{Marks, chunk_of, mark_of};
pub(crate) use mounted::{ActiveSegment, CountedDocument, LiveDocuments, Segments};
#[cfg(test)]
pub(crate) use paths::directory;
pub(crate) use paths::{clear_orphans, delete, delete_files, list, path};
pub(crate) use policy::{SealCandidates, SegmentPolicy, SegmentSource, Urgency};
pub(crate) use write::write;
