//! The read side: everything that reads documents without changing them.
//!
//! Readers take the store's lock for reading, for one document or a few at a time, so that the writer continues
//! meanwhile. They see only what is durable. The functions block on the disk and on the writer, so call them from
//! blocking threads only.
//!
//! Read `document_text.rs` first: text and head of one document, from the log or from a segment. Then:
//!
//! * `feed.rs`: changes of a namespace or a group after a cursor
//! * `pull.rs`: the feeds of several namespaces and groups, in an answer of a limited size (`answer_budget.rs`)
//! * `segments.rs`: segments as files, and documents in no segment, for workers that take a namespace over
//! * `selection.rs`: documents by state or head
//! * `erasure.rs`: the documents that an erasure hits
//! * `outbox.rs`: what is to be sent to other replicas
//! * `join.rs`: what a replica hands over to one that joins
//! * `export.rs`: pages of an export
//! * `usage.rs`: pages of rows of usage
//! * `verify.rs`: a check of everything that is stored

pub(crate) mod answer_budget;
pub(crate) mod document_text;
pub(crate) mod erasure;
pub(crate) mod export;
pub(crate) mod feed;
pub(crate) mod join;
pub(crate) mod outbox;
pub(crate) mod pull;
pub(crate) mod segments;
pub(crate) mod selection;
pub(crate) mod usage;
pub(crate) mod verify;
