//! All sessions, with their limits.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use anyhow::Context as _;
use parking_lot::Mutex;
use refrain_accounts::AccountMetrics;
use refrain_gateway::SessionsConfig;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, TenantName};
use refrain_service_kit::{clock, random};

use super::session::{RETRY_AFTER_MS, Session};
use super::session_file::{SessionFile, lock_folder, read_folder};
use super::turns::Turns;
use crate::metrics::TrainerFamilies;

/// The limits of sessions, as metrics name them.
pub(crate) const SESSIONS_LIMIT: &str = "trainer_sessions";

/// Longest id of a session, bytes. It is the name of a file.
const ID_BYTES_MAX: usize = 128;

/// All sessions of the listener.
pub(crate) struct SessionTable {
    config: SessionsConfig,
    tenant: TenantName,
    accounts: Arc<AccountMetrics>,
    /// Keeps other processes out of the folder.
    _lock: Option<File>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    families: Arc<TrainerFamilies>,
}

impl SessionTable {
    /// Reads the sessions that are on disk.
    ///
    /// # Errors
    /// The disk refuses.
    pub(crate) fn open(
        config: SessionsConfig,
        tenant: TenantName,
        accounts: Arc<AccountMetrics>,
        families: Arc<TrainerFamilies>,
    ) -> anyhow::Result<Self> {
        let mut sessions = HashMap::new();
        let mut lock = None;
        if let Some(folder) = &config.folder {
            let place = || format!("the sessions in {}", folder.display());
            lock = Some(lock_folder(folder).with_context(place)?);
            let found = read_folder(folder);
            for one in found.with_context(place)? {
                let session = Session::new(one.turns, Some(one.file), families.clone());
                sessions.insert(one.id, Arc::new(session));
            }
        }
        Ok(SessionTable {
            config,
            tenant,
            accounts,
            _lock: lock,
            sessions: Mutex::new(sessions),
            families,
        })
    }

    /// Makes a session, if there is none with this id. Without an id it gets a new one.
    ///
    /// # Errors
    /// As [`SessionTable::enter`].
    pub(crate) fn create(&self, id: Option<String>) -> Result<String, ApiError> {
        let id = match id {
            Some(id) => id,
            None => format!("{:032x}", random::u128()?),
        };
        self.enter(&id)?;
        Ok(id)
    }

    /// The session with this id, if there is one.
    pub(super) fn find(&self, id: &str) -> Option<Arc<Session>> {
        self.sessions.lock().get(id).cloned()
    }

    /// The session with this id, which is made if there is none.
    ///
    /// # Errors
    /// The id is none, or there is no room for another session.
    pub(super) fn enter(&self, id: &str) -> Result<Arc<Session>, ApiError> {
        check_id(id)?;
        let mut sessions = self.sessions.lock();
        if let Some(session) = sessions.get(id) {
            return Ok(session.clone());
        }
        self.check_room(None, sessions.len())?;
        let folder = self.config.folder.as_ref();
        let file = folder.map(|folder| SessionFile::new(folder, id));
        let session = Arc::new(Session::new(Vec::new(), file, self.families.clone()));
        sessions.insert(id.to_owned(), session.clone());
        Ok(session)
    }

    /// Checks that there may be another turn, of this session or of a new one with this id.
    ///
    /// # Errors
    /// The id is none, or there is no room.
    pub(super) fn check(&self, id: &str, session: Option<&Session>) -> Result<(), ApiError> {
        check_id(id)?;
        let sessions = self.sessions.lock().len();
        self.check_room(session, sessions)
    }

    /// Checks the limits for another turn, of this session or of a new one.
    fn check_room(&self, session: Option<&Session>, sessions: usize) -> Result<(), ApiError> {
        let bytes = self.families.session_bytes.get().cast_unsigned();
        let limit = match session {
            _ if bytes >= self.config.bytes_max => "bytes_max",
            Some(session) if session.turns() >= self.config.turns_max => "turns_max",
            None if sessions >= self.config.sessions_max => "sessions_max",
            _ => {
                session.inspect(|session| session.used());
                return Ok(());
            }
        };
        Err(self.full(&format!("gateway.trainer.sessions.{limit}")))
    }

    fn full(&self, limit: &str) -> ApiError {
        self.accounts.rejected(&self.tenant, SESSIONS_LIMIT);
        let message = format!(
            "there is no room for another session or turn, by {limit}; delete sessions that were read, or raise it"
        );
        ApiError::new(ErrorKind::Overloaded, message)
            .with_code(code::RATE_LIMIT_EXCEEDED)
            .with_retry_after_ms(RETRY_AFTER_MS)
    }

    /// The turns of a session.
    ///
    /// # Errors
    /// `NotFound` if there is none with this id.
    pub(crate) fn turns(&self, id: &str) -> Result<Turns, ApiError> {
        let session = self.find(id).ok_or_else(|| unknown(id))?;
        session.used();
        Ok(session.turns_now())
    }

    /// The ids of all sessions in order, each with its number of turns.
    pub(crate) fn list(&self) -> Vec<(String, usize)> {
        let sessions = self.sessions.lock();
        let shared = sessions
            .iter()
            .map(|(id, session)| (id.clone(), session.clone()));
        let mut list: Vec<_> = shared.collect();
        // A session may be busy with the disk.
        drop(sessions);
        list.sort_by(|(one, _), (other, _)| one.cmp(other));
        let count = |(id, session): (String, Arc<Session>)| (id, session.turns());
        list.into_iter().map(count).collect()
    }

    /// Ends a session. A turn that is under way is answered, and not recorded.
    ///
    /// # Errors
    /// `NotFound` if there is none with this id, or the disk refuses.
    pub(crate) fn erase(&self, id: &str) -> Result<(), ApiError> {
        let session = self.find(id).ok_or_else(|| unknown(id))?;
        session.end("erased")?;
        self.sessions.lock().remove(id);
        Ok(())
    }

    /// Ends the sessions that nobody has used for too long.
    pub(crate) fn expire(&self) {
        let now_s = clock::unix_s();
        let is_over = |session: &Arc<Session>| {
            let unused_s = now_s.saturating_sub(session.used_s());
            // A turn under way holds its session.
            Arc::strong_count(session) == 1 && unused_s * 1_000 > self.config.keep_ms
        };
        let over: Vec<_> = {
            let mut sessions = self.sessions.lock();
            sessions.extract_if(|_, session| is_over(session)).collect()
        };
        for (id, session) in over {
            if let Err(error) = session.end("expired") {
                tracing::warn!(session = id, %error, "the file of an expired session cannot be removed");
            }
        }
    }
}

fn check_id(id: &str) -> Result<(), ApiError> {
    match is_id(id) {
        true => Ok(()),
        false => {
            let message = format!(
                "session: its id must have 1 to {ID_BYTES_MAX} letters, digits, '-', '_', '.' or ':', and begin with a \
                 letter or digit"
            );
            Err(ApiError::invalid("session", message))
        }
    }
}

/// Whether this may be the id of a session.
fn is_id(id: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    id.len() <= ID_BYTES_MAX
        && id.bytes().all(fits)
        && id
            .bytes()
            .next()
            .is_some_and(|first| first.is_ascii_alphanumeric())
}

fn unknown(id: &str) -> ApiError {
    let message = match is_id(id) {
        true => format!("session not found: {id}; it was never made, was deleted, or has expired"),
        false => "session not found".to_owned(),
    };
    ApiError::new(ErrorKind::NotFound, message)
}
