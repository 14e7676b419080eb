//! What can go wrong, by who can mend it.

/// An error of this crate. None of them holds text of a prompt.
#[derive(Debug, thiserror::Error)]
pub enum TokenizationError {
    /// A file of the model is missing or unreadable.
    #[error("cannot read {path}: {reason}; a model folder needs tokenizer.json")]
    File {
        /// Which.
        path: String,
        /// What the system said.
        reason: String,
    },
    /// A file of the model says something that cannot be used.
    #[error("{file}: {reason}")]
    Model {
        /// Which.
        file: &'static str,
        /// What.
        reason: String,
    },
    /// The model has no chat template.
    #[error(
        "the model has no chat template: add chat_template.jinja, or `chat_template` in tokenizer_config.json"
    )]
    NoTemplate,
    /// The template failed on these messages.
    #[error("the model's chat template failed: {0}")]
    Render(String),
    /// The messages refuse to be a chat.
    #[error("{0}")]
    Input(String),
    /// The text was not tokenized, since it has more tokens than there is room for.
    #[error("the text has at least {at_least} tokens, more than there is room for; shorten it")]
    TooLong {
        /// How many it has in any case.
        at_least: usize,
    },
    /// The tokenizer failed on this text.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}
