//! Recovery from panics in the core of an actor.
//!
//! A panic in a handler closes an actix mailbox for good, even under a supervisor. So the core of an actor runs
//! behind `catch_unwind`. After a panic the core is rebuilt, and the address of the actor stays valid.

use std::panic::{AssertUnwindSafe, catch_unwind};

use prometheus::IntCounter;

/// A core that is rebuilt after a panic.
pub struct Guarded<C> {
    core: C,
    rebuild: Box<dyn FnMut() -> C + Send>,
    restarts: IntCounter,
    name: &'static str,
}

/// The core panicked and was rebuilt. The action did not happen, or only in part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Panicked;

impl<C> Guarded<C> {
    /// Builds the core by `rebuild`, which is called again after each panic. The actor documents what is lost then.
    pub fn new(
        name: &'static str,
        mut rebuild: impl FnMut() -> C + Send + 'static,
        restarts: IntCounter,
    ) -> Self {
        Guarded {
            core: rebuild(),
            rebuild: Box::new(rebuild),
            restarts,
            name,
        }
    }

    /// Runs `action` on the core.
    ///
    /// # Errors
    /// [`Panicked`] if the action panicked. The core is a fresh one then.
    pub fn run<R>(&mut self, action: impl FnOnce(&mut C) -> R) -> Result<R, Panicked> {
        // This is unwind safe because a half-changed core is thrown away and never read again.
        match catch_unwind(AssertUnwindSafe(|| action(&mut self.core))) {
            Ok(value) => Ok(value),
            Err(_) => {
                self.restarts.inc();
                tracing::error!(
                    actor = self.name,
                    "the core of an actor panicked and was rebuilt"
                );
                self.core = (self.rebuild)();
                Err(Panicked)
            }
        }
    }

    /// Read access to the core.
    pub fn core(&self) -> &C {
        &self.core
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_rebuilds_the_core_and_is_counted() {
        let restarts = IntCounter::new("restarts", "restarts").unwrap();
        let mut guarded = Guarded::new("test", || 1u32, restarts.clone());
        guarded.run(|core| *core = 5).unwrap();
        let outcome: Result<(), _> = guarded.run(|core| {
            *core = 9;
            std::panic::resume_unwind(Box::new("boom"))
        });
        assert_eq!(outcome, Err(Panicked));
        assert_eq!((*guarded.core(), restarts.get()), (1, 1));
    }
}
