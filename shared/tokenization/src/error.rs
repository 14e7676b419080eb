//! The errors of this crate.

/// An error of tokenization. No message contains text of a prompt.
#[derive(Debug, thiserror::Error)]
pub enum TokenizationError {
    /// A file of the model is missing or unreadable.
    #[error("cannot read {path}: {reason}; a model folder needs tokenizer.json")]
    File {
        /// The path of the file.
        path: String,
        /// The error of the system.
        reason: String,
    },
    /// A file of the model has content that cannot be used.
    #[error("{file}: {reason}")]
    Model {
        /// The name of the file.
        file: &'static str,
        /// The fault in its content.
        reason: String,
    },
    /// A GGUF file cannot be used.
    #[error("cannot use {path}: {reason}")]
    Gguf {
        /// The path of the file.
        path: String,
        /// The fault of the file, and the remedy if there is one.
        reason: String,
    },
    /// The template failed: its author did not think of such messages, or it uses what is not known here.
    #[error("the model's chat template failed: {0}")]
    Render(String),
    /// The template refuses these messages, and says why.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// The template writes nothing of a message of this role, in no arrangement of the messages.
    #[error(
        "the model's chat template leaves out a message of the role {0}, so the model would not see it; send its text \
         in a message of another role"
    )]
    NotShown(String),
    /// The messages cannot be made a prompt.
    #[error("{0}")]
    Input(String),
    /// The text has more tokens than there is room for. It was not encoded.
    #[error("the text has at least {at_least} tokens, more than there is room for; shorten it")]
    TooLong {
        /// A lower bound of its number of tokens.
        at_least: usize,
    },
    /// The tokenizer failed on this text.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}
