//! A call that passed through.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::copy::BodyCopy;

/// A call and its answer.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) path: String,
    pub(super) created_ms: u64,
    pub(super) duration_ms: u64,
    /// From the beginning of the request to the first piece of the answer.
    pub(super) first_ms: Option<u64>,
    pub(super) session: Option<String>,
    /// A hash in place of the caller's key.
    pub(super) caller: Option<u64>,
    pub(super) request: Arc<Mutex<BodyCopy>>,
    pub(super) status: u16,
    pub(super) answer: BodyCopy,
}

impl Exchange {
    /// Bytes of both bodies in memory.
    pub(super) fn bytes(&self) -> usize {
        self.request.lock().len() + self.answer.len()
    }

    /// The call as one JSON object: request and response as they were, with what their heads say.
    ///
    /// # Errors
    /// The reason for which it is left out.
    pub(super) fn record(&self, caller: Option<String>) -> Result<Value, &'static str> {
        if !(200..300).contains(&self.status) {
            return Err("an answer that is an error");
        }
        let request = self.request.lock().json()?;
        let response = self.answer.json()?;
        Ok(json!({
            "created_ms": self.created_ms,
            "duration_ms": self.duration_ms,
            // An answer that is no stream has no first token.
            "first_ms": self.first_ms.filter(|_| self.answer.is_stream()),
            "endpoint": self.path,
            "session": self.session,
            "tenant": caller,
            "request": request,
            "response": response,
        }))
    }
}
