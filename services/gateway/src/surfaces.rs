//! The surfaces: the APIs through which clients ask for an output.
//!
//! A surface reads its body and writes its answers. The work between is the same for all of them: every body becomes
//! a [`GenerateRequest`], and all but text completions become one through the body of a chat ([`ChatBody`]). So a
//! field of sampling is read in one place, whichever API it came through. The answers of `messages` and `responses`
//! are state machines over the events of an output; `items` has the part that both share.
//!
//! | folder | API |
//! |---|---|
//! | `messages/` | Anthropic's Messages |
//! | `responses/` | OpenAI's Responses |
//!
//! The writer of chats and text completions is in `response/writer.rs`.

mod chat_body;
mod items;
mod messages;
mod responses;

use std::sync::Arc;

use bytes::Bytes;
use refrain_protocol::ApiError;

use crate::config::GatewayTuning;
use crate::models::Models;
use crate::request::{EndUser, GenerateRequest};
use crate::response::{AnswerWriter, SurfaceWriter};
use crate::tenants::Caller;
use crate::tenants::file::KeyEndpoint;
use crate::tenants::rate_headers::HeaderWords;

pub(crate) use chat_body::ChatBody;
pub(crate) use responses::{PageQuery, ResponseStore, StoreLimits, input_items, unknown_response};

/// The API that was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Surface {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
    /// `/v1/messages`.
    Messages,
    /// `/v1/messages/count_tokens`, which generates nothing.
    MessagesCount,
    /// `/v1/responses`.
    Responses,
    /// `/v1/responses/input_tokens`, which generates nothing.
    ResponsesCount,
}

/// The objects that surfaces need to read a body.
pub(crate) struct SurfaceContext<'a> {
    pub(crate) models: &'a Models,
    pub(crate) tuning: &'a GatewayTuning,
    pub(crate) stored: &'a Arc<ResponseStore>,
}

/// A request that can be carried out, and what its answer repeats of the body.
pub(crate) struct AcceptedRequest {
    pub(crate) request: Arc<GenerateRequest>,
    answer: AnswerShape,
}

enum AnswerShape {
    OpenAi,
    Messages,
    Responses(Box<responses::Echo>),
}

impl Surface {
    /// The endpoint, as the scopes of keys name it.
    pub(crate) fn endpoint(self) -> KeyEndpoint {
        match self {
            Surface::Chat => KeyEndpoint::Chat,
            Surface::Completion => KeyEndpoint::Completions,
            Surface::Messages | Surface::MessagesCount => KeyEndpoint::Messages,
            Surface::Responses | Surface::ResponsesCount => KeyEndpoint::Responses,
        }
    }

    /// The words of its headers about limits.
    pub(crate) fn header_words(self) -> HeaderWords {
        match self {
            Surface::Messages | Surface::MessagesCount => HeaderWords::Anthropic,
            _ => HeaderWords::OpenAi,
        }
    }

    /// Reads a body.
    ///
    /// # Errors
    /// As [`GenerateRequest::chat`].
    pub(crate) fn read(
        self,
        body: Bytes,
        tenant: &str,
        context: &SurfaceContext<'_>,
    ) -> Result<AcceptedRequest, ApiError> {
        let (models, tuning) = (context.models, context.tuning);
        let (request, answer) = match self {
            Surface::Chat => (
                GenerateRequest::chat(body, tenant, models, tuning)?,
                AnswerShape::OpenAi,
            ),
            Surface::Completion => (
                GenerateRequest::completion(body, tenant, models, tuning)?,
                AnswerShape::OpenAi,
            ),
            Surface::Messages | Surface::MessagesCount => {
                let counts_only = self == Surface::MessagesCount;
                let (chat, format_field) = messages::to_chat(body, counts_only)?;
                let renamed = |error| messages::renamed(error, format_field);
                let read = GenerateRequest::chat(chat, tenant, models, tuning);
                let mut request = read.map_err(renamed)?;
                request.rename_form_places(renamed);
                (request, AnswerShape::Messages)
            }
            Surface::Responses | Surface::ResponsesCount => {
                let (chat, echo) = responses::to_chat(body, tenant, context.stored)?;
                let read = GenerateRequest::chat(chat, tenant, models, tuning);
                let mut request = read.map_err(responses::renamed)?;
                request.rename_form_places(responses::renamed);
                (request, AnswerShape::Responses(Box::new(echo)))
            }
        };
        Ok(AcceptedRequest {
            request: Arc::new(request),
            answer,
        })
    }

    /// The body of an error response, where it is not OpenAI's.
    pub(crate) fn error_body(self, error: &ApiError) -> Option<Vec<u8>> {
        match self {
            Surface::Messages | Surface::MessagesCount => Some(messages::error_body(error)),
            Surface::Chat | Surface::Completion | Surface::Responses | Surface::ResponsesCount => {
                None
            }
        }
    }
}

impl AcceptedRequest {
    /// A request that is answered in OpenAI's shape, or by a writer of the caller's own.
    pub(crate) fn of(request: GenerateRequest) -> Self {
        AcceptedRequest {
            request: Arc::new(request),
            answer: AnswerShape::OpenAi,
        }
    }

    /// Holds the calls of the output to less, as [`GenerateRequest::loose_form`] says. Nobody else may have the
    /// request yet.
    pub(crate) fn loosen_form(&mut self) {
        if let Some(request) = Arc::get_mut(&mut self.request)
            && let Some(loose) = request.loose_form.take()
        {
            request.sampling.form = Some(loose);
        }
    }

    /// Gives the request the standing of its caller. Nobody else may have it yet.
    pub(crate) fn hold_to(&mut self, caller: &Caller) {
        let policy = &caller.policy;
        if let Some(request) = Arc::get_mut(&mut self.request) {
            let end_user = request.end_user.map(EndUser::hex);
            request.scope = caller.scope(end_user.as_deref());
            request.shape = policy.shape;
            request.hides_metrics = policy.hides_metrics;
            request.weight = policy.weight;
            request.class = policy.class(request.class);
        }
    }

    /// Takes the hints away that make the request urgent. Nobody else may have it yet.
    pub(crate) fn make_ordinary(&mut self) {
        if let Some(request) = Arc::get_mut(&mut self.request) {
            request.urgency = request.urgency.ordinary();
        }
    }

    /// Creates the writer of the answer.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn writer(self) -> Result<Box<dyn SurfaceWriter>, ApiError> {
        let request = self.request;
        Ok(match self.answer {
            AnswerShape::OpenAi => Box::new(AnswerWriter::new(request)?),
            AnswerShape::Messages => Box::new(messages::MessagesWriter::new(&request)?),
            AnswerShape::Responses(echo) => {
                Box::new(responses::ResponsesWriter::new(&request, *echo)?)
            }
        })
    }
}
