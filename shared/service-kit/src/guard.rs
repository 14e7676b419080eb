//! A panic in an actor's handler closes an actix mailbox for ever, under a supervisor too. So cores run
//! behind `catch_unwind`; after a panic the core is made anew and the address stays valid.

use std::panic::{AssertUnwindSafe, catch_unwind};

use prometheus::IntCounter;

/// A core that can be replaced.
pub struct Guarded<C> {
    core: C,
    rebuild: Box<dyn FnMut() -> C + Send>,
    restarts: IntCounter,
    name: &'static str,
}

/// The core panicked and was rebuilt; what the call was to do did not happen, or only in part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Panicked;

impl<C> Guarded<C> {
    /// Builds the core. `rebuild` is called again after each panic; what is lost then is the actor's to say.
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
    /// [`Panicked`] when it panicked; the core is a fresh one now.
    pub fn run<R>(&mut self, action: impl FnOnce(&mut C) -> R) -> Result<R, Panicked> {
        // A half-changed core is thrown away, never looked at again: that is what makes this unwind safe.
        match catch_unwind(AssertUnwindSafe(|| action(&mut self.core))) {
            Ok(value) => Ok(value),
            Err(_) => {
                self.restarts.inc();
                tracing::error!(actor = self.name, "actor core panicked and was rebuilt");
                self.core = (self.rebuild)();
                Err(Panicked)
            }
        }
    }

    /// The core, for reading.
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
