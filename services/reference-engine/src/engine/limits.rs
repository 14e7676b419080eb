//! Checks of a step's requests against the engine's limits.

use std::collections::HashSet;

use refrain_protocol::engine::{DrafterCapabilities, SelfDraft, StepItem, StepRequest};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};

use crate::sampler;

/// The limits of an engine's steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepLimits {
    pub(crate) vocab_size: u32,
    pub(crate) max_context: u32,
    pub(crate) max_batch: u32,
    pub(crate) max_step_tokens: u32,
    pub(crate) max_draft_tokens: u32,
    /// Limits of the drafter, if there is one.
    pub(crate) drafter: Option<DrafterCapabilities>,
}

/// The facts about an open session that the checks need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownSession {
    pub(crate) text_len: usize,
    /// Whether the session was opened with `self_drafts`.
    pub(crate) self_drafts: bool,
}

impl StepLimits {
    /// Checks a batch as a whole.
    ///
    /// # Errors
    /// `InvalidRequest` if the batch breaks a limit or has a session twice.
    pub(crate) fn check_batch(&self, request: &StepRequest) -> Result<(), ApiError> {
        let items = &request.items;
        if items.len() > self.max_batch as usize {
            return Err(ApiError::invalid(
                "items",
                format!(
                    "the batch has {} items; a step takes at most {}",
                    items.len(),
                    self.max_batch
                ),
            )
            .with_code("batch_too_large"));
        }
        let tokens: usize = items
            .iter()
            .map(|item| {
                let own = item.self_draft.map_or(0, |draft| draft.tokens_max as usize);
                let draft = item.draft.as_ref().map_or(0, |draft| draft.tokens.len());
                item.tokens.len() + draft.saturating_add(own)
            })
            .sum();
        if tokens > self.max_step_tokens as usize {
            let message = format!(
                "the batch has {tokens} tokens; a step takes at most {}. Send long prompts in pieces, with \
                 `sample` at the last",
                self.max_step_tokens
            );
            return Err(ApiError::invalid("items", message).with_code("step_too_large"));
        }
        let mut seen = HashSet::with_capacity(items.len());
        if let Some(item) = items.iter().find(|item| !seen.insert(item.session)) {
            return Err(ApiError::invalid(
                "items",
                format!("session {} occurs twice in the batch", item.session),
            ));
        }
        Ok(())
    }

    /// Checks an item. `known` describes its session, if it is open. Returns the length of the text after `tokens`,
    /// which is at least 1.
    ///
    /// # Errors
    /// `InvalidRequest` for a fault of the item, and `NotFound` for an unknown session.
    pub(crate) fn check_item(
        &self,
        index: usize,
        item: &StepItem,
        known: Option<KnownSession>,
    ) -> Result<usize, ApiError> {
        let field = |name: &str| format!("items[{index}].{name}");
        let known = match (&item.open, known) {
            (Some(spec), _) => {
                sampler::validate(&spec.sampling, self.vocab_size)?;
                KnownSession {
                    text_len: 0,
                    self_drafts: spec.self_drafts,
                }
            }
            (None, Some(known)) => known,
            (None, None) => return Err(unknown_session(item.session)),
        };
        if item.keep_len as usize > known.text_len {
            let message = format!(
                "keep_len is {}, but the text has only {} tokens",
                item.keep_len, known.text_len
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
                "the text has {text_len} tokens; this model takes at most {}, emitted tokens included",
                self.max_context
            );
            return Err(ApiError::invalid(field("tokens"), message)
                .with_code(code::CONTEXT_LENGTH_EXCEEDED));
        }
        let draft = item.draft.as_ref().map_or(&[][..], |draft| &draft.tokens);
        if let Some(token) = item
            .tokens
            .iter()
            .chain(draft)
            .find(|token| **token >= self.vocab_size)
        {
            let message = format!(
                "token {token} is outside the vocabulary; ids must be below {}",
                self.vocab_size
            );
            return Err(ApiError::invalid(field("tokens"), message));
        }
        if draft.len() > self.max_draft_tokens as usize {
            let message = format!(
                "the draft has {} nodes; an item takes at most {}",
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
        if let Some(wanted) = &item.self_draft {
            self.check_self_draft(item, wanted, known)
                .map_err(|(part, message)| {
                    ApiError::invalid(field(&format!("self_draft{part}")), message)
                })?;
        }
        if item.sample && item.max_emit == 0 {
            return Err(ApiError::invalid(
                field("max_emit"),
                "max_emit must be at least 1",
            ));
        }
        Ok(text_len)
    }

    /// Checks `self_draft`. The error is the faulty field of it, and what is wrong.
    fn check_self_draft(
        &self,
        item: &StepItem,
        wanted: &SelfDraft,
        known: KnownSession,
    ) -> Result<(), (&'static str, String)> {
        let Some(drafter) = self.drafter else {
            let message = "this engine has neither an EAGLE-3 head nor a draft model";
            return Err(("", message.into()));
        };
        if !item.sample {
            return Err(("", "a draft needs `sample`".into()));
        }
        if !known.self_drafts {
            let message = "the session was opened without `self_drafts`";
            return Err(("", message.into()));
        }
        // A draft that is too large has been refused before.
        let received = item.draft.as_ref().map_or(0, |draft| draft.tokens.len());
        let room = self.max_draft_tokens.saturating_sub(received as u32);
        let counts = [
            (".depth", wanted.depth, 1, drafter.depth_max),
            (".top_k", wanted.top_k, 1, drafter.top_k_max),
            (".tokens_max", wanted.tokens_max, 0, room),
        ];
        for (part, count, least, most) in counts {
            if !(least..=most).contains(&count) {
                return Err((
                    part,
                    format!("self_draft{part} is {count}; it must be from {least} to {most}"),
                ));
            }
        }
        if !(0.0..=1.0).contains(&wanted.path_prob_min) {
            let message = format!(
                "self_draft.path_prob_min is {}; it must be from 0 to 1",
                wanted.path_prob_min
            );
            return Err((".path_prob_min", message));
        }
        if wanted.sampled && wanted.top_k > 1 {
            let message = "with self_draft.sampled, self_draft.top_k must be 1, because drawn drafts are chains";
            return Err((".sampled", message.into()));
        }
        if wanted.sampled && item.draft.is_some() {
            let message = "self_draft.sampled cannot be combined with `draft`, because a drawn draft cannot be \
                 merged; send one of them";
            return Err((".sampled", message.into()));
        }
        Ok(())
    }
}

/// Returns the error for a session that is not open.
pub(crate) fn unknown_session(id: EngineSessionId) -> ApiError {
    ApiError::new(
        ErrorKind::NotFound,
        format!("session {id} is not open; open it again with the whole text"),
    )
    .with_code("session_not_found")
}
