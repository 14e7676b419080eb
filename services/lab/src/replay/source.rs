//! The sources of drafts.

use clap::ValueEnum;
use serde::Serialize;

/// A source of drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ReplaySource {
    /// The request's own prompt and output so far.
    Request,
    /// The samples of the request's group.
    Group,
    /// All outputs of the tenant.
    Global,
}

impl ReplaySource {
    pub(super) const ALL: [ReplaySource; 3] = [
        ReplaySource::Request,
        ReplaySource::Group,
        ReplaySource::Global,
    ];
}
