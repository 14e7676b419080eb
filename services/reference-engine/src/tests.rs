//! Tests of the engine as a whole, on small random networks and on the compiled-in model.

mod backend;
mod batching;
mod bits;
mod draft_model;
mod drafts;
mod eagle3;
mod forms;
mod golden;
mod http;
mod limits;
mod loading;
mod new_weights;
mod parking;
mod pool;
mod sampling;
mod self_drafts;
pub(crate) mod support;
mod weight_files;
