//! Keeps what was compiled, and what was refused.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use refrain_protocol::NamespaceId;
use refrain_protocol::engine::OutputForm;
use sha2::{Digest, Sha256};

use crate::compiled::Outcome;
use crate::{CompiledGrammar, GrammarError, GrammarLimits};

/// Most outcomes that are kept without their grammar. One takes about 200 bytes.
const VERDICTS_MAX: usize = 4_096;

/// A form of a namespace. Others do not learn from the time of a call that the form was compiled before.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    pub(crate) namespace: NamespaceId,
    digest: [u8; 32],
    form_bytes: usize,
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
            form_bytes: digester.bytes,
        })
    }
}

/// Grammars, and in a map of their own the verdicts, so that bad forms push no grammar out.
pub(crate) struct Cache {
    grammars: LruCache<CacheKey, Arc<CompiledGrammar>>,
    grammars_max: usize,
    bytes: usize,
    bytes_max: usize,
    verdicts: LruCache<CacheKey, Result<(), GrammarError>>,
}

impl Cache {
    pub(crate) fn new(limits: &GrammarLimits) -> Self {
        Cache {
            grammars: LruCache::unbounded(),
            grammars_max: limits.cached_grammars_max,
            bytes: 0,
            bytes_max: limits.cached_form_bytes_max,
            verdicts: LruCache::new(const { NonZeroUsize::new(VERDICTS_MAX).unwrap() }),
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

    /// Numbers of kept grammars, and of bytes of their forms.
    pub(crate) fn size(&self) -> (usize, usize) {
        (self.grammars.len(), self.bytes)
    }

    pub(crate) fn insert(&mut self, key: CacheKey, outcome: &Outcome) {
        self.verdicts
            .put(key, outcome.as_ref().map(|_| ()).map_err(Clone::clone));
        let Ok(grammar) = outcome else {
            return;
        };
        if self.grammars.put(key, grammar.clone()).is_none() {
            self.bytes += key.form_bytes;
        }
        while self.grammars.len() > self.grammars_max || self.bytes > self.bytes_max {
            let Some(victim) = self.victim() else {
                break;
            };
            if self.grammars.pop(&victim).is_some() {
                self.bytes -= victim.form_bytes;
            }
        }
    }

    /// The grammar that was not used for longest, of the namespace that has most. So none can push out those of
    /// others by asking for many.
    fn victim(&self) -> Option<CacheKey> {
        let owned = |namespace| {
            let keys = self.grammars.iter().map(|(key, _)| key);
            let own = keys.filter(|key| key.namespace == namespace);
            own.map(|key| key.form_bytes + self.bytes_max / self.grammars_max.max(1))
                .sum::<usize>()
        };
        // From the oldest on; of equals, the last is found.
        let mut seen: Vec<NamespaceId> = Vec::new();
        let mut most = (0, None);
        for (key, _) in self.grammars.iter().rev() {
            if !seen.contains(&key.namespace) {
                seen.push(key.namespace);
                let bytes = owned(key.namespace);
                if bytes > most.0 {
                    most = (bytes, Some(*key));
                }
            }
        }
        most.1
    }
}
