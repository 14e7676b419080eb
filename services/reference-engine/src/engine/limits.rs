//! Checks of a step's requests against the engine's limits.

use std::collections::HashSet;

use refrain_protocol::engine::{DrafterCapabilities, SelfDraft, StepItem, StepRequest};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};

use super::session::Session;
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

impl StepLimits {
    /// Checks a batch as a whole.
    ///
    /// # Errors
    /// `InvalidRequest` if the batch breaks a limit or has a session twice.
    pub(crate) fn check_batch(&self, request: &StepRequest) -> Result<(), ApiError> {
        let items = &request.items;
        let (count, most) = (items.len(), self.max_batch);
        if count > most as usize {
            let message = format!("the batch has {count} items; a step takes at most {most}");
            return Err(ApiError::invalid("items", message).with_code("batch_too_large"));
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
            let message = format!("session {} occurs twice in the batch", item.session);
            return Err(ApiError::invalid("items", message));
        }
        Ok(())
    }

    /// Checks an item. `session` is its session, if it is open. Returns the length of the text after `tokens`,
    /// which is at least 1.
    ///
    /// # Errors
    /// `InvalidRequest` for a fault of the item, and `NotFound` for an unknown session.
    pub(crate) fn check_item(
        &self,
        index: usize,
        item: &StepItem,
        session: Option<&Session>,
    ) -> Result<usize, ApiError> {
        let fault = |name: &str, message: String| {
            ApiError::invalid(format!("items[{index}].{name}"), message)
        };
        let (known_len, self_drafts) = match (&item.open, session) {
            (Some(spec), _) => {
                sampler::validate(&spec.sampling, self.vocab_size)?;
                (0, spec.self_drafts)
            }
            (None, Some(session)) => (session.text.len(), session.drafter_state.is_some()),
            (None, None) => return Err(unknown_session(item.session)),
        };
        if item.keep_len as usize > known_len {
            let message = format!(
                "keep_len is {}, but the text has only {known_len} tokens",
                item.keep_len
            );
            return Err(fault("keep_len", message));
        }
        let text_len = item.keep_len as usize + item.tokens.len();
        if text_len == 0 {
            return Err(fault("tokens", "the text must not be empty".into()));
        }
        let longest = self.max_context as usize - usize::from(item.sample);
        if text_len > longest {
            let message = format!(
                "the text has {text_len} tokens; this model takes at most {}, emitted tokens included",
                self.max_context
            );
            return Err(fault("tokens", message).with_code(code::CONTEXT_LENGTH_EXCEEDED));
        }
        let draft = item.draft.as_ref().map_or(&[][..], |draft| &draft.tokens);
        let mut tokens = item.tokens.iter().chain(draft);
        if let Some(token) = tokens.find(|token| **token >= self.vocab_size) {
            let message = format!(
                "token {token} is outside the vocabulary; ids must be below {}",
                self.vocab_size
            );
            return Err(fault("tokens", message));
        }
        if draft.len() > self.max_draft_tokens as usize {
            let message = format!(
                "the draft has {} nodes; an item takes at most {}",
                draft.len(),
                self.max_draft_tokens
            );
            return Err(fault("draft", message).with_code("draft_too_large"));
        }
        if let Some(draft) = &item.draft {
            if !item.sample {
                return Err(fault("draft", "a draft needs `sample`".into()));
            }
            draft.validate()?;
        }
        if let Some(wanted) = &item.self_draft {
            self.check_self_draft(item, wanted, self_drafts)
                .map_err(|(part, message)| fault(&format!("self_draft{part}"), message))?;
        }
        if item.sample && item.max_emit == 0 {
            return Err(fault("max_emit", "max_emit must be at least 1".into()));
        }
        Ok(text_len)
    }

    /// Checks `self_draft`. The error is the faulty field of it, and what is wrong.
    fn check_self_draft(
        &self,
        item: &StepItem,
        wanted: &SelfDraft,
        self_drafts: bool,
    ) -> Result<(), (&'static str, String)> {
        let Some(drafter) = self.drafter else {
            let message = "this engine has neither an EAGLE-3 head nor a draft model";
            return Err(("", message.into()));
        };
        let refuse = |holds: bool, part, message: &str| match holds {
            true => Err((part, message.to_owned())),
            false => Ok(()),
        };
        refuse(!item.sample, "", "a draft needs `sample`")?;
        refuse(
            !self_drafts,
            "",
            "the session was opened without `self_drafts`",
        )?;
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
        refuse(
            wanted.sampled && wanted.top_k > 1,
            ".sampled",
            "with self_draft.sampled, self_draft.top_k must be 1, because drawn drafts are chains",
        )?;
        refuse(
            wanted.sampled && item.draft.is_some(),
            ".sampled",
            "self_draft.sampled cannot be combined with `draft`, because a drawn draft cannot be merged; send one of \
             them",
        )
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
