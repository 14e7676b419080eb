//! JSON schemas before they are compiled: limits, keywords that are refused, and the style of the JSON.

use serde_json::{Map, Value, json};

use crate::weight::Scale;
use crate::{GrammarError, GrammarLimits};

/// The key by which llguidance takes its settings inside a schema.
const SETTINGS: &str = "x-guidance";

/// Keywords that restrict a value and cannot be compiled, unless [`restricts_nothing`].
const REFUSED: [&str; 15] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
];

/// Maximum number of patterns of property names in one object. Each pair of them is compared.
const PATTERN_PROPERTIES_MAX: usize = 16;

/// Maximum number of alternatives of one `oneOf`. Each pair of them is compared.
const ONE_OF_MAX: usize = 128;

/// Keywords with one subschema.
const WITH_SCHEMA: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
/// Keywords with a list of subschemas.
const WITH_LIST: [&str; 5] = ["prefixItems", "anyOf", "oneOf", "allOf", "items"];
/// Keywords with subschemas by name.
const WITH_MAP: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// A pointer with one more part, written as RFC 6901 says.
fn pointer(at: &str, part: &str) -> String {
    format!("{at}/{}", part.replace('~', "~0").replace('/', "~1"))
}

/// The subschemas that stand right inside a schema, with their pointers.
pub(crate) fn subschemas<'a>(schema: &'a Value, at: &str) -> Vec<(String, &'a Value)> {
    let Some(fields) = schema.as_object() else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for (name, value) in fields {
        let at = pointer(at, name);
        let name = name.as_str();
        match value {
            Value::Array(items) if WITH_LIST.contains(&name) => {
                let items = items.iter().enumerate();
                found.extend(items.map(|(index, item)| (format!("{at}/{index}"), item)));
            }
            Value::Object(fields) if WITH_MAP.contains(&name) => {
                found.extend(
                    fields
                        .iter()
                        .map(|(name, value)| (pointer(&at, name), value)),
                );
            }
            _ if WITH_SCHEMA.contains(&name) => found.push((at, value)),
            _ => {}
        }
    }
    found
}

/// The schema in a text, with the settings by which it is compiled.
pub(crate) fn read(text: &str, limits: &GrammarLimits) -> Result<Value, GrammarError> {
    let mut schema: Value = serde_json::from_str(text).map_err(|error| {
        let place = format!("line {}, column {}", error.line(), error.column());
        GrammarError::at(place, "the schema is not JSON, or nests too deeply")
    })?;
    check_all(&schema, limits)?;
    drop_idle(&mut schema);
    if schema == Value::Bool(true) {
        schema = Value::Object(Map::new());
    }
    set_style(&mut schema);
    Ok(schema)
}

/// Checks a schema and all that stand in it.
fn check_all(schema: &Value, limits: &GrammarLimits) -> Result<(), GrammarError> {
    let mut open = vec![(String::new(), schema, 1)];
    let mut count = 0;
    let mut scale = Scale::new(schema);
    while let Some((at, schema, depth)) = open.pop() {
        count += 1;
        check(schema, &at)?;
        if depth > limits.schema_depth_max {
            let reason = format!(
                "the schema nests more than {} deep",
                limits.schema_depth_max
            );
            return Err(GrammarError::at(shown(&at), reason));
        }
        if count > limits.subschemas_max {
            let reason = format!(
                "the schema has more than {} subschemas",
                limits.subschemas_max
            );
            return Err(GrammarError::at(shown(&at), reason));
        }
        if let Some(reason) = scale.fault(schema) {
            return Err(GrammarError::at(shown(&at), reason));
        }
        let inner = subschemas(schema, &at).into_iter().rev();
        open.extend(inner.map(|(at, schema)| (at, schema, depth + 1)));
    }
    Ok(())
}

/// Any JSON object.
pub(crate) fn any_object() -> Value {
    let mut any = json!({"type": "object"});
    set_style(&mut any);
    any
}

/// Checks the schemas inside a grammar in Lark, and the size of the grammar. Text that is no JSON is found when
/// the grammar is compiled.
pub(crate) fn check_in_lark(text: &str, limits: &GrammarLimits) -> Result<(), GrammarError> {
    if text.len() > limits.grammar_bytes_max {
        let reason = format!(
            "the grammar has more than {} bytes",
            limits.grammar_bytes_max
        );
        return Err(GrammarError::refused(reason));
    }
    for (at, keyword) in text.match_indices("%json") {
        let mut values =
            serde_json::Deserializer::from_str(&text[at + keyword.len()..]).into_iter();
        if let Some(Ok(schema)) = values.next() {
            check_all(&schema, limits).map_err(|error| match error {
                // The grammar is a text, so a pointer leads to no field of the body.
                GrammarError::Invalid { place, reason } => {
                    let line = text[..at].matches('\n').count() + 1;
                    GrammarError::at(format!("the schema in line {line}, {place}"), reason)
                }
                other => other,
            })?;
        }
    }
    Ok(())
}

