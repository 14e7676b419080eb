//! Look-ups: a few run at once, and none waits for another.

use std::time::Instant;

use prometheus::IntGauge;
use refrain_protocol::ApiError;
use refrain_protocol::lookup::{LookupReply, LookupRequest};
use tokio::sync::OwnedSemaphorePermit;

use crate::metrics::{Limit, StoreMetrics};
use crate::service::handle::DraftStoreHandle;
use crate::service::handle::checks::overloaded;

/// Most contexts of one call. Workers ask for 256 at most.
const LOOKUP_CONTEXTS_MAX: usize = 256;

impl DraftStoreHandle {
    pub(super) async fn look_up(&self, request: LookupRequest) -> Result<LookupReply, ApiError> {
        let _running = self.enter()?;
        let inner = &*self.inner;
        let namespace = inner.mesh.verify(&request.namespace)?;
        self.check_count(
            request.contexts.len(),
            LOOKUP_CONTEXTS_MAX,
            "contexts",
            Limit::LookupContexts,
        )?;
        let permits = inner.lookup_permits.clone();
        let Ok(permit) = permits.try_acquire_owned() else {
            let error = overloaded("too many look-ups run at once", Limit::Lookups);
            return Err(self.reject(Limit::Lookups, error));
        };
        let running = LookupInFlight::begin(&inner.metrics, permit);
        let (shared, views) = (inner.shared.clone(), inner.lookup_views.clone());
        let seconds = inner.metrics.lookup_seconds.clone();
        let run = tokio::task::spawn_blocking(move || {
            let _running = running;
            let started = Instant::now();
            let reply = views.look_up(&shared, namespace, &request);
            seconds.observe(started.elapsed().as_secs_f64());
            reply
        });
        let (reply, is_due) = run.await.map_err(ApiError::internal)??;
        if is_due {
            let (shared, views) = (inner.shared.clone(), inner.lookup_views.clone());
            tokio::task::spawn_blocking(move || views.refresh(&shared, namespace));
        }
        for draft in &reply.drafts {
            let result = if draft.is_some() { "found" } else { "nothing" };
            inner
                .metrics
                .lookup_contexts
                .with_label_values(&[result])
                .inc();
        }
        Ok(reply)
    }
}

/// A look-up in flight. It is counted until it ends, also if it panics or its caller is gone.
struct LookupInFlight {
    calls: IntGauge,
    _permit: OwnedSemaphorePermit,
}

impl LookupInFlight {
    fn begin(metrics: &StoreMetrics, permit: OwnedSemaphorePermit) -> Self {
        metrics.lookups_running.inc();
        LookupInFlight {
            calls: metrics.lookups_running.clone(),
            _permit: permit,
        }
    }
}

impl Drop for LookupInFlight {
    fn drop(&mut self) {
        self.calls.dec();
    }
}
