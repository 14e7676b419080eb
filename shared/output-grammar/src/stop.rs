//! The end of work that nobody wants any longer.

use std::fmt;
use std::sync::Arc;

use llguidance::CancellationHandle;
use parking_lot::Mutex;

/// Ends the work of a matcher, from any thread. Its calls fail from then on, also the one in progress.
#[derive(Clone, Default)]
pub struct StopSignal(Arc<Mutex<Stop>>);

#[derive(Default)]
struct Stop {
    is_set: bool,
    /// That of the grammar which the matcher follows now.
    grammar: Option<CancellationHandle>,
}

impl fmt::Debug for StopSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StopSignal").field(&self.is_set()).finish()
    }
}

impl StopSignal {
    /// Stops the matcher for good.
    pub fn set(&self) {
        let mut stop = self.0.lock();
        stop.is_set = true;
        stop.grammar.iter().for_each(CancellationHandle::cancel);
    }

    /// Whether the matcher was stopped.
    pub fn is_set(&self) -> bool {
        self.0.lock().is_set
    }

    /// Stops this grammar as well, which the matcher follows from now on.
    pub(crate) fn follow(&self, grammar: Option<CancellationHandle>) {
        let mut stop = self.0.lock();
        stop.grammar = grammar;
        if stop.is_set {
            stop.grammar.iter().for_each(CancellationHandle::cancel);
        }
    }
}
