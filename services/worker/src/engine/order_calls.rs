//! The orders of a trainer in the words of a third-party engine: the calls that carry one out, and their answers.

use bytes::Bytes;
use refrain_protocol::ApiError;
use refrain_protocol::engine_order::EngineOrder;
use serde_json::Value;

use super::client::status_error;
use super::words::unsupported;

/// A call that carries an order out, or a part of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct OrderCall {
    pub(super) path: String,
    /// The body of a POST.
    pub(super) body: Value,
    /// The calls to be made instead if the engine does not know this one, or cannot carry it out in this form.
    pub(super) otherwise: Vec<OrderCall>,
}

impl OrderCall {
    pub(super) fn new(path: impl Into<String>, body: Value) -> Self {
        OrderCall {
            path: path.into(),
            body,
            otherwise: Vec::new(),
        }
    }

    /// Whether the other calls are to be made after an answer with this status.
    pub(super) fn is_replaced(&self, status: u16) -> bool {
        !self.otherwise.is_empty() && matches!(status, 400 | 404 | 405 | 422 | 501)
    }

    /// Reads the answer.
    ///
    /// # Errors
    /// The engine has not done what it was told.
    pub(super) fn read(&self, status: u16, body: &Bytes) -> Result<(), ApiError> {
        let answer: Value = serde_json::from_slice(body).unwrap_or_default();
        let has_failed = answer["success"] == Value::Bool(false);
        if status < 400 && !has_failed {
            return Ok(());
        }
        let path = self.path.split('?').next().unwrap_or_default();
        if status == 404 || status == 405 {
            let message = format!(
                "the engine has no route {path}; start it with its interface for trainers (status {status})"
            );
            return Err(unsupported(message));
        }
        let status = if has_failed && status < 400 {
            400
        } else {
            status
        };
        let mut error = status_error(status, body);
        error.message = format!("{path}: {}", error.message);
        Err(error)
    }
}

/// The error of an order for which an engine has no words.
pub(super) fn no_order(engine: &str, order: &EngineOrder) -> ApiError {
    let what = match order {
        EngineOrder::Report => "tells no state",
        EngineOrder::Pause { .. } | EngineOrder::Resume => "cannot be paused",
        EngineOrder::FlushCache => "cannot be told to empty its cache",
        EngineOrder::LoadWeights { .. } | EngineOrder::SetVersion { .. } => {
            "takes no other weights while it runs"
        }
        EngineOrder::PassOn(_) => "takes no such calls",
    };
    unsupported(format!(
        "{engine} {what}; this order needs SGLang, vLLM or the reference engine"
    ))
}

/// Checks the path of a call that is passed on.
///
/// # Errors
/// It does not stay at the engine.
pub(super) fn check_path(path: &str) -> Result<(), ApiError> {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'\\';
    match path.starts_with('/') && !path.starts_with("//") && path.bytes().all(is_plain) {
        true => Ok(()),
        false => Err(ApiError::invalid(
            "path",
            "must begin with one slash, and have neither spaces nor backslashes",
        )),
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::ErrorKind;
    use serde_json::json;

    use super::*;

    #[test]
    fn answers_tell_whether_the_order_was_carried_out() {
        let call = OrderCall::new("/update_weights_from_disk?x=1", json!({}));
        let read =
            |status, body: &'static str| call.read(status, &Bytes::from_static(body.as_bytes()));
        for body in ["", "Cache flushed.", "{\"success\":true}", "{}"] {
            assert_eq!(read(200, body), Ok(()));
        }
        let failed = r#"{"success":false,"message":"no such folder"}"#;
        for status in [200, 400] {
            let error = read(status, failed).unwrap_err();
            assert_eq!(error.kind, ErrorKind::InvalidRequest);
            assert!(
                error.message.contains("/update_weights_from_disk: "),
                "{error}"
            );
            assert!(error.message.ends_with("no such folder"), "{error}");
        }
        assert!(
            read(404, "{}")
                .unwrap_err()
                .has_code("unsupported_by_engine")
        );
        assert_eq!(read(500, "").unwrap_err().kind, ErrorKind::Upstream);
    }

    #[test]
    fn a_call_that_is_passed_on_stays_at_the_engine() {
        for path in ["/pause?mode=keep", "/a/b"] {
            assert_eq!(check_path(path), Ok(()));
        }
        for path in [
            "",
            "pause",
            "@other:1/",
            "//other/",
            "/a b",
            "/a\r\nx: y",
            "/\\other",
        ] {
            assert!(check_path(path).is_err(), "{path:?}");
        }
    }
}
