//! Closes the objects of a schema: where it lists properties and says nothing of others, there are no others.
//!
//! By the standard such an object may have any further property. A model that is bound to it may then invent names
//! until the limit of tokens. OpenAI's strict schemas have to be closed, and vLLM, SGLang and llama.cpp close such
//! objects by themselves. Closed here, a schema means the same in front of every engine, and what it allows is valid
//! by the schema as it came.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// Keywords whose schemas hold for the same value as the schema that they stand in.
const ALTERNATIVES: [&str; 2] = ["anyOf", "oneOf"];
/// Keywords that list properties.
const PROPERTIES: [&str; 2] = ["properties", "patternProperties"];
/// Keywords that say what other properties there are.
const OTHERS: [&str; 2] = ["additionalProperties", "unevaluatedProperties"];

/// A schema that is reached on some way: its pointer, and whether other schemas hold for the same value. Those may
/// list properties that this one does not.
type Place = (String, bool);

/// Closes the objects of a schema. An object stays open where another schema holds for it as well.
pub fn close_objects(schema: &mut Value) {
    let mut open: Vec<Place> = vec![(String::new(), false)];
    let mut seen: HashSet<Place> = open.iter().cloned().collect();
    while let Some((at, is_shared)) = open.pop() {
        let Some(fields) = schema.pointer(&at).and_then(Value::as_object) else {
            continue;
        };
        let next = reached(fields, &at, is_shared);
        open.extend(next.into_iter().filter(|place| seen.insert(place.clone())));
    }
    let shared: HashSet<&String> = seen
        .iter()
        .filter(|place| place.1)
        .map(|place| &place.0)
        .collect();
    for (at, _) in seen.iter().filter(|place| !shared.contains(&place.0)) {
        if let Some(fields) = schema.pointer_mut(at).and_then(Value::as_object_mut)
            && PROPERTIES.iter().any(|key| fields.contains_key(*key))
            && !OTHERS.iter().any(|key| fields.contains_key(*key))
            && !is_joined(fields)
        {
            fields.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
    }
}

/// Whether keywords of a schema bring further schemas for the same value.
fn is_joined(fields: &Map<String, Value>) -> bool {
    let keys = ["$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"];
    keys.iter().any(|key| fields.contains_key(*key))
}

/// The schemas right inside a schema, and the one that it refers to.
fn reached(fields: &Map<String, Value>, at: &str, is_shared: bool) -> Vec<Place> {
    let lists = PROPERTIES.iter().any(|key| fields.contains_key(*key));
    let kinds = ["$ref", "allOf", "anyOf", "oneOf"];
    let joins = kinds
        .iter()
        .filter(|key| fields.contains_key(**key))
        .count();
    // Alone, a reference or a choice says all there is about the value.
    let is_shared = is_shared || lists || joins > 1;
    let mut places = Vec::new();
    for (key, value) in fields {
        let inner =
            |name: &str| format!("{at}/{key}/{}", name.replace('~', "~0").replace('/', "~1"));
        match (key.as_str(), value) {
            ("$ref", Value::String(target)) => {
                places.extend(
                    target
                        .strip_prefix('#')
                        .map(|target| (target.to_owned(), is_shared)),
                );
            }
            ("allOf", Value::Array(all)) => {
                let is_shared = is_shared || all.len() > 1;
                places.extend((0..all.len()).map(|index| (inner(&index.to_string()), is_shared)));
            }
            (key, Value::Array(all)) if ALTERNATIVES.contains(&key) => {
                places.extend((0..all.len()).map(|index| (inner(&index.to_string()), is_shared)));
            }
            ("items" | "prefixItems", Value::Array(all)) => {
                places.extend((0..all.len()).map(|index| (inner(&index.to_string()), false)));
            }
            (key, Value::Object(all)) if PROPERTIES.contains(&key) => {
                places.extend(all.keys().map(|name| (inner(name), false)));
            }
            ("items" | "additionalItems" | "additionalProperties", Value::Object(_)) => {
                places.push((format!("{at}/{key}"), false));
            }
            _ => {}
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn closed(mut schema: Value) -> Value {
        close_objects(&mut schema);
        schema
    }

    #[test]
    fn objects_with_properties_are_closed_wherever_they_stand() {
        let object = || json!({"type": "object", "properties": {"a": {"type": "string"}}});
        let done = || json!({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": false});
        assert_eq!(closed(object()), done());
        let nested = |object: Value| {
            json!({
                "properties": {"x~/y": object, "list": {"type": "array", "items": object},
                    "pair": {"prefixItems": [object]}, "map": {"additionalProperties": object},
                    "maybe": {"anyOf": [object, {"type": "null"}]}, "one": {"allOf": [object]},
                    "node": {"$ref": "#/$defs/n~1o"}, "self": {"$ref": "#"}},
                "$defs": {"n/o": object},
            })
        };
        let mut expected = nested(done());
        expected["additionalProperties"] = json!(false);
        assert_eq!(closed(nested(object())), expected);
    }

    #[test]
    fn what_the_schema_says_about_other_properties_stays() {
        for schema in [
            json!({"type": "object"}),
            json!({"properties": {"a": true}, "additionalProperties": true}),
            json!({"properties": {"a": true}, "additionalProperties": {"type": "integer"}}),
            json!({"properties": {"a": true}, "unevaluatedProperties": false}),
            json!({"enum": [{"properties": {"a": 1}}], "default": {"properties": {}}}),
            json!(true),
            json!({"properties": 7, "$ref": 1, "allOf": {}, "additionalProperties": true}),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }

    #[test]
    fn objects_that_several_schemas_describe_stay_open() {
        let part =
            |name: &str| json!({"properties": {name: {"type": "integer"}}, "required": [name]});
        let value = json!({"a": 1, "b": 2});
        for schema in [
            json!({"allOf": [part("a"), part("b")]}),
            json!({"properties": {"a": true}, "allOf": [part("b")]}),
            json!({"properties": {"a": true}, "anyOf": [part("b"), part("c")]}),
            json!({"properties": {"a": true}, "$ref": "#/$defs/b", "$defs": {"b": part("b")}}),
            json!({"allOf": [part("a"), {"$ref": "#/$defs/b"}], "$defs": {"b": part("b")}}),
            json!({"anyOf": [{"$ref": "#/$defs/b"}], "allOf": [part("a")], "$defs": {"b": part("b")}}),
        ] {
            let judge = jsonschema::validator_for(&closed(schema.clone())).unwrap();
            assert!(judge.is_valid(&value), "{schema}");
        }
        // A definition that is used alone and beside others is one schema, so it stays open.
        let two = json!({
            "properties": {"alone": {"$ref": "#/$defs/b"}, "both": {"allOf": [part("a"), {"$ref": "#/$defs/b"}]}},
            "$defs": {"b": part("b")},
        });
        let mut expected = two.clone();
        expected["additionalProperties"] = json!(false);
        assert_eq!(closed(two), expected);
    }
}
