//! `POST /admin/try`: a chat that an operator sends from the console with a tenant's key.
//!
//! The console may call only its own listener, and clients' listener may be elsewhere. So this one takes the chat.
//! Everything else is as at `/v1/chat/completions`: the key, its limits, and what the answer may tell.

use std::sync::Arc;

use actix_web::body::MessageBody;
use actix_web::dev::{Service as _, ServiceRequest};
use actix_web::dev::{ServiceFactory, ServiceResponse};
use actix_web::http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use actix_web::{HttpRequest, HttpResponse, Resource, web};
use futures_util::future::LocalBoxFuture;

/// Carries out the request of a chat as clients' listener does. Cheap to clone.
pub type TrialChat =
    Arc<dyn Fn(HttpRequest, web::Payload) -> LocalBoxFuture<'static, HttpResponse> + Send + Sync>;

/// The header of the tenant's key. `Authorization` has the operator's token.
const KEY_HEADER: HeaderName = HeaderName::from_static("x-refrain-key");

/// `/admin/try`, behind the guard of operators.
pub(super) fn chat(
    trial: TrialChat,
) -> Resource<
    impl ServiceFactory<
        ServiceRequest,
        Config = (),
        Response = ServiceResponse<impl MessageBody>,
        Error = actix_web::Error,
        InitError = (),
    >,
> {
    web::resource("/try")
        .route(web::post().to(move |request, payload| trial(request, payload)))
        .wrap_fn(|mut request, service| {
            use_key_of_tenant(&mut request);
            service.call(request)
        })
}

/// Puts the tenant's key in the place of the operator's token, which has been checked by now.
fn use_key_of_tenant(request: &mut ServiceRequest) {
    let key = request.headers_mut().remove(KEY_HEADER).next();
    let bearer = key.and_then(|key| {
        let bearer = [b"Bearer ", key.as_bytes()].concat();
        HeaderValue::from_bytes(&bearer).ok()
    });
    let headers = request.headers_mut();
    match bearer {
        Some(bearer) => headers.insert(AUTHORIZATION, bearer),
        None => headers.remove(AUTHORIZATION),
    };
}
