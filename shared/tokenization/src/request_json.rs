//! The parts of a request's JSON that a template reads. Their number of values is limited.

use std::cell::Cell;
use std::fmt;

use minijinja::value::{Value, ValueKind};
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum number of values in one part of a request, including nested ones. A value of two bytes in JSON can take a
/// hundred bytes in memory. The largest requests of real clients have a few thousand values.
const JSON_VALUES_MAX: usize = 65_536;

/// Any JSON value. It is cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct JsonValue(pub(crate) Value);

/// A JSON list.
#[derive(Clone, Debug, Default)]
pub struct JsonList(pub(crate) Vec<Value>);

/// A JSON object. Its keys keep their order in the request.
#[derive(Clone, Debug, Default)]
pub struct JsonMap(pub(crate) Vec<(String, Value)>);

impl JsonValue {
    /// A field of an object. `None` if the field is missing or null, or if this is no object.
    pub fn get(&self, field: &str) -> Option<JsonValue> {
        if !self.is_object() {
            return None;
        }
        let value = self.0.get_attr(field).ok()?;
        (!value.is_undefined() && !value.is_none()).then_some(JsonValue(value))
    }

    /// The text, if this is a string.
    pub fn as_str(&self) -> Option<&str> {
        self.0.as_str()
    }

    /// An object of these fields.
    pub fn object<const N: usize>(fields: [(&str, JsonValue); N]) -> Self {
        let fields = fields.into_iter().map(|(name, value)| (name, value.0));
        JsonValue(Value::from_pairs(fields))
    }

    /// This object with another value of a field, which it keeps in its place.
    pub fn with(&self, field: &str, value: JsonValue) -> Self {
        let object = self.0.as_object();
        let pairs = object.and_then(|object| object.try_iter_pairs());
        let mut fields: Vec<(Value, Value)> = pairs.into_iter().flatten().collect();
        match fields
            .iter_mut()
            .find(|(name, _)| name.as_str() == Some(field))
        {
            Some((_, known)) => *known = value.0,
            None => fields.push((Value::from(field), value.0)),
        }
        JsonValue(Value::from_pairs(fields))
    }

    /// The value, if this is true or false.
    pub fn as_bool(&self) -> Option<bool> {
        match self.0.kind() {
            ValueKind::Bool => Some(self.0.is_true()),
            _ => None,
        }
    }

    /// The values, if this is a list.
    pub fn items(&self) -> Option<impl Iterator<Item = JsonValue>> {
        match self.0.kind() {
            ValueKind::Seq => Some(self.0.try_iter().ok()?.map(JsonValue)),
            _ => None,
        }
    }

    /// The names of the fields, if this is an object.
    pub fn names(&self) -> impl Iterator<Item = String> {
        let keys = self.is_object().then(|| self.0.try_iter().ok()).flatten();
        keys.into_iter()
            .flatten()
            .filter_map(|key| key.as_str().map(str::to_owned))
    }

    /// The same value as the JSON library has it. A number that JSON cannot express becomes null.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(&self.0).unwrap_or_default()
    }

    /// Whether this is an object.
    pub fn is_object(&self) -> bool {
        self.0.kind() == ValueKind::Map
    }
}

/// Its keys keep their order.
impl Serialize for JsonValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl From<&str> for JsonValue {
    fn from(text: &str) -> Self {
        JsonValue(Value::from(text))
    }
}

impl FromIterator<JsonValue> for JsonValue {
    fn from_iter<I: IntoIterator<Item = JsonValue>>(values: I) -> Self {
        JsonValue(values.into_iter().map(|value| value.0).collect())
    }
}

impl FromIterator<JsonValue> for JsonList {
    fn from_iter<I: IntoIterator<Item = JsonValue>>(values: I) -> Self {
        JsonList(values.into_iter().map(|value| value.0).collect())
    }
}

impl JsonList {
    /// The values.
    pub fn items(&self) -> impl Iterator<Item = JsonValue> {
        self.0.iter().cloned().map(JsonValue)
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'de> Deserialize<'de> for JsonValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let left = Cell::new(JSON_VALUES_MAX);
        LimitedReader { left: &left }
            .deserialize(deserializer)
            .map(JsonValue)
    }
}

