//! The form of the output that a body asks for, in all spellings that clients use.
//!
//! | field | comes from |
//! |---|---|
//! | `response_format` | OpenAI, and in this name the formats of the other surfaces |
//! | `structured_outputs`, `guided_*` | vLLM, now and earlier |
//! | `json_schema`, `regex`, `ebnf` | SGLang |
//! | `json_schema`, `grammar` | llama.cpp |

use refrain_output_grammar::close_objects;
use refrain_protocol::ApiError;
use refrain_protocol::engine::TextForm;
use refrain_tokenization::JsonValue;
use serde_json::Value;

use super::refusal::{invalid, unsupported};

/// The fields that ask for a form.
pub(super) const FORM_FIELDS: [&str; 10] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
];

/// Longest name of a schema, bytes, as with OpenAI.
const NAME_BYTES_MAX: usize = 64;
/// Most texts of a choice.
const CHOICES_MAX: usize = 4096;

/// The fields of a body that ask for a form, as they came.
#[derive(Debug, Default)]
pub(super) struct FormFields {
    values: Vec<(&'static str, JsonValue)>,
}

/// A form that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AskedForm {
    /// The texts that are allowed.
    pub(super) text: TextForm,
    /// The place in the body of what describes them.
    pub(super) place: String,
}

impl FormFields {
    /// Keeps the value of a field, which is one of [`FORM_FIELDS`].
    pub(super) fn set(&mut self, field: &'static str, value: JsonValue) {
        self.values.push((field, value));
    }

    /// Whether the field came.
    pub(super) fn has(&self, field: &str) -> bool {
        self.values.iter().any(|(other, _)| *other == field)
    }

    /// The form, if the body asks for one. The names of fields that nobody knows are added to `unknown`.
    ///
    /// # Errors
    /// A field is not what it should be, is not supported, or a second one asks for a form.
    pub(super) fn asked(&self, unknown: &mut Vec<String>) -> Result<Option<AskedForm>, ApiError> {
        let mut found: Option<(&str, AskedForm)> = None;
        for (field, value) in &self.values {
            let Some(form) = read(field, value, unknown)? else {
                continue;
            };
            if let Some((first, _)) = &found {
                let fault =
                    format!("asks for a form of the output, and so does {first}; send one of them");
                return invalid(field, fault);
            }
            found = Some((field, form));
        }
        Ok(found.map(|(_, form)| form))
    }
}

/// Reads one field.
fn read(
    field: &str,
    value: &JsonValue,
    unknown: &mut Vec<String>,
) -> Result<Option<AskedForm>, ApiError> {
    if is_nothing(value) {
        return Ok(None);
    }
    let text = match field {
        "response_format" | "structured_outputs" if !value.is_object() => {
            return invalid(field, "must be an object");
        }
        "response_format" => return response_format(value, unknown),
        "structured_outputs" => return structured_outputs(value, unknown),
        "guided_json" | "json_schema" => TextForm::JsonSchema(schema(value, field)?),
        "guided_regex" | "regex" => TextForm::Regex(text(value, field)?),
        "guided_choice" => choice(value, field)?,
        "guided_grammar" => grammar(value, field)?,
        _ => TextForm::Ebnf(text(value, field)?),
    };
    Ok(Some(AskedForm {
        text,
        place: field.to_owned(),
    }))
}

/// Whether a field is set to nothing. An empty object is something: a schema that allows any JSON.
fn is_nothing(value: &JsonValue) -> bool {
    value.as_str() == Some("")
        || value.as_bool() == Some(false)
        || value
            .items()
            .is_some_and(|mut items| items.next().is_none())
}

