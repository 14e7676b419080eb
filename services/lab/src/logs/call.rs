//! Calls as logs hold them, and as replays take them.

use std::sync::Arc;

use refrain_suffix_index::Token;

/// One recorded call.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RecordedCall {
    pub(crate) workload: Option<String>,
    pub(crate) tenant: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) group: Option<String>,
    pub(crate) model: Option<String>,
    /// When the call began, since 1970.
    pub(crate) at_ms: Option<u64>,
    pub(crate) duration_ms: Option<u64>,
    /// Time to the first token.
    pub(crate) first_ms: Option<u64>,
    pub(crate) prompt: Vec<Token>,
    pub(crate) output: Vec<Token>,
}

/// A call whose text is not turned into tokens yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LoggedCall {
    /// All but prompt and output.
    pub(crate) head: RecordedCall,
    pub(crate) prompt: Content,
    pub(crate) output: Content,
}

/// A prompt or an output.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Content {
    Tokens(Vec<Token>),
    /// Pieces that follow each other. Calls of a conversation share them.
    Text(Vec<Arc<str>>),
}

impl Default for Content {
    fn default() -> Self {
        Content::Tokens(Vec::new())
    }
}

impl Content {
    pub(crate) fn text(text: impl Into<Arc<str>>) -> Self {
        Content::Text(vec![text.into()])
    }

    /// The text, if it is one.
    pub(crate) fn into_text(self) -> Option<String> {
        match self {
            Content::Text(pieces) => Some(pieces.concat()),
            Content::Tokens(_) => None,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Content::Tokens(tokens) => tokens.is_empty(),
            Content::Text(pieces) => pieces.iter().all(|piece| piece.is_empty()),
        }
    }
}
