//! Chat templates: messages to tokens, as the model's authors wrote it in Jinja.

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde::{Deserialize, Serialize};

use crate::json::{JsonList, JsonMap};
use crate::{TokenId, TokenizationError, Tokenizer};

/// What a template is given: the messages of a chat and what goes with them.
///
/// Read from the request's own JSON, so that keys stay in the client's order: tool schemas end up in the
/// prompt, and models have seen them in that order.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ChatInput {
    messages: JsonList,
    #[serde(default)]
    tools: Option<JsonList>,
    /// Variables of the template's own, such as `enable_thinking`.
    #[serde(default)]
    chat_template_kwargs: Option<JsonMap>,
}

impl ChatInput {
    /// From the parts of a request: its messages, its tools, and variables of the template's own.
    pub fn new(messages: JsonList, tools: Option<JsonList>, kwargs: Option<JsonMap>) -> Self {
        ChatInput {
            messages,
            tools,
            chat_template_kwargs: kwargs,
        }
    }

    /// The messages.
    pub fn messages(&self) -> &JsonList {
        &self.messages
    }

    /// From (role, content) pairs.
    pub fn from_messages<'a>(messages: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let message = |(role, content)| Value::from_pairs([("role", role), ("content", content)]);
        ChatInput {
            messages: JsonList(messages.into_iter().map(message).collect()),
            ..ChatInput::default()
        }
    }

    /// From the JSON body of a chat request; fields of no concern here are ignored.
    ///
    /// # Errors
    /// A body that is no JSON, or has no list of messages.
    pub fn from_json(body: &[u8]) -> Result<Self, TokenizationError> {
        serde_json::from_slice(body).map_err(|error| TokenizationError::Input(error.to_string()))
    }

    /// The same without tools.
    pub fn without_tools(mut self) -> Self {
        self.tools = None;
        self
    }
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and its like.
    names: Vec<(String, String)>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

const TEMPLATE_NAME: &str = "chat_template";

/// Special tokens that templates call by name.
const TOKEN_NAMES: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

