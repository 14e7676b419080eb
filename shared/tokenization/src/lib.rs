//! Text to tokens and back, by a model's own files.
//!
//! This crate keeps one promise: *special tokens come from the template, never from a user*. It encodes text without
//! recognising special tokens. In a rendered template, it keeps apart those that a user's string would form (see
//! [`ChatTemplate::encode_within`]).
//!
//! It knows nothing of networks, requests, or sampling.
//!
//! # Where to read
//!
//! | file | content |
//! |---|---|
//! | `tokenizer.rs` | **Read this first.** [`Tokenizer`] encodes, decodes, and has an identity. |
//! | `tokenizer/encoder.rs` | The libraries that encode, and which of them a model gets. |
//! | `tokenizer/special_tokens.rs` | How special tokens in a user's text are made harmless. |
//! | `chat_template.rs`, `chat_template/` | [`ChatTemplate`]: messages become tokens, as in training. |
//! | `request_json.rs` | The parts of a request that a template reads, with a limit on their size. |
//! | `detokenizer.rs` | [`Detokenizer`]: a stream of tokens becomes text without half characters. |
//! | `token_lower_bound.rs`, `token_lower_bound/` | Refuses a text that has too many tokens, without encoding it. |
//! | `token_spelling.rs` | The bytes of a token, by the way in which a vocabulary spells them. |
//! | `model_files.rs` | [`ModelFiles`]: the files of a model's folder. |
//! | `gguf.rs`, `gguf/` | The same of a GGUF file, and [`GgufHeader`]: the shape of the model in it. |

mod chat_template;
mod detokenizer;
mod error;
mod gguf;
mod model_files;
mod request_json;
#[cfg(feature = "testing")]
pub mod testing;
mod token_lower_bound;
mod token_spelling;
mod tokenizer;

pub use chat_template::{ChatInput, ChatTemplate, SampledAnswer};
pub use detokenizer::Detokenizer;
pub use error::TokenizationError;
pub use gguf::GgufHeader;
pub use model_files::{CONFIG_BYTES_MAX, ModelFiles, read_model_file};
pub use request_json::{JsonList, JsonMap, JsonValue};
pub use tokenizer::Tokenizer;

/// The prefix of a tokenizer's identity for engines whose output is read as text. The engine's own token ids may
/// differ, so such text is kept apart from the output of engines that return token ids.
pub const TEXT_ONLY_PREFIX: &str = "text:";

/// The target of the spans of a request's stages, here and in the gateway. `cargo bench -p refrain --bench gateway --
/// --stages` measures them. They have the level `trace`, so they cost next to nothing otherwise.
pub const STAGE: &str = "refrain::stage";

/// A token id, as everywhere in the mesh.
pub type TokenId = u32;
