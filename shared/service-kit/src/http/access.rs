//! The access log: a line for each request once its answer has ended, without any content.

use std::sync::Arc;
use std::time::Instant;

use actix_web::{HttpMessage as _, HttpRequest};
use parking_lot::Mutex;

/// The facts of a request that only its handler knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessFacts {
    /// The tenant, once its key was checked.
    pub tenant: Option<String>,
    /// The public name of the model.
    pub model: Option<String>,
    /// Tokens of the prompts and of the outputs.
    pub tokens: Option<(u64, u64)>,
}

/// The place where a handler notes the facts of its request, if anybody reads them. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct AccessNote(Option<Arc<Mutex<AccessFacts>>>);

impl AccessNote {
    /// A note that is read at the end of the request. The default is one that nobody reads.
    pub(super) fn read_at_end() -> Self {
        AccessNote(Some(Arc::default()))
    }

    /// The note of a request. Where no access is logged, it is a note that nobody reads.
    pub fn of(request: &HttpRequest) -> Self {
        let known = request.extensions().get::<AccessNote>().cloned();
        known.unwrap_or_default()
    }

    /// Notes facts.
    pub fn note(&self, change: impl FnOnce(&mut AccessFacts)) {
        if let Some(facts) = &self.0 {
            change(&mut facts.lock());
        }
    }

    fn facts(&self) -> AccessFacts {
        self.0
            .as_ref()
            .map_or_else(AccessFacts::default, |facts| facts.lock().clone())
    }
}

/// The target of the lines, by which the filter of the log names them.
const TARGET: &str = "access";

/// Routes that machines ask again and again. Their lines have the level `debug`.
const PROBES: [&str; 5] = ["/health", "/healthz", "/metrics", "/ping", "/readyz"];

/// The status of a request whose caller left before there was an answer.
const CLIENT_CLOSED: u16 = 499;

/// The line of one request. It is written when this is dropped, which is at the end of the body.
pub(super) struct AccessLine {
    method: String,
    identity: String,
    note: AccessNote,
    began: Instant,
    route: String,
    status: u16,
}

impl AccessLine {
    /// Whether the log takes such lines.
    pub(super) fn is_logged() -> bool {
        tracing::enabled!(target: TARGET, tracing::Level::INFO)
    }

    /// Begins the line of a request.
    pub(super) fn new(method: String, identity: String, note: AccessNote, began: Instant) -> Self {
        AccessLine {
            method,
            identity,
            note,
            began,
            route: "unmatched".to_owned(),
            status: CLIENT_CLOSED,
        }
    }

    /// Takes the head of the answer.
    pub(super) fn answered(&mut self, route: String, status: u16) {
        self.route = route;
        self.status = status;
    }
}

impl Drop for AccessLine {
    fn drop(&mut self) {
        let AccessFacts {
            tenant,
            model,
            tokens,
        } = self.note.facts();
        let (prompt_tokens, completion_tokens) = tokens.unzip();
        let duration_ms = self.began.elapsed().as_millis() as u64;
        let (method, route, status) = (&self.method, &self.route, self.status);
        if PROBES.contains(&route.as_str()) {
            tracing::debug!(target: TARGET, method, route, status, duration_ms, "probe");
            return;
        }
        tracing::info!(
            target: TARGET,
            method,
            route,
            status,
            duration_ms,
            tenant,
            model,
            prompt_tokens,
            completion_tokens,
            request_id = self.identity,
            "request"
        );
    }
}
