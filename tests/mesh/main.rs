//! End-to-end tests of whole meshes: in one process, over HTTP, and as child processes that are killed.

mod cancel;
mod connections;
mod dashboards;
mod drain;
mod engine_contract;
mod fairness;
mod fallback;
mod grammar_drafts;
mod limits;
mod lossless;
mod memory;
mod other_engine;
mod parameters;
mod retries;
mod routes;
mod sealing;
mod stopped;
mod store_import;
mod takeover;
mod tidy;
mod tools;
mod traces;
mod trust;
mod up;
mod work_counts;
mod worker_lost;
