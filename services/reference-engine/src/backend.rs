//! Models that other code computes, such as llama.cpp. The engine around them stays the same: sessions, drafts, forms
//! and sampling. Only the forward pass, and the keys and values, are elsewhere.

use std::fmt::Debug;
use std::sync::Arc;

use refrain_protocol::TokenId;

/// A model that a [`Backend`] computes, and the facts about it.
pub(crate) struct BackendModel {
    /// The place of its weights, its keys and its values.
    pub(crate) backend: Arc<dyn Backend>,
    /// The name that clients use, unless the configuration sets another.
    pub(crate) name: String,
    /// The tokenizer and the chat template.
    pub(crate) files: refrain_tokenization::ModelFiles,
    /// Number of tokens in the vocabulary.
    pub(crate) vocab_size: u32,
    /// Longest text, in tokens.
    pub(crate) max_context: u32,
    /// Most sessions at once, open or kept for reuse. The sequences beyond them are for the branches of drafts.
    pub(crate) sessions_max: u32,
    /// Tokens that end an output.
    pub(crate) eos_token_ids: Vec<TokenId>,
}

/// A number by which a backend knows a sequence.
pub(crate) type SequenceId = u32;

/// One sequence's part of a forward pass.
#[derive(Debug)]
#[cfg_attr(
    not(any(feature = "llama", test)),
    allow(
        dead_code,
        reason = "llama.cpp is the only backend beside that of the tests"
    )
)]
pub(crate) struct BackendPart<'a> {
    /// The sequence.
    pub(crate) sequence: SequenceId,
    /// Position of the first token of `chain`, or of the first level of the draft where `chain` is empty.
    pub(crate) start: usize,
    /// Tokens that become part of the sequence.
    pub(crate) chain: &'a [TokenId],
    /// Tokens of the draft tree, whose root is the last token before it. Only those from `computed_nodes` on are new.
    pub(crate) nodes: &'a [TokenId],
    /// Parent of each node, which is an earlier node. `None` stands for the root.
    pub(crate) parents: &'a [Option<u32>],
    /// Number of nodes that earlier passes computed, since the sequence was last cut.
    pub(crate) computed_nodes: usize,
    /// Whether logits are wanted: those after the last token of `chain`, if it has any, and after each new node.
    pub(crate) wants_logits: bool,
}

/// Computes a model, and keeps the keys and values of its sequences. One thread makes all calls.
pub(crate) trait Backend: Debug + Send + Sync {
    /// Number of sequences that are not in use. A draft needs one for each of its leaves but the first.
    fn free(&self) -> usize;

    /// Begins an empty sequence. `None`: all are in use.
    fn open(&self) -> Option<SequenceId>;

    /// Begins a sequence with up to `len` positions that another one holds. `None`: all are in use.
    fn fork(&self, sequence: SequenceId, len: usize) -> Option<SequenceId>;

    /// Drops the positions of a sequence from `len` on, and its draft.
    fn truncate(&self, sequence: SequenceId, len: usize);

    /// Moves nodes of a sequence's draft, which are a path from the root, to the sequence.
    fn accept(&self, sequence: SequenceId, nodes: &[usize]);

    /// Ends a sequence.
    fn close(&self, sequence: SequenceId);

    /// Computes the parts in one pass, and returns the wanted logits: rows of the vocabulary's size, in the order of
    /// the parts, for each first that of its chain.
    ///
    /// # Errors
    /// The reason why nothing can be computed. The sequences must not be used any longer.
    fn compute(&self, parts: &[BackendPart<'_>]) -> Result<Vec<f32>, String>;
}

/// The place of a cache in a backend. It ends with the cache.
#[derive(Debug)]
pub(crate) struct BackendSequence {
    backend: Arc<dyn Backend>,
    /// `None`: all sequences were in use when it began.
    id: Option<SequenceId>,
}

impl BackendSequence {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        let id = backend.open();
        BackendSequence { backend, id }
    }

    /// A sequence with the first `len` positions of this one.
    pub(crate) fn prefix(&self, len: usize) -> Self {
        BackendSequence {
            backend: self.backend.clone(),
            id: self.id.and_then(|id| self.backend.fork(id, len)),
        }
    }

    pub(crate) fn id(&self) -> Option<SequenceId> {
        self.id
    }

    pub(crate) fn truncate(&self, len: usize) {
        if let Some(id) = self.id {
            self.backend.truncate(id, len);
        }
    }

    pub(crate) fn accept(&self, nodes: &[usize]) {
        if let Some(id) = self.id {
            self.backend.accept(id, nodes);
        }
    }
}

impl Clone for BackendSequence {
    fn clone(&self) -> Self {
        self.prefix(usize::MAX)
    }
}

impl Drop for BackendSequence {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.backend.close(id);
        }
    }
}
