//! The wire types of the OpenAI API, as far as the gateway offers it.
//!
//! Requests are read leniently: an optional field may be missing or null, and fields that the gateway does not know
//! are no fault here, because clients send fields that other servers understand. The gateway decides what the values
//! mean. [`Parameters`] are the fields that both endpoints have; the others are read in the gateway
//! (`request/body.rs`).
//!
//! Lists end at the length that the gateway would refuse, so that no body takes many times its own size in memory.

mod error;
mod field_shapes;
mod request;
mod response;

pub use error::{ErrorBody, ErrorFields};
pub use field_shapes::{BadWords, JsonObject, ListedPrompt, LogitBias, Prompt, Stop};
pub use request::{ClassName, Parameters, RequestPriority, StreamOptions};
pub use response::{
    Answer, AnswerMessage, ChatChoice, ChatChunkChoice, ChatLogprobs, ChatTokenLogprob,
    CompletionChoice, CompletionLogprobs, CompletionTokensDetails, Delta, FinishReason,
    FunctionCall, ModelCard, ModelList, PromptLogprob, PromptLogprobs, PromptPlace,
    PromptTokensDetails, ResponseMetrics, SpeculativeDecoding, StepTrace, Timings, ToolCall,
    TopLogprob, TracedDraft, TracedStep, Usage, WeightSpan,
};
