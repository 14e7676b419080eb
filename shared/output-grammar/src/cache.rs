//! Keeps what was compiled, and what was refused.

use std::sync::Arc;

use crate::cache_key::CacheKey;
use crate::compiled::Outcome;
use crate::shares::Shares;
use crate::{CompiledGrammar, GrammarError, GrammarLimits};

/// The compiled forms that a compiler keeps.
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

/// Grammars, and in a map of their own the verdicts, so that bad forms push no grammar out. In both, each namespace
/// has a share.
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
