//! Keeps strangers out of internal routes.

use std::future::{Ready, ready};

use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{Service, ServiceRequest, ServiceResponse, Transform, forward_ready};
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::{Error, ResponseError};
use futures_util::future::{Either, FutureExt, Map};

use super::HttpError;
use crate::clocks::CLOCK_HEADER;
use crate::mesh::MeshAuth;

/// A middleware that lets calls with the mesh's secret through and answers all others with 401.
///
/// It holds what it checks with. (A check that is looked up among the app's data is one forgotten line away
/// from checking nothing.) It runs before any extractor, so that nobody else can make a service read or
/// parse a body.
///
/// ```
/// # use actix_web::web;
/// # use refrain_service_kit::{http::mesh_only, mesh::MeshAuth};
/// fn routes(app: &mut web::ServiceConfig, auth: &MeshAuth) {
///     app.service(
///         web::scope("/internal/v1")
///             .wrap(mesh_only(auth.clone()))
///             .route("/ping", web::get().to(async || "pong")),
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

/// What [`MeshOnly`] makes of the routes behind it.
pub struct MeshOnlyService<S> {
    auth: MeshAuth,
    inner: S,
}

impl<S> MeshOnlyService<S> {
    /// What the answer to a call says of the time.
    fn told(&self, request: &ServiceRequest) -> Option<HeaderValue> {
        let said = request.headers().get(CLOCK_HEADER)?.to_str().ok()?;
        let from = request.peer_addr().map(|addr| addr.ip());
        let answer = self.auth.clocks().heard(said, from)?;
        HeaderValue::from_str(&answer).ok()
    }
}

type Outcome<B> = Result<ServiceResponse<B>, Error>;
/// Takes no memory for the calls that tell nothing of a clock, which is most of them.
type Wrap<B> = Box<dyn FnOnce(Outcome<B>) -> Outcome<EitherBody<B>>>;

impl<S, B> Service<ServiceRequest> for MeshOnlyService<S>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
    B: MessageBody,
{
    type Response = ServiceResponse<EitherBody<B>>;
    type Error = Error;
    type Future = Either<Map<S::Future, Wrap<B>>, Ready<Outcome<EitherBody<B>>>>;

    forward_ready!(inner);

    fn call(&self, request: ServiceRequest) -> Self::Future {
        match self.auth.check(request.request()) {
            Ok(()) => {
                let wrap: Wrap<B> = match self.told(&request) {
                    None => Box::new(|outcome| outcome.map(ServiceResponse::map_into_left_body)),
                    Some(told) => Box::new(|outcome| {
                        outcome.map(|mut response| {
                            let name = HeaderName::from_static(CLOCK_HEADER);
                            response.headers_mut().insert(name, told);
                            response.map_into_left_body()
                        })
                    }),
                };
                Either::Left(self.inner.call(request).map(wrap))
            }
            // As a response and not as an error, so that the listener counts it like any other.
            Err(error) => {
                let response = HttpError(error).error_response().map_into_right_body();
                Either::Right(ready(Ok(request.into_response(response))))
            }
        }
    }
}
