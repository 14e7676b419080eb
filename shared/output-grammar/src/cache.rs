//! Keeps what was compiled, and what was refused.

use std::sync::Arc;

use refrain_protocol::NamespaceId;
use refrain_protocol::engine::OutputForm;
use sha2::{Digest, Sha256};

use crate::compiled::Outcome;
use crate::shares::Shares;
use crate::{CompiledGrammar, GrammarError, GrammarLimits};

/// What a compiler keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSize {
    /// Compiled grammars.
    pub grammars: usize,
    /// About the bytes of these.
    pub grammar_bytes: usize,
    /// Verdicts, of forms that were compiled or refused.
    pub verdicts: usize,
    /// Grammars that were pushed out so far, because the budget was used up.
    pub pushed_out: u64,
}

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

/// Grammars, and in a map of their own the verdicts, so that bad forms push no grammar out. In both, each namespace has
/// a share.
pub(crate) struct Cache {
    grammars: Shares<Arc<CompiledGrammar>>,
    verdicts: Shares<Result<(), GrammarError>>,
    pushed_out: u64,
}

impl Cache {
    pub(crate) fn new(limits: &GrammarLimits) -> Self {
        Cache {
            grammars: Shares::new(limits.cached_bytes_max),
            verdicts: Shares::new(limits.verdicts_max),
            pushed_out: 0,
        }
    }

    pub(crate) fn outcome(&mut self, key: &CacheKey) -> Option<Outcome> {
        match self.grammars.get(key) {
            Some(grammar) => Some(Ok(grammar.clone())),
            None => self.verdict(key)?.err().map(Err),
        }
    }

    pub(crate) fn verdict(&mut self, key: &CacheKey) -> Option<Result<(), GrammarError>> {
        self.verdicts.get(key).cloned()
    }

    pub(crate) fn size(&self) -> CacheSize {
        CacheSize {
            grammars: self.grammars.len(),
            grammar_bytes: self.grammars.weight(),
            verdicts: self.verdicts.len(),
            pushed_out: self.pushed_out,
        }
    }

    pub(crate) fn insert(&mut self, key: CacheKey, outcome: &Outcome) {
        let verdict = outcome.as_ref().map(|_| ()).map_err(Clone::clone);
        self.verdicts.insert(key, verdict, 1);
        if let Ok(grammar) = outcome {
            let bytes = grammar.bytes();
            self.pushed_out += self.grammars.insert(key, grammar.clone(), bytes) as u64;
        }
    }
}
