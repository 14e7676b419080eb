//! The engine's session of a request, as far as this worker knows it.

use refrain_protocol::engine::DrafterKind;
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};
use refrain_speculation::router::HeadState;

/// Number of lost sessions in one chunk from which on the engine is considered faulty.
const LOST_MAX: u32 = 3;

/// Number of unread tokens above which the head reads a context at once. Up to this, reading what plain and suffix
/// steps left is a part of drafting.
const CATCH_UP_TOKENS_MIN: u32 = 32;

/// The use that a request makes of the drafter inside the engine, which is the engine's head for short.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadUse {
    /// The drafter inside the engine, if it is the fallback.
    pub(crate) drafter: Option<DrafterKind>,
    /// Sessions of the request are opened for drafts of it.
    pub(crate) self_drafts: bool,
}

/// The engine's session of a request. With an engine that generates by itself, nothing is ever sent to it.
pub(crate) struct EngineSession {
    pub(crate) id: EngineSessionId,
    pub(crate) head: HeadUse,
    /// Length of the part of the text that it holds; 0 before it is opened.
    len: u32,
    /// Length of the part of the text that the head has read.
    head_len: u32,
    /// Number of times that the engine lost it in this chunk.
    losses: u32,
}

impl EngineSession {
    /// A session that is still to be opened.
    ///
    /// # Errors
    /// The system's random generator failed.
    pub(super) fn new(head: HeadUse) -> Result<Self, ApiError> {
        Ok(EngineSession {
            // Random, so that two workers of one engine never collide.
            id: EngineSessionId(refrain_service_kit::random::u128()?),
            head,
            len: 0,
            head_len: 0,
            losses: 0,
        })
    }

    /// Whether it is still to be opened.
    pub(super) fn is_new(&self) -> bool {
        self.len == 0
    }

    /// Length of the part of the text that it holds.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Length of the part that it holds after the next `context` tokens of a text.
    pub(crate) fn len_with(&self, context: u32, text_len: u32) -> u32 {
        (self.len + context).min(text_len)
    }

    /// Number of tokens of a text that still need a forward pass.
    pub(crate) fn owed(&self, text_len: u32) -> u32 {
        // The last token always needs a pass, even if the engine holds it already.
        (text_len - self.len).max(1)
    }

    /// Number of tokens that the head would have to read at once before it drafts.
    pub(super) fn unread_tokens(&self) -> u32 {
        let behind = self.len.saturating_sub(self.head_len);
        if behind > CATCH_UP_TOKENS_MIN {
            behind
        } else {
            0
        }
    }

    /// Whether the head can draft in the next step, after a text of this length.
    pub(super) fn head_state(&self, text_len: u32) -> HeadState {
        if !self.head.self_drafts {
            HeadState::Absent
        } else if self.is_new() || self.owed(text_len) > 1 {
            HeadState::Blind
        } else {
            HeadState::Ready {
                unread_tokens: self.unread_tokens(),
            }
        }
    }

    /// Notes that it holds a text of this length.
    pub(super) fn holds(&mut self, len: u32) {
        self.len = len;
    }

    /// Notes that the head has read a text of this length.
    pub(super) fn head_has_read(&mut self, len: u32) {
        self.head_len = len;
    }

    /// Begins a new session in the place of one that the engine lost.
    ///
    /// # Errors
    /// The engine lost too many sessions, or the system's random generator failed.
    pub(super) fn reopen(&mut self) -> Result<(), ApiError> {
        let losses = self.losses + 1;
        if losses > LOST_MAX {
            let message = "the engine keeps losing this request's session";
            return Err(ApiError::new(ErrorKind::Upstream, message));
        }
        *self = EngineSession {
            losses,
            ..EngineSession::new(self.head)?
        };
        Ok(())
    }

    /// Forgets that the engine has lost sessions: it did so by order, or in an earlier chunk.
    pub(crate) fn forgive_losses(&mut self) {
        self.losses = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> EngineSession {
        let head = HeadUse {
            drafter: Some(DrafterKind::Eagle3),
            self_drafts: true,
        };
        EngineSession::new(head).unwrap()
    }

    #[test]
    fn the_last_token_is_always_owed() {
        let mut session = session();
        assert_eq!((session.owed(10), session.len_with(4, 10)), (10, 4));
        session.holds(9);
        assert_eq!((session.owed(10), session.len_with(4, 10)), (1, 10));
        session.holds(10);
        assert_eq!(session.owed(10), 1);
    }

    #[test]
    fn a_head_drafts_after_a_prompt_and_reads_long_texts_first() {
        let mut session = session();
        assert!(matches!(session.head_state(100), HeadState::Blind));
        session.holds(50);
        assert!(matches!(session.head_state(100), HeadState::Blind));
        session.holds(99);
        let ready = |tokens| HeadState::Ready {
            unread_tokens: tokens,
        };
        assert_eq!(session.head_state(100), ready(99));
        session.head_has_read(99 - CATCH_UP_TOKENS_MIN);
        assert_eq!(session.head_state(100), ready(0));
        session.head = HeadUse::default();
        assert!(matches!(session.head_state(100), HeadState::Absent));
    }

    #[test]
    fn an_engine_that_keeps_losing_a_session_fails_the_request() {
        let mut session = session();
        for _ in 0..LOST_MAX {
            let lost = session.id;
            session.holds(5);
            session.reopen().unwrap();
            assert!(session.is_new() && session.id != lost);
        }
        assert!(session.reopen().is_err());
        session.forgive_losses();
        session.reopen().unwrap();
    }
}
