//! Routes of trainers that cannot work through this listener. Each says why, and what to set in the trainer: a bare
//! 404 would have some of them wait or repeat the call without an end.

use actix_web::web::ServiceConfig;
use refrain_protocol::ApiError;
use refrain_protocol::error::code;
use refrain_service_kit::http::{HttpResult, post};

/// The advice for weights of TRL's server mode.
const TRL_WEIGHTS: &str = "TRL's server mode sends weights in calls of its own, which only one engine of TRL's can take; \
    use AsyncGRPOTrainer, whose weights go through vLLM's own calls";

/// The advice for TRL's own way to sample.
const TRL_SAMPLES: &str = "this is TRL's server mode; use AsyncGRPOTrainer, which asks /v1/completions, or POST /generate without the slash";

/// The advice for routed experts.
const ROUTED_EXPERTS: &str = "routed experts are not passed through; set enable_return_routed_experts=false and ask \
    /inference/v1/generate";

/// The advice for Tinker's API.
const TINKER: &str = "the servers of Tinker's API are clients of this listener: start SkyRL's or miles's, and give it \
    this URL as its engine";

/// The routes, and the advice for each.
const REFUSED: [(&str, &str); 13] = [
    ("/init_communicator/", TRL_WEIGHTS),
    ("/update_named_param/", TRL_WEIGHTS),
    ("/batch_update_named_params/", TRL_WEIGHTS),
    ("/close_communicator/", TRL_WEIGHTS),
    ("/generate/", TRL_SAMPLES),
    ("/chat/", TRL_SAMPLES),
    ("/get_sequence_logprobs/", TRL_SAMPLES),
    ("/skyrl/v1/generate", ROUTED_EXPERTS),
    (
        "/skyrl/v1/load_lora_adapter",
        "adapters of SkyRL are not passed through; train all weights",
    ),
    (
        "/v1/chat/completions/render",
        "images are not served; give SkyRL a local tokenizer for texts",
    ),
    (
        "/fetch_weights",
        "deltas of weights are not passed through; use the broadcast strategy",
    ),
    ("/api/v1/asample", TINKER),
    ("/api/v1/create_session", TINKER),
];

/// Adds the routes.
pub(super) fn add(app: &mut ServiceConfig) {
    for (path, advice) in REFUSED {
        app.service(post(path, move || async move { refuse(path, advice) }));
    }
}

fn refuse(path: &str, advice: &str) -> HttpResult<String> {
    let error = ApiError::invalid("", format!("{path}: {advice}"));
    Err(error.with_code(code::UNSUPPORTED_BY_ENGINE).into())
}
