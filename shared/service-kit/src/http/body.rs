//! Request bodies: those that are not JSON, and the deadline of all.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use actix_web::dev::{Payload, ServiceRequest};
use actix_web::error::PayloadError;
use actix_web::http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use actix_web::{FromRequest, HttpMessage as _, HttpRequest, web};
use bytes::Bytes;
use futures_util::future::{FutureExt, LocalBoxFuture};
use futures_util::{Stream, StreamExt as _};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::time::Sleep;

use super::HttpError;

/// A whole body, at most as large as the listener allows. Unlike the `Bytes` extractor of actix, it refuses a larger
/// one with an error in OpenAI's shape.
#[derive(Clone, Debug)]
pub struct RawBody(pub Bytes);

/// The listener's limit on bodies, kept in the data of its app.
#[derive(Clone, Copy)]
pub(super) struct BodyBytesMax(pub(super) usize);

impl FromRequest for RawBody {
    type Error = HttpError;
    type Future = LocalBoxFuture<'static, Result<Self, HttpError>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let limit = request.app_data::<BodyBytesMax>().copied();
        let payload = web::Payload::from_request(request, payload);
        async move {
            let Some(BodyBytesMax(bytes_max)) = limit else {
                return Err(ApiError::internal("the listener has no limit on bodies").into());
            };
            let payload = payload.await.map_err(ApiError::internal)?;
            match payload.to_bytes_limited(bytes_max).await {
                Ok(Ok(body)) => Ok(RawBody(body)),
                Ok(Err(error)) if is_late(&error) => Err(late().into()),
                Ok(Err(error)) => Err(ApiError::new(
                    ErrorKind::InvalidRequest,
                    "the connection broke off before the body was complete",
                )
                .with_detail(error)
                .into()),
                Err(_) => Err(too_large(bytes_max).into()),
            }
        }
        .boxed_local()
    }
}

/// The time at which the body of a request has to have arrived. It holds for every route, whatever reads the body.
pub(super) struct BodyDeadline {
    has_passed: Rc<Cell<bool>>,
}

impl BodyDeadline {
    /// Sets the deadline of a request. `None` if the request has no body.
    pub(super) fn set(request: &mut ServiceRequest, until: Instant) -> Option<Self> {
        let headers = request.headers();
        if !headers.contains_key(CONTENT_LENGTH) && !headers.contains_key(TRANSFER_ENCODING) {
            return None;
        }
        let has_passed = Rc::new(Cell::new(false));
        let payload = TimedPayload {
            payload: request.take_payload(),
            late_at: Box::pin(tokio::time::sleep_until(until.into())),
            has_passed: has_passed.clone(),
        };
        request.set_payload(Payload::Stream {
            payload: payload.boxed_local(),
        });
        Some(BodyDeadline { has_passed })
    }

    /// Whether a part of the body was missing at that time, and somebody waited for it.
    pub(super) fn has_passed(&self) -> bool {
        self.has_passed.get()
    }
}

/// A body that breaks off with an error at its deadline.
struct TimedPayload {
    payload: Payload,
    late_at: Pin<Box<Sleep>>,
    has_passed: Rc<Cell<bool>>,
}

impl Stream for TimedPayload {
    type Item = Result<Bytes, PayloadError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Poll::Ready(piece) = Pin::new(&mut self.payload).poll_next(context) {
            return Poll::Ready(piece);
        }
        ready!(self.late_at.as_mut().poll(context));
        self.has_passed.set(true);
        Poll::Ready(Some(Err(PayloadError::Io(io::ErrorKind::TimedOut.into()))))
    }
}

/// Whether a body broke off at its deadline. Extractors pass the error of the payload on.
fn is_late(error: &actix_web::Error) -> bool {
    let payload = error.as_error::<PayloadError>();
    matches!(payload, Some(PayloadError::Io(error)) if error.kind() == io::ErrorKind::TimedOut)
}

pub(super) fn late() -> ApiError {
    let message = "the body did not arrive in time";
    ApiError::new(ErrorKind::RequestTimeout, message).with_code("body_timeout")
}

pub(super) fn too_large(bytes_max: usize) -> ApiError {
    ApiError::new(
        ErrorKind::TooLarge,
        format!("the body is larger than {bytes_max} bytes"),
    )
    .with_code(code::REQUEST_TOO_LARGE)
}