impl ChatTemplate {
    /// Compiles a template; `names` are the special tokens it may call by name.
    ///
    /// # Errors
    /// What the template's author got wrong, with the line.
    pub fn new(source: &str, names: Vec<(String, String)>) -> Result<Self, TokenizationError> {
        let mut environment = Environment::new();
        let faulty = |error: Error| TokenizationError::Model {
            file: "chat_template",
            reason: describe(&error),
        };
        // As the library that these templates are written for sets Jinja up.
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(faulty)?,
        );
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        // Python prints these three with a capital.
        environment.set_formatter(|out, state, value| {
            let printed = match (value.kind(), value.is_true()) {
                (ValueKind::Bool, true) => Value::from("True"),
                (ValueKind::Bool, false) => Value::from("False"),
                (ValueKind::None, _) => Value::from("None"),
                _ => value.clone(),
            };
            minijinja::escape_formatter(out, state, &printed)
        });
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<String, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        // `strftime_now` is deliberately absent: templates that ask for it have a fixed date to fall back
        // on, and a prompt that changes every day would never be found in a cache again.
        environment
            .add_template_owned(TEMPLATE_NAME, source.to_owned())
            .map_err(faulty)?;
        Ok(ChatTemplate { environment, names })
    }

    /// From a model's files: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`], and a configuration that is no JSON.
    pub(crate) fn from_files(
        template: Option<&str>,
        tokenizer_config: Option<&[u8]>,
    ) -> Result<Option<Self>, TokenizationError> {
        let config: serde_json::Value = match tokenizer_config {
            None => serde_json::Value::Null,
            Some(bytes) => {
                serde_json::from_slice(bytes).map_err(|error| TokenizationError::Model {
                    file: "tokenizer_config.json",
                    reason: error.to_string(),
                })?
            }
        };
        let names = TOKEN_NAMES
            .iter()
            .filter_map(|name| {
                let token = &config[*name];
                let text = token.as_str().or_else(|| token["content"].as_str())?;
                Some(((*name).to_owned(), text.to_owned()))
            })
            .collect();
        let listed = || {
            let templates = config["chat_template"].as_array()?;
            templates
                .iter()
                .find(|template| template["name"] == "default")?["template"]
                .as_str()
        };
        match template
            .or_else(|| config["chat_template"].as_str())
            .or_else(listed)
        {
            None => Ok(None),
            Some(source) => ChatTemplate::new(source, names).map(Some),
        }
    }

    /// The prompt as text, for people to look at. Not to be encoded: it no longer says what a user wrote.
    ///
    /// # Errors
    /// What the template says about these messages.
    pub fn render(
        &self,
        input: &ChatInput,
        add_generation_prompt: bool,
    ) -> Result<String, TokenizationError> {
        self.render_mapped(&Parts::new(input), add_generation_prompt, &mut |_| None)
    }

    /// The prompt as tokens. Special tokens that the template writes are recognised; those that a string of
    /// the input holds, or would complete, are ordinary text.
    ///
    /// How: a character that occurs nowhere in the input (the *guard*) is put inside such places before
    /// rendering, so templates may cut, trim and compare strings as ever. Only what is unguarded in the
    /// rendered text can be a special token; the guards are then taken out. Encoding messages one by one was
    /// rejected: merges across the border of template and content would come out otherwise than in training.
    /// An input that needs no guard, nearly every one, is encoded by the library in one go.
    ///
    /// # Errors
    /// What the template says about these messages, or text that the vocabulary cannot spell.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
        add_generation_prompt: bool,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        self.encode_within(tokenizer, input, add_generation_prompt, usize::MAX)
    }

    /// As [`ChatTemplate::encode`], of a prompt that is refused without tokenizing it if it has more than `most`
    /// tokens for certain. It can have more all the same.
    ///
    /// # Errors
    /// [`TokenizationError::TooLong`], and as [`ChatTemplate::encode`].
    pub fn encode_within(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
        add_generation_prompt: bool,
        most: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        let parts = Parts::new(input);
        let guard = parts.unused_character()?;
        let mut guarded = false;
        let mut map = |text: &str| {
            let text = tokenizer.guard(text, guard);
            guarded |= text.is_some();
            text
        };
        let text = self.render_mapped(&parts, add_generation_prompt, &mut map)?;
        tokenizer.check_floor(&text, guarded.then_some(guard), most)?;
        if guarded {
            tokenizer.encode_guarded(&text, guard)
        } else {
            tokenizer.encode_trusted(&text)
        }
    }

    fn render_mapped(
        &self,
        parts: &Parts,
        add_generation_prompt: bool,
        map: &mut Map<'_>,
    ) -> Result<String, TokenizationError> {
        let failed = |error: Error| TokenizationError::Render(describe(&error));
        let template = self
            .environment
            .get_template(TEMPLATE_NAME)
            .map_err(failed)?;
        let mut context: BTreeMap<String, Value> = parts
            .kwargs
            .iter()
            .map(|(name, value)| (name.clone(), map_strings(value, map)))
            .collect();
        context.extend(
            self.names
                .iter()
                .map(|(name, text)| (name.clone(), Value::from(text))),
        );
        let mut mapped = |value: &Value| map_strings(value, map);
        let messages: Vec<Value> = parts.messages.iter().map(&mut mapped).collect();
        context.insert("messages".into(), Value::from(messages));
        context.insert("tools".into(), mapped(&parts.tools));
        context.insert("documents".into(), Value::from(()));
        context.insert(
            "add_generation_prompt".into(),
            Value::from(add_generation_prompt),
        );
        template.render(Value::from(context)).map_err(failed)
    }
}

/// Makes the text that takes a string's place; `None` leaves it, and makes no copy of it.
type Map<'a> = dyn FnMut(&str) -> Option<String> + 'a;

/// The input in the shape that templates expect. Texts are shared with it rather than copied.
struct Parts {
    messages: Vec<Value>,
    /// None if there is none of them.
    tools: Value,
    kwargs: Vec<(String, Value)>,
}

impl Parts {
    fn new(input: &ChatInput) -> Self {
        let tools = match &input.tools {
            Some(tools) if !tools.is_empty() => Value::from(tools.0.clone()),
            _ => Value::from(()),
        };
        let kwargs = input.chat_template_kwargs.as_ref();
        Parts {
            messages: input.messages.0.iter().map(normal).collect(),
            tools,
            kwargs: kwargs.map_or_else(Vec::new, |kwargs| kwargs.0.clone()),
        }
    }

