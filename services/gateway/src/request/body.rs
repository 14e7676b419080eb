//! The bodies of both endpoints, each read in one pass.
//!
//! Both endpoints have the [`Parameters`]. serde's `flatten` would copy the whole body and lose the place of a fault.
//! So the derived code of `Parameters` reads an object from which the fields of only one endpoint are taken out
//! first.

use std::fmt;

use refrain_protocol::openai::{Parameters, Prompt};
use refrain_tokenization::{JsonList, JsonMap, JsonValue};
use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error, IgnoredAny, IntoDeserializer, MapAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::other_fields::OtherFields;
use super::output_form::{FORM_FIELDS, FormFields};

/// A body: the parameters of both endpoints, and the own fields of one.
#[derive(Debug)]
pub(super) struct RequestBody<T: OwnFields> {
    pub(super) parameters: Parameters,
    pub(super) required: T::Required,
    pub(super) own: T,
    pub(super) form: FormFields,
    pub(super) others: OtherFields,
}

/// The optional fields that only one endpoint has. Null counts as missing.
pub(super) trait OwnFields: Default {
    /// Their names.
    const NAMES: &[&str];

    /// The name of the field that the endpoint needs beside them.
    const REQUIRED: &str;

    /// The value of that field.
    type Required: for<'de> Deserialize<'de>;

    /// Reads the value of one of these fields.
    fn read<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error>;
}

/// The fields that only chats have, beside their messages.
#[derive(Debug, Default)]
pub(super) struct ChatFields {
    /// The functions that the model may call.
    pub(super) tools: Option<JsonList>,
    /// Variables of the template.
    pub(super) chat_template_kwargs: Option<JsonMap>,
    /// Whether to report log-probabilities.
    pub(super) logprobs: Option<bool>,
    /// Number of most likely tokens to report beside the chosen one.
    pub(super) top_logprobs: Option<u64>,
    /// Whether a function has to be called.
    pub(super) tool_choice: Option<JsonValue>,
    /// Whether several functions may be called at once.
    pub(super) parallel_tool_calls: Option<bool>,
    /// The deprecated form of `tools`.
    pub(super) functions: Option<JsonList>,
    /// The deprecated form of `tool_choice`.
    pub(super) function_call: Option<JsonValue>,
    /// OpenAI's Predicted Outputs.
    pub(super) prediction: Option<JsonValue>,
    /// Whether the prompt ends with the beginning of an answer; default true.
    pub(super) add_generation_prompt: Option<bool>,
    /// Whether the model goes on with the last message.
    pub(super) continue_final_message: Option<bool>,
}

impl OwnFields for ChatFields {
    const NAMES: &[&str] = &[
        "tools",
        "chat_template_kwargs",
        "logprobs",
        "top_logprobs",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "prediction",
        "add_generation_prompt",
        "continue_final_message",
    ];
    const REQUIRED: &str = "messages";
    type Required = JsonList;

    fn read<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "tools" => self.tools = map.next_value()?,
            "chat_template_kwargs" => self.chat_template_kwargs = map.next_value()?,
            "logprobs" => self.logprobs = map.next_value()?,
            "top_logprobs" => self.top_logprobs = map.next_value()?,
            "parallel_tool_calls" => self.parallel_tool_calls = map.next_value()?,
            "functions" => self.functions = map.next_value()?,
            "function_call" => self.function_call = map.next_value()?,
            "tool_choice" => self.tool_choice = map.next_value()?,
            "add_generation_prompt" => self.add_generation_prompt = map.next_value()?,
            "continue_final_message" => self.continue_final_message = map.next_value()?,
            _ => self.prediction = map.next_value()?,
        }
        Ok(())
    }
}

/// The fields that only text completions have, beside their prompt.
#[derive(Debug, Default)]
pub(super) struct CompletionFields {
    /// Number of most likely tokens whose log-probabilities are reported, beside that of the chosen one.
    pub(super) logprobs: Option<u64>,
    /// Whether the answer begins with the prompt.
    pub(super) echo: Option<bool>,
    /// Number of outputs from which the best `n` would be chosen.
    pub(super) best_of: Option<u64>,
    /// Text after the output, for insertions.
    pub(super) suffix: Option<String>,
}

/// The value of `logprobs`. Some clients have the word of chats here: `true` shows the chosen tokens only.
#[derive(Deserialize)]
#[serde(untagged)]
enum Logprobs {
    Number(u64),
    Shows(bool),
}

impl Logprobs {
    fn number(self) -> Option<u64> {
        match self {
            Logprobs::Number(number) => Some(number),
            Logprobs::Shows(shows) => shows.then_some(0),
        }
    }
}

