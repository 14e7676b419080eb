//! The state that all handlers share, and the steps that all requests with a body have.

use std::sync::Arc;
use std::time::Instant;

use actix_web::body::BoxBody;
use actix_web::http::ConnectionType;
use actix_web::http::header::{AUTHORIZATION, CONTENT_LENGTH, HeaderName, HeaderValue};
use actix_web::{HttpRequest, HttpResponse, ResponseError, web};
use bytes::Bytes;
use refrain_accounts::tenants::file::KeyEndpoint;
use refrain_accounts::tenants::{Caller, QuotaTicket};
use refrain_accounts::{Accounts, NONE};
use refrain_protocol::error::code;
use refrain_protocol::scheduling::RequestClass;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock::{self, millis};
use refrain_service_kit::http::{AccessNote, ContentEncoding, HttpError, Readiness};

use crate::config::GatewayTuning;
use crate::intake::{
    Admission, AdmissionTicket, BodyReader, FormCheck, TokenizingLimiter, TokenizingThreads,
    UnknownFields,
};
use crate::metrics::GatewayMetrics;
use crate::models::Models;
use crate::passthrough::Passthrough;
use crate::relay::RelayContext;
use crate::request::{ContextWords, RequestReader};
use crate::surfaces::{ResponseStore, Surface};

/// The state that all handlers share.
pub(crate) struct GatewayState {
    pub(crate) accounts: Arc<Accounts>,
    pub(crate) models: Arc<Models>,
    pub(crate) admission: Admission,
    pub(crate) tokenizing: TokenizingLimiter,
    pub(crate) forms: FormCheck,
    pub(crate) tokenizing_threads: TokenizingThreads,
    pub(crate) relay: Arc<RelayContext>,
    pub(crate) metrics: Arc<GatewayMetrics>,
    pub(crate) bodies: BodyReader,
    pub(crate) unknown_fields: UnknownFields,
    pub(crate) tuning: GatewayTuning,
    pub(crate) readiness: Readiness,
    pub(crate) stored: Arc<ResponseStore>,
    pub(crate) passthrough: Passthrough,
}

/// The body of a request that was admitted.
pub(crate) struct AdmittedBody {
    pub(crate) body: Bytes,
    pub(crate) ticket: AdmissionTicket,
    pub(crate) quota: QuotaTicket,
}

/// Bodies of this size and more are parsed and tokenized on a separate thread. To encode a megabyte takes long enough
/// to delay the other requests of an HTTP thread.
const SEPARATE_THREAD_BYTES: usize = 32 << 10;

/// Time after which a client may retry an unavailable service, if the error tells no other.
const RETRY_AFTER_MS: u64 = 1_000;

/// The head in which Anthropic's clients send the key.
const X_API_KEY: &str = "x-api-key";