/// Reads `response_format`.
fn response_format(
    format: &JsonValue,
    unknown: &mut Vec<String>,
) -> Result<Option<AskedForm>, ApiError> {
    let field = "response_format";
    let kind = format.get("type");
    let form = |text, place: &str| {
        Ok(Some(AskedForm {
            text,
            place: place.to_owned(),
        }))
    };
    match kind.as_ref().and_then(JsonValue::as_str) {
        Some("text") => {
            note_unknown(format, field, &["type"], unknown);
            Ok(None)
        }
        Some("json_object") => {
            note_unknown(format, field, &["type", "schema"], unknown);
            // An extension of llama.cpp and others.
            match format.get("schema") {
                None => form(TextForm::JsonObject, field),
                Some(given) => {
                    let place = "response_format.schema";
                    form(TextForm::JsonSchema(schema(&given, place)?), place)
                }
            }
        }
        Some("json_schema") => {
            note_unknown(format, field, &["type", "json_schema"], unknown);
            let inner = "response_format.json_schema";
            let Some(given) = format.get("json_schema").filter(JsonValue::is_object) else {
                return invalid(inner, "must be an object with a schema");
            };
            note_unknown(
                &given,
                inner,
                &["name", "description", "schema", "strict"],
                unknown,
            );
            if let Some(name) = given.get("name") {
                check_name(&name)?;
            }
            if given
                .get("strict")
                .is_some_and(|strict| strict.as_bool().is_none())
            {
                return invalid(&format!("{inner}.strict"), "must be true or false");
            }
            let place = "response_format.json_schema.schema";
            match given.get("schema") {
                Some(given) => form(TextForm::JsonSchema(schema(&given, place)?), place),
                None => invalid(place, "is missing"),
            }
        }
        Some("structural_tag") => unsupported(
            "response_format",
            "response_format: structural_tag is not supported; use json_schema, or tools with strict: true",
        ),
        _ => invalid(
            "response_format.type",
            "must be text, json_object or json_schema",
        ),
    }
}

fn check_name(name: &JsonValue) -> Result<(), ApiError> {
    let is_name = |name: &str| {
        let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(is_letter)
    };
    match name.as_str().is_some_and(is_name) {
        true => Ok(()),
        false => invalid(
            "response_format.json_schema.name",
            format!("must have 1 to {NAME_BYTES_MAX} letters, digits, _ or -"),
        ),
    }
}

/// Reads vLLM's `structured_outputs`.
fn structured_outputs(
    given: &JsonValue,
    unknown: &mut Vec<String>,
) -> Result<Option<AskedForm>, ApiError> {
    /// Fields that ask for a form.
    const FORMS: [&str; 5] = ["json", "regex", "choice", "grammar", "json_object"];
    /// Fields that would change the form, and cannot be carried out.
    const UNSUPPORTED: [&str; 2] = ["structural_tag", "whitespace_pattern"];
    /// Outputs have no optional white space anyway, there is one compiler, and objects are closed in any case.
    const WITHOUT_EFFECT: [&str; 3] = [
        "disable_any_whitespace",
        "disable_fallback",
        "disable_additional_properties",
    ];

    let field = "structured_outputs";
    let known: Vec<&str> = [&FORMS[..], &UNSUPPORTED, &WITHOUT_EFFECT].concat();
    note_unknown(given, field, &known, unknown);
    let set = |name: &str| given.get(name).filter(|value| !is_nothing(value));
    for name in UNSUPPORTED {
        if set(name).is_some() {
            let place = format!("{field}.{name}");
            return unsupported(&place, &format!("{place} is not supported; leave it out"));
        }
    }
    let mut forms = FORMS.iter().filter_map(|name| Some((*name, set(name)?)));
    let Some((name, value)) = forms.next() else {
        return Ok(None);
    };
    if let Some((second, _)) = forms.next() {
        let fault =
            format!("asks for a form of the output, and so does {field}.{name}; send one of them");
        return invalid(&format!("{field}.{second}"), fault);
    }
    let place = format!("{field}.{name}");
    let text = match name {
        "json" => TextForm::JsonSchema(schema(&value, &place)?),
        "regex" => TextForm::Regex(text(&value, &place)?),
        "choice" => choice(&value, &place)?,
        "grammar" => grammar(&value, &place)?,
        _ => TextForm::JsonObject,
    };
    Ok(Some(AskedForm { text, place }))
}

/// A JSON schema as text, with closed objects: an object, or one written as text, as some clients send it.
fn schema(value: &JsonValue, place: &str) -> Result<String, ApiError> {
    let schema = match value.as_str() {
        Some(text) => serde_json::from_str(text).ok(),
        None => Some(value.to_json()),
    };
    match schema {
        Some(mut schema @ Value::Object(_)) => {
            close_objects(&mut schema);
            Ok(schema.to_string())
        }
        _ => invalid(place, "must be a JSON schema"),
    }
}

fn text(value: &JsonValue, place: &str) -> Result<String, ApiError> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => invalid(place, "must be a text"),
    }
}

fn choice(value: &JsonValue, place: &str) -> Result<TextForm, ApiError> {
    let texts = value.items().map(|texts| {
        let text = |value: JsonValue| {
            value
                .as_str()
                .filter(|text| !text.is_empty())
                .map(str::to_owned)
        };
        texts.map(text).collect::<Option<Vec<_>>>()
    });
    match texts.flatten() {
        Some(texts) if texts.len() <= CHOICES_MAX => Ok(TextForm::Choice(texts)),
        _ => invalid(
            place,
            format!("must be a list of 1 to {CHOICES_MAX} texts that are not empty"),
        ),
    }
}

