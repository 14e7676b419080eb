//! A session: its turns in memory, and their file.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use refrain_protocol::{ApiError, ErrorKind, TokenId};
use refrain_service_kit::clock;

use super::digests::Digest;
use super::session_file::SessionFile;
use super::turns::{Turn, Turns};
use crate::metrics::TrainerFamilies;

/// Time after which a turn that found no room may be sent again.
pub(super) const RETRY_AFTER_MS: u64 = 5_000;

/// A session.
pub(super) struct Session {
    state: Mutex<State>,
    /// Unix time of its last use, seconds.
    used_s: AtomicU64,
    families: Arc<TrainerFamilies>,
}

struct State {
    turns: Turns,
    /// `None` where sessions are kept in memory only.
    file: Option<SessionFile>,
    bytes: u64,
    has_ended: bool,
}

/// A turn that a chat goes on from.
pub(super) struct KnownTurn {
    pub(super) turn: u32,
    /// Messages of the chat that it has, its answer included.
    pub(super) messages: usize,
    /// All tokens up to its end.
    pub(super) tokens: Vec<TokenId>,
}

/// The place of a request in its session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The digest of its messages; `None` if nothing can go on from it.
    pub(super) digest: Option<Digest>,
    /// The turn that it goes on from.
    pub(super) parent: Option<u32>,
    /// Whether the session has turns, and the prompt does not go on from one.
    pub(super) is_anew: bool,
}

impl Session {
    /// A session with the turns that its file has.
    pub(super) fn new(
        turns: Vec<Turn>,
        file: Option<SessionFile>,
        families: Arc<TrainerFamilies>,
    ) -> Self {
        families.sessions.inc();
        let used_s = turns.last().map_or_else(clock::unix_s, |turn| turn.ended_s);
        let mut state = State {
            turns: Turns::default(),
            file,
            bytes: 0,
            has_ended: false,
        };
        for turn in turns {
            state.push(turn, &families);
        }
        Session {
            state: Mutex::new(state),
            used_s: used_s.into(),
            families,
        }
    }

    /// Unix time of its last use, seconds.
    pub(super) fn used_s(&self) -> u64 {
        self.used_s.load(Ordering::Relaxed)
    }

    /// Notes that somebody uses it.
    pub(super) fn used(&self) {
        self.used_s.store(clock::unix_s(), Ordering::Relaxed);
    }

    /// Its turns so far, which are shared and not copied.
    pub(super) fn turns_now(&self) -> Turns {
        self.state.lock().turns.clone()
    }

    /// Number of turns.
    pub(super) fn turns(&self) -> usize {
        self.state.lock().turns.len()
    }

    /// The turn that a chat with these digests goes on from.
    pub(super) fn latest(&self, digests: &[Digest]) -> Option<KnownTurn> {
        let state = self.state.lock();
        let (turn, messages) = state.turns.latest(digests)?;
        let tokens = state.turns.tokens(turn);
        Some(KnownTurn {
            turn,
            messages,
            tokens,
        })
    }

    /// Adds the turns that `turns` makes, all or none. It is told which turn they go on from, and how many tokens of
    /// their `prompt` that one has.
    ///
    /// # Errors
    /// The disk refuses. Nothing is added then.
    pub(super) fn add(
        &self,
        place: Place,
        prompt: &[TokenId],
        turns: impl FnOnce(Option<u32>, usize) -> Vec<Turn>,
    ) -> Result<(), ApiError> {
        let mut state = self.state.lock();
        if state.has_ended {
            return Ok(());
        }
        let known = place
            .parent
            .map(|parent| (parent, state.turns.tokens(parent)));
        // A prompt that was cut to its last tokens begins with no other.
        let known = known.filter(|(_, tokens)| prompt.starts_with(tokens));
        let kind = match (&known, place.is_anew || place.parent.is_some()) {
            (Some(_), _) => "continued",
            (None, false) => "first",
            (None, true) => "rendered_anew",
        };
        let turns = match known {
            Some((parent, tokens)) => turns(Some(parent), tokens.len()),
            None => turns(None, 0),
        };
        if let Some(file) = &state.file {
            file.append(&turns).map_err(|error| unwritten(&error))?;
        }
        self.used();
        for turn in turns {
            state.push(turn, &self.families);
            self.families.session_turns.with_label_values(&[kind]).inc();
        }
        Ok(())
    }

    /// Ends it, and removes its file. A turn that is under way is not recorded.
    ///
    /// # Errors
    /// The disk refuses.
    pub(super) fn end(&self, reason: &str) -> Result<(), ApiError> {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.has_ended, true) {
            self.families
                .sessions_ended
                .with_label_values(&[reason])
                .inc();
        }
        let removed = state.file.as_ref().map_or(Ok(()), SessionFile::remove);
        removed.map_err(|error| unwritten(&error))
    }
}

impl State {
    fn push(&mut self, turn: Turn, families: &TrainerFamilies) {
        let bytes = turn.bytes();
        self.bytes += bytes;
        families.session_bytes.add(bytes.cast_signed());
        self.turns.add(turn);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let bytes = self.state.get_mut().bytes;
        self.families.session_bytes.sub(bytes.cast_signed());
        self.families.sessions.dec();
    }
}

/// The error of a turn that cannot be kept.
pub(super) fn unwritten(error: &std::io::Error) -> ApiError {
    let message = "the turn cannot be written to gateway.trainer.sessions.folder; see the log";
    ApiError::new(ErrorKind::Unavailable, message)
        .with_detail(error)
        .with_retry_after_ms(RETRY_AFTER_MS)
}
