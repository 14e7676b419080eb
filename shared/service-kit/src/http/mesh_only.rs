//! Protects internal routes by the mesh secret.

use std::future::{Ready, ready};

use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{Service, ServiceRequest, ServiceResponse, Transform, forward_ready};
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::{Error, ResponseError};
use futures_util::future::{Either, FutureExt, Map};

use super::HttpError;
use crate::clocks::CLOCK_HEADER;
use crate::mesh::MeshAuth;

/// Creates a middleware that passes calls with the mesh secret and answers all others with 401.
///
/// The middleware owns the secret. If it looked the secret up in the data of the app, one forgotten line would
/// disable the check. It runs before all extractors, so a caller without the secret cannot make a service read or
/// parse a body.
///
/// ```
/// # use actix_web::web;
/// # use refrain_service_kit::{http::{get, mesh_only}, mesh::MeshAuth};
/// fn routes(app: &mut web::ServiceConfig, auth: &MeshAuth) {
///     app.service(
///         web::scope("/internal/v1")
///             .wrap(mesh_only(auth.clone()))
///             .service(get("/ping", async || "pong")),
///     );
/// }
/// ```
pub fn mesh_only(auth: MeshAuth) -> MeshOnly {
    MeshOnly { auth }
}

/// See [`mesh_only`].
#[derive(Clone)]
pub struct MeshOnly {
    auth: MeshAuth,
}

impl<S, B> Transform<S, ServiceRequest> for MeshOnly
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
    B: MessageBody,
{
    type Response = ServiceResponse<EitherBody<B>>;
    type Error = Error;
    type Transform = MeshOnlyService<S>;
    type InitError = ();
    type Future = Ready<Result<Self::Transform, ()>>;

    fn new_transform(&self, inner: S) -> Self::Future {
        ready(Ok(MeshOnlyService {
            auth: self.auth.clone(),
            inner,
        }))
    }
}

/// The routes behind a [`MeshOnly`].
pub struct MeshOnlyService<S> {
    auth: MeshAuth,
    inner: S,
}

impl<S> MeshOnlyService<S> {
    /// Reads the caller's clock. Returns the header of the response, if it has to carry one.
    fn clock_header(&self, request: &ServiceRequest) -> Option<HeaderValue> {
        let header = request.headers().get(CLOCK_HEADER)?.to_str().ok()?;
        let from = request.peer_addr().map(|addr| addr.ip());
        let answer = self.auth.clocks().read_request_header(header, from)?;
        HeaderValue::from_str(&answer).ok()
    }
}

type ServiceResult<B> = Result<ServiceResponse<B>, Error>;
/// Adds the header to a response. The closure allocates nothing for calls without a clock, which are most of them.
type Wrap<B> = Box<dyn FnOnce(ServiceResult<B>) -> ServiceResult<EitherBody<B>>>;

impl<S, B> Service<ServiceRequest> for MeshOnlyService<S>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
    B: MessageBody,
{
    type Response = ServiceResponse<EitherBody<B>>;
    type Error = Error;
    type Future = Either<Map<S::Future, Wrap<B>>, Ready<ServiceResult<EitherBody<B>>>>;

    forward_ready!(inner);

    fn call(&self, request: ServiceRequest) -> Self::Future {
        match self.auth.check(request.request()) {
            Ok(()) => {
                let wrap: Wrap<B> = match self.clock_header(&request) {
                    None => Box::new(|outcome| outcome.map(ServiceResponse::map_into_left_body)),
                    Some(value) => Box::new(|outcome| {
                        outcome.map(|mut response| {
                            let name = HeaderName::from_static(CLOCK_HEADER);
                            response.headers_mut().insert(name, value);
                            response.map_into_left_body()
                        })
                    }),
                };
                Either::Left(self.inner.call(request).map(wrap))
            }
            // This is a response and not an error, so that the listener counts it like any other.
            Err(error) => {
                let response = HttpError(error).error_response().map_into_right_body();
                Either::Right(ready(Ok(request.into_response(response))))
            }
        }
    }
}
