//! The engines that a worker can decode with. Adapters translate; they decide nothing.
//!
//! There are two kinds. A [`VerifyingEngine`] verifies drafts, and the decode loop drives it step by step. A
//! [`StreamingEngine`] generates by itself, and the streaming driver relays its stream. Third-party engines are
//! streaming engines behind HTTP ([`connect_third_party`]); each kind of them has a [`dialect`].

mod breaker;
mod call_body;
mod call_error;
mod client;
mod detect;
mod dialect;
mod event_calls;
mod forms;
mod generate;
mod http_engine;
mod identity;
mod introductions;
mod load;
mod order_calls;
mod per_runtime;
mod response;
mod slots;
mod sse;
mod streaming;
mod third_party;
mod verifying;
mod words;
mod worker_engine;

pub(crate) use breaker::CircuitBreaker;
pub(crate) use client::without_version;
pub(crate) use detect::{FoundEngine, find_engine};
pub use forms::FormAbilities;
pub use generate::{AttachedDocument, GenerateRequest, Generated, GeneratedEnd, GeneratedStream};
pub use http_engine::HttpEngine;
pub use slots::EngineSlots;
pub use sse::{SseParser, TooLong};
pub use streaming::{
    IntroductionCounts, RestoredWeights, StreamingCapabilities, StreamingEngine, StreamingLoad,
};
pub(crate) use third_party::expected_tokenizer;
pub use third_party::{ExpectedModel, connect_third_party};
pub use verifying::VerifyingEngine;
pub(crate) use verifying::cannot_forget;
pub(crate) use words::{engine_words, unsupported_field};
pub(crate) use worker_engine::EngineLimits;
pub use worker_engine::WorkerEngine;
