//! The routes of the listener. None asks for a key. A route that changes something takes no
//! GET, which any web page can send.

use std::sync::Arc;

use actix_web::Resource;
use actix_web::web::{self, Data, ServiceConfig};
use refrain_gateway::Surface;
use refrain_service_kit::http::{get, post};

use super::data::{DataSurface, carry_out};
use super::state::TrainerState;
use super::{engines, facts, pass_on, pauses, refused, session_routes, vllm_routes, weights};

/// Calls that go to the engines as they are.
const PASSED_ON: [&str; 31] = [
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/pull_weights",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/weights_checker",
    "/weight_checker",
    "/post_process_weights",
    "/begin_weight_update",
    "/end_weight_update",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/finish_weight_update",
    "/init_broadcaster",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/areal_init_weights_update_group",
    "/areal_set_update_weight_meta",
    "/areal_update_weights_xccl",
    "/areal_update_weights_lora",
    "/areal_set_update_weight_meta_lora",
    "/areal_update_weights_lora_xccl",
    "/sleep",
    "/wake_up",
];

/// Adds the routes.
pub(super) fn add(trainer: &Arc<TrainerState>, app: &mut ServiceConfig) {
    app.app_data(Data::from(trainer.clone()))
        .service(post("/generate", |trainer, request, payload| {
            carry_out(trainer, DataSurface::Sglang, request, payload)
        }))
        .service(post(
            "/inference/v1/generate",
            |trainer, request, payload| carry_out(trainer, DataSurface::Vllm, request, payload),
        ))
        .service(post("/v1/completions", |trainer, request, payload| {
            carry_out(trainer, DataSurface::Completion, request, payload)
        }))
        .service(agent_route("/v1/chat/completions", Surface::Chat))
        .service(agent_route("/v1/messages", Surface::Messages))
        .service(agent_route("/v1/responses", Surface::Responses))
        .service(get("/v1/models", facts::models))
        .service(
            get("/sessions", session_routes::list).route(web::post().to(session_routes::create)),
        )
        .service(
            get("/sessions/{id}", session_routes::show)
                .route(web::delete().to(session_routes::erase)),
        )
        .service(get(
            "/sessions/{id}/trajectories",
            session_routes::trajectories,
        ))
        .service(post("/abort_request", pauses::abort_request))
        .service(post("/abort_requests", pauses::abort_requests))
        .service(post("/pause", pauses::pause))
        .service(post("/resume", pauses::resume))
        .service(get("/is_paused", pauses::is_paused))
        .service(post("/pause_generation", pauses::pause_generation))
        .service(post("/continue_generation", pauses::continue_generation))
        .service(post("/areal_pause_generation", pauses::pause_generation))
        .service(post(
            "/areal_continue_generation",
            pauses::continue_generation,
        ))
        .service(post("/flush_cache", pauses::flush_cache))
        .service(post("/update_weights_from_disk", weights::from_disk))
        .service(post("/update_weights", pass_on::update_weights))
        .service(post("/areal_update_weights", pass_on::areal_update_weights))
        .service(post("/update_weight_version", weights::set_version))
        .service(get("/get_weight_version", weights::get_version))
        .service(get("/weight_version", weights::get_version))
        .service(get("/weight_info", weights::get_version))
        .service(get("/workers", engines::workers).route(web::post().to(engines::register)))
        .service(
            web::resource("/workers/{id:.*}")
                .route(web::delete().to(engines::remove))
                .route(web::get().to(engines::worker)),
        )
        .service(get("/list_workers", engines::list_workers))
        .service(post("/add_worker", engines::add_worker))
        .service(post("/remove_worker", engines::remove_worker))
        .service(get("/get_world_size", facts::world_size))
        .service(get("/get_world_size/", facts::world_size))
        .service(post("/reset_prefix_cache", vllm_routes::reset_prefix_cache))
        .service(post(
            "/reset_prefix_cache/",
            vllm_routes::reset_prefix_cache,
        ))
        .service(post("/collective_rpc", vllm_routes::collective_rpc))
        .service(post("/finish_session", vllm_routes::finish_session))
        .service(get("/metrics", vllm_routes::metrics))
        .service(get("/v1/loads", facts::loads))
        .service(get("/health", facts::health))
        .service(get("/health/", facts::health))
        .service(get("/ping", facts::health))
        .service(get("/liveness", facts::health))
        .service(get("/health_generate", facts::health))
        .service(get("/server_info", facts::server_info))
        .service(get("/get_server_info", facts::server_info))
        .service(get("/get_model_info", facts::model_info))
        .service(get("/model_info", facts::model_info));
    refused::add(app);
    for path in PASSED_ON {
        app.service(post(path, pass_on::pass_on));
    }
}

/// A route of agents, as the other listener has it, and the same in a session that the path names.
fn agent_route(path: &str, surface: Surface) -> Resource {
    let paths = [path.to_owned(), format!("/sessions/{{id}}{path}")];
    web::resource(paths).route(web::post().to(move |trainer, request, payload| {
        carry_out(trainer, DataSurface::Agent(surface), request, payload)
    }))
}
