//! The worker's internal listener.

use std::net::SocketAddr;
use std::sync::Arc;

use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use futures_util::StreamExt;
use refrain_clients::Worker;
use refrain_protocol::ApiError;
use refrain_protocol::chunk::{ChunkCut, ChunkEvent, ChunkRequest};
use refrain_service_kit::http::{HttpResult, ServeOptions, Server, serve as listen_on};
use refrain_service_kit::telemetry::Metrics;

use crate::{WorkerConfig, WorkerHandle};

const CONNECTIONS_MAX: usize = 4096;

pub(crate) fn serve(
    config: &WorkerConfig,
    listen: SocketAddr,
    worker: WorkerHandle,
    metrics: &Metrics,
) -> anyhow::Result<Server> {
    let options = ServeOptions {
        service: "worker",
        listen,
        threads: config.http_threads,
        body_bytes_max: config.body_bytes_max,
        connections_max: CONNECTIONS_MAX,
    };
    let ready = worker.clone();
    listen_on(
        options,
        metrics,
        Arc::new(move || ready.readiness()),
        move |app| {
            app.app_data(web::Data::new(worker.clone()))
                .route("/internal/v1/chunk", web::post().to(chunk))
                .route("/internal/v1/cut", web::post().to(cut));
        },
    )
}

async fn chunk(
    http: HttpRequest,
    worker: web::Data<WorkerHandle>,
    body: Bytes,
) -> HttpResult<HttpResponse> {
    worker.inner.auth.check(&http)?;
    let request: ChunkRequest = parse(&body)?;
    let events = worker.chunk(request).await?;
    Ok(HttpResponse::Ok()
        .content_type("application/x-ndjson")
        .streaming(events.map(line)))
}

async fn cut(
    http: HttpRequest,
    worker: web::Data<WorkerHandle>,
    body: Bytes,
) -> HttpResult<HttpResponse> {
    worker.inner.auth.check(&http)?;
    let request: ChunkCut = parse(&body)?;
    worker.cut(request).await?;
    Ok(HttpResponse::Ok().json(()))
}

/// Read by hand, after the secret was checked: strangers get no parser to play with.
fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        ApiError::invalid("body", "the body is not a message of this call").with_detail(error)
    })
}

fn line(event: Result<ChunkEvent, ApiError>) -> Result<Bytes, actix_web::Error> {
    let mut line = match event {
        Ok(event) => serde_json::to_vec(&event)?,
        Err(error) => serde_json::to_vec(&serde_json::json!({ "error": error }))?,
    };
    line.push(b'\n');
    Ok(line.into())
}
