//! The lengths of complete outputs by prompt.
//!
//! A document keeps 64 of the 128 bits of its prompt's hash here, and a complete one has an entry of 20 bytes. Two
//! prompts that share these bits make an estimate worse, and do no other harm. A list per prompt was rejected: most
//! prompts have one output, and a list would take three times the memory for it.

use std::collections::BTreeMap;

use refrain_protocol::document::FinishReason;
use refrain_protocol::history::{OutputLengths, PromptHash};

use crate::catalog::document::Document;
use crate::record::finish_of;

/// Most outputs of a prompt that an answer is made from: the newest.
const LENGTHS_MAX: usize = 64;

/// The part of a prompt's hash that is kept in memory; 0 stands for no hash.
pub(super) fn short(prompt: PromptHash) -> u64 {
    (prompt.0 as u64).max(1)
}

/// The lengths of the complete outputs of one namespace, by the prompt and the sequence of the last change.
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

    /// The lengths of the newest outputs to a prompt.
    pub(super) fn newest(&self, prompt: PromptHash) -> OutputLengths {
        let prompt = short(prompt);
        let newest = self.0.range((prompt, 0)..=(prompt, u64::MAX)).rev();
        OutputLengths::of(newest.map(|(_, len)| *len).take(LENGTHS_MAX).collect())
    }
}

/// The entry that a document has among the lengths: none while it runs. The length of a partial output tells nothing.
pub(super) fn entry_of(document: &Document) -> Option<((u64, u64), u32)> {
    let state = &document.state;
    match finish_of(state.finish)? {
        FinishReason::Stop | FinishReason::Length => {}
        FinishReason::Cancelled | FinishReason::Failed => return None,
    }
    (document.prompt != 0).then_some(((document.prompt, state.sequence), state.len))
}
