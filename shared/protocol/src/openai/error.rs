//! The body of error responses.

use serde::{Deserialize, Serialize};

use crate::ApiError;

/// `{"error": {..}}`, all four keys always: the body of every error response, and the last event of a stream
/// that fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorFields,
}

/// What clients branch on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorFields {
    /// For people.
    pub message: String,
    /// The kind.
    #[serde(rename = "type")]
    pub kind: String,
    /// The request field at fault.
    pub param: Option<String>,
    /// The exact reason.
    pub code: Option<String>,
}

impl From<&ApiError> for ErrorBody {
    fn from(error: &ApiError) -> Self {
        ErrorBody {
            error: ErrorFields {
                message: error.message.clone(),
                kind: error.kind.openai_type().to_owned(),
                param: error.param.clone(),
                code: error.code.clone(),
            },
        }
    }
}
