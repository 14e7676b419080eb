//! The namespace of requests that bring none: a token of the configuration, or of a file that is read again and again.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use refrain_draft_memory::Memory;
use refrain_protocol::{ApiError, SignedNamespace};
use refrain_service_kit::mesh::{MeshAuth, from_token};

/// How often the token's file is read.
const READ_EVERY: Duration = Duration::from_secs(60);

/// The namespace of requests that bring none.
pub(crate) struct Standing {
    pub(crate) file: Option<PathBuf>,
    pub(crate) auth: MeshAuth,
    pub(crate) tokenizer: String,
    signed: Mutex<Option<SignedNamespace>>,
}

impl Standing {
    pub(crate) fn new(file: Option<PathBuf>, auth: MeshAuth, tokenizer: String) -> Self {
        Standing {
            file,
            auth,
            tokenizer,
            signed: Mutex::default(),
        }
    }

    /// Believes a token, if it is this mesh's and of this engine's tokenizer.
    pub(crate) fn check(&self, token: &str) -> Result<SignedNamespace, ApiError> {
        let signed = from_token(token)?;
        self.auth.verify(&signed)?;
        if signed.namespace.tokenizer != self.tokenizer {
            return Err(ApiError::invalid(
                "namespace",
                "namespace refused: it is of another tokenizer than this engine's; sign it with the files that the engine has",
            ));
        }
        Ok(signed)
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

    pub(crate) fn set(&self, signed: SignedNamespace) {
        *self.signed.lock().unwrap_or_else(PoisonError::into_inner) = Some(signed);
    }

    /// Reads the token's file.
    pub(crate) fn read(&self) -> anyhow::Result<Option<SignedNamespace>> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let token = std::fs::read_to_string(file)
            .map_err(|error| anyhow::anyhow!("{}: {error}", file.display()))?;
        let signed = self.check(&token);
        Ok(Some(signed.map_err(|error| {
            anyhow::anyhow!("{}: {error}", file.display())
        })?))
    }

    /// Reads it again and again.
    pub(crate) async fn renew(self: Arc<Self>, memory: Arc<Memory>) {
        loop {
            tokio::time::sleep(READ_EVERY).await;
            match self.read() {
                Ok(Some(signed)) => {
                    memory.namespace(signed.namespace.id(), &signed);
                    self.set(signed);
                }
                Ok(None) => return,
                Err(error) => tracing::warn!(%error, "the namespace's token is not renewed"),
            }
        }
    }
}
