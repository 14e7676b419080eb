//! How far each request is.

use refrain_protocol::LeaseId;

/// How far a request is.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    pub(super) generated: u32,
    pub(super) submitted_s: f64,
    pub(super) first_s: Option<f64>,
    pub(super) finished_s: Option<f64>,
    pub(super) lease: Option<LeaseId>,
    /// Where its last chunk ran.
    pub(super) instance: Option<usize>,
    pub(super) chunks: u64,
}
