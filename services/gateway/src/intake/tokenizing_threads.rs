//! The threads that parse and tokenize large bodies.
//!
//! An encoder keeps a cache of words on each thread that encodes, of up to 64 MiB. So the number of these threads is
//! fixed, unlike that of the runtime's threads for blocking work.

use anyhow::Context as _;
use rayon::{ThreadPool, ThreadPoolBuilder};
use refrain_protocol::ApiError;
use tokio::sync::oneshot;

/// A fixed number of threads.
pub(crate) struct TokenizingThreads(ThreadPool);

impl TokenizingThreads {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system has no room for them.
    pub(crate) fn start(threads: usize) -> anyhow::Result<Self> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|number| format!("tokenizing-{number}"))
            // Whoever waits for the work learns of it.
            .panic_handler(|_| {})
            .build()
            .context("cannot start the threads that tokenize")?;
        Ok(TokenizingThreads(pool))
    }

    /// Does work on one of the threads. It is done also if nobody waits for it any more.
    ///
    /// # Errors
    /// `Internal` if the work panicked.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let (done, is_done) = oneshot::channel();
        self.0.spawn(move || {
            // An error means that nobody waits any more.
            let _ = done.send(work());
        });
        let panicked = |_| ApiError::internal("a thread that tokenizes panicked");
        is_done.await.map_err(panicked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_is_done_on_few_threads_and_a_panic_ends_none_of_them() {
        let threads = TokenizingThreads::start(2).unwrap();
        let panicked: Result<(), _> = threads.run(|| panic!("planned")).await;
        assert!(panicked.is_err());
        let mut names = std::collections::BTreeSet::new();
        for _ in 0..40 {
            let name = threads.run(|| std::thread::current().name().map(str::to_owned));
            names.insert(name.await.unwrap().unwrap());
        }
        assert!(
            (1..=2).contains(&names.len())
                && names.iter().all(|name| name.starts_with("tokenizing-")),
            "{names:?}"
        );
    }
}
