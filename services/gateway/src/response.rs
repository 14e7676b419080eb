//! Writes answers, whole or as a stream of events.

mod best_of;
mod event_stream;
mod logprobs;
mod message;
mod surface_writer;
mod writer;

pub(crate) use event_stream::EventStreamBody;
pub(crate) use surface_writer::{SurfaceWriter, read_to_end, write_named_frame};
pub(crate) use writer::AnswerWriter;
