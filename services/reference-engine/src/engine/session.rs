//! One session: its text, its KV cache, and its drafter's state.

use std::time::Instant;

use refrain_output_grammar::GrammarError;
use refrain_protocol::engine::Sampling;
use refrain_protocol::prefix::{PrefixHash, PrefixHasher, mark};
use refrain_protocol::{NamespaceId, TenantId, TokenId};

use super::form_slot::FormSlot;
use super::session_form::SessionForm;
use crate::drafter::DrafterState;
use crate::network::KvCache;
use crate::pool::PooledText;

/// The hashes of the prefixes of a session's text.
pub(super) struct SessionPrefixes(PrefixHasher);

impl SessionPrefixes {
    /// Begins with a text without tokens.
    pub(super) fn new(namespace: &NamespaceId) -> Self {
        SessionPrefixes(PrefixHasher::new(namespace))
    }

    /// The longest hashed prefix of at most `len` tokens.
    fn longest(&self, len: usize) -> Option<HeldPrefix> {
        let hashes = self.0.hashes().iter().enumerate();
        let prefixes = hashes.map(|(nth, hash)| HeldPrefix {
            hash: *hash,
            len: mark(nth) as usize,
        });
        prefixes.take_while(|prefix| prefix.len <= len).last()
    }
}

/// A prefix of a text whose KV is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldPrefix {
    pub(super) hash: PrefixHash,
    /// Its length in tokens.
    pub(super) len: usize,
}

impl std::fmt::Debug for SessionPrefixes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_tuple("SessionPrefixes");
        shown.field(&self.0.context_len()).finish()
    }
}

/// A session, open or kept.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) namespace: NamespaceId,
    pub(crate) tenant: TenantId,
    /// Its tenant was forgotten while it ran, so nothing of it is kept.
    pub(super) leaves_nothing: bool,
    pub(crate) sampling: Sampling,
    /// Length of the prompt; the text after it is output.
    pub(crate) prompt_len: usize,
    /// All tokens. Between steps, `kv` of an open session lacks the last one, whose forward pass is outstanding.
    pub(crate) text: Vec<TokenId>,
    pub(crate) kv: KvCache,
    /// The drafter's state, in sessions that were opened with `self_drafts`.
    pub(crate) drafter_state: Option<DrafterState>,
    /// The state of the output in its form, if it must have one.
    pub(crate) form: Option<FormSlot>,
    /// The names of its blocks in the pool, if there is a pool.
    pub(super) pooled: Option<PooledText>,
    /// Hashes of the prefixes of `text`, as far as they have been asked for.
    pub(super) prefixes: SessionPrefixes,
    /// Time of the last step.
    pub(super) used: Instant,
    /// The time since when the session is parked: its request goes on soon.
    pub(super) parked: Option<Instant>,
}

impl Session {
    /// Cuts the text to its first `keep` tokens, and appends `tokens`. The KV cache keeps at most all but the last
    /// token.
    ///
    /// # Errors
    /// The output does not have its form. The session cannot be used any longer.
    pub(super) fn replace_text(
        &mut self,
        keep: usize,
        tokens: &[TokenId],
    ) -> Result<(), GrammarError> {
        self.text.truncate(keep);
        self.forget_names();
        self.text.extend_from_slice(tokens);
        let computed = keep.min(self.text.len().saturating_sub(1));
        self.kv.truncate(computed);
        if let Some(state) = &mut self.drafter_state {
            state.truncate(keep, computed);
        }
        match self.form.as_mut().and_then(FormSlot::here) {
            Some(form) => form.follow(keep, &self.text),
            None => Ok(()),
        }
    }

    /// The form of the output, if it must have one.
    pub(super) fn form_mut(&mut self) -> Option<&mut SessionForm> {
        self.form.as_mut().and_then(FormSlot::here)
    }

    /// Cuts everything to the tokens whose KV is there, after which the session can be kept.
    pub(super) fn cut_to_kv(&mut self) {
        let len = self.kv.len();
        self.text.truncate(len);
        self.forget_names();
        if let Some(state) = &mut self.drafter_state {
            state.truncate(len, len);
        }
    }

    /// Forgets hashes that cover more than the text, which has become shorter. Decoding never does that.
    fn forget_names(&mut self) {
        if let Some(pooled) = &mut self.pooled {
            pooled.truncate(self.text.len());
        }
        if self.prefixes.0.context_len() > self.text.len() {
            self.prefixes = SessionPrefixes::new(&self.namespace);
        }
    }

    /// Returns the longest hashed prefix whose KV is there, and the longest such prefix of the prompt.
    pub(super) fn held(&mut self) -> [Option<HeldPrefix>; 2] {
        let len = self.kv.len().min(self.text.len());
        let from = self.prefixes.0.context_len();
        if let Some(new) = self.text.get(from..len) {
            self.prefixes.0.extend(new);
        }
        [len, len.min(self.prompt_len)].map(|len| self.prefixes.longest(len))
    }

    /// Returns the length of the prefix of `wanted` whose KV a session of `namespace` can share.
    pub(super) fn shared_len(&self, namespace: NamespaceId, wanted: &[TokenId]) -> usize {
        if namespace != self.namespace {
            return 0;
        }
        let same = self.text.iter().zip(wanted);
        let same = same.take_while(|(own, wanted)| own == wanted).count();
        same.min(self.kv.len())
    }

    /// Returns the end of the positions that the drafter has read or can read.
    pub(super) fn drafter_end(&self) -> usize {
        self.drafter_state.as_ref().map_or(0, DrafterState::end)
    }
}
