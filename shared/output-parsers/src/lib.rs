//! Tool calls and reasoning out of the tokens that a model emits.
//!
//! An output arrives in steps of one or more tokens, because drafts bring several at once. The parser gives **the
//! same events for every chunking**. Its work is linear in the output, its memory is bounded, and it loses no text.
//! An attempt at a call that cannot be parsed comes out as text, exactly as the model emitted it, and is counted.
//! In [`Delivery::Streamed`], a call whose arguments have already begun to come cannot become text any more. It ends
//! with `intact: false`, and only the rest is text.
//!
//! ```
//! use refrain_output_parsers::{Event, OutputParser, ParserOptions, Piece, ToolParserKind};
//!
//! let options = ParserOptions {
//!     tools_as: ToolParserKind::Hermes,
//!     ..ParserOptions::default()
//! };
//! let mut parser = OutputParser::new(options, |_marker| None);
//! let mut events = Vec::new();
//! for chunk in ["Let me see.<tool", "_call>{\"name\": \"f\", \"argu", "ments\": {\"a\": 1}}</tool_call>"] {
//!     parser.push(&[Piece::text(chunk)], &mut events);
//! }
//! parser.finish(&mut events);
//! assert_eq!(
//!     events,
//!     [
//!         Event::Text("Let me see.".into()),
//!         Event::CallStart { index: 0, id: None, name: "f".into() },
//!         Event::CallArguments { index: 0, delta: "{\"a\": 1}".into() },
//!         Event::CallEnd { index: 0, intact: true },
//!     ]
//! );
//! ```
//!
//! # How it works
//!
//! 1. The scanner cuts the output into text and *markers*, by token or by text.
//! 2. The reasoning parser takes the block at the beginning, between its two markers.
//! 3. A *family* reads the rest: a state machine for one format of calls. It opens an attempt, records its text, and
//!    starts the call as soon as the name and the beginning of the arguments are known.
//! 4. The sink turns that into events.
//!
//! Arguments that are JSON go out exactly as the model wrote them. Other formats are turned into JSON text as they
//! arrive, and the tools' schemas tell strings from other values.
//!
//! # Decisions
//!
//! * A marker that is a token of the tokenizer is recognised by that token alone, where tokens are known. The same
//!   text made of other tokens is text, because a user can put it there. Engines' own parsers mostly search text.
//! * A marker within a string of arguments is part of the string.
//! * Where a marker announces a call, any name makes one; the caller can answer that there is no such tool. Without a
//!   marker (`llama3_json`, `pythonic`) the name has to be known, because an answer may look the same.
//! * Whitespace between calls, and before the first one if nothing else precedes it, is dropped.
//! * Calls after the first that are not wanted are left out and counted. They do not become text.
//!
//! # Where to read
//!
//! | file | content |
//! |---|---|
//! | `parser.rs` | **Read this first.** [`OutputParser`] puts the parts together. |
//! | `options.rs`, `event.rs` | What goes in and what comes out. |
//! | `family.rs`, `families/` | The trait of formats, and one file for each. |
//! | `scanner.rs` | Markers, in chunks of any size. |
//! | `sink.rs` | Attempts, failures, whitespace, delivery. |
//! | `think.rs` | Reasoning between markers. |
//! | `json.rs`, `call_object.rs`, `name.rs`, `python.rs`, `schema.rs` | Incremental readers that families share. |
//! | `form.rs` | The form of calls that are forced; each family writes what it reads. |
//! | `registry.rs`, `detect.rs` | Names of formats, and how a template tells them. |

mod call_object;
mod detect;
mod event;
mod families;
mod family;
mod form;
mod json;
mod name;
mod options;
mod parser;
mod python;
mod registry;
mod scanner;
mod schema;
mod sink;
#[cfg(test)]
mod tests;
mod think;

pub use detect::{Detected, detect};
pub use event::{Counts, Event};
pub use families::{answer_form, calls_form};
pub use form::{CallsWanted, NoForm};
pub use options::{Delivery, Limits, ParserOptions, Piece, TokenId, Tool};
pub use parser::OutputParser;
pub use registry::{ReasoningParserKind, ToolParserKind, UnknownParser};
