//! The things that a caller says about an output before it comes.

use serde_json::Value;

use crate::registry::{ReasoningParserKind, ToolParserKind};

/// A token id, as everywhere in the mesh.
pub type TokenId = u32;

/// A token of the output, or text of an engine that speaks only text.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The token. Without it, every marker is searched in the text.
    pub token: Option<TokenId>,
    /// The text that this token completes. It is empty for half a character, and may be empty for a special token.
    pub text: &'a str,
    /// Whether clients must not see this token's text. A hidden token that marks nothing is left out.
    pub hidden: bool,
}

impl<'a> Piece<'a> {
    /// A token and the text that it completes.
    pub fn token(token: TokenId, text: &'a str) -> Self {
        Piece {
            token: Some(token),
            text,
            hidden: false,
        }
    }

    /// A special token. Its text is needed only where it marks nothing and has to be shown.
    pub fn hidden(token: TokenId) -> Self {
        Piece {
            token: Some(token),
            text: "",
            hidden: true,
        }
    }

    /// Text alone.
    pub fn text(text: &'a str) -> Self {
        Piece {
            token: None,
            text,
            hidden: false,
        }
    }
}

/// A tool of the request.
#[derive(Clone, Debug)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments. Formats without JSON need it to tell strings from numbers.
    pub parameters: Value,
}

/// When a call comes out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// As it arrives. A mistake of the model within the arguments ends the call, which is then not intact.
    #[default]
    Streamed,
    /// When it is complete and valid. Any other attempt comes out as text, exactly as the model emitted it.
    Whole,
}

/// The bounds of a parser's memory, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Text that may become a call, before its name and the beginning of its arguments are known. Longer is text.
    pub head_bytes: usize,
    /// A call that is delivered whole. A longer one is text.
    pub call_bytes: usize,
    /// A value whose type is known only at its end, in formats without JSON. A longer one is a string.
    pub value_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            head_bytes: 64 << 10,
            call_bytes: 8 << 20,
            value_bytes: 1 << 20,
        }
    }
}

/// How an output is to be parsed.
#[derive(Clone, Debug, Default)]
pub struct ParserOptions {
    /// How the model writes tool calls.
    pub tools_as: ToolParserKind,
    /// How the model writes reasoning.
    pub reasoning_as: ReasoningParserKind,
    /// Whether the prompt already opened the reasoning, see [`ReasoningParserKind::is_open_after`]. `None` takes the
    /// usual state of models of this kind.
    pub reasoning_is_open: Option<bool>,
    /// The tools of the request. Where a format has no marker, only their names make a call. With an empty list every
    /// name does.
    pub tools: Vec<Tool>,
    /// When calls come out.
    pub delivery: Delivery,
    /// Whether only the first call is wanted, as `parallel_tool_calls: false` says. Later ones are left out and
    /// counted.
    pub first_call_only: bool,
    /// Whether the engine holds calls to their form. A call that the end of the output cuts off then comes out with
    /// its name and what there is of its arguments, also where calls come out whole. It is not intact. Where its name
    /// is not known yet, and without a form, its text comes out as text.
    pub calls_are_bound: bool,
    /// A tool that must be called, where the engine was constrained to write this tool's arguments and nothing else.
    pub forced_tool: Option<String>,
    /// The bounds of memory.
    pub limits: Limits,
}