impl<'de> Deserialize<'de> for JsonList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Vec<Value>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                let left = Cell::new(JSON_VALUES_MAX);
                LimitedReader { left: &left }.list(list)
            }
        }
        deserializer.deserialize_seq(List).map(JsonList)
    }
}

impl<'de> Deserialize<'de> for JsonMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Vec<(String, Value)>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                let left = Cell::new(JSON_VALUES_MAX);
                LimitedReader { left: &left }.map(map)
            }
        }
        deserializer.deserialize_map(Map).map(JsonMap)
    }
}

/// Reads a value and the values inside it, up to the limit. The parser bounds their depth (128).
#[derive(Clone, Copy)]
struct LimitedReader<'a> {
    /// How many more values may be read.
    left: &'a Cell<usize>,
}

impl LimitedReader<'_> {
    fn list<'de, A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Value>, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self)? {
            values.push(value);
        }
        Ok(values)
    }

    fn map<'de, A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<(String, Value)>, A::Error> {
        let mut values = Vec::new();
        while let Some(key) = map.next_key()? {
            values.push((key, map.next_value_seed(self)?));
        }
        Ok(values)
    }
}

impl<'de> DeserializeSeed<'de> for LimitedReader<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        match self.left.get().checked_sub(1) {
            Some(left) => self.left.set(left),
            None => {
                return Err(D::Error::custom(format_args!(
                    "there are more than {JSON_VALUES_MAX} JSON values; send fewer of them"
                )));
            }
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for LimitedReader<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::from(()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Value, A::Error> {
        self.list(list).map(Value::from)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Value, A::Error> {
        self.map(map).map(Value::from_pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of JSON texts, sound and unsound.
    const JSON_PARTS: [&str; 24] = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"a\"",
        "\"\\ud83e\\udd80\"",
        "\"\\ud800\"",
        "\"",
        "0",
        "-1",
        "1.5",
        "1e999",
        "18446744073709551616",
        "true",
        "null",
        " ",
        "{\"a\":",
        "{\"a\":1,\"a\":",
        "[[",
        "]]",
        "[1,",
        "\u{0}",
    ];

    fn is_json(text: &str) -> bool {
        serde_json::from_str::<serde_json::Value>(text).is_ok()
    }

    /// The readers accept exactly the texts that the JSON library accepts. `cargo test` runs this fuzz target for a
    /// second, and `cargo bolero test -p refrain-tokenization request_json::tests::readers_accept_all_json` runs it
    /// for as long as wanted.
    #[test]
    fn readers_accept_all_json() {
        bolero::check!()
            .with_type::<Vec<u8>>()
            .with_max_len(300)
            .for_each(|parts| {
                let part = |at: &u8| JSON_PARTS[usize::from(*at) % JSON_PARTS.len()];
                let text: String = parts.iter().map(part).collect();
                let accepted = is_json(&text);
                let value = serde_json::from_str::<JsonValue>(&text);
                assert_eq!(value.is_ok(), accepted, "{text}");
                let (is_list, is_object) = match &value {
                    Ok(value) => (value.items().is_some(), value.is_object()),
                    Err(_) => (false, false),
                };
                let list = serde_json::from_str::<JsonList>(&text);
                assert_eq!(list.is_ok(), is_list, "{text}");
                let map = serde_json::from_str::<JsonMap>(&text);
                assert_eq!(map.is_ok(), is_object, "{text}");
                if let Ok(value) = value {
                    assert!(serde_json::to_string(&value.0).is_ok(), "{text}");
                }
                // Any bytes at all are JSON or an error.
                let _ = serde_json::from_slice::<JsonValue>(parts);
            });
    }

    #[test]
    fn values_inside_others_count_towards_the_limit() {
        let nested = |count: usize| format!("[[{}]]", vec!["1"; count].join(","));
        // The outer list of a `JsonList` does not count, and the inner one does.
        let list = serde_json::from_str::<JsonList>(&nested(JSON_VALUES_MAX - 1));
        assert!(list.is_ok());
        let error = serde_json::from_str::<JsonList>(&nested(JSON_VALUES_MAX)).unwrap_err();
        assert!(error.to_string().contains("65536"), "{error}");
        assert!(serde_json::from_str::<JsonValue>(&nested(JSON_VALUES_MAX - 1)).is_err());
    }
}
