//! The routes of other servers: from the head of a request to the stream of the answer.

use std::sync::Arc;
use std::time::Instant;

use actix_web::http::StatusCode;
use actix_web::http::header::CONTENT_TYPE;
use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use refrain_accounts::tenants::Caller;
use refrain_accounts::tenants::file::KeyEndpoint;
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::RequestClass;
use refrain_service_kit::http::{AccessNote, pass_answer_heads};

use crate::http::state::{GatewayState, finish};
use crate::models::unknown_model;
use crate::passthrough::{PassedAnswer, PassedRequest, model_of};
use crate::request::RequestReader;
use crate::surfaces::Surface;

/// Bytes of a JSON body for each token that is reserved in limits. The server tells the true number only later.
const BYTES_A_TOKEN: usize = 4;

/// Passes a request on and answers it.
pub(crate) async fn pass(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    let received = Instant::now();
    let gateway = gateway.into_inner();
    let pass = async |caller: &Caller| gateway.pass(caller, &request, payload, received).await;
    let passed = gateway.for_caller(&request, KeyEndpoint::Passthrough, pass);
    finish(Surface::Chat, received, passed.await)
}

impl GatewayState {
    async fn pass(
        self: &Arc<Self>,
        caller: &Caller,
        request: &HttpRequest,
        payload: web::Payload,
        received: Instant,
    ) -> Result<HttpResponse, ApiError> {
        let admitted = self.admit(caller, request, payload, received).await?;
        let (mut ticket, mut quota) = (admitted.ticket, admitted.quota);
        let kind = request.headers().get(CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok().map(str::to_owned));
        let read = move |_: &GatewayState, _: &RequestReader<'_>, body: Bytes| {
            Ok((kind.and_then(|kind| model_of(&kind, &body)), body))
        };
        let (model, body) = self
            .parse(&caller.tenant, admitted.body, received, read)
            .await?;
        if model.as_ref().is_some_and(|model| !caller.may_use(model)) {
            return Err(unknown_model());
        }
        let found = self
            .passthrough
            .find(&caller.tenant, request.path(), model.as_deref());
        let (server, counted) = found?;
        let note = AccessNote::of(request);
        note.note(|facts| facts.model = Some(counted.clone()));
        let class = RequestClass::Interactive;
        ticket.decide(class, 1)?;
        let estimate = (body.len() / BYTES_A_TOKEN) as u64;
        let reserved = quota
            .reserve(estimate, std::iter::once(0), received)
            .await?;
        let time = &self.relay.time;
        let call = self.passthrough.call(&server, request, body);
        let answered = tokio::time::timeout(time.left(class, received), call).await;
        let answered = answered.map_err(|_| time.error(class))??;
        let status = StatusCode::from_u16(answered.status().as_u16());
        let status = status.map_err(ApiError::internal)?;
        let mut response = HttpResponse::build(status);
        // Cookies of a server are not for callers.
        let ends_here = |name: &str| matches!(name, "set-cookie" | "date" | "server");
        pass_answer_heads(answered.headers(), &mut response, ends_here);
        let passed = PassedRequest {
            metrics: self.metrics.clone(),
            accounts: self.accounts.clone(),
            caller: caller.clone(),
            model: counted,
            status,
            received,
            reserved,
            note,
        };
        let until = tokio::time::Instant::now() + time.left(class, received);
        let answer = PassedAnswer::new(answered, passed, ticket, quota, until);
        Ok(response.streaming(answer.into_stream()))
    }
}