impl OwnFields for CompletionFields {
    const NAMES: &[&str] = &["logprobs", "echo", "best_of", "suffix"];
    const REQUIRED: &str = "prompt";
    type Required = Prompt;

    fn read<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "logprobs" => self.logprobs = map.next_value::<Option<_>>()?.and_then(Logprobs::number),
            "echo" => self.echo = map.next_value()?,
            "best_of" => self.best_of = map.next_value()?,
            _ => self.suffix = map.next_value()?,
        }
        Ok(())
    }
}

/// The fields that neither endpoint has: none. Objects of sampling parameters have only those of both.
#[derive(Debug, Default)]
pub(super) struct NoFields;

impl OwnFields for NoFields {
    const NAMES: &[&str] = &[];
    const REQUIRED: &str = "";
    type Required = IgnoredAny;

    fn read<'de, A: MapAccess<'de>>(&mut self, _: &str, _: &mut A) -> Result<(), A::Error> {
        Ok(())
    }
}

/// The fields of an object that may lack the required one.
#[derive(Debug)]
pub(super) struct ReadFields<T: OwnFields> {
    pub(super) parameters: Parameters,
    required: Option<T::Required>,
    own: T,
    pub(super) form: FormFields,
    pub(super) others: OtherFields,
}

impl<'de, T: OwnFields> Deserialize<'de> for RequestBody<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let read = ReadFields::<T>::deserialize(deserializer)?;
        let missing = || D::Error::missing_field(T::REQUIRED);
        Ok(RequestBody {
            parameters: read.parameters,
            required: read.required.ok_or_else(missing)?,
            own: read.own,
            form: read.form,
            others: read.others,
        })
    }
}

impl<'de, T: OwnFields> Deserialize<'de> for ReadFields<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BodyVisitor(std::marker::PhantomData))
    }
}

struct BodyVisitor<T>(std::marker::PhantomData<T>);

impl<'de, T: OwnFields> Visitor<'de> for BodyVisitor<T> {
    type Value = ReadFields<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ReadFields<T>, A::Error> {
        let mut rest = WithoutOwnFields {
            map,
            required: None,
            own: T::default(),
            seen: Vec::new(),
            shared: &[],
            form: FormFields::default(),
            others: OtherFields::default(),
        };
        let parameters = Parameters::deserialize(SharedFields(&mut rest))?;
        Ok(ReadFields {
            parameters,
            required: rest.required,
            own: rest.own,
            form: rest.form,
            others: rest.others,
        })
    }
}

/// An object without the fields of `T`, which it takes out and reads by itself.
struct WithoutOwnFields<A, T: OwnFields> {
    map: A,
    required: Option<T::Required>,
    own: T,
    /// The optional fields that were read.
    seen: Vec<&'static str>,
    /// The names of the fields that both endpoints have.
    shared: &'static [&'static str],
    form: FormFields,
    others: OtherFields,
}

/// Reads the [`Parameters`], and learns the names of their fields from the derived code.
struct SharedFields<'m, A, T: OwnFields>(&'m mut WithoutOwnFields<A, T>);

impl<'de, A: MapAccess<'de>, T: OwnFields> Deserializer<'de> for SharedFields<'_, A, T> {
    type Error = A::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, A::Error> {
        visitor.visit_map(self.0)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.0.shared = fields;
        visitor.visit_map(self.0)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de, A: MapAccess<'de>, T: OwnFields> MapAccess<'de> for &mut WithoutOwnFields<A, T> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        while let Some(key) = self.map.next_key::<String>()? {
            if key == T::REQUIRED {
                if self.required.is_some() {
                    return Err(A::Error::duplicate_field(T::REQUIRED));
                }
                self.required = Some(self.map.next_value()?);
            } else if let Some(name) = T::NAMES.iter().find(|name| **name == key) {
                if self.seen.contains(name) {
                    return Err(A::Error::duplicate_field(name));
                }
                self.seen.push(name);
                self.own.read(name, &mut self.map)?;
            } else if self.shared.contains(&key.as_str()) {
                return seed.deserialize(key.into_deserializer()).map(Some);
            } else if let Some(name) = FORM_FIELDS.iter().find(|name| **name == key) {
                if self.form.has(name) {
                    return Err(A::Error::duplicate_field(name));
                }
                // Null counts as missing here as well.
                if let Some(value) = self.map.next_value()? {
                    self.form.set(name, value);
                }
            } else {
                self.others.read(key, &mut self.map)?;
            }
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}
