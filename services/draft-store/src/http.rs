//! The store for other processes: bincode over HTTP for the calls with tokens, JSON for figures, all for
//! holders of the mesh secret only.

use actix_web::HttpResponse;
use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::middleware::{Next, from_fn};
use actix_web::web::{self, Bytes, Data, Json};
use refrain_clients::{BINCODE_CONTENT_TYPE, DraftStore as _, decode_bincode, encode_bincode};
use refrain_protocol::document::StoreStats;
use refrain_service_kit::http::{HttpError, HttpResult};
use refrain_service_kit::mesh::MeshAuth;
use serde::Serialize;

use crate::handle::{DraftStoreHandle, StoreState};

/// Adds the routes.
pub(crate) fn routes(app: &mut web::ServiceConfig, handle: DraftStoreHandle, mesh: MeshAuth) {
    app.app_data(Data::new(handle)).app_data(Data::new(mesh));
    app.service(
        web::scope("/internal/v1")
            .wrap(from_fn(mesh_only))
            .route("/append", web::post().to(append))
            .route("/follow", web::post().to(follow))
            .route("/touch", web::post().to(touch))
            .route("/stats", web::get().to(stats)),
    );
    app.service(
        web::resource("/debug/state")
            .wrap(from_fn(mesh_only))
            .route(web::get().to(observe)),
    );
}

/// Before a body is read: strangers get nothing parsed.
async fn mesh_only(
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
    if let Some(mesh) = request.app_data::<Data<MeshAuth>>() {
        mesh.check(request.request()).map_err(HttpError)?;
    }
    next.call(request).await
}

fn answer(message: &impl Serialize) -> HttpResult<HttpResponse> {
    let body = encode_bincode(message)?;
    Ok(HttpResponse::Ok()
        .content_type(BINCODE_CONTENT_TYPE)
        .body(body))
}

async fn append(handle: Data<DraftStoreHandle>, body: Bytes) -> HttpResult<HttpResponse> {
    answer(&handle.append(decode_bincode(&body)?).await?)
}

async fn follow(handle: Data<DraftStoreHandle>, body: Bytes) -> HttpResult<HttpResponse> {
    answer(&handle.follow(decode_bincode(&body)?).await?)
}

async fn touch(handle: Data<DraftStoreHandle>, body: Bytes) -> HttpResult<HttpResponse> {
    handle.touch(decode_bincode(&body)?).await?;
    answer(&())
}

async fn stats(handle: Data<DraftStoreHandle>) -> HttpResult<Json<StoreStats>> {
    Ok(Json(handle.stats().await?))
}

async fn observe(handle: Data<DraftStoreHandle>) -> Json<StoreState> {
    Json(handle.observe())
}