/// The empty pointer, which is the root, has no letters to show.
pub(crate) fn shown(at: &str) -> String {
    match at {
        "" => "the root of the schema".to_owned(),
        at => at.to_owned(),
    }
}

fn check(schema: &Value, at: &str) -> Result<(), GrammarError> {
    let Some(fields) = schema.as_object() else {
        return match schema {
            Value::Bool(_) => Ok(()),
            _ => Err(GrammarError::at(
                shown(at),
                "a schema is an object, true or false",
            )),
        };
    };
    for (name, value) in fields {
        if REFUSED.contains(&name.as_str()) && !restricts_nothing(name, value, fields) {
            let reason = format!("the keyword {name} is not supported");
            return Err(GrammarError::at(pointer(at, name), reason));
        }
        let len = value.as_object().map_or(0, Map::len);
        if name == "patternProperties" && len > PATTERN_PROPERTIES_MAX {
            let reason = format!("it has more than {PATTERN_PROPERTIES_MAX} patterns");
            return Err(GrammarError::at(pointer(at, name), reason));
        }
        let len = value.as_array().map_or(0, Vec::len);
        if name == "oneOf" && len > ONE_OF_MAX {
            let reason = format!("it has more than {ONE_OF_MAX} alternatives");
            return Err(GrammarError::at(pointer(at, name), reason));
        }
        let local = value.as_str().is_none_or(|uri| uri.starts_with('#'));
        if name == "$ref" && !local {
            let reason = "references lead into the same schema only, such as #/$defs/name";
            return Err(GrammarError::at(pointer(at, name), reason));
        }
    }
    Ok(())
}

/// Whether a keyword of [`REFUSED`] has no effect in a schema. Generators of schemas write some of these always.
fn restricts_nothing(name: &str, value: &Value, fields: &Map<String, Value>) -> bool {
    let allows_all = *value == Value::Bool(true) || value.as_object().is_some_and(Map::is_empty);
    let has = |name: &str| fields.contains_key(name);
    match name {
        "uniqueItems" => *value == Value::Bool(false),
        // Every name is a string.
        "propertyNames" => allows_all || *value == json!({"type": "string"}),
        "unevaluatedProperties" | "unevaluatedItems" => allows_all,
        "minContains" | "maxContains" => !has("contains"),
        "if" => !has("then") && !has("else"),
        "then" | "else" => !has("if"),
        "dependentRequired" | "dependentSchemas" | "dependencies" => {
            value.as_object().is_some_and(Map::is_empty)
        }
        _ => false,
    }
}

/// Leaves out the keywords that [`restricts_nothing`] names, in a schema that was checked and all that stand in it.
fn drop_idle(schema: &mut Value) {
    let Some(fields) = schema.as_object_mut() else {
        return;
    };
    fields.retain(|name, _| !REFUSED.contains(&name.as_str()));
    for (name, value) in fields {
        let name = name.as_str();
        match value {
            Value::Array(items) if WITH_LIST.contains(&name) => {
                items.iter_mut().for_each(drop_idle);
            }
            Value::Object(fields) if WITH_MAP.contains(&name) => {
                fields.values_mut().for_each(drop_idle);
            }
            value if WITH_SCHEMA.contains(&name) => drop_idle(value),
            _ => {}
        }
    }
}

/// Puts our settings in the place of a client's. JSON is written as most models were shown it: with one space after
/// each colon and each comma, and no other white space. So a grammar forces more tokens.
pub(crate) fn set_style(schema: &mut Value) {
    if let Some(fields) = schema.as_object_mut() {
        let style =
            json!({"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false});
        fields.insert(SETTINGS.to_owned(), style);
    }
}

/// The schema of a call's arguments, which are an object.
pub(crate) fn of_arguments(mut schema: Value) -> Value {
    let says_type = ["type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"];
    if let Some(fields) = schema.as_object_mut()
        && !says_type
            .iter()
            .any(|keyword| fields.contains_key(*keyword))
    {
        fields.insert("type".to_owned(), json!("object"));
    }
    schema
}
