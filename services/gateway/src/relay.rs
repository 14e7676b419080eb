//! Carries a request out: a lease, a chunk, the next lease, until all its choices have ended.
//!
//! The reader of a request's events, an event stream or the collector of a plain answer, drives all choices by
//! reading ([`RequestEvents`]). When it goes away, the streams of the workers and the leases go with it. The same
//! happens when the time of the request is up ([`RequestTime`]), whether or not anybody reads.
//!
//! Read first: `request_run.rs` (the loop over leases and chunks), then `choice_run.rs` (one chunk), `choice.rs`
//! (tokens to text) and `attempts.rs` (what follows a failure).

mod aborts;
mod attempts;
mod choice;
mod choice_run;
mod context;
mod draft_memory;
mod driven_work;
mod events;
mod implicit_groups;
mod kept_steps;
mod lease_guard;
mod output_text;
mod parked_at;
mod parsing;
mod paused_time;
mod request_events;
mod request_run;
mod request_time;
mod retry_budget;
mod scheduler_absence;
mod stream_shaper;

pub use choice::{ChoiceFigures, ChoiceProgress, OutputToken};
pub(crate) use context::RelayContext;
pub use events::{RelayEvent, RequestSummary};
pub(crate) use kept_steps::KeptStep;
pub use request_events::{EventObserver, RequestEvents};
pub(crate) use request_time::RequestTime;
