//! A form that was compiled.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::GrammarError;
use crate::matcher::{Layout, Matcher};

/// A compiled form, or why there is none.
pub type Outcome = Result<Arc<CompiledGrammar>, GrammarError>;

/// A compiled form.
pub struct CompiledGrammar {
    /// At its beginning. It is only cloned.
    pub(crate) start: Arc<Mutex<llguidance::Matcher>>,
    pub(crate) layout: Arc<Layout>,
    /// About the bytes of all of it.
    pub(crate) bytes: usize,
}

impl CompiledGrammar {
    /// About the bytes of the grammar. An output that follows it has a copy, which grows with the states that it
    /// meets, up to [`crate::GrammarLimits::states_max`].
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A matcher at the beginning of an output. Matchers share no state, so threads do not wait for each other.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(self.start.clone(), self.layout.clone())
    }
}
