//! What happens to a request before it is understood: its key, its place among those in flight, its body, and its turn to be
//! tokenized. Each step has a limit and an error of its own.

mod admission;
mod api_keys;
mod bodies;
mod tokenizing;

pub(crate) use admission::{Admission, AdmissionTicket};
pub(crate) use api_keys::ApiKeys;
pub(crate) use bodies::{BodyLimits, BodyReader};
pub(crate) use tokenizing::TokenizingLimiter;
