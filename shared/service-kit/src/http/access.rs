//! The access log: a line for each request once its answer has ended, without any content.

use std::sync::Arc;
use std::time::Instant;

use actix_web::http::header::USER_AGENT;
use actix_web::{HttpMessage as _, HttpRequest};
use parking_lot::Mutex;
use refrain_protocol::ApiError;

/// The facts of a request that only its handler knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessFacts {
    /// The tenant, once its key was checked.
    pub tenant: Option<String>,
    /// The public name of the model.
    pub model: Option<String>,
    /// Tokens of the prompts and of the outputs.
    pub tokens: Option<(u64, u64)>,
    /// The names in the error that it got.
    pub error: Option<ErrorNames>,
}

/// The names in an error: its code, and the field at fault. They have no values of the caller's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorNames {
    /// The code.
    pub code: Option<String>,
    /// The field.
    pub param: Option<String>,
}

/// Longest name in a line, characters.
const NAME_CHARS_MAX: usize = 128;

impl ErrorNames {
    /// The names in an error, in the characters that names have.
    pub(super) fn of(error: &ApiError) -> Self {
        ErrorNames {
            code: error.code.as_deref().map(|code| cleaned(code, "")),
            param: error.param.as_deref().map(|param| cleaned(param, "[]")),
        }
    }
}

/// The program that sends a request: the first product of its `User-Agent`, such as `OpenAI/Python`.
pub(super) fn client_program(user_agent: &str) -> Option<String> {
    let product = user_agent.split_whitespace().next()?;
    Some(cleaned(product, "/+"))
}

/// A name of a bounded length, in which characters are replaced that are neither usual in names nor in `more`.
fn cleaned(name: &str, more: &str) -> String {
    let is_usual = |char: char| char.is_ascii_alphanumeric() || "_-.".contains(char);
    let shown = |char| match is_usual(char) || more.contains(char) {
        true => char,
        false => '?',
    };
    name.chars().take(NAME_CHARS_MAX).map(shown).collect()
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

    /// Notes the error of a request.
    pub fn failed(&self, error: &ApiError) {
        self.note(|facts| facts.error = Some(ErrorNames::of(error)));
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
    /// The program of the caller, if it names one.
    client: Option<String>,
    note: AccessNote,
    began: Instant,
    route: String,
    status: u16,
}

impl AccessLine {
    /// Begins the line of a request. Whether it is written is the log's business: to ask for that before would leave
    /// the answer to the next span of the thread, which could be lost by it.
    pub(super) fn new(
        request: &HttpRequest,
        identity: String,
        note: AccessNote,
        began: Instant,
    ) -> Self {
        let program = request.headers().get(USER_AGENT);
        let program = program.and_then(|value| value.to_str().ok());
        AccessLine {
            method: request.method().to_string(),
            identity,
            client: program.and_then(client_program),
            note,
            began,
            route: "unmatched".to_owned(),
            status: CLIENT_CLOSED,
        }
    }

    /// Takes the head of the answer, and the names in its error.
    pub(super) fn answered(&mut self, route: String, status: u16, error: Option<ErrorNames>) {
        self.route = route;
        self.status = status;
        if error.is_some() {
            self.note.note(|facts| facts.error = error);
        }
    }
}

impl Drop for AccessLine {
    fn drop(&mut self) {
        let AccessFacts {
            tenant,
            model,
            tokens,
            error,
        } = self.note.facts();
        let ErrorNames { code, param } = error.unwrap_or_default();
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
            error_code = code,
            error_param = param,
            client = self.client,
            request_id = self.identity,
            "request"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_names_of_a_bounded_length_and_nothing_that_breaks_a_log() {
        let program = |text| client_program(text).unwrap_or_default();
        assert_eq!(program("OpenAI/Python 1.99.1"), "OpenAI/Python");
        assert_eq!(program("codex_cli_rs/0.1 (Linux; x)"), "codex_cli_rs/0.1");
        assert_eq!(program("a\u{1b}[31m\"b\""), "a??31m?b?");
        assert_eq!(program(&"x".repeat(1_000)).len(), NAME_CHARS_MAX);
        assert_eq!(client_program("  "), None);
        let error = ApiError::invalid("tools[1].function.a b\n", "no").with_code("c\"d");
        let names = ErrorNames::of(&error);
        assert_eq!(names.param.as_deref(), Some("tools[1].function.a?b?"));
        assert_eq!(names.code.as_deref(), Some("c?d"));
    }
}
