//! A chunk that is decoded.

use refrain_protocol::{DocumentId, LeaseId};

use super::admission::AdmissionPermit;
use super::watch::Watch;
use crate::running::ActiveRequest;

/// A chunk that is decoded.
pub(crate) struct ActiveChunk {
    pub(crate) running: ActiveRequest,
    pub(crate) watch: Watch,
    pub(crate) permit: AdmissionPermit,
    pub(crate) span: tracing::Span,
}

/// The names of a chunk by which orders find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkKey {
    pub(crate) lease: LeaseId,
    pub(crate) document: DocumentId,
    /// The number of the pause in which its request began; 0: in none.
    pub(crate) begun_in: u64,
}

impl ActiveChunk {
    pub(crate) fn key(&self) -> ChunkKey {
        ChunkKey {
            lease: self.permit.lease(),
            document: self.running.document.id,
            begun_in: self.watch.begun_in(),
        }
    }
}
