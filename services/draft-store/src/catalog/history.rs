//! The finished outputs by prompt: their lengths, and which they are.
//!
//! A document keeps 64 of the 128 bits of its prompt's hash here, and a finished one has an entry of 20 bytes. Two
//! prompts that share these bits make an estimate worse, and do no other harm. A list per prompt was rejected: most
//! prompts have one output, and a list would take three times the memory for it.

use std::collections::BTreeMap;

use refrain_protocol::document::FinishReason;
use refrain_protocol::history::{OutputLengths, PromptHash};

use crate::catalog::document::Document;
use crate::record::finish_of;

/// Most outputs of a prompt that an answer is made from: the newest.
const LENGTHS_MAX: usize = 64;

/// Most outputs of a prompt that are looked at for them. The others are partial.
const LOOKED_AT_MAX: usize = 1_024;

/// The top bit of a length in the list: the output is partial, so that its length tells nothing.
const PARTIAL: u32 = 1 << 31;

/// The part of a prompt's hash that is kept in memory; 0 stands for no hash.
pub(super) fn short(prompt: PromptHash) -> u64 {
    (prompt.0 as u64).max(1)
}

/// The lengths of the finished outputs of one namespace, by the prompt and the sequence of the last change. Those of
/// partial outputs are marked by [`PARTIAL`].
#[derive(Default)]
pub(super) struct PromptLengths(BTreeMap<(u64, u64), u32>);

impl PromptLengths {
    /// Brings the entry of a document up to date. `before` is [`entry_of`] it before the change.
    pub(super) fn change(
        &mut self,
        before: Option<((u64, u64), u32)>,
        after: Option<((u64, u64), u32)>,
    ) {
        if before == after {
            return;
        }
        if let Some((key, _)) = before {
            self.0.remove(&key);
        }
        if let Some((key, len)) = after {
            self.0.insert(key, len);
        }
    }

    /// The lengths of the newest complete outputs to a prompt.
    pub(super) fn newest(&self, prompt: PromptHash) -> OutputLengths {
        let complete = self.newest_first(prompt, false);
        OutputLengths::of(complete.map(|(_, len)| len).take(LENGTHS_MAX).collect())
    }

    /// The sequences and lengths of the outputs to a prompt: first the complete ones, then the partial ones, and of
    /// either the newest first.
    pub(super) fn outputs(&self, prompt: PromptHash) -> impl Iterator<Item = (u64, u32)> {
        let partial = self.newest_first(prompt, true);
        self.newest_first(prompt, false).chain(partial)
    }

    fn newest_first(&self, prompt: PromptHash, partial: bool) -> impl Iterator<Item = (u64, u32)> {
        let prompt = short(prompt);
        let all = self.0.range((prompt, 0)..=(prompt, u64::MAX)).rev();
        all.take(LOOKED_AT_MAX)
            .filter(move |(_, len)| (**len & PARTIAL != 0) == partial)
            .map(|((_, sequence), len)| (*sequence, *len & !PARTIAL))
    }
}

/// The entry that a document has among the lengths: none while it runs.
pub(super) fn entry_of(document: &Document) -> Option<((u64, u64), u32)> {
    let state = &document.state;
    let mark = match finish_of(state.finish)? {
        FinishReason::Stop | FinishReason::Length => 0,
        FinishReason::Cancelled | FinishReason::Failed => PARTIAL,
    };
    let len = state.len.min(!PARTIAL) | mark;
    (document.prompt != 0).then_some(((document.prompt, state.sequence), len))
}
