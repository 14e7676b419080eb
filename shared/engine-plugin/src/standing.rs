//! The namespace of requests that bring none: a token of the configuration, or of a file that is read again and again.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::IntCounter;
use refrain_draft_replica::Memory;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, SignedNamespace};
use refrain_service_kit::mesh::{MeshAuth, from_token};

/// How often the token's file is read.
const READ_EVERY: Duration = Duration::from_secs(60);
/// The same as long as there is no namespace.
const READ_EVERY_AT_FIRST: Duration = Duration::from_secs(1);

/// The namespace of requests that bring none.
pub(crate) struct Standing {
    pub(crate) file: Option<PathBuf>,
    pub(crate) auth: MeshAuth,
    pub(crate) tokenizer: String,
    /// Times that there was no token to believe.
    pub(crate) failures: IntCounter,
    signed: Mutex<Option<SignedNamespace>>,
}

/// Why there is no token to believe.
pub(crate) enum Unbelieved {
    /// It can be there later: it is too old, or its file cannot be read, or not whole.
    ForNow(String),
    /// It is another mesh's, or another tokenizer's.
    ForGood(String),
}

impl Unbelieved {
    fn of(error: &ApiError) -> Self {
        let why = error.to_string();
        if error.has_code(code::NAMESPACE_EXPIRED) {
            Unbelieved::ForNow(why)
        } else {
            Unbelieved::ForGood(why)
        }
    }
}

impl Standing {
    pub(crate) fn new(
        file: Option<PathBuf>,
        auth: MeshAuth,
        tokenizer: String,
        failures: IntCounter,
    ) -> Self {
        Standing {
            file,
            auth,
            tokenizer,
            failures,
            signed: Mutex::default(),
        }
    }

    /// The namespace to begin with: that of the token, or else of the file. None, where neither is configured, or where what
    /// there is may be believed later: an engine must start all the same.
    ///
    /// # Errors
    /// The token is one that will never be believed.
    pub(crate) fn first(&self, token: Option<&str>) -> anyhow::Result<Option<SignedNamespace>> {
        let found = match token {
            Some(token) => self
                .check(token)
                .map(Some)
                .map_err(|error| Unbelieved::of(&error)),
            None => self.read(),
        };
        match found {
            Ok(found) => Ok(found),
            Err(Unbelieved::ForGood(why)) => Err(anyhow::anyhow!(why)),
            Err(Unbelieved::ForNow(why)) => {
                self.failures.inc();
                tracing::warn!(
                    why,
                    "requests that bring no namespace have none until there is a token"
                );
                Ok(None)
            }
        }
    }

    /// Believes a token, if it is this mesh's and of this engine's tokenizer.
    pub(crate) fn check(&self, token: &str) -> Result<SignedNamespace, ApiError> {
        let signed = from_token(token)?;
        self.believe(&signed)?;
        Ok(signed)
    }

    fn believe(&self, signed: &SignedNamespace) -> Result<(), ApiError> {
        self.auth.verify(signed)?;
        if signed.namespace.tokenizer == self.tokenizer {
            return Ok(());
        }
        Err(ApiError::invalid(
            "namespace",
            "namespace refused: it is of another tokenizer than this engine's; sign it with the files that the engine has",
        ))
    }

    pub(crate) fn signed(&self) -> Option<SignedNamespace> {
        let signed = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        signed.clone()
    }

    /// Brings a copy of it up to date, for those who must not wait: not while it is being renewed.
    pub(crate) fn refresh(&self, copy: &mut Option<SignedNamespace>) {
        if let Ok(signed) = self.signed.try_lock()
            && *copy != *signed
        {
            copy.clone_from(&signed);
        }
    }

    /// From here on it is followed: the first request finds what there was before.
    pub(crate) fn set(&self, signed: SignedNamespace, memory: &Memory) {
        memory.namespace(signed.namespace.id(), &signed);
        *self.signed.lock().unwrap_or_else(PoisonError::into_inner) = Some(signed);
    }

    /// Reads the token's file.
    fn read(&self) -> Result<Option<SignedNamespace>, Unbelieved> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let at = |why: &str| format!("{}: {why}", file.display());
        let token = std::fs::read_to_string(file);
        let token = token.map_err(|error| Unbelieved::ForNow(at(&error.to_string())))?;
        // Half a token is what a file holds that is being written.
        let signed = from_token(&token);
        let signed = signed.map_err(|error| Unbelieved::ForNow(at(&error.to_string())))?;
        match self
            .believe(&signed)
            .map_err(|error| Unbelieved::of(&error))
        {
            Ok(()) => Ok(Some(signed)),
            Err(Unbelieved::ForNow(why)) => Err(Unbelieved::ForNow(at(&why))),
            Err(Unbelieved::ForGood(why)) => Err(Unbelieved::ForGood(at(&why))),
        }
    }

    /// Reads it again and again.
    pub(crate) async fn renew(self: Arc<Self>, memory: Arc<Memory>) {
        let mut told = None;
        loop {
            let is_missing = self.signed().is_none();
            tokio::time::sleep(if is_missing {
                READ_EVERY_AT_FIRST
            } else {
                READ_EVERY
            })
            .await;
            match self.read() {
                Ok(Some(signed)) => {
                    self.set(signed, &memory);
                    told = None;
                }
                Ok(None) => return,
                Err(Unbelieved::ForNow(why) | Unbelieved::ForGood(why)) => {
                    self.failures.inc();
                    // Once for each reason, not every second.
                    if told.as_ref() != Some(&why) {
                        tracing::warn!(why, "the namespace's token is not renewed");
                        told = Some(why);
                    }
                }
            }
        }
    }
}
