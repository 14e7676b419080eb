//! Carries administrative acts out, with lines in the audit log before and after.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use actix_web::HttpRequest;
use actix_web::http::header::{ETAG, HeaderValue, IF_MATCH};
use actix_web::web::Data;
use actix_web::{HttpResponse, HttpResponseBuilder};
use refrain_accounts::tenants::act::TenantAct;
use refrain_accounts::tenants::key::NewKey;
use refrain_accounts::tenants::{VersionedTenant, audit};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock;
use serde::Serialize;
use serde_json::{Map, Value};

use super::operators::Operator;
use super::state::AdminState;

/// A line of the audit log.
#[derive(Serialize)]
struct Line<'a> {
    /// The same in both lines of an act.
    number: u64,
    operator: &'a str,
    act: &'a str,
    /// `begun` before the act. After it `done`, or the error.
    outcome: &'a str,
}

/// The result of an act.
pub(super) struct Done {
    /// The tenant as it is now; `None` if it was removed.
    pub(super) tenant: Option<VersionedTenant>,
    /// The key that was made.
    pub(super) key: Option<NewKey>,
}

/// Numbers the acts of this process. It begins at the time of the start, so that no number comes twice in a log.
static NUMBER: AtomicU64 = AtomicU64::new(0);

fn next_number() -> u64 {
    let start = clock::unix_ms();
    let number = NUMBER.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| {
        Some(start.max(last + 1))
    });
    number.map_or(start, |last| start.max(last + 1))
}

/// Carries an act out for an operator, to its end even if the caller hangs up. With `expected`, the tenant must have
/// this version before.
///
/// # Errors
/// `Unavailable` if the audit log cannot be written; nothing has happened then. Otherwise as
/// [`StoreTenants::carry_out`](refrain_accounts::tenants::StoreTenants::carry_out).
pub(super) async fn carry_out(
    state: Data<AdminState>,
    operator: Operator,
    act: TenantAct,
    expected: Option<u64>,
) -> Result<Done, ApiError> {
    let store = state.parts.tenants.writable()?.clone();
    let mut act = act;
    let key = act.make_key()?;
    let what = act.description();
    let change = async move {
        let now = clock::unix_s().cast_signed();
        store.carry_out(&act, expected, now).await
    };
    let tenant = audited(state, operator, what, change).await?;
    Ok(Done { tenant, key })
}

/// Carries an act out for an operator, with lines in the audit log before and after, to its end even if the caller
/// hangs up. `what` describes it without any text of a prompt or an output.
///
/// # Errors
/// `Unavailable` if the audit log cannot be written; nothing has happened then. Otherwise as the act.
pub(super) async fn audited<T, F>(
    state: Data<AdminState>,
    operator: Operator,
    what: String,
    act: F,
) -> Result<T, ApiError>
where
    T: Send + 'static,
    F: Future<Output = Result<T, ApiError>> + Send + 'static,
{
    let state = state.into_inner();
    let act = tokio::spawn(async move { state.run(&operator, &what, act).await });
    act.await.map_err(ApiError::internal)?
}

impl AdminState {
    async fn run<T>(
        &self,
        operator: &Operator,
        what: &str,
        act: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let number = next_number();
        self.log(number, operator, what, "begun").await?;
        let outcome = act.await;
        let text = match &outcome {
            Ok(_) => "done".to_owned(),
            Err(error) => error.message.clone(),
        };
        let is_done = outcome.is_ok();
        tracing::info!(
            operator = operator.name,
            act = what,
            is_done,
            "an administrative act"
        );
        let label = if is_done { "done" } else { "refused" };
        let acts = &self.families.admin_acts;
        acts.with_label_values(&[label]).inc();
        // The act stands, whether or not its outcome can be logged.
        let _ = self.log(number, operator, what, &text).await;
        outcome
    }

    async fn log(
        &self,
        number: u64,
        operator: &Operator,
        act: &str,
        outcome: &str,
    ) -> Result<(), ApiError> {
        let (path, operator) = (self.parts.audit_file.clone(), operator.name.clone());
        let (act, outcome) = (act.to_owned(), outcome.to_owned());
        let write = move || {
            let line = Line {
                number,
                operator: &operator,
                act: &act,
                outcome: &outcome,
            };
            audit::append(path.as_deref().unwrap_or(Path::new("")), &line)
        };
        let written = tokio::task::spawn_blocking(write).await;
        let written = written.map_err(ApiError::internal)?;
        written.map_err(|error| {
            tracing::error!(error = format!("{error:#}"), "the audit log cannot be written");
            let message = "the audit log (gateway.audit_file) cannot be written, and no act goes without a line there";
            ApiError::new(ErrorKind::Unavailable, message).with_code("audit_unavailable")
        })
    }
}

/// The version that the caller has read, from `If-Match`.
///
/// # Errors
/// The header is no version.
pub(super) fn expected_version(request: &HttpRequest) -> Result<Option<u64>, ApiError> {
    let Some(header) = request.headers().get(IF_MATCH) else {
        return Ok(None);
    };
    let text = header.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let version = text.trim_matches('"').parse();
    version.map(Some).map_err(|_| {
        let message = "must be the ETag of the tenant, such as \"1800000000000\"";
        ApiError::invalid("If-Match", message)
    })
}

/// A tenant in an answer: its fields, its keys without their hashes, and its version.
pub(super) fn shown(tenant: &VersionedTenant) -> Result<Value, ApiError> {
    let mut value = serde_json::to_value(&tenant.entry).map_err(ApiError::internal)?;
    if let Some(keys) = value.get_mut("keys").and_then(Value::as_array_mut) {
        for key in keys {
            key.as_object_mut().map(without_hash);
        }
    }
    if let Some(version) = tenant.version {
        value["version"] = version.into();
    }
    Ok(value)
}

pub(super) fn without_hash(key: &mut Map<String, Value>) {
    key.shift_remove("sha256");
}

/// An answer that has the version of the tenant in `ETag`.
pub(super) fn answer(
    mut response: HttpResponseBuilder,
    tenant: &VersionedTenant,
    body: &Value,
) -> HttpResponse {
    if let Some(version) = tenant.version
        && let Ok(tag) = HeaderValue::from_str(&format!("\"{version}\""))
    {
        response.insert_header((ETAG, tag));
    }
    response.json(body)
}
