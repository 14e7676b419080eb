//! The engines that a worker can decode with. Adapters translate; they decide nothing.
//!
//! There are two kinds. A [`VerifyingEngine`] verifies drafts, and the decode loop drives it step by step. A
//! [`StreamingEngine`] generates by itself, and the streaming driver relays its stream. Third-party engines are
//! streaming engines behind HTTP ([`ThirdPartyEngine`]); each kind of them has a [`dialect`].

mod breaker;
mod client;
pub(crate) mod dialect;
mod generate;
mod http_engine;
mod identity;
mod introductions;
mod load;
mod response;
mod sse;
mod streaming;
mod third_party;
mod verifying;

pub(crate) use breaker::CircuitBreaker;
pub(crate) use client::{EngineClient, parse, unexpected_response};
pub use generate::{AttachedDocument, GenerateRequest, Generated, GeneratedEnd, GeneratedStream};
pub use http_engine::HttpEngine;
pub(crate) use identity::plain_tokens;
pub(crate) use response::AbortOnDrop;
pub use streaming::{IntroductionCounts, StreamingCapabilities, StreamingEngine, StreamingLoad};
pub use third_party::ExpectedModel;
pub(crate) use third_party::ThirdPartyEngine;
pub use verifying::VerifyingEngine;
