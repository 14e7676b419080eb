//! The events of a request, as its reader sees them.

use refrain_protocol::ApiError;
use refrain_protocol::openai::{ResponseMetrics, Usage};

use crate::relay::choice::ChoiceProgress;

/// An event of a request. The last one is `Done` or `Failed`.
#[derive(Debug)]
pub enum RelayEvent {
    /// A choice has new output, or has ended.
    Progress {
        /// Index of the choice.
        index: u32,
        /// Its new output.
        progress: ChoiceProgress,
    },
    /// All choices have ended.
    Done(Box<RequestSummary>),
    /// The request cannot be carried out.
    Failed(ApiError),
}

/// The figures of a finished request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestSummary {
    /// The tokens of the request.
    pub usage: Usage,
    /// `None`: the answer must not have them.
    pub metrics: Option<ResponseMetrics>,
}

impl RequestSummary {
    /// The same without what tells which part of the work was known before.
    pub(super) fn without_traces(mut self) -> Self {
        self.metrics = None;
        self.usage.prompt_tokens_details.cached_tokens = 0;
        if let Some(details) = &mut self.usage.completion_tokens_details {
            details.accepted_prediction_tokens = 0;
            details.rejected_prediction_tokens = 0;
        }
        self
    }
}
