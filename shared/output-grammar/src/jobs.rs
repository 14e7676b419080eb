//! The forms that are compiled or wait for it: each form once, however many wait for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::TenantId;
use refrain_protocol::engine::OutputForm;

use crate::GrammarError;
use crate::cache_key::CacheKey;
use crate::compiled::Outcome;
use crate::threads::FormThreads;

/// A form that nobody waits for is compiled only if somebody asked for it within this time. Callers that poll come
/// again within a second, so whoever does not has left.
const POLLED_WITHIN: Duration = Duration::from_secs(3);

/// Called with the outcome, on the thread that compiled.
pub(crate) type Then = Box<dyn FnOnce(Outcome) + Send>;

/// A form to compile, and the tenant whose form it is.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) tenant: TenantId,
    pub(crate) key: CacheKey,
    pub(crate) form: OutputForm,
}

/// The forms that are compiled or wait for it.
pub(crate) struct Jobs {
    threads: Arc<FormThreads>,
    waiting_max: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    forms: HashMap<CacheKey, Waiting>,
    /// Callers that found the queue full.
    refused: u64,
}

/// A form whose outcome is not known yet.
struct Waiting {
    tenant: TenantId,
    has_begun: bool,
    callers: Vec<Then>,
    /// The last time that somebody asked for it.
    asked: Instant,
}

impl Waiting {
    fn is_wanted(&self, now: Instant) -> bool {
        !self.callers.is_empty() || now.saturating_duration_since(self.asked) <= POLLED_WITHIN
    }
}

impl Jobs {
    pub(crate) fn new(threads: Arc<FormThreads>, waiting_max: usize) -> Self {
        Jobs {
            threads,
            waiting_max: waiting_max.max(1),
            state: Mutex::default(),
        }
    }

    /// Number of forms whose outcome is not known yet.
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().forms.len()
    }

    /// Number of callers so far that were refused because the queue was full.
    pub(crate) fn refused(&self) -> u64 {
        self.state.lock().refused
    }

    /// Compiles a form, and calls `then` with the outcome. Without `then` the caller asks again, and the form is
    /// dropped if nobody does. `known` is asked once more, because the form may just have been compiled. `work`
    /// compiles and keeps the outcome.
    pub(crate) fn start(
        self: &Arc<Self>,
        job: Job,
        then: Option<Then>,
        now: Instant,
        known: impl FnOnce() -> Option<Outcome>,
        work: impl FnOnce(&Job) -> Outcome + Send + 'static,
    ) {
        let mut state = self.state.lock();
        if let Some(waiting) = state.forms.get_mut(&job.key) {
            waiting.asked = now;
            waiting.callers.extend(then);
            return;
        }
        if let Some(outcome) = known() {
            drop(state);
            return then.into_iter().for_each(|then| then(outcome.clone()));
        }
        if self.is_full(&state, job.tenant) {
            state.refused += 1;
            drop(state);
            let error = GrammarError::NotNow("too many forms wait to be compiled");
            return then.into_iter().for_each(|then| then(Err(error.clone())));
        }
        let (key, tenant) = (job.key, job.tenant);
        let waiting = Waiting {
            tenant,
            has_begun: false,
            callers: then.into_iter().collect(),
            asked: now,
        };
        state.forms.insert(key, waiting);
        drop(state);
        let jobs = self.clone();
        let task = Box::new(move || jobs.run(&job, work));
        if self.threads.start(tenant, task).is_err() {
            let error = GrammarError::NotNow("no thread could be started to compile the form");
            self.end(&key, Err(error));
        }
    }

    /// Whether a tenant's form finds no room. A tenant may have a quarter of it.
    fn is_full(&self, state: &State, tenant: TenantId) -> bool {
        let waits = |waiting: &&Waiting| !waiting.has_begun;
        let all = state.forms.values().filter(waits).count();
        let own = state.forms.values().filter(waits);
        let own = own.filter(|waiting| waiting.tenant == tenant).count();
        all >= self.waiting_max || own >= self.waiting_max.div_ceil(4)
    }

    /// Compiles a form whose turn has come, unless nobody wants it any longer.
    fn run(&self, job: &Job, work: impl FnOnce(&Job) -> Outcome) {
        let mut state = self.state.lock();
        let waiting = state.forms.get_mut(&job.key);
        let is_wanted = waiting.is_some_and(|waiting| {
            waiting.has_begun = true;
            waiting.is_wanted(Instant::now())
        });
        drop(state);
        let outcome = match is_wanted {
            true => std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(job)))
                .unwrap_or_else(|_| Err(GrammarError::refused("the form cannot be compiled"))),
            false => Err(GrammarError::NotNow("nobody asked for the form any longer")),
        };
        self.end(&job.key, outcome);
    }

    fn end(&self, key: &CacheKey, outcome: Outcome) {
        let ended = self.state.lock().forms.remove(key);
        let callers = ended.map(|waiting| waiting.callers).unwrap_or_default();
        callers.into_iter().for_each(|then| then(outcome.clone()));
    }
}
