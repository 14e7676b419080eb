//! The rules of other systems, for comparison on the same calls.
//!
//! Each system drafts from its own sources. Prompt lookup uses the request alone, SAM decoding the request and a
//! corpus that is known from the start, and SuffixDecoding the request and all earlier outputs. The options can
//! make [`PresetChanges`].

mod automaton;
mod chain;
mod pld;
mod sam;

use clap::ValueEnum;
use refrain_speculation::draft::{Expansion, ProposeParams};
use serde::Serialize;

use super::source::ReplaySource;

pub(super) use automaton::Automaton;
pub(super) use pld::{PLD_DRAFT_TOKENS, look_up};
pub(super) use sam::{SamRequest, SamRules, add_text};

/// Another system's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// SAM decoding (arXiv 2411.10666): copy what followed the earliest occurrence of the longest match, in the
    /// request's text or in the outputs of --warm. Short matches are left to the head, if there is one.
    Sam,
    /// Prompt lookup decoding: copy what followed the earliest occurrence of the last three, two or one tokens in the
    /// request's text.
    Pld,
    /// SuffixDecoding (arXiv 2411.04975): Algorithm 1 with alpha 1, trees, and the hybrid rule, if there is a head.
    Paper,
}

/// How drafts are made from memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Drafter {
    /// From suffix indexes.
    Suffix,
    /// As SAM decoding does.
    Sam(SamRules),
    /// As prompt lookup decoding does, with so many tokens.
    Pld(usize),
    /// No drafts.
    None,
}

/// Changes that the options make in a preset.
#[derive(Clone, Debug, Default)]
pub(crate) struct PresetChanges {
    pub(super) alpha: Option<f32>,
    pub(super) offset: Option<f32>,
    /// Most tokens of a draft.
    pub(super) draft_tokens: Option<usize>,
    pub(super) is_linear: bool,
    pub(super) sources: Option<Vec<ReplaySource>>,
}

impl PresetChanges {
    /// SuffixDecoding's rules with these changes.
    pub(super) fn paper_params(&self) -> ProposeParams {
        let paper = paper_params();
        ProposeParams {
            expansion: match self.is_linear {
                true => Expansion::Linear,
                false => paper.expansion,
            },
            alpha: self.alpha.unwrap_or(paper.alpha),
            offset: self.offset.unwrap_or(paper.offset),
            max_spec_tokens: self.draft_tokens.unwrap_or(paper.max_spec_tokens),
            ..paper
        }
    }

    /// Whether SuffixDecoding drafts from this source. It has no groups of its own.
    pub(super) fn has(&self, source: ReplaySource) -> bool {
        match &self.sources {
            Some(sources) => sources.contains(&source),
            None => source != ReplaySource::Group,
        }
    }

    /// SAM's rules with these changes.
    pub(super) fn sam_rules(&self, rules: SamRules) -> SamRules {
        SamRules {
            draft_tokens: self.draft_tokens.unwrap_or(rules.draft_tokens),
            ..rules
        }
    }
}

/// Algorithm 1 as printed: D is the plain count, and a pattern of p tokens gives a tree of p nodes, its root
/// included. Alpha is that of the paper's Figure 8. The paper names no longest pattern, so it is the 64 tokens of the
/// published code.
fn paper_params() -> ProposeParams {
    ProposeParams {
        expansion: Expansion::Tree,
        alpha: 1.0,
        offset: -1.0,
        max_spec_tokens: usize::MAX,
        min_token_prob: 0.0,
        min_match_len: 1,
        max_pattern: 64,
        match_plus_draft_cap: None,
        shrinks: false,
        max_fan_out: usize::MAX,
        samples_max: usize::MAX,
        price: None,
    }
}
