//! Prompts whose beginning has its tokens already: those of earlier turns.

use refrain_protocol::TokenId;
use refrain_tokenization::{ChatInput, ChatTemplate, TokenizationError, Tokenizer};

/// A chat as its template reads it.
pub struct TemplatedChat<'a> {
    /// Its messages, tools and variables.
    pub input: &'a ChatInput,
    /// The template of its model.
    pub template: &'a ChatTemplate,
    /// The tokenizer of its model.
    pub tokenizer: &'a Tokenizer,
    /// The model.
    pub model: &'a str,
    /// The tokens that end an output of the model.
    pub ends: &'a [TokenId],
    /// Whether the prompt ends with the beginning of an answer.
    pub open_answer: bool,
    /// Most tokens that the prompt may have.
    pub tokens_max: usize,
}

/// The turns of a conversation whose tokens are known.
pub trait KnownTurns: Sync {
    /// The tokens of the prompt, if the chat goes on from a known turn. `None` has the chat rendered as a whole.
    ///
    /// # Errors
    /// Those of the template and the tokenizer.
    fn prompt(&self, chat: &TemplatedChat<'_>) -> Result<Option<Vec<TokenId>>, TokenizationError>;
}
