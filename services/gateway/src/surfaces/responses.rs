//! OpenAI's Responses API: its bodies as bodies of chats, its answers, and the responses that are stored.
//!
//! `history` has the conversation as items, which is what bodies carry and what is stored. `store` is a table with
//! limits; nothing is on disk, and each gateway has its own. `tools` has the names of tools, and `input_items` shows
//! the input of a stored response.

mod echo;
mod history;
mod input_items;
mod item_ids;
mod request;
mod store;
mod tools;
mod writer;

pub(super) use echo::Echo;
pub(crate) use input_items::{PageQuery, input_items, unknown_response};
pub(super) use request::to_chat;
pub use store::ResponseStore;
pub(crate) use store::StoreLimits;
pub(super) use writer::ResponsesWriter;
