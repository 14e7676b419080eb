//! Keeps web pages out: the listener asks for no key, and a page in a browser of this machine could call it.

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::ORIGIN;
use actix_web::middleware::Next;
use actix_web::{Error, ResponseError as _};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::HttpError;

/// Refuses a call that a browser made for a page, and passes on any other. Browsers name the origin of the page with
/// every call that can change something.
pub(super) async fn refuse_pages<B: MessageBody + 'static>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    if request.headers().contains_key(ORIGIN) {
        let message =
            "web pages may not call the listener for trainers; call it without an Origin header";
        let error = ApiError::new(ErrorKind::Forbidden, message).with_code("origin_refused");
        let refused = HttpError(error).error_response().map_into_right_body();
        return Ok(request.into_response(refused));
    }
    Ok(next.call(request).await?.map_into_left_body())
}
