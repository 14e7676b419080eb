//! The objects by which the bodies of the data routes are read.

use bytes::Bytes;
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::RequestClass;
use tokio_util::sync::CancellationToken;

use crate::config::GatewayTuning;
use crate::models::Models;
use crate::request::{CompletionDefaults, ParsedRequest, SampleBody};

/// The objects by which bodies are read.
pub(super) struct ReadContext<'a> {
    pub(super) models: &'a Models,
    pub(super) tuning: &'a GatewayTuning,
    pub(super) tenant: &'a str,
    /// The model of a body that names none.
    pub(super) model: &'a str,
    /// Aborts the request.
    pub(super) abort: CancellationToken,
}

impl ReadContext<'_> {
    /// Makes rollouts that a trainer can abort.
    ///
    /// # Errors
    /// As [`ParsedRequest::samples`].
    pub(super) fn samples(&self, body: SampleBody) -> Result<ParsedRequest, ApiError> {
        let request = ParsedRequest::samples(body, self.tenant, self.models, self.tuning)?;
        Ok(self.abortable(request))
    }

    /// Makes rollouts of the body of a text completion, which a trainer can abort.
    ///
    /// # Errors
    /// As [`ParsedRequest::completion`].
    pub(super) fn completion(&self, body: Bytes) -> Result<ParsedRequest, ApiError> {
        let defaults = CompletionDefaults {
            model: Some(self.model),
            max_tokens: None,
        };
        let request =
            ParsedRequest::completion_with(body, self.tenant, self.models, self.tuning, defaults)?;
        Ok(self.abortable(request))
    }

    /// Makes a rollout of the body of a chat, which a trainer can abort.
    ///
    /// # Errors
    /// As [`ParsedRequest::chat`].
    pub(super) fn chat(&self, body: Bytes) -> Result<ParsedRequest, ApiError> {
        let request = ParsedRequest::chat(body, self.tenant, self.models, self.tuning)?;
        Ok(self.abortable(request))
    }

    fn abortable(&self, mut request: ParsedRequest) -> ParsedRequest {
        request.asked_class = RequestClass::Rollout;
        request.abort = Some(self.abort.clone());
        request
    }
}
