//! Errors of the gateway in one line.

use serde::Deserialize;

/// The reason why there is no answer, or the `error` of OpenAI's API.
#[derive(Debug, Deserialize)]
pub(super) struct ChatFault {
    message: String,
    /// The field of the request that the gateway refuses.
    param: Option<String>,
}

impl ChatFault {
    pub(super) fn new(message: impl Into<String>) -> Self {
        ChatFault {
            message: message.into(),
            param: None,
        }
    }

    /// Whether the gateway refuses this field.
    pub(super) fn is_about(&self, field: &str) -> bool {
        self.param.as_deref() == Some(field)
    }
}

impl std::fmt::Display for ChatFault {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A message of several lines, as that of a proxy, becomes one.
        let words: Vec<&str> = self.message.split_whitespace().collect();
        out.write_str(&words.join(" "))
    }
}

impl std::error::Error for ChatFault {}
