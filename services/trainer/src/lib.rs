//! The listener for trainers: rollouts in the words of SGLang and vLLM, aborts, pauses and weights.
//!
//! A trainer sends its rollouts here as if this were one engine. They wait for room and are not refused (`hold`), and
//! the trainer may abort them wherever they are (`in_flight`). Its orders go to every worker of the model (`fleet`).
//! The gateway carries them out, by a [`GatewayHandle`](refrain_gateway::GatewayHandle).
//!
//! | file | what it has |
//! |---|---|
//! | `data.rs` | the way of a rollout; read this first |
//! | `body.rs`, `sglang.rs`, `vllm.rs`, `agent_fields.rs` | bodies of the data routes |
//! | `sglang_writer.rs`, `vllm_writer.rs` | their answers |
//! | `pauses.rs`, `weights.rs`, `pass_on.rs`, `facts.rs` | the control routes |
//! | `engines.rs`, `adopters.rs` | engines that register |
//! | `sessions.rs`, `sessions/`, `session_routes.rs` | chats whose tokens are kept |
//! | `vllm_routes.rs`, `refused.rs` | further calls of vLLM's relatives, and those that cannot work |
//! | `ranks.rs` | the parts of engines in a group of processes |

mod adopters;
mod agent_fields;
mod body;
mod data;
mod engines;
mod facts;
mod fleet;
mod hold;
mod in_flight;
mod listener;
mod metrics;
mod output_facts;
mod pass_on;
mod pauses;
mod ranks;
mod refused;
mod routes;
mod session_routes;
mod sessions;
mod sglang;
mod sglang_writer;
mod state;
mod tracked_writer;
mod trajectory_body;
mod version;
mod vllm;
mod vllm_routes;
mod vllm_writer;
mod weights;

pub use listener::listen;
