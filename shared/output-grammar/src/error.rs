//! The errors of this crate.

/// A form that cannot be compiled, or an output that left it. No message has text of a form, beyond the place in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The model cannot be used with grammars.
    #[error("the model cannot hold its output to a form: {0}")]
    Model(&'static str),
    /// A place of the form cannot be compiled.
    #[error("{reason} (at {place})")]
    Invalid {
        /// A JSON pointer into the schema, or line and column of the grammar.
        place: String,
        /// The fault.
        reason: String,
    },
    /// The form as a whole cannot be compiled.
    #[error("{0}")]
    Refused(String),
    /// The form could not be compiled now. It may be tried again.
    #[error("{0}; try again")]
    NotNow(&'static str),
    /// The grammar's limits ended the matching, or tokens came that it does not allow.
    #[error("the output cannot be held to its form any longer: {0}")]
    Matching(&'static str),
}

impl GrammarError {
    pub(crate) fn refused(reason: impl Into<String>) -> Self {
        GrammarError::Refused(reason.into())
    }

    pub(crate) fn at(place: impl Into<String>, reason: impl Into<String>) -> Self {
        GrammarError::Invalid {
            place: place.into(),
            reason: reason.into(),
        }
    }
}
