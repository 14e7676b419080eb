//! Writes answers, whole or as a stream of events.

mod best_of;
mod event_stream;
mod logprobs;
mod message;
mod surface_writer;
mod weight_spans;
mod writer;

pub(crate) use event_stream::EventStreamBody;
pub use logprobs::{TokenNames, chat_logprobs, chosen, prompt_logprobs, top};
pub use message::text;
pub(crate) use surface_writer::write_named_frame;
pub use surface_writer::{SurfaceWriter, read_to_end, write_frame};
pub use weight_spans::add_weight_spans;
pub(crate) use writer::AnswerWriter;
