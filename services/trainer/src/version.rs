//! Versions of weights as trainers name them.

use refrain_protocol::ApiError;
use serde_json::Value;

/// The name of the weights that an engine started with, as with SGLang.
const FIRST_VERSION: &str = "default";

/// The name of a version.
pub(super) fn version_name(version: u64) -> String {
    match version {
        0 => FIRST_VERSION.to_owned(),
        version => version.to_string(),
    }
}

/// Reads a version: a number, a text with a number, or the name of the first weights. `name` is its field.
///
/// # Errors
/// It is something else.
pub(super) fn read_version(name: &str, value: Option<Value>) -> Result<Option<u64>, ApiError> {
    let version = match &value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Number(number)) => number.as_u64(),
        Some(Value::String(text)) if text == FIRST_VERSION => Some(0),
        Some(Value::String(text)) => text.trim().parse().ok(),
        Some(_) => None,
    };
    match version {
        Some(version) => Ok(Some(version)),
        None => {
            let message =
                format!("{name}: must be a whole number that is not negative, or its text");
            Err(ApiError::invalid(name, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_version_is_a_number_or_its_text() {
        let read = |value: Value| read_version("weight_version", Some(value));
        assert_eq!(read(json!(7)), Ok(Some(7)));
        assert_eq!(read(json!("7")), Ok(Some(7)));
        assert_eq!(read(json!("default")), Ok(Some(0)));
        assert_eq!(read(Value::Null), Ok(None));
        assert_eq!(read_version("weight_version", None), Ok(None));
        for wrong in [json!(-1), json!(1.5), json!("v7"), json!([7]), json!("")] {
            let error = read(wrong.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("weight_version"), "{wrong}");
        }
        assert_eq!(
            (version_name(0), version_name(7)),
            ("default".into(), "7".into())
        );
    }
}
