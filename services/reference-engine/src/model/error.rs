//! Errors of loading a model.

/// A fault in a model's files. Each message names the file or the tensor, and says what would be right.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file that is missing or unreadable.
    #[error("cannot read {path}: {reason}")]
    File {
        /// Path of the file.
        path: String,
        /// The system's message.
        reason: String,
    },
    /// A `config.json` that is not JSON, or in which a key is missing, wrong or of the wrong type.
    #[error("config.json: {0}")]
    Config(String),
    /// A `config.json` that describes a network which this engine does not support.
    #[error("config.json: {key} is {found}; this engine supports {supported}")]
    Unsupported {
        /// The key in `config.json`.
        key: &'static str,
        /// The value of the key.
        found: String,
        /// The supported values.
        supported: &'static str,
    },
    /// A weight file that is damaged or in another format.
    #[error("{file}: {reason}")]
    WeightFile {
        /// Path of the file.
        file: String,
        /// The fault in the file.
        reason: String,
    },
    /// A tensor that no file holds.
    #[error("tensor {name} is missing from the model's weights")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor whose shape contradicts `config.json`.
    #[error("tensor {name} has shape {found:?}; config.json requires {expected:?}")]
    Shape {
        /// Name of the tensor.
        name: String,
        /// The shape that `config.json` requires.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor of an element type that this engine does not read.
    #[error("tensor {name} has type {found}; this engine reads {readable}")]
    Type {
        /// Name of the tensor.
        name: String,
        /// The type in the file.
        found: String,
        /// The types that would be read.
        readable: &'static str,
    },
    /// A tensor with invalid values.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// Which value is wrong, and why.
        reason: String,
    },
    /// A fault of an EAGLE-3 head.
    #[error("EAGLE-3 head {head}: {fault}")]
    Eagle3Head {
        /// The source of the head.
        head: String,
        /// The fault.
        fault: Box<ModelError>,
    },
    /// A fault of a draft model.
    #[error("draft model {name}: {fault}")]
    DraftModel {
        /// The folder of the draft model, or the name of a model that is compiled in.
        name: String,
        /// The fault.
        fault: Box<ModelError>,
    },
    /// A draft model whose tokenizer differs from the target's.
    #[error("tokenizer.json: {reason}")]
    TokenizerMismatch {
        /// How it differs, and what to do.
        reason: &'static str,
    },
    /// A fault in the tokenizer's files.
    #[error(transparent)]
    Tokenizer(#[from] refrain_tokenization::TokenizationError),
}
