//! The keys of a configuration type, by its schema.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value};

/// One key of a configuration file.
#[derive(Clone, Debug)]
pub struct Key {
    /// Sections and name, such as `worker.engine.kind`; `[]` stands for an element of a list, `NAME` for a name in a
    /// map.
    pub path: String,
    /// Its schema where it is named.
    pub property: Value,
    /// The schema of its type.
    pub target: Value,
}

impl Key {
    /// The default as TOML; `None` where the key has no value until it is set.
    pub fn default(&self) -> Option<String> {
        match (&self.property["default"], self.target["type"].as_str()) {
            (Value::Null, Some("array")) => Some("[]".into()),
            (Value::Null, Some("object")) => Some("{}".into()),
            (Value::Null, _) => None,
            // Numbers of 32 bits have many digits as numbers of 64 bits.
            (Value::Number(number), _) if number.is_f64() => {
                number.as_f64().map(|number| (number as f32).to_string())
            }
            (value, _) => Some(value.to_string()),
        }
    }
}

/// Every key of a configuration type, in the order of its fields, the keys of a section before those of the sections
/// in it.
pub fn keys<T: JsonSchema>() -> Vec<Key> {
    let mut generator = SchemaGenerator::new(SchemaSettings::draft2020_12());
    let root = T::json_schema(&mut generator);
    let mut keys = Vec::new();
    walk(root.as_value(), generator.definitions(), "", &mut keys);
    keys
}

/// The schema that a reference points to, or the schema itself. One that may be null is a choice of a reference.
fn resolve<'a>(schema: &'a Value, definitions: &'a Map<String, Value>) -> &'a Value {
    let by_name = |schema: &Value| {
        let name = schema["$ref"].as_str()?.rsplit('/').next()?.to_owned();
        definitions.get(&name)
    };
    let mut options = schema["anyOf"].as_array().into_iter().flatten();
    by_name(schema)
        .or_else(|| options.find_map(by_name))
        .unwrap_or(schema)
}

fn walk(schema: &Value, definitions: &Map<String, Value>, section: &str, keys: &mut Vec<Key>) {
    let schema = resolve(schema, definitions);
    let mut inner = Vec::new();
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = match section {
            "" => name.clone(),
            section => format!("{section}.{name}"),
        };
        let target = resolve(property, definitions);
        if target["properties"].is_object() {
            inner.push((target, path));
            continue;
        }
        keys.push(Key {
            path: path.clone(),
            property: property.clone(),
            target: target.clone(),
        });
        for (element, suffix) in [("items", "[]"), ("additionalProperties", ".NAME")] {
            let element = resolve(&target[element], definitions);
            if element["properties"].is_object() {
                inner.push((element, format!("{path}{suffix}")));
            }
        }
    }
    for (schema, section) in inner {
        walk(schema, definitions, &section, keys);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_sections_are_found() {
        let definitions =
            serde_json::from_str(r#"{"Inner": {"properties": {"a_ms": {"type": "integer"}}}}"#);
        let schema = serde_json::json!({
            "properties": {"inner": {"anyOf": [{"$ref": "#/$defs/Inner"}, {"type": "null"}]}}
        });
        let mut keys = Vec::new();
        walk(&schema, &definitions.unwrap(), "", &mut keys);
        let paths: Vec<_> = keys.iter().map(|key| key.path.as_str()).collect();
        assert_eq!(paths, ["inner.a_ms"]);
    }
}