/// The length of the body that the head announces.
pub fn announced_bytes(request: &HttpRequest) -> Option<u64> {
    let length = request.headers().get(CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

/// Turns the outcome of a request into its response.
pub(crate) fn finish(
    surface: Surface,
    received: Instant,
    outcome: Result<HttpResponse, ApiError>,
) -> HttpResponse {
    let mut response = outcome.unwrap_or_else(|mut error| {
        if error.kind == ErrorKind::Unavailable {
            // It may pass, whichever service is unavailable.
            error.retry_after_ms.get_or_insert(RETRY_AFTER_MS);
        }
        // The rest of such a body is not read.
        let is_unread = matches!(error.kind, ErrorKind::RequestTimeout | ErrorKind::TooLarge);
        let body = surface.error_body(&error);
        let mut response = HttpError(error).error_response();
        if let Some(body) = body {
            response = response.map_body(|_, _| BoxBody::new(body));
        }
        if is_unread {
            response
                .head_mut()
                .set_connection_type(ConnectionType::Close);
        }
        response
    });
    response.headers_mut().insert(
        HeaderName::from_static("openai-processing-ms"),
        HeaderValue::from(millis(received.elapsed())),
    );
    response
}

impl GatewayState {
    /// The caller of a request, by either header that clients send keys in.
    ///
    /// # Errors
    /// As [`Accounts::caller`].
    pub(super) async fn caller(&self, request: &HttpRequest) -> Result<Caller, ApiError> {
        let headers = request.headers();
        // A header that is not text matches no key.
        let text = |value: &HeaderValue| value.to_str().unwrap_or("Bearer \u{fffd}").to_owned();
        let now = clock::unix_s().cast_signed();
        let authorization = headers.get(AUTHORIZATION).map(text);
        let key = headers.get(X_API_KEY).map(text);
        let caller = self
            .accounts
            .caller(authorization.as_deref(), key.as_deref(), now)
            .await?;
        AccessNote::of(request).note(|facts| facts.tenant = Some(caller.tenant.to_string()));
        Ok(caller)
    }

    /// The caller of a request to an endpoint.
    ///
    /// # Errors
    /// As [`Accounts::caller`], and `Forbidden` if the key may not call the endpoint.
    pub(crate) async fn caller_at(
        &self,
        request: &HttpRequest,
        endpoint: KeyEndpoint,
    ) -> Result<Caller, ApiError> {
        let caller = self.caller(request).await?;
        caller.check_endpoint(endpoint)?;
        Ok(caller)
    }

    /// Does work for the caller of a request to an endpoint, and counts a request that is refused.
    ///
    /// # Errors
    /// Those of the work, and of [`GatewayState::caller_at`].
    pub(super) async fn for_caller<T>(
        &self,
        request: &HttpRequest,
        endpoint: KeyEndpoint,
        work: impl AsyncFnOnce(&Caller) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let caller = self.caller_at(request, endpoint).await;
        let caller = caller.inspect_err(|error| self.count_refused(NONE, error))?;
        let done = work(&caller).await;
        done.inspect_err(|error| self.count_refused(&caller.tenant, error))
    }

    /// The objects by which the bodies of a tenant are read.
    fn reader<'a>(&'a self, tenant: &'a str) -> RequestReader<'a> {
        RequestReader {
            tenant,
            models: &self.models,
            limits: &self.tuning,
            grammars: None,
            context_words: ContextWords::OpenAi,
            default_model: None,
            known_turns: None,
        }
    }

    /// Counts a request that was refused before it could be carried out.
    pub(crate) fn count_refused(&self, tenant: &str, error: &ApiError) {
        let status = error.kind.status().to_string();
        self.metrics.ended(tenant, NONE, &status);
        if error.has_code(code::CONTEXT_LENGTH_EXCEEDED) {
            self.metrics.rejected(tenant, "context");
        }
    }

    /// Reads the body of a caller's request and admits it.
    pub(crate) async fn admit(
        &self,
        caller: &Caller,
        request: &HttpRequest,
        payload: web::Payload,
        received: Instant,
    ) -> Result<AdmittedBody, ApiError> {
        let tenant = &caller.tenant;
        // A full gateway refuses before it reads the body. The request is admitted only when there is something to
        // do.
        self.admission.check(tenant)?;
        let quota = self.accounts.begin(caller, received).await?;
        let encoding = ContentEncoding::of(request.headers())?;
        let body = self
            .bodies
            .read(
                tenant,
                announced_bytes(request),
                encoding,
                payload,
                received,
            )
            .await?;
        let ticket = self.admission.admit(tenant)?;
        Ok(AdmittedBody {
            body,
            ticket,
            quota,
        })
    }

    /// Parses a body with `read`. A large body waits for its turn.
    pub(crate) async fn parse<T: Send + 'static>(
        self: &Arc<Self>,
        tenant: &str,
        body: Bytes,
        received: Instant,
        read: impl FnOnce(&GatewayState, &RequestReader<'_>, Bytes) -> Result<T, ApiError>
        + Send
        + 'static,
    ) -> Result<T, ApiError> {
        let time = &self.relay.time;
        if body.len() < SEPARATE_THREAD_BYTES {
            return read(self, &self.reader(tenant), body);
        }
        let turn = self.tokenizing.enter(tenant, body.len());
        // Its class is not known yet.
        let class = RequestClass::Interactive;
        let entered = tokio::time::timeout(time.left(class, received), turn).await;
        let permit = entered.map_err(|_| time.error(class))??;
        let (gateway, tenant) = (self.clone(), tenant.to_owned());
        // The work goes on if the client leaves meanwhile, so the permit belongs to it.
        let parsed = self.tokenizing_threads.run(move || {
            let parsed = read(&gateway, &gateway.reader(&tenant), body);
            drop(permit);
            parsed
        });
        parsed.await?
    }
}
