//! One value per calling runtime, for connections: each is served by the runtime that opened it.
//!
//! With one pool for all, a token would often wake one thread only to be handed to another, and connections would die
//! with the listener thread that opened them.

use std::num::NonZeroUsize;

use lru::LruCache;
use parking_lot::Mutex;
use tokio::runtime;

/// Maximum number of runtimes with a value. A process has its own runtime and one per listener thread, so beyond
/// this the least recently used runtime is gone.
const RUNTIMES_MAX: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// One value per calling runtime.
pub(super) struct PerRuntime<T> {
    values: Mutex<LruCache<runtime::Id, T>>,
}

impl<T> Default for PerRuntime<T> {
    fn default() -> Self {
        PerRuntime {
            values: Mutex::new(LruCache::new(RUNTIMES_MAX)),
        }
    }
}

impl<T: Clone> PerRuntime<T> {
    /// The value of the current runtime, which `create` makes for its first caller.
    ///
    /// # Errors
    /// That of `create`.
    pub(super) fn current<E>(&self, create: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let runtime = runtime::Handle::current().id();
        if let Some(value) = self.values.lock().get(&runtime) {
            return Ok(value.clone());
        }
        // Created without the lock: it takes a while, and other calls need the lock meanwhile. If two values are
        // created at once, the first one stays.
        let value = create()?;
        let mut values = self.values.lock();
        Ok(values.get_or_insert(runtime, || value).clone())
    }
}
