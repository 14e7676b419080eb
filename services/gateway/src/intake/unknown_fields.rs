//! Fields of requests that the gateway does not know.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use refrain_protocol::ApiError;

/// Most names that are remembered, and so logged.
const NAMES_MAX: usize = 256;

/// Refuses fields that nobody knows, or logs the name of each once. Values are never logged.
pub(crate) struct UnknownFields {
    refuses: bool,
    logged: Mutex<BTreeSet<String>>,
}

impl UnknownFields {
    /// Creates the table, without names.
    pub(crate) fn new(refuses: bool) -> Self {
        UnknownFields {
            refuses,
            logged: Mutex::default(),
        }
    }

    /// Records the unknown fields of a request.
    ///
    /// # Errors
    /// They are refused.
    pub(crate) fn met(&self, names: &[String]) -> Result<(), ApiError> {
        if self.refuses
            && let Some(name) = names.first()
        {
            let message = format!(
                "{name}: this gateway does not know the field, and gateway.strict_fields refuses it; leave it out"
            );
            return Err(ApiError::invalid(name, message).with_code("unknown_parameter"));
        }
        for name in names.iter().filter(|name| self.is_new(name)) {
            tracing::warn!(
                field = ?name,
                "a request has a field that this gateway does not know; it is ignored"
            );
        }
        Ok(())
    }

    /// Remembers a name. Returns whether it was not known before, and there was room for it.
    fn is_new(&self, name: &str) -> bool {
        let mut logged = self.logged.lock();
        logged.len() < NAMES_MAX && logged.insert(name.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_met_once_and_bounded() {
        let fields = UnknownFields::new(false);
        assert!(fields.is_new("a") && !fields.is_new("a"));
        let news = (0..1_000).filter(|at| fields.is_new(&at.to_string()));
        assert_eq!(news.count(), NAMES_MAX - 1);
        assert_eq!(fields.met(&["b".into()]), Ok(()));
        let strict = UnknownFields::new(true);
        assert_eq!(strict.met(&[]), Ok(()));
        let error = strict.met(&["b".into()]).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("b"));
    }
}
