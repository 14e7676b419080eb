//! Protects internal routes by the mesh secret, or by credentials of roles.

use actix_web::body::MessageBody;
use actix_web::dev::{Service, ServiceRequest, ServiceResponse, Transform};
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::middleware::{Next, from_fn};
use actix_web::{Error, ResponseError};

use super::HttpError;
use crate::clocks::CLOCK_HEADER;
use crate::mesh::{MeshAuth, MeshRole};

/// The paths of internal routes, and the roles that may call each. A path that is missing is for no role.
pub type RouteRoles = [(&'static str, &'static [MeshRole])];

/// Creates a middleware that passes calls with the mesh secret, or with a credential of a role that the route is for.
/// It answers all others with 401, and those of other roles with 403. Handlers learn the caller by `MeshCaller::of`.
///
/// The middleware owns the secret. If it looked the secret up in the data of the app, one forgotten line would
/// disable the check. It runs before all extractors, so a caller without the secret cannot make a service read or
/// parse a body.
///
/// ```
/// # use actix_web::web;
/// # use refrain_service_kit::{http::{get, mesh_only}, mesh::{MeshAuth, MeshRole}};
/// fn routes(app: &mut web::ServiceConfig, auth: &MeshAuth) {
///     app.service(
///         web::scope("/internal/v1")
///             .wrap(mesh_only(auth.clone(), &[("/internal/v1/ping", &[MeshRole::Worker])]))
///             .service(get("/ping", async || "pong")),
///     );
/// }
/// ```
pub fn mesh_only<S, B>(
    auth: MeshAuth,
    roles: &'static RouteRoles,
) -> impl Transform<
    S,
    ServiceRequest,
    Response = ServiceResponse<impl MessageBody>,
    Error = Error,
    InitError = (),
>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    from_fn(move |request: ServiceRequest, next: Next<B>| {
        let auth = auth.clone();
        async move {
            let path = request.path();
            let of_path = roles.iter().find(|(route, _)| *route == path);
            let allowed = of_path.map_or(&[][..], |(_, roles)| roles);
            match auth.check(request.request(), allowed) {
                Ok(caller) => caller.note(request.request()),
                Err(error) => {
                    // This is a response and not an error, so that the listener counts it like any other.
                    let response = HttpError(error).error_response().map_into_right_body();
                    return Ok(request.into_response(response));
                }
            }
            let clock = clock_header(&auth, &request);
            let mut response = next.call(request).await?;
            if let Some(clock) = clock {
                let name = HeaderName::from_static(CLOCK_HEADER);
                response.headers_mut().insert(name, clock);
            }
            Ok(response.map_into_left_body())
        }
    })
}

/// Reads the caller's clock. Returns the header of the response, if it has to carry one.
fn clock_header(auth: &MeshAuth, request: &ServiceRequest) -> Option<HeaderValue> {
    let header = request.headers().get(CLOCK_HEADER)?.to_str().ok()?;
    let from = request.peer_addr().map(|addr| addr.ip());
    let answer = auth.clocks().read_request_header(header, from)?;
    HeaderValue::from_str(&answer).ok()
}
