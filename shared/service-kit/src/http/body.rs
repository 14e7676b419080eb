//! Request bodies that are not JSON.

use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpRequest, web};
use bytes::Bytes;
use futures_util::future::{FutureExt, LocalBoxFuture};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

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

pub(super) fn too_large(bytes_max: usize) -> ApiError {
    ApiError::new(
        ErrorKind::TooLarge,
        format!("the body is larger than {bytes_max} bytes"),
    )
    .with_code(code::REQUEST_TOO_LARGE)
}
