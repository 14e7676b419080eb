//! The shape of the events of an answer, see `relay/stream_shaper.rs`.

use std::time::Duration;

/// The shape of the events of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamShape {
    /// Equal numbers of tokens.
    Size,
    /// Equal numbers of tokens at equal times.
    Pace {
        /// The time of a token.
        per_token: Duration,
    },
}
