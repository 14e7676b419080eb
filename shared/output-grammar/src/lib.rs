//! Holds outputs to a form: which tokens may come next, and which must.
//!
//! A form ([`refrain_protocol::engine::OutputForm`]) says which texts are allowed. This crate compiles it for one
//! model, by the library `llguidance`. It then follows outputs token by token, forwards along a draft and back again.
//!
//! It knows nothing of networks, requests, or sampling. Bad input never panics, and its work is bounded by
//! [`GrammarLimits`].
//!
//! # Where to read
//!
//! | file | content |
//! |---|---|
//! | `compiler.rs` | **Read this first.** [`GrammarCompiler`] compiles forms within limits, and keeps them. |
//! | `jobs.rs` | The forms that are compiled or wait for it, each once. |
//! | `threads.rs` | The threads that do this and other work of forms, for which tenants take turns. |
//! | `limits.rs`, `compiled.rs` | What goes in and what comes out, beside the form. |
//! | `cache_key.rs` | The key that a form is kept under: its namespace and its digest. |
//! | `cache.rs`, `shares.rs` | Grammars and verdicts of lately compiled forms, with a share for each namespace. |
//! | `matcher.rs` | [`Matcher`]: the state of one output, with masks, forced tokens and rollback. |
//! | `parser.rs` | The library's parser: its work is counted, and it can be stopped. |
//! | `mask.rs` | Sets of tokens. |
//! | `stop.rs` | [`StopSignal`]: the end of work that nobody wants any longer. |
//! | `size.rs` | The memory of a compiled grammar. |
//! | `source.rs` | A form becomes a JSON schema or a grammar in Lark. |
//! | `lark.rs` | Choices, calls of tools and alternatives of forms become Lark. |
//! | `closed_schema.rs` | Closes the objects of a JSON schema. |
//! | `schema.rs` | JSON schemas before they are compiled: limits, keywords that are refused, the style of the JSON. |
//! | `weight.rs` | What the merging of a schema's parts costs. |
//! | `ebnf.rs` | Grammars in EBNF become Lark. |
//! | `pattern.rs` | Grammars that do not refer to themselves become regular expressions. |
//! | `reader.rs` | The text of a grammar as it is read. |
//! | `place.rs` | Where in a form an error is. |
//! | `testing.rs` | Forms that are built to cost much, from a seed. |
//! | `vocabulary.rs` | The bytes of every token, and how the tokenizer itself writes a text. |

mod cache;
mod cache_key;
mod closed_schema;
mod compiled;
mod compiler;
mod ebnf;
mod error;
mod jobs;
mod lark;
mod limits;
mod literal;
mod mask;
mod matcher;
mod parser;
mod pattern;
mod place;
mod reader;
mod schema;
mod shares;
mod size;
mod source;
mod stop;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod threads;
mod vocabulary;
mod weight;

pub use cache::CacheSize;
pub use closed_schema::close_objects;
pub use compiled::{CompiledGrammar, Outcome};
pub use compiler::GrammarCompiler;
pub use error::GrammarError;
pub use limits::GrammarLimits;
pub use mask::TokenMask;
pub use matcher::Matcher;
pub use pattern::text_pattern;
pub use stop::StopSignal;

/// A token id, as everywhere in the mesh.
pub type TokenId = u32;
