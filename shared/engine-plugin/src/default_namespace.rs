//! The namespace of requests that bring none: a token of the configuration, or of a file that is read again and
//! again.

use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::IntCounter;
use refrain_draft_replica::DraftReplica;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, SignedNamespace};
use refrain_service_kit::mesh::{MeshAuth, from_token};

/// How often the token's file is read.
const READ_EVERY: Duration = Duration::from_secs(60);
/// How often it is read while there is no valid token yet.
const READ_EVERY_AT_FIRST: Duration = Duration::from_secs(1);

/// The namespace of requests that bring none, and the check of every token.
pub(crate) struct DefaultNamespace {
    pub(crate) file: Option<PathBuf>,
    pub(crate) auth: MeshAuth,
    /// The identity of the engine's tokenizer.
    pub(crate) tokenizer: String,
    /// Counts the times that there was no valid token.
    pub(crate) failures: IntCounter,
    pub(crate) signed: Mutex<Option<SignedNamespace>>,
}

/// Why a token is not valid.
pub(crate) struct TokenFault {
    why: String,
    /// It is of another mesh, or of another tokenizer. Otherwise a valid one may be there later: this one is expired,
    /// or its file cannot be read or is not complete.
    is_final: bool,
}

/// Whether a token that is refused with this error will never be valid.
fn is_final(refusal: &ApiError) -> bool {
    !refusal.has_code(code::NAMESPACE_EXPIRED)
}

impl DefaultNamespace {
    /// The namespace to start with: that of the token, or else of the file. `None` where neither is configured, or
    /// where the token may be valid later: an engine must start all the same.
    ///
    /// # Errors
    /// The token will never be valid.
    pub(crate) fn first(&self, token: Option<&str>) -> anyhow::Result<Option<SignedNamespace>> {
        let found = match token {
            Some(token) => self.check(token).map(Some).map_err(|error| TokenFault {
                why: error.to_string(),
                is_final: is_final(&error),
            }),
            None => self.read(),
        };
        match found {
            Ok(found) => Ok(found),
            Err(fault) if fault.is_final => Err(anyhow::anyhow!(fault.why)),
            Err(TokenFault { why, .. }) => {
                self.failures.inc();
                tracing::warn!(
                    why,
                    "there is no valid token yet; requests without a namespace draft from their own text alone"
                );
                Ok(None)
            }
        }
    }

    /// Checks that a token is of this mesh and of this engine's tokenizer.
    pub(crate) fn check(&self, token: &str) -> Result<SignedNamespace, ApiError> {
        let signed = from_token(token)?;
        self.verify(&signed)?;
        Ok(signed)
    }

    fn verify(&self, signed: &SignedNamespace) -> Result<(), ApiError> {
        self.auth.verify(signed)?;
        if signed.namespace.tokenizer == self.tokenizer {
            return Ok(());
        }
        Err(ApiError::invalid(
            "namespace",
            "namespace refused: it is of another tokenizer than this engine's; sign it with the engine's files",
        ))
    }

    /// Brings a copy of the namespace up to date, without waiting: not while another thread renews it.
    pub(crate) fn refresh(&self, copy: &mut Option<SignedNamespace>) {
        if let Some(signed) = self.signed.try_lock()
            && *copy != *signed
        {
            copy.clone_from(&signed);
        }
    }

    /// Sets the namespace, and follows the store for it from now on, before its first request.
    pub(crate) fn set(&self, signed: SignedNamespace, replica: &DraftReplica) {
        replica.namespace(signed.namespace.id(), &signed);
        *self.signed.lock() = Some(signed);
    }

    /// Reads the token's file.
    fn read(&self) -> Result<Option<SignedNamespace>, TokenFault> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let fault = |why: &dyn Display, is_final| TokenFault {
            why: format!("{}: {why}", file.display()),
            is_final,
        };
        let token = std::fs::read_to_string(file).map_err(|error| fault(&error, false))?;
        // A file that is being written may hold half a token.
        let signed = from_token(&token).map_err(|error| fault(&error, false))?;
        let verified = self.verify(&signed);
        verified.map_err(|error| fault(&error, is_final(&error)))?;
        Ok(Some(signed))
    }

    /// Reads the file again and again.
    pub(crate) async fn renew(self: Arc<Self>, replica: Arc<DraftReplica>) {
        let mut logged = None;
        loop {
            let is_missing = self.signed.lock().is_none();
            tokio::time::sleep(if is_missing {
                READ_EVERY_AT_FIRST
            } else {
                READ_EVERY
            })
            .await;
            match self.read() {
                Ok(Some(signed)) => {
                    self.set(signed, &replica);
                    logged = None;
                }
                Ok(None) => return,
                Err(TokenFault { why, .. }) => {
                    self.failures.inc();
                    // Each reason is logged once, not every second.
                    if logged.as_ref() != Some(&why) {
                        tracing::warn!(
                            why,
                            "the token of the configured namespace cannot be renewed"
                        );
                        logged = Some(why);
                    }
                }
            }
        }
    }
}
