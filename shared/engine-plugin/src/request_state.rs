//! The part of a request that outlives an interruption: its text, its document, and how far replicas have the output.

use refrain_draft_replica::DocumentUpdateRef;
use refrain_protocol::NamespaceId;
use refrain_protocol::document::{DocumentUpdate, LEFT_CONTEXT_TOKENS};
use refrain_protocol::history::PromptHash;

use crate::background::UnmergedUpdate;
use crate::metrics::PluginMetrics;

/// Enough of a request to resume it where it stopped.
pub(crate) struct RequestState {
    pub(crate) namespace: Option<NamespaceId>,
    /// Prompt and output.
    pub(crate) text: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// The next update of the output. Its tokens are filled in when it is made.
    pub(crate) update: DocumentUpdate,
    /// How far the namespace's replica has the output, and the group's. No token is merged twice, so that documents
    /// that were removed there meanwhile stay removed.
    pub(crate) merged: MergeProgress,
    pub(crate) group_merged: MergeProgress,
    /// Whether the caller named the document. The caller then writes it to the store: a worker knows more of an
    /// output than its engine does, such as its session and where a stop string cut it.
    pub(crate) is_named: bool,
}

/// How far a replica has an output.
#[derive(Clone, Copy, Default)]
pub(crate) struct MergeProgress {
    /// Length, tokens.
    pub(crate) len: usize,
    /// Whether nothing of an earlier attempt stands behind that.
    pub(crate) is_sole_source: bool,
}

impl RequestState {
    /// The state of a request that begins. The last `written` tokens of `text` are output already, of the document
    /// that `update` names.
    pub(crate) fn new(
        text: Vec<u32>,
        written: usize,
        namespace: Option<NamespaceId>,
        mut update: DocumentUpdate,
        is_named: bool,
    ) -> Self {
        let prompt_len = text.len().saturating_sub(written);
        let from = prompt_len.saturating_sub(LEFT_CONTEXT_TOKENS);
        update.head.left_context = text[from..prompt_len].to_vec();
        update.head.prompt_hash = Some(PromptHash::of(&text[..prompt_len]));
        RequestState {
            namespace,
            prompt_len,
            text,
            update,
            merged: MergeProgress::default(),
            group_merged: MergeProgress::default(),
            is_named,
        }
    }

    /// Whether the request that begins as `new` is this one, resumed: it has the same prompt, namespace and, if the
    /// caller names documents, the same document.
    pub(crate) fn is_resumed_by(&self, new: &RequestState) -> bool {
        self.text.starts_with(&new.text)
            && self.prompt_len == new.prompt_len
            && self.namespace == new.namespace
            && self.is_named == new.is_named
            && (!self.is_named || self.update.document == new.update.document)
    }

    /// Length of the text, tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.text.len()
    }

    pub(crate) fn output(&self) -> &[u32] {
        &self.text[self.prompt_len..]
    }

    /// The update that brings the output from the length `from` on.
    pub(crate) fn update_from(&mut self, from: usize) -> &DocumentUpdate {
        let output = &self.text[self.prompt_len..];
        self.update.prev_len = from as u32;
        self.update.tokens.clear();
        self.update.tokens.extend_from_slice(&output[from..]);
        &self.update
    }

    /// Has `merge` bring a replica what it lacks of the output. Returns how far the replica has it now.
    ///
    /// For a replica that another thread holds, `merge` returns `None`. It is counted as busy, and gets the rest with
    /// a later step.
    pub(crate) fn merge_rest(
        &mut self,
        progress: MergeProgress,
        merge: impl FnOnce(DocumentUpdateRef<'_>, bool) -> Option<bool>,
        metrics: &PluginMetrics,
    ) -> MergeProgress {
        let update = self.update_from(progress.len).into();
        let Some(is_sole_source) = merge(update, progress.is_sole_source) else {
            metrics.busy.inc();
            return progress;
        };
        MergeProgress {
            len: self.output().len(),
            is_sole_source,
        }
    }

    /// The update that a replica lacks.
    pub(crate) fn unmerged(&mut self, progress: MergeProgress) -> UnmergedUpdate {
        UnmergedUpdate {
            update: self.update_from(progress.len).clone(),
            is_sole_source: progress.is_sole_source,
        }
    }

    /// The state of the resumed request. The store knows that its output has ended, so it goes on under a higher
    /// epoch.
    pub(crate) fn resume(mut self) -> Self {
        if !self.is_named {
            self.update.epoch = self.update.epoch.saturating_add(1);
        }
        self.update.finish = None;
        // Tokens that replicas lacked at the interruption may have reached them since.
        self.merged.is_sole_source = false;
        self.group_merged.is_sole_source = false;
        self
    }
}
