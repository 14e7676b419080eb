//! The body of error responses.

use serde::{Deserialize, Serialize};

use crate::ApiError;
use crate::error::code;

/// `{"error": {..}}`, always with all four keys: the body of every error response, and the last event of a stream
/// that fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorFields,
}

/// The fields of an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorFields {
    /// A sentence for people.
    pub message: String,
    /// The kind of the error.
    #[serde(rename = "type")]
    pub kind: String,
    /// The request field at fault.
    pub param: Option<String>,
    /// The exact reason, for programs.
    pub code: Option<String>,
}

impl From<&ApiError> for ErrorBody {
    fn from(error: &ApiError) -> Self {
        // OpenAI's own error of a spent quota has the code in both places.
        let kind = match error.has_code(code::INSUFFICIENT_QUOTA) {
            true => code::INSUFFICIENT_QUOTA,
            false => error.kind.openai_type(),
        };
        ErrorBody {
            error: ErrorFields {
                message: error.message.clone(),
                kind: kind.to_owned(),
                param: error.param.clone(),
                code: error.code.clone(),
            },
        }
    }
}
