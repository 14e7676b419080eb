//! Writes answers in OpenAI's shape, whole or as a stream of events.

mod event_stream;
mod logprobs;
mod message;
mod writer;

pub(crate) use event_stream::EventStreamBody;
pub(crate) use writer::AnswerWriter;
