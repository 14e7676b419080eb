//! Anthropic's Messages API: its bodies as bodies of chats, and its answers.

mod error;
mod request;
mod writer;

pub(super) use error::error_body;
pub(super) use request::{renamed, to_chat};
pub(super) use writer::MessagesWriter;
