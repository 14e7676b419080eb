//! The body of a call that generates: the fields of a dialect, and the token ids of the text.
//!
//! A text may have a hundred thousand tokens. As JSON values they would take eight times their size, and be built
//! only to be written, so the ids are written from where they are.

use refrain_protocol::TokenId;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::generate::GenerateRequest;

/// The body of a call, as JSON.
pub(super) struct CallBody<'a> {
    fields: &'a Value,
    tokens: Option<(&'static str, &'a [TokenId])>,
}

impl<'a> CallBody<'a> {
    /// The body with these fields, an object, and with the tokens of `request` in the field `tokens_field`, if there
    /// is one.
    pub(super) fn new(
        fields: &'a Value,
        tokens_field: Option<&'static str>,
        request: &'a GenerateRequest,
    ) -> Self {
        CallBody {
            fields,
            tokens: tokens_field.map(|field| (field, &*request.tokens)),
        }
    }
}

impl Serialize for CallBody<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut body = serializer.serialize_map(None)?;
        for (name, value) in self.fields.as_object().into_iter().flatten() {
            body.serialize_entry(name, value)?;
        }
        if let Some((field, tokens)) = &self.tokens {
            body.serialize_entry(field, tokens)?;
        }
        body.end()
    }
}
