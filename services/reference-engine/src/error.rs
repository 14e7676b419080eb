//! Why a model cannot be loaded.

/// A fault of a model's files. Each names the file or tensor and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file that is missing or unreadable.
    #[error("cannot read {path}: {reason}")]
    File {
        /// Which.
        path: String,
        /// What the system said.
        reason: String,
    },
    /// `config.json` is no JSON, or a key is missing or has the wrong type.
    #[error("config.json: {0}")]
    Config(String),
    /// `config.json` describes a network that this engine does not compute.
    #[error("config.json: {key} is {found}; this engine computes {supported}")]
    Unsupported {
        /// Key of `config.json`.
        key: &'static str,
        /// Its value.
        found: String,
        /// What would do.
        supported: &'static str,
    },
    /// A file of weights that is damaged or in another format.
    #[error("{file}: {reason}")]
    Weights {
        /// Which.
        file: String,
        /// What.
        reason: String,
    },
    /// A weight that no file holds.
    #[error("tensor {name} is missing from the model's weights")]
    MissingTensor {
        /// Its name.
        name: String,
    },
    /// A weight of another shape than `config.json` says.
    #[error("tensor {name} has shape {found:?}; config.json makes it {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// By `config.json`.
        expected: Vec<usize>,
        /// In the file.
        found: Vec<usize>,
    },
    /// A weight in a type that is not read as it is meant.
    #[error("tensor {name} has type {found}; this engine reads {readable}")]
    Type {
        /// Its name.
        name: String,
        /// In the file.
        found: String,
        /// What would do.
        readable: &'static str,
    },
    /// A tensor whose numbers make no sense.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// Which number, and what it must be.
        reason: String,
    },
    /// Any fault of an EAGLE-3 head.
    #[error("EAGLE-3 head {head}: {fault}")]
    Head {
        /// Where the head comes from.
        head: String,
        /// What is wrong with it.
        fault: Box<ModelError>,
    },
    /// Any fault of a draft model.
    #[error("draft model {name}: {fault}")]
    DraftModel {
        /// Folder, or the name of a model that is compiled in.
        name: String,
        /// What is wrong with it.
        fault: Box<ModelError>,
    },
    /// A draft model that does not fit its target.
    #[error("{file}: {reason}")]
    Misfit {
        /// Which of its files.
        file: &'static str,
        /// Why it does not fit, and what would.
        reason: &'static str,
    },
    /// The tokenizer's files.
    #[error(transparent)]
    Tokenizer(#[from] refrain_tokenization::TokenizationError),
}
