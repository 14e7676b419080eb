//! Errors of loading a model.

/// A fault in a model's files. Each message names the file or the tensor, and says what would be right.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file that is missing or unreadable.
    #[error("cannot read {path}: {reason}")]
    Read {
        /// Path of the file.
        path: String,
        /// The system's message.
        reason: String,
    },
    /// A `config.json` that is not JSON, in which a key is missing or wrong, or that describes a network which this
    /// engine does not support.
    #[error("config.json: {0}")]
    Config(String),
    /// A file of weights or a tokenizer that is damaged, in another format, or does not fit the model.
    #[error("{file}: {reason}")]
    Content {
        /// Path of the file.
        file: String,
        /// The fault in the file.
        reason: String,
    },
    /// A tensor that is missing, contradicts `config.json`, has a type that is not read, or has invalid values.
    #[error("tensor {0}")]
    Tensor(String),
    /// A fault of an EAGLE-3 head or of a draft model.
    #[error("{drafter}: {fault}")]
    Drafter {
        /// The kind of the drafter, and its source.
        drafter: String,
        /// The fault.
        fault: Box<ModelError>,
    },
    /// A fault in the tokenizer's files.
    #[error(transparent)]
    Tokenizer(#[from] refrain_tokenization::TokenizationError),
}

impl ModelError {
    /// Returns this fault as one of a drafter.
    pub(crate) fn of_drafter(self, kind: &str, source: &str) -> Self {
        ModelError::Drafter {
            drafter: format!("{kind} {source}"),
            fault: Box::new(self),
        }
    }

    /// Returns a fault of `config.json` unless `holds`.
    pub(crate) fn unless(holds: bool, fault: impl FnOnce() -> String) -> Result<(), Self> {
        match holds {
            true => Ok(()),
            false => Err(ModelError::Config(fault())),
        }
    }

    /// Returns a fault of `config.json` that names the supported values of a key, unless `holds`.
    pub(crate) fn unless_supported(
        holds: bool,
        key: &str,
        found: impl std::fmt::Display,
        supported: &str,
    ) -> Result<(), Self> {
        match holds {
            true => Ok(()),
            false => Err(ModelError::unsupported(key, found, supported)),
        }
    }

    /// Returns the fault of a key of `config.json` whose value is not supported.
    pub(crate) fn unsupported(key: &str, found: impl std::fmt::Display, supported: &str) -> Self {
        ModelError::Config(format!(
            "{key} is {found}; this engine supports {supported}"
        ))
    }
}

impl From<serde_json::Error> for ModelError {
    fn from(error: serde_json::Error) -> Self {
        ModelError::Config(error.to_string())
    }
}
