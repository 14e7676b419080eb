//! The shape of the events of an answer, which must not tell what steps brought.

use std::time::Duration;

/// The shape of the events of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamShape {
    /// Equal numbers of tokens.
    Size,
    /// Equal numbers of tokens at equal times.
    Pace {
        /// The time of a token.
        per_token: Duration,
    },
}