/// A grammar in one of two languages. A line of EBNF begins with a name and `::=`.
fn grammar(value: &JsonValue, place: &str) -> Result<TextForm, ApiError> {
    let text = text(value, place)?;
    let is_name = |name: &str| {
        let is_letter = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
        !name.is_empty() && name.chars().all(is_letter)
    };
    let defines = |line: &str| {
        let parts = line.split_once("::=");
        parts.is_some_and(|(name, _)| is_name(name.trim()))
    };
    Ok(match text.lines().any(defines) {
        true => TextForm::Ebnf(text),
        false => TextForm::Lark(text),
    })
}

/// Adds the names of an object that are not known.
fn note_unknown(object: &JsonValue, place: &str, known: &[&str], unknown: &mut Vec<String>) {
    let others = object
        .names()
        .filter(|name| !known.contains(&name.as_str()));
    unknown.extend(others.map(|name| format!("{place}.{name}")));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(body: &Value) -> FormFields {
        let mut fields = FormFields::default();
        for field in FORM_FIELDS {
            if let Some(value) = body.get(field) {
                fields.set(field, serde_json::from_value(value.clone()).unwrap());
            }
        }
        fields
    }

    fn asked(body: &Value) -> Result<Option<AskedForm>, ApiError> {
        fields(body).asked(&mut Vec::new())
    }

    #[test]
    fn all_spellings_are_read_into_one_form() {
        let mut schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let open = schema.clone();
        schema["additionalProperties"] = json!(false);
        let json_schema = TextForm::JsonSchema(schema.to_string());
        let regex = TextForm::Regex("a+".into());
        let choice = TextForm::Choice(vec!["a".into(), "b".into()]);
        let ebnf = TextForm::Ebnf("root ::= \"a\"".into());
        let lark = TextForm::Lark("start: \"a\"".into());
        let format = |format: Value| json!({"response_format": format});
        let vllm = |fields: Value| json!({"structured_outputs": fields});
        for (body, text, place) in [
            (
                format(json!({"type": "json_object"})),
                TextForm::JsonObject,
                "response_format",
            ),
            (
                format(json!({"type": "json_object", "schema": schema})),
                json_schema.clone(),
                "response_format.schema",
            ),
            (
                format(json!({"type": "json_schema",
                    "json_schema": {"name": "n", "strict": true, "schema": schema}})),
                json_schema.clone(),
                "response_format.json_schema.schema",
            ),
            (
                vllm(json!({"json": open, "disable_additional_properties": true})),
                json_schema.clone(),
                "structured_outputs.json",
            ),
            (
                vllm(json!({"json": schema.to_string()})),
                json_schema.clone(),
                "structured_outputs.json",
            ),
            (
                vllm(json!({"json_object": true})),
                TextForm::JsonObject,
                "structured_outputs.json_object",
            ),
            (
                vllm(json!({"regex": "a+", "json": null, "disable_any_whitespace": true})),
                regex.clone(),
                "structured_outputs.regex",
            ),
            (
                vllm(json!({"choice": ["a", "b"]})),
                choice.clone(),
                "structured_outputs.choice",
            ),
            (
                vllm(json!({"grammar": "root ::= \"a\""})),
                ebnf.clone(),
                "structured_outputs.grammar",
            ),
            (
                vllm(json!({"grammar": "start: \"a\""})),
                lark.clone(),
                "structured_outputs.grammar",
            ),
            (
                json!({"guided_json": open}),
                json_schema.clone(),
                "guided_json",
            ),
            (
                json!({"guided_json": {}}),
                TextForm::JsonSchema("{}".into()),
                "guided_json",
            ),
            (json!({"guided_regex": "a+"}), regex.clone(), "guided_regex"),
            (
                json!({"guided_choice": ["a", "b"]}),
                choice,
                "guided_choice",
            ),
            (
                json!({"guided_grammar": "start: \"a\""}),
                lark,
                "guided_grammar",
            ),
            (
                json!({"json_schema": schema.to_string()}),
                json_schema,
                "json_schema",
            ),
            (json!({"regex": "a+"}), regex, "regex"),
            (json!({"ebnf": "root ::= \"a\""}), ebnf.clone(), "ebnf"),
            (json!({"grammar": "root ::= \"a\""}), ebnf, "grammar"),
        ] {
            let form = asked(&body).unwrap().unwrap();
            assert_eq!((form.text, form.place.as_str()), (text, place), "{body}");
        }
    }

    #[test]
    fn the_language_of_a_grammar_is_told_by_its_definitions() {
        for (grammar, is_ebnf) in [
            ("root ::= \"a\"", true),
            (
                "# comment\n  some-rule\t::= [a-z]+\nroot ::= some-rule",
                true,
            ),
            ("start: \"a\"", false),
            ("start: NAME \" ::= \" NAME\nNAME: /[a-z]+/", false),
            ("start: \"::=\"", false),
        ] {
            let form = asked(&json!({"guided_grammar": grammar})).unwrap().unwrap();
            let found = matches!(form.text, TextForm::Ebnf(_));
            assert_eq!(found, is_ebnf, "{grammar}");
        }
    }

    #[test]
    fn fields_that_are_set_to_nothing_ask_for_nothing() {
        for body in [
            json!({}),
            json!({"response_format": {"type": "text"}}),
            json!({"structured_outputs": {}}),
            json!({"structured_outputs": {"json_object": false, "choice": []}}),
            json!({"guided_regex": "", "guided_choice": [], "grammar": ""}),
            json!({"response_format": {"type": "text"}, "guided_regex": ""}),
        ] {
            assert_eq!(asked(&body).unwrap(), None, "{body}");
        }
    }

    #[test]
    fn the_properties_of_a_schema_keep_their_order() {
        let text = r#"{"properties":{"z":{},"a":{}},"additionalProperties":true}"#;
        for given in [json!(text), serde_json::from_str(text).unwrap()] {
            let form = asked(&json!({"guided_json": given})).unwrap().unwrap();
            assert_eq!(form.text, TextForm::JsonSchema(text.into()));
        }
    }

    #[test]
    fn faults_name_their_place() {
        let format = |format: Value| json!({"response_format": format});
        let schema = |inner: Value| format(json!({"type": "json_schema", "json_schema": inner}));
        let vllm = |fields: Value| json!({"structured_outputs": fields});
        for (body, param, is_unsupported) in [
            (
                format(json!({"type": "xml"})),
                "response_format.type",
                false,
            ),
            (format(json!("json")), "response_format", false),
            (format(json!(["text"])), "response_format", false),
            (
                format(json!({"type": "structural_tag"})),
                "response_format",
                true,
            ),
            (
                format(json!({"type": "json_schema"})),
                "response_format.json_schema",
                false,
            ),
            (
                schema(json!({"name": "n"})),
                "response_format.json_schema.schema",
                false,
            ),
            (
                schema(json!({"name": "n", "schema": [1]})),
                "response_format.json_schema.schema",
                false,
            ),
            (
                schema(json!({"name": "a".repeat(65), "schema": {}})),
                "response_format.json_schema.name",
                false,
            ),
            (
                schema(json!({"name": "a b", "schema": {}})),
                "response_format.json_schema.name",
                false,
            ),
            (
                schema(json!({"name": "n", "schema": {}, "strict": "yes"})),
                "response_format.json_schema.strict",
                false,
            ),
            (vllm(json!([1])), "structured_outputs", false),
            (vllm(json!({"regex": 7})), "structured_outputs.regex", false),
            (
                vllm(json!({"regex": "a", "json": {}})),
                "structured_outputs.regex",
                false,
            ),
            (
                vllm(json!({"structural_tag": "{}"})),
                "structured_outputs.structural_tag",
                true,
            ),
            (
                vllm(json!({"json": {}, "whitespace_pattern": " "})),
                "structured_outputs.whitespace_pattern",
                true,
            ),
            (json!({"guided_json": "{"}), "guided_json", false),
            (json!({"guided_choice": ["a", 1]}), "guided_choice", false),
            (json!({"guided_choice": [""]}), "guided_choice", false),
            (json!({"guided_regex": ["a"]}), "guided_regex", false),
            (
                json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}),
                "guided_regex",
                false,
            ),
        ] {
            let error = asked(&body).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
            let is_so = error.has_code("unsupported_parameter");
            assert_eq!(is_so, is_unsupported, "{body}: {}", error.message);
            assert!(error.message.starts_with(param), "{}", error.message);
        }
    }

    #[test]
    fn unknown_fields_are_not_dropped_in_silence() {
        let body = json!({
            "response_format": {"type": "json_schema", "foo": 1, "json_schema": {"schema": {}, "bar": 2}},
        });
        let mut unknown = Vec::new();
        fields(&body).asked(&mut unknown).unwrap();
        let expected = ["response_format.foo", "response_format.json_schema.bar"];
        assert_eq!(unknown, expected);
    }
}
