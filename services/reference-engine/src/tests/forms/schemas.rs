//! Random JSON schemas whose values are short, so that outputs end.

use serde_json::{Map, Value, json};

use crate::tests::support::Random;

/// A schema of nested objects, arrays, choices, strings and numbers, of which some refer to themselves.
pub(super) fn schema(random: &mut Random) -> Value {
    let mut schema = object(random, 2);
    if random.below(4) == 0 {
        let node = json!({
            "type": "object",
            "properties": {"v": leaf(random), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["v", "next"],
            "additionalProperties": false
        });
        schema["properties"]["list"] = json!({"$ref": "#/$defs/node"});
        schema["$defs"] = json!({"node": node});
    }
    schema
}

fn value(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 3 } else { 6 }) {
        0..=2 => leaf(random),
        3 => object(random, depth - 1),
        4 => {
            let least = random.below(3);
            json!({
                "type": "array",
                "items": value(random, depth - 1),
                "minItems": least,
                "maxItems": least + random.below(3)
            })
        }
        _ => json!({"anyOf": [value(random, depth - 1), {"type": "null"}]}),
    }
}

fn object(random: &mut Random, depth: usize) -> Value {
    const NAMES: [&str; 6] = ["id", "full_name", "address", "is active", "hello", "tags"];
    let mut properties = Map::new();
    let mut required = Vec::new();
    for _ in 0..1 + random.below(3) {
        let name = NAMES[random.below(NAMES.len())];
        properties.insert(name.to_owned(), value(random, depth));
        if random.below(3) > 0 && !required.contains(&name) {
            required.push(name);
        }
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn leaf(random: &mut Random) -> Value {
    let low = random.below(200) as i64 - 100;
    match random.below(8) {
        0 => json!({"type": "string", "minLength": random.below(3), "maxLength": 5}),
        1 => json!({"type": "string", "pattern": "^[a-f]{1,3}-[0-9]{2}$"}),
        2 => json!({"type": "integer", "minimum": low, "maximum": low + 50}),
        3 => {
            json!({"type": "number", "minimum": low, "exclusiveMaximum": low + 9, "multipleOf": 0.25})
        }
        4 => json!({"enum": ["red", "green", "greenish", 7, null]}),
        5 => json!({"const": {"kind": "fixed", "n": [1, 2]}}),
        6 => json!({"type": "string", "format": "date"}),
        _ => json!({"type": "boolean"}),
    }
}
