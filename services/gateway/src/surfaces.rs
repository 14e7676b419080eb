//! The surfaces: the APIs through which clients ask for an output.
//!
//! A surface reads its body and writes its answers. The work between is the same for all of them: every body becomes
//! a [`ParsedRequest`], and all but text completions become one through the body of a chat ([`ChatBody`]). So a
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
use refrain_accounts::tenants::HeaderWords;
use refrain_accounts::tenants::file::KeyEndpoint;
use refrain_protocol::ApiError;

use crate::request::{
    COMPLETION_MAX_TOKENS, ContextWords, GenerateRequest, ParsedRequest, RequestReader,
};
use crate::response::{AnswerWriter, SurfaceWriter};

pub(crate) use chat_body::ChatBody;
pub use responses::ResponseStore;
pub(crate) use responses::{PageQuery, StoreLimits, input_items, unknown_response};

/// The API that was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
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

/// The shape of an answer, and what it repeats of the body.
pub enum AnswerShape {
    /// Chats and text completions.
    OpenAi,
    /// Messages.
    Messages,
    /// Responses, with what they repeat.
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
    /// As [`ParsedRequest::chat`].
    pub fn read(
        self,
        body: Bytes,
        reader: &RequestReader<'_>,
        stored: &Arc<ResponseStore>,
    ) -> Result<(ParsedRequest, AnswerShape), ApiError> {
        Ok(match self {
            Surface::Chat => (ParsedRequest::chat(body, reader)?, AnswerShape::OpenAi),
            Surface::Completion => (
                ParsedRequest::completion(body, reader, None, Some(COMPLETION_MAX_TOKENS))?,
                AnswerShape::OpenAi,
            ),
            Surface::Messages | Surface::MessagesCount => {
                let counts_only = self == Surface::MessagesCount;
                let (chat, format_field) = messages::to_chat(body, counts_only)?;
                let renamed = |error| messages::renamed(error, format_field);
                let reader = RequestReader {
                    context_words: ContextWords::Anthropic,
                    ..*reader
                };
                let read = ParsedRequest::chat(chat, &reader);
                let mut request = read.map_err(renamed)?;
                request.rename_form_places(renamed);
                (request, AnswerShape::Messages)
            }
            Surface::Responses | Surface::ResponsesCount => {
                let (chat, echo) = responses::to_chat(body, reader.tenant, stored)?;
                let reader = RequestReader {
                    grammars: Some(echo.grammars()),
                    ..*reader
                };
                let read = ParsedRequest::chat(chat, &reader);
                let mut request = read.map_err(|error| echo.renamed(error))?;
                request.rename_form_places(|error| echo.renamed(error));
                (request, AnswerShape::Responses(Box::new(echo)))
            }
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

impl AnswerShape {
    /// Creates the writer of the answer to a request.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn writer(
        self,
        request: &Arc<GenerateRequest>,
    ) -> Result<Box<dyn SurfaceWriter>, ApiError> {
        Ok(match self {
            AnswerShape::OpenAi => Box::new(AnswerWriter::new(request.clone())?),
            AnswerShape::Messages => Box::new(messages::MessagesWriter::new(request)?),
            AnswerShape::Responses(echo) => {
                Box::new(responses::ResponsesWriter::new(request, *echo)?)
            }
        })
    }
}
