//! Parts of a request's JSON that a template may read: kept as they come, up to a number of values.

use std::cell::Cell;
use std::fmt;

use minijinja::value::{Value, ValueKind};
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Most values in one part of a request, those inside others counted as well. A value of two bytes in JSON can take a
/// hundred in memory. The largest requests of real clients have a few thousand.
pub const JSON_VALUES_MAX: usize = 65_536;

/// Any value. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct JsonValue(pub(crate) Value);

/// A list.
#[derive(Clone, Debug, Default)]
pub struct JsonList(pub(crate) Vec<Value>);

/// An object, in the order of its keys in the request.
#[derive(Clone, Debug, Default)]
pub struct JsonMap(pub(crate) Vec<(String, Value)>);

impl JsonValue {
    /// A field of an object; `None` if it is missing or null, and of what is no object.
    pub fn get(&self, field: &str) -> Option<JsonValue> {
        if !self.is_object() {
            return None;
        }
        let value = self.0.get_attr(field).ok()?;
        (!value.is_undefined() && !value.is_none()).then_some(JsonValue(value))
    }

    /// The text that it is.
    pub fn as_str(&self) -> Option<&str> {
        self.0.as_str()
    }

    /// The values of the list that it is.
    pub fn items(&self) -> Option<impl Iterator<Item = JsonValue>> {
        match self.0.kind() {
            ValueKind::Seq => Some(self.0.try_iter().ok()?.map(JsonValue)),
            _ => None,
        }
    }

    /// Whether it is an object.
    pub fn is_object(&self) -> bool {
        self.0.kind() == ValueKind::Map
    }
}

impl JsonList {
    /// Its values.
    pub fn items(&self) -> impl Iterator<Item = JsonValue> {
        self.0.iter().cloned().map(JsonValue)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'de> Deserialize<'de> for JsonValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let left = Cell::new(JSON_VALUES_MAX);
        Reader { left: &left }
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
                Reader { left: &left }.list(list)
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
                Reader { left: &left }.map(map)
            }
        }
        deserializer.deserialize_map(Map).map(JsonMap)
    }
}

/// Reads a value and those inside it, as many as are left. The parser bounds how deep they go (128).
#[derive(Clone, Copy)]
struct Reader<'a> {
    left: &'a Cell<usize>,
}

impl Reader<'_> {
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

impl<'de> DeserializeSeed<'de> for Reader<'_> {
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

impl<'de> Visitor<'de> for Reader<'_> {
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
