//! A form that was compiled.

use std::sync::Arc;
use std::time::Duration;

use crate::GrammarError;
use crate::matcher::{GrammarStart, Matcher};

/// A compiled form, or why there is none.
pub type Outcome = Result<Arc<CompiledGrammar>, GrammarError>;

/// A compiled form.
pub struct CompiledGrammar {
    pub(crate) start: Arc<GrammarStart>,
    /// The longest time of the first mask, and of a token and the mask after it in a short output.
    pub(crate) token_time: Duration,
    /// About the bytes of all of it.
    pub(crate) bytes: usize,
}

impl CompiledGrammar {
    /// About the bytes of the grammar. An output that follows it has a copy, which grows with the states that it
    /// meets, up to [`crate::GrammarLimits::states_max`].
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The longest time that a mask took with the token before it, in a short output that was tried when the form was
    /// compiled. Others may take longer.
    pub fn token_time(&self) -> Duration {
        self.token_time
    }

    /// A matcher at the beginning of an output. Matchers share no state, so threads do not wait for each other.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(self.start.clone())
    }
}
