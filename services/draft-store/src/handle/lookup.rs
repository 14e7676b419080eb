//! Drafts for workers: a few calls at once, none of which waits for another.

use std::time::Instant;

use refrain_protocol::lookup::{LookupReply, LookupRequest};
use refrain_protocol::{ApiError, ErrorKind};

use super::{DraftStoreHandle, overloaded};
use crate::metrics::Limit;

impl DraftStoreHandle {
    pub(super) async fn look_up(&self, request: LookupRequest) -> Result<LookupReply, ApiError> {
        let _running = self.enter()?;
        let inner = &*self.inner;
        let namespace = inner.mesh.verify(&request.namespace)?;
        let most = inner.config.lookup_contexts_max;
        if request.contexts.len() > most {
            let message = format!("more than {most} contexts in one call");
            let error = ApiError::new(ErrorKind::TooLarge, message);
            return Err(self.reject(Limit::LookupContexts, error));
        }
        let permits = inner.lookup_permits.clone();
        let Ok(permit) = permits.try_acquire_owned() else {
            let error = overloaded("too many look-ups at once", Limit::Lookups);
            return Err(self.reject(Limit::Lookups, error));
        };
        inner.metrics.lookups_running.inc();
        let (lookups, shared) = (inner.lookups.clone(), inner.shared.clone());
        let metrics = inner.metrics.clone();
        let run = tokio::task::spawn_blocking(move || {
            let started = Instant::now();
            let reply = lookups.run(&shared, namespace, &request);
            metrics
                .lookup_seconds
                .observe(started.elapsed().as_secs_f64());
            metrics.lookups_running.dec();
            drop(permit);
            reply
        });
        let reply = run.await.map_err(ApiError::internal)??;
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
