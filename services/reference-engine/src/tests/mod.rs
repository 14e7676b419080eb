//! Tests of the engine as a whole, on small random networks and on the shipped one.

mod batching;
mod bits;
mod drafts;
mod eagle3;
mod golden;
mod http;
mod limits;
mod loading;
mod sampling;
pub(crate) mod support;
