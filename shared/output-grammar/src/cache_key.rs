//! The key that a compiled or refused form is kept under.

use refrain_protocol::NamespaceId;
use refrain_protocol::engine::OutputForm;
use sha2::{Digest, Sha256};

use crate::GrammarError;

/// A form of a namespace. Others do not learn from the time of a call that the form was compiled before.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    pub(crate) namespace: NamespaceId,
    digest: [u8; 32],
}

/// Digests a form, up to a length.
struct Digester {
    hash: Sha256,
    bytes: usize,
    bytes_max: usize,
}

impl std::io::Write for Digester {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes += bytes.len();
        if self.bytes > self.bytes_max {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.hash.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl CacheKey {
    /// # Errors
    /// The form is too long.
    pub(crate) fn new(
        namespace: NamespaceId,
        form: &OutputForm,
        bytes_max: usize,
    ) -> Result<Self, GrammarError> {
        let mut digester = Digester {
            hash: Sha256::new(),
            bytes: 0,
            bytes_max,
        };
        serde_json::to_writer(&mut digester, form).map_err(|_| {
            GrammarError::refused(format!("the form has more than {bytes_max} bytes"))
        })?;
        Ok(CacheKey {
            namespace,
            digest: digester.hash.finalize().into(),
        })
    }
}