    /// A private-use character that stands in none of the strings.
    fn unused_character(&self) -> Result<char, TokenizationError> {
        let mut used = std::collections::BTreeSet::new();
        let mut note = |text: &str| {
            used.extend(text.chars().filter(|character| *character >= '\u{F0000}'));
            None
        };
        let kwargs = self.kwargs.iter().map(|(_, value)| value);
        for value in self.messages.iter().chain([&self.tools]).chain(kwargs) {
            map_strings(value, &mut note);
        }
        ('\u{F0000}'..='\u{10FFFD}')
            .find(|character| !used.contains(character))
            .ok_or_else(|| {
                TokenizationError::Input("the messages hold every private-use character".into())
            })
    }
}

/// A message as templates expect it: `content` is one string (text parts are joined by line ends, nothing is
/// the empty string), and the arguments of tool calls are objects, where clients send them as JSON text.
fn normal(message: &Value) -> Value {
    let mut fields = pairs(message);
    if !fields
        .iter()
        .any(|(name, _)| name.as_str() == Some("content"))
    {
        fields.push((Value::from("content"), Value::from("")));
    }
    for (name, value) in &mut fields {
        match name.as_str() {
            Some("content") if value.is_none() => *value = Value::from(""),
            Some("content") if value.kind() == ValueKind::Seq => {
                let texts = value.try_iter().into_iter().flatten().filter_map(|part| {
                    let text = part.get_attr("text").ok()?;
                    text.as_str().map(str::to_owned)
                });
                *value = Value::from(texts.collect::<Vec<_>>().join("\n"));
            }
            Some("tool_calls") if value.kind() == ValueKind::Seq => {
                *value = value
                    .try_iter()
                    .into_iter()
                    .flatten()
                    .map(|call| normal_call(&call))
                    .collect();
            }
            _ => {}
        }
    }
    Value::from_pairs(fields)
}

fn normal_call(call: &Value) -> Value {
    let function = |function: &Value| {
        Value::from_pairs(pairs(function).into_iter().map(|(name, value)| {
            match (name.as_str(), value.as_str()) {
                (Some("arguments"), Some(text)) => {
                    let parsed = serde_json::from_str::<Value>(text).ok();
                    let object = parsed.filter(|parsed| parsed.kind() == ValueKind::Map);
                    (name, object.unwrap_or(value))
                }
                _ => (name, value),
            }
        }))
    };
    Value::from_pairs(
        pairs(call)
            .into_iter()
            .map(|(name, value)| match name.as_str() {
                Some("function") => (name, function(&value)),
                _ => (name, value),
            }),
    )
}

fn pairs(map: &Value) -> Vec<(Value, Value)> {
    if map.kind() != ValueKind::Map {
        return Vec::new();
    }
    let keys = map.try_iter().into_iter().flatten();
    keys.map(|key| (key.clone(), map.get_item(&key).unwrap_or_default()))
        .collect()
}

/// Depth is bounded by the JSON parser (128).
fn map_strings(value: &Value, map: &mut Map<'_>) -> Value {
    match value.kind() {
        ValueKind::String => match map(value.as_str().unwrap_or_default()) {
            Some(text) => Value::from(text),
            None => value.clone(),
        },
        ValueKind::Seq => value
            .try_iter()
            .into_iter()
            .flatten()
            .map(|item| map_strings(&item, map))
            .collect(),
        ValueKind::Map => {
            let mapped: Vec<_> = pairs(value)
                .into_iter()
                .map(|(key, item)| (map_strings(&key, map), map_strings(&item, map)))
                .collect();
            Value::from_pairs(mapped)
        }
        _ => value.clone(),
    }
}

/// The message without the excerpt of the template that debug builds add.
fn describe(error: &Error) -> String {
    let what = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (template line {line})"),
        None => what,
    }
}

/// Python's `json.dumps(value, ensure_ascii=False)`: a space after `,` and `:`, or lines with `indent`.
fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = kwargs.get::<Option<usize>>("indent")?;
    for accepted in ["ensure_ascii", "sort_keys", "separators"] {
        let _ = kwargs.get::<Option<Value>>(accepted)?;
    }
    kwargs.assert_all_used()?;
    let failed =
        |error: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut bytes = Vec::new();
    let written = match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(
            &mut bytes,
            PythonFormatter,
        )),
        Some(indent) => {
            let spaces = " ".repeat(indent.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(
                &mut bytes, formatter,
            ))
        }
    };
    written.map_err(|error| failed(&error))?;
    String::from_utf8(bytes)
        .map(Value::from)
        .map_err(|error| failed(&error))
}

struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
