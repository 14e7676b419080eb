//! Text to tokens and back, as a model's own files say.
//!
//! [`ModelFiles`] holds what was read from a model's folder; [`Tokenizer`] encodes, decodes and names itself
//! by [`Tokenizer::identity`]; [`ChatTemplate`] turns messages into the tokens that the model was trained on;
//! [`Detokenizer`] turns a stream of tokens into text without ever showing half a character.
//!
//! The promise that shapes this crate: *special tokens come from the template, never from a user*. Text is
//! encoded without recognising any, and inside a rendered template those that a user's string would form are
//! kept apart (see [`ChatTemplate::encode`]).
//!
//! It knows nothing of networks, requests, or sampling.

mod bytes;
mod detokenizer;
mod error;
mod files;
mod floor;
mod json;
mod template;
#[cfg(feature = "testing")]
pub mod testing;
mod tokenizer;

pub use detokenizer::Detokenizer;
pub use error::TokenizationError;
pub use files::ModelFiles;
pub use json::{JSON_VALUES_MAX, JsonList, JsonMap, JsonValue};
pub use template::{ChatInput, ChatTemplate};
pub use tokenizer::Tokenizer;

/// Begins the identity of a tokenizer that reads what an engine says as text: the engine's own ids may be others, so
/// that text is kept apart from what engines say in token ids.
pub const TEXT_ONLY_PREFIX: &str = "text:";

/// A token id, as everywhere in the mesh.
pub type TokenId = u32;
