//! The key that a misspelt one stands for.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value};

/// Least likeness of two names that are taken for one, of at most 1 (Jaro and Winkler).
const LIKENESS_MIN: f64 = 0.88;

/// The key of `T` that is most like an unknown one: one of nearly that name, or of that name in another section.
pub(super) fn similar_key<T: JsonSchema>(unknown: &str) -> Option<String> {
    // The elements of a list have the keys of any other.
    let segments = unknown.split('.');
    let segments = segments.filter(|segment| segment.parse::<usize>().is_err());
    let segments: Vec<&str> = segments.collect();
    let (name, section) = segments.split_last()?;
    let section = section.join(".");
    let likeness = |key: &String| {
        let (head, tail) = key.rsplit_once('.').unwrap_or(("", key));
        let of_name = strsim::jaro_winkler(name, tail);
        // A name in its own section before the same name in another.
        let of_section = strsim::jaro_winkler(&section, head);
        let is_like = of_name >= LIKENESS_MIN && (head == section || of_name == 1.0);
        is_like.then_some(of_name + of_section)
    };
    let keys = keys::<T>().into_iter();
    let alike = keys.filter_map(|key| Some((likeness(&key)?, key)));
    let best = alike.max_by(|one, other| one.0.total_cmp(&other.0))?;
    Some(best.1)
}

/// The paths of all keys and sections.
fn keys<T: JsonSchema>() -> Vec<String> {
    let mut generator = SchemaGenerator::new(SchemaSettings::draft2020_12());
    let root = T::json_schema(&mut generator);
    let mut keys = Vec::new();
    walk(root.as_value(), generator.definitions(), "", &mut keys);
    keys
}

fn walk(schema: &Value, definitions: &Map<String, Value>, section: &str, keys: &mut Vec<String>) {
    let inner = [schema, &schema["items"]].into_iter();
    let options = schema["anyOf"].as_array().into_iter().flatten();
    for schema in inner.chain(options) {
        let name = schema["$ref"].as_str();
        let name = name.and_then(|name| name.rsplit('/').next());
        let schema = name
            .and_then(|name| definitions.get(name))
            .unwrap_or(schema);
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            let path = match section {
                "" => name.clone(),
                section => format!("{section}.{name}"),
            };
            walk(property, definitions, &path, keys);
            keys.push(path);
        }
    }
}
