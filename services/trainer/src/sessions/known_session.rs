//! The prompt of the next turn: the tokens of the turn that it goes on from, and those of what is new.

use std::sync::Arc;

use parking_lot::Mutex;
use refrain_gateway::{KnownTurns, TemplatedChat};
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::{SampledAnswer, TokenizationError};

use super::digests;
use super::session::{Place, Session};
use super::table::SessionTable;

/// A session as the reader of a request knows it. A request may be read several times, and the last time counts.
#[derive(Clone)]
pub(crate) struct KnownSession {
    id: Arc<str>,
    table: Arc<SessionTable>,
    /// `None` before its first turn. A request that is refused makes no session.
    session: Option<Arc<Session>>,
    place: Arc<Mutex<Place>>,
}

impl KnownSession {
    /// The session with this id, which may have no turn yet.
    ///
    /// # Errors
    /// The id is none, or there is no room for another session or turn.
    pub(crate) fn of_path(table: &Arc<SessionTable>, id: &str) -> Result<Self, ApiError> {
        let session = table.find(id);
        table.check(id, session.as_deref())?;
        Ok(KnownSession::new(table, id, session))
    }

    /// The session with this name, if there is one. Many programs name their conversations, and few of them are for a
    /// trainer.
    ///
    /// # Errors
    /// There is no room for another turn.
    pub(crate) fn of_head(table: &Arc<SessionTable>, name: &str) -> Result<Option<Self>, ApiError> {
        let Some(session) = table.find(name) else {
            return Ok(None);
        };
        table.check(name, Some(&session))?;
        Ok(Some(KnownSession::new(table, name, Some(session))))
    }

    fn new(table: &Arc<SessionTable>, id: &str, session: Option<Arc<Session>>) -> Self {
        KnownSession {
            id: id.into(),
            table: table.clone(),
            session,
            place: Arc::default(),
        }
    }

    /// The id of the session.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The session of a request that was let in. It is made for its first turn.
    ///
    /// # Errors
    /// As [`SessionTable::enter`].
    pub(crate) fn entered(self) -> Result<EnteredSession, ApiError> {
        let session = match self.session {
            Some(session) => session,
            None => self.table.enter(&self.id)?,
        };
        let place = *self.place.lock();
        Ok(EnteredSession { session, place })
    }
}

/// The session of a request that is carried out.
pub(crate) struct EnteredSession {
    pub(super) session: Arc<Session>,
    /// The place of the request in it.
    pub(super) place: Place,
}

impl KnownTurns for KnownSession {
    fn prompt(&self, chat: &TemplatedChat<'_>) -> Result<Option<Vec<TokenId>>, TokenizationError> {
        let digests = digests::of_chat(chat);
        let session = self.session.as_ref();
        let known = session.and_then(|session| session.latest(&digests));
        let mut place = Place {
            digest: digests.last().copied(),
            parent: None,
            is_anew: session.is_some_and(|session| session.turns() > 0),
        };
        let mut prompt = None;
        if let Some(known) = known {
            let last = known.tokens.last().copied();
            let answer = SampledAnswer {
                message: known.messages - 1,
                end: last.filter(|token| chat.ends.contains(token)),
            };
            let room = chat.tokens_max.saturating_sub(known.tokens.len());
            let (tokenizer, template) = (chat.tokenizer, chat.template);
            let rest =
                template.encode_behind(tokenizer, chat.input, answer, chat.open_answer, room);
            // A chat that the template refuses with a mark in it may be one that it renders without.
            if let Some(rest) = rest.ok().flatten() {
                place.parent = Some(known.turn);
                place.is_anew = false;
                prompt = Some([known.tokens, rest].concat());
            }
        }
        *self.place.lock() = place;
        Ok(prompt)
    }
}
