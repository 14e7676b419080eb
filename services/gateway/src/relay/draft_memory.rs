//! The gateway's side of the draft store: it registers groups, and asks for the lengths of outputs to a prompt.
//!
//! Neither ever fails a request. A store that is away costs drafts of other workers' samples, and the estimate of a
//! length. The workers register their groups as well; the gateway does it because it knows a group whose samples all
//! wait.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest, PromptHash};
use refrain_protocol::{ApiError, NamespaceId};
use refrain_rpc::DraftStore;
use refrain_service_kit::clock::millis;
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, Semaphore};
use tracing::Instrument as _;

use crate::metrics::GatewayMetrics;
use crate::models::KnownNamespace;

/// Time that a group lives in the store after it was registered last: longer than its samples wait for a worker.
const GROUP_TTL: Duration = Duration::from_secs(3_600);

/// Age of a registration at which the next lease of the group renews it.
const RENEWED_AFTER: Duration = Duration::from_secs(1_200);

/// Registrations in flight. Further ones are left to the next lease of their group, or to the workers.
const REGISTRATIONS_MAX: usize = 64;

/// Groups and prompts that are remembered. A forgotten one costs a call.
const REMEMBERED_MAX: NonZeroUsize = NonZeroUsize::new(16_384).unwrap();

/// Longest wait for the lengths of earlier outputs. The request has not asked for a lease yet.
const LENGTHS_WAIT: Duration = Duration::from_millis(200);

/// Time for which an answer about a prompt serves all of its samples.
const LENGTHS_FRESH: Duration = Duration::from_secs(60);

/// The same where there was no output to the prompt: the next epoch of a training run may be short.
const NO_LENGTHS_FRESH: Duration = Duration::from_secs(2);

/// Time for which the store is not asked after it did not answer.
const ABSENCE: Duration = Duration::from_secs(5);

type GroupKey = (NamespaceId, String);

/// The lengths of the outputs to one prompt, which one of its samples asks for.
struct KnownLengths {
    since: Instant,
    lengths: Arc<OnceCell<OutputLengths>>,
}

/// The gateway's side of the draft store.
pub(crate) struct DraftMemory {
    store: Arc<dyn DraftStore>,
    metrics: Arc<GatewayMetrics>,
    tasks: Handle,
    /// When groups were registered last.
    registered: Arc<Mutex<LruCache<GroupKey, Instant>>>,
    registrations: Arc<Semaphore>,
    lengths: Mutex<LruCache<(NamespaceId, PromptHash), KnownLengths>>,
    away_until: Mutex<Option<Instant>>,
}

impl DraftMemory {
    /// Registrations are made on the runtime of `tasks`.
    pub(crate) fn new(
        store: Arc<dyn DraftStore>,
        metrics: Arc<GatewayMetrics>,
        tasks: Handle,
    ) -> Self {
        DraftMemory {
            store,
            metrics,
            tasks,
            registered: Arc::new(Mutex::new(LruCache::new(REMEMBERED_MAX))),
            registrations: Arc::new(Semaphore::new(REGISTRATIONS_MAX)),
            lengths: Mutex::new(LruCache::new(REMEMBERED_MAX)),
            away_until: Mutex::default(),
        }
    }

    /// Notes that a request of a group asks for a lease. The group is registered unless that was done not long ago.
    /// This does not wait.
    pub(crate) fn group_runs(&self, namespace: &KnownNamespace, group: &str) {
        let key: GroupKey = (namespace.id, group.to_owned());
        let now = Instant::now();
        let is_fresh = |since: &Instant| now.saturating_duration_since(*since) < RENEWED_AFTER;
        if self.registered.lock().get(&key).is_some_and(is_fresh) {
            return;
        }
        let Ok(permit) = self.registrations.clone().try_acquire_owned() else {
            let tenant = namespace.signed.namespace.tenant_name();
            self.metrics.rejected(tenant, "group_registrations");
            return;
        };
        self.registered.lock().put(key.clone(), now);
        let (store, registered) = (self.store.clone(), self.registered.clone());
        let request = RegisterGroupRequest {
            namespace: namespace.signed.clone(),
            group: key.1.clone(),
            ttl_ms: millis(GROUP_TTL),
        };
        let registrations = self.metrics.families.group_registrations.clone();
        let register = async move {
            let outcome = store.register_group(request).await;
            drop(permit);
            let label = if outcome.is_ok() { "done" } else { "failed" };
            registrations.with_label_values(&[label]).inc();
            if let Err(error) = outcome {
                tracing::debug!(%error, "a group could not be registered in the draft store");
                // The next lease tries again.
                registered.lock().pop(&key);
            }
        };
        let span = tracing::info_span!("register_group");
        self.tasks.spawn(register.instrument(span));
    }

    /// The length to expect of an output, from earlier outputs to the same prompt. `None`: there are none, or the
    /// store does not answer at once. All samples of a prompt ask once.
    pub(crate) async fn expected_tokens(
        &self,
        namespace: &KnownNamespace,
        prompt: PromptHash,
    ) -> Option<u32> {
        let known = self.known_lengths((namespace.id, prompt));
        let ask = async || self.ask(namespace, prompt).await;
        let lengths = known.get_or_try_init(ask).await.ok()?;
        (lengths.count > 0).then_some(lengths.median)
    }

    fn known_lengths(&self, key: (NamespaceId, PromptHash)) -> Arc<OnceCell<OutputLengths>> {
        let now = Instant::now();
        let mut all = self.lengths.lock();
        let is_fresh = |known: &&KnownLengths| {
            let is_none = known.lengths.get().is_some_and(|known| known.count == 0);
            let fresh = if is_none {
                NO_LENGTHS_FRESH
            } else {
                LENGTHS_FRESH
            };
            now.saturating_duration_since(known.since) < fresh
        };
        if let Some(known) = all.get(&key).filter(is_fresh) {
            return known.lengths.clone();
        }
        let lengths = Arc::new(OnceCell::new());
        let known = KnownLengths {
            since: now,
            lengths: lengths.clone(),
        };
        all.put(key, known);
        lengths
    }

    async fn ask(
        &self,
        namespace: &KnownNamespace,
        prompt: PromptHash,
    ) -> Result<OutputLengths, ApiError> {
        let is_away = self
            .away_until
            .lock()
            .is_some_and(|until| Instant::now() < until);
        if is_away {
            return Err(ApiError::internal("the draft store did not answer"));
        }
        let request = OutputLengthsRequest {
            namespace: namespace.signed.clone(),
            prompt,
        };
        let asked = self.store.output_lengths(request);
        let asked = asked.instrument(tracing::info_span!("output_lengths"));
        let asked = tokio::time::timeout(LENGTHS_WAIT, asked).await;
        let late = |_| Err(ApiError::internal("the draft store did not answer in time"));
        let lengths = asked.unwrap_or_else(late);
        let label = match &lengths {
            Ok(lengths) if lengths.count > 0 => "known",
            Ok(_) => "unknown",
            Err(_) => "failed",
        };
        let families = &self.metrics.families;
        families.length_estimates.with_label_values(&[label]).inc();
        if lengths.is_err() {
            *self.away_until.lock() = Some(Instant::now() + ABSENCE);
        }
        lengths
    }
}

#[cfg(test)]
mod tests;
