//! The steps before a request is parsed: its key, its admission, its body, and its turn to be tokenized. Each step
//! has its own limit and its own error.

mod admission;
mod api_keys;
mod bodies;
mod tokenizing;

pub(crate) use admission::{Admission, AdmissionTicket};
pub(crate) use api_keys::ApiKeys;
pub(crate) use bodies::{BodyLimits, BodyReader};
pub(crate) use tokenizing::TokenizingLimiter;
