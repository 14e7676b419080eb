//! What a step may ask for: all checks that need no session, apart from the length of its text.

use std::collections::HashSet;

use refrain_protocol::engine::{StepItem, StepRequest};
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};

use crate::sampler;

/// The limits of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) vocab_size: u32,
    pub(crate) max_context: u32,
    pub(crate) max_batch: u32,
    pub(crate) max_step_tokens: u32,
    pub(crate) max_draft_tokens: u32,
}

impl Limits {
    /// Everything that can be wrong with a batch as a whole.
    ///
    /// # Errors
    /// `InvalidRequest`.
    pub(crate) fn check_batch(&self, request: &StepRequest) -> Result<(), ApiError> {
        let items = &request.items;
        if items.len() > self.max_batch as usize {
            return Err(ApiError::invalid(
                "items",
                format!("{} items; a step takes {}", items.len(), self.max_batch),
            )
            .with_code("batch_too_large"));
        }
        let tokens: usize = items
            .iter()
            .map(|item| {
                item.tokens.len() + item.draft.as_ref().map_or(0, |draft| draft.tokens.len())
            })
            .sum();
        if tokens > self.max_step_tokens as usize {
            let message = format!(
                "{tokens} tokens; a step takes {}. Send long prompts in pieces, with `sample` at the last",
                self.max_step_tokens
            );
            return Err(ApiError::invalid("items", message).with_code("step_too_large"));
        }
        let mut seen = HashSet::with_capacity(items.len());
        if let Some(item) = items.iter().find(|item| !seen.insert(item.session)) {
            return Err(ApiError::invalid(
                "items",
                format!("session {} stands twice in the batch", item.session),
            ));
        }
        Ok(())
    }

    /// Everything that can be wrong with an item, given the length of its session's text (`None` for an
    /// unknown session). Gives the length of its text after `tokens`, at least 1.
    ///
    /// # Errors
    /// `InvalidRequest`, or `NotFound` for an unknown session.
    pub(crate) fn check_item(
        &self,
        index: usize,
        item: &StepItem,
        known_len: Option<usize>,
    ) -> Result<usize, ApiError> {
        let field = |name: &str| format!("items[{index}].{name}");
        let known_len = match (&item.open, known_len) {
            (Some(spec), _) => {
                sampler::validate(&spec.sampling, self.vocab_size)?;
                0
            }
            (None, Some(len)) => len,
            (None, None) => return Err(unknown_session(item.session)),
        };
        if item.keep_len as usize > known_len {
            let message = format!(
                "keep_len {} is over the text's length {known_len}",
                item.keep_len
            );
            return Err(ApiError::invalid(field("keep_len"), message));
        }
        let text_len = item.keep_len as usize + item.tokens.len();
        if text_len == 0 {
            return Err(ApiError::invalid(
                field("tokens"),
                "the text must not be empty",
            ));
        }
        let longest = self.max_context as usize - usize::from(item.sample);
        if text_len > longest {
            let message = format!(
                "the text has {text_len} tokens; this model takes {}, those it emits included",
                self.max_context
            );
            return Err(
                ApiError::invalid(field("tokens"), message).with_code("context_length_exceeded")
            );
        }
        let draft = item.draft.as_ref().map_or(&[][..], |draft| &draft.tokens);
        if let Some(token) = item
            .tokens
            .iter()
            .chain(draft)
            .find(|token| **token >= self.vocab_size)
        {
            let message = format!(
                "token {token} is not below the vocabulary's size {}",
                self.vocab_size
            );
            return Err(ApiError::invalid(field("tokens"), message));
        }
        if draft.len() > self.max_draft_tokens as usize {
            let message = format!(
                "{} draft nodes; an item takes {}",
                draft.len(),
                self.max_draft_tokens
            );
            return Err(ApiError::invalid(field("draft"), message).with_code("draft_too_large"));
        }
        if let Some(draft) = &item.draft {
            if !item.sample {
                return Err(ApiError::invalid(field("draft"), "a draft needs `sample`"));
            }
            draft.validate()?;
        }
        if item.sample && item.max_emit == 0 {
            return Err(ApiError::invalid(
                field("max_emit"),
                "max_emit must be at least 1",
            ));
        }
        Ok(text_len)
    }
}

/// What callers are told of a session that is not open.
pub(crate) fn unknown_session(id: EngineSessionId) -> ApiError {
    ApiError::new(
        ErrorKind::NotFound,
        format!("no session {id}; open it again with the whole text"),
    )
    .with_code("session_not_found")
}
