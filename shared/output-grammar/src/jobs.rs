//! The threads that compile forms: a few at once, each form once however many wait for it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use refrain_protocol::NamespaceId;
use refrain_protocol::engine::OutputForm;

use crate::GrammarError;
use crate::cache_key::CacheKey;
use crate::compiled::Outcome;

/// Stack of a thread that compiles. References nest as deeply as a schema has them, and rules as a grammar has them.
const STACK_BYTES: usize = 512 << 20;

/// A thread without work ends after this time, and gives its stack back.
const IDLE: Duration = Duration::from_secs(2);

/// Called with the outcome, on the thread that compiled.
pub(crate) type Then = Box<dyn FnOnce(Outcome) + Send>;

/// A form to compile.
pub(crate) struct Job {
    pub(crate) key: CacheKey,
    pub(crate) form: OutputForm,
}

/// The forms that wait to be compiled.
pub(crate) struct Jobs {
    threads_max: usize,
    waiting_max: usize,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// The callers that wait for a form, from their call until its outcome is known.
    callers: HashMap<CacheKey, Vec<Then>>,
    threads: usize,
    idle: usize,
    /// Callers that found the queue full.
    refused: u64,
}

impl Jobs {
    pub(crate) fn new(threads_max: usize, waiting_max: usize) -> Self {
        Jobs {
            threads_max: threads_max.max(1),
            waiting_max: waiting_max.max(1),
            state: Mutex::default(),
            wake: Condvar::new(),
        }
    }

    /// Number of forms whose outcome somebody waits for.
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().callers.len()
    }

    /// Number of callers so far that were refused because the queue was full.
    pub(crate) fn refused(&self) -> u64 {
        self.state.lock().refused
    }

    /// Compiles a form, and calls `then` with the outcome. `known` is asked once more, because the form may just have
    /// been compiled. `work` compiles and keeps the outcome.
    pub(crate) fn start(
        self: &Arc<Self>,
        job: Job,
        then: Then,
        known: impl FnOnce() -> Option<Outcome>,
        work: impl Fn(&Job) -> Outcome + Send + 'static,
    ) {
        let mut state = self.state.lock();
        if let Some(callers) = state.callers.get_mut(&job.key) {
            callers.push(then);
            return;
        }
        if let Some(outcome) = known() {
            drop(state);
            return then(outcome);
        }
        if state.queue.len() >= self.share(&state, job.key.namespace) {
            state.refused += 1;
            drop(state);
            return then(Err(GrammarError::NotNow(
                "too many forms wait to be compiled",
            )));
        }
        let key = job.key;
        state.callers.insert(key, vec![then]);
        state.queue.push_back(job);
        if state.queue.len() <= state.idle || state.threads >= self.threads_max {
            self.wake.notify_one();
            return;
        }
        let jobs = self.clone();
        let thread = std::thread::Builder::new()
            .name("form-compiler".into())
            .stack_size(STACK_BYTES)
            .spawn(move || jobs.run(&work));
        match thread {
            Ok(_) => state.threads += 1,
            Err(_) if state.threads > 0 => {}
            Err(_) => {
                state.queue.retain(|job| job.key != key);
                let callers = state.callers.remove(&key).unwrap_or_default();
                drop(state);
                let error = GrammarError::NotNow("no thread could be started to compile the form");
                callers
                    .into_iter()
                    .for_each(|then| then(Err(error.clone())));
            }
        }
    }

    /// Length of the queue from which on a caller is refused: all of it for a namespace that has none of its forms in
    /// it, and a quarter of it for one that has.
    fn share(&self, state: &State, namespace: NamespaceId) -> usize {
        let own = state
            .queue
            .iter()
            .filter(|job| job.key.namespace == namespace);
        match own.count() < self.waiting_max.div_ceil(4) {
            true => self.waiting_max,
            false => 0,
        }
    }

    /// Compiles forms until there have been none for a while. This is the body of a thread.
    fn run(&self, work: &impl Fn(&Job) -> Outcome) {
        let mut state = self.state.lock();
        loop {
            let Some(job) = state.queue.pop_front() else {
                state.idle += 1;
                let waited = self.wake.wait_for(&mut state, IDLE);
                state.idle -= 1;
                if waited.timed_out() && state.queue.is_empty() {
                    break;
                }
                continue;
            };
            drop(state);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&job)))
                .unwrap_or_else(|_| Err(GrammarError::refused("the form cannot be compiled")));
            state = self.state.lock();
            let callers = state.callers.remove(&job.key).unwrap_or_default();
            drop(state);
            callers.into_iter().for_each(|then| then(outcome.clone()));
            state = self.state.lock();
        }
        state.threads -= 1;
    }
}
