//! The bodies of both endpoints, each read in one pass.
//!
//! Both endpoints have the [`Parameters`]. serde's `flatten` would copy the whole body and lose the place of a fault.
//! So the derived code of `Parameters` reads an object from which the fields of only one endpoint are taken out
//! first.

use std::fmt;

use refrain_protocol::openai::{Parameters, Prompt, ResponseFormat};
use refrain_tokenization::{ChatInput, JsonList, JsonMap, JsonValue};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, Visitor};

/// A body: the parameters of both endpoints, and the own fields of one.
#[derive(Debug)]
pub(super) struct RequestBody<T> {
    pub(super) parameters: Parameters,
    pub(super) own: T,
}

/// The fields that only chats have.
#[derive(Debug)]
pub(super) struct ChatFields {
    /// Messages, tools, and variables of the template.
    pub(super) input: ChatInput,
    /// Whether to report log-probabilities.
    pub(super) logprobs: Option<bool>,
    /// Number of most likely tokens to report beside the chosen one.
    pub(super) top_logprobs: Option<u64>,
    /// The shape of the answer.
    pub(super) response_format: Option<ResponseFormat>,
    /// Whether a function has to be called.
    pub(super) tool_choice: Option<JsonValue>,
    /// OpenAI's Predicted Outputs.
    pub(super) prediction: Option<JsonValue>,
}

/// The fields that only text completions have.
#[derive(Debug)]
pub(super) struct CompletionFields {
    /// One prompt or several, as text or as tokens.
    pub(super) prompt: Prompt,
    /// Number of most likely tokens whose log-probabilities are reported, beside that of the chosen one.
    pub(super) logprobs: Option<u64>,
    /// Whether the answer begins with the prompt.
    pub(super) echo: Option<bool>,
    /// Number of outputs from which the best `n` would be chosen.
    pub(super) best_of: Option<u64>,
    /// Text after the output, for insertions.
    pub(super) suffix: Option<String>,
}

/// The own fields of an endpoint, beside the parameters.
pub(super) trait OwnFields: Sized {
    /// The fields that were read so far.
    type Partial: Default;

    /// Reads the value of `key` if it is one of these fields. Returns whether it is.
    fn read<'de, A: MapAccess<'de>>(
        fields: &mut Self::Partial,
        key: &str,
        map: &mut A,
    ) -> Result<bool, A::Error>;

    /// Completes the fields at the end of the body.
    fn whole<E: Error>(fields: Self::Partial) -> Result<Self, E>;
}

/// A field that was read or not. Null counts as missing.
type Field<T> = Option<Option<T>>;

#[derive(Default)]
pub(super) struct PartialChatFields {
    messages: Option<JsonList>,
    tools: Field<JsonList>,
    chat_template_kwargs: Field<JsonMap>,
    logprobs: Field<bool>,
    top_logprobs: Field<u64>,
    response_format: Field<ResponseFormat>,
    tool_choice: Field<JsonValue>,
    prediction: Field<JsonValue>,
}

impl OwnFields for ChatFields {
    type Partial = PartialChatFields;

    fn read<'de, A: MapAccess<'de>>(
        fields: &mut PartialChatFields,
        key: &str,
        map: &mut A,
    ) -> Result<bool, A::Error> {
        match key {
            "messages" => once("messages", &mut fields.messages, map),
            "tools" => once("tools", &mut fields.tools, map),
            "chat_template_kwargs" => once(
                "chat_template_kwargs",
                &mut fields.chat_template_kwargs,
                map,
            ),
            "logprobs" => once("logprobs", &mut fields.logprobs, map),
            "top_logprobs" => once("top_logprobs", &mut fields.top_logprobs, map),
            "response_format" => once("response_format", &mut fields.response_format, map),
            "tool_choice" => once("tool_choice", &mut fields.tool_choice, map),
            "prediction" => once("prediction", &mut fields.prediction, map),
            _ => Ok(false),
        }
    }

    fn whole<E: Error>(fields: PartialChatFields) -> Result<Self, E> {
        let messages = fields.messages.ok_or(E::missing_field("messages"))?;
        let (tools, kwargs) = (fields.tools, fields.chat_template_kwargs);
        Ok(ChatFields {
            input: ChatInput::new(messages, tools.flatten(), kwargs.flatten()),
            logprobs: fields.logprobs.flatten(),
            top_logprobs: fields.top_logprobs.flatten(),
            response_format: fields.response_format.flatten(),
            tool_choice: fields.tool_choice.flatten(),
            prediction: fields.prediction.flatten(),
        })
    }
}

#[derive(Default)]
pub(super) struct PartialCompletionFields {
    prompt: Option<Prompt>,
    logprobs: Field<u64>,
    echo: Field<bool>,
    best_of: Field<u64>,
    suffix: Field<String>,
}

impl OwnFields for CompletionFields {
    type Partial = PartialCompletionFields;

    fn read<'de, A: MapAccess<'de>>(
        fields: &mut PartialCompletionFields,
        key: &str,
        map: &mut A,
    ) -> Result<bool, A::Error> {
        match key {
            "prompt" => once("prompt", &mut fields.prompt, map),
            "logprobs" => once("logprobs", &mut fields.logprobs, map),
            "echo" => once("echo", &mut fields.echo, map),
            "best_of" => once("best_of", &mut fields.best_of, map),
            "suffix" => once("suffix", &mut fields.suffix, map),
            _ => Ok(false),
        }
    }

    fn whole<E: Error>(fields: PartialCompletionFields) -> Result<Self, E> {
        Ok(CompletionFields {
            prompt: fields.prompt.ok_or(E::missing_field("prompt"))?,
            logprobs: fields.logprobs.flatten(),
            echo: fields.echo.flatten(),
            best_of: fields.best_of.flatten(),
            suffix: fields.suffix.flatten(),
        })
    }
}

/// Reads the value of a field that may come only once.
fn once<'de, A: MapAccess<'de>, T: Deserialize<'de>>(
    name: &'static str,
    field: &mut Option<T>,
    map: &mut A,
) -> Result<bool, A::Error> {
    if field.is_some() {
        return Err(A::Error::duplicate_field(name));
    }
    *field = Some(map.next_value()?);
    Ok(true)
}

impl<'de, T: OwnFields> Deserialize<'de> for RequestBody<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BodyVisitor(std::marker::PhantomData))
    }
}

struct BodyVisitor<T>(std::marker::PhantomData<T>);

impl<'de, T: OwnFields> Visitor<'de> for BodyVisitor<T> {
    type Value = RequestBody<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<RequestBody<T>, A::Error> {
        let mut fields = T::Partial::default();
        let parameters = WithoutOwnFields::<A, T> {
            map,
            fields: &mut fields,
        };
        let parameters = Parameters::deserialize(MapAccessDeserializer::new(parameters))?;
        let own = T::whole(fields)?;
        Ok(RequestBody { parameters, own })
    }
}

/// An object without the fields of `T`, which it takes out and reads by itself.
struct WithoutOwnFields<'a, A, T: OwnFields> {
    map: A,
    fields: &'a mut T::Partial,
}

impl<'de, A: MapAccess<'de>, T: OwnFields> MapAccess<'de> for WithoutOwnFields<'_, A, T> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        while let Some(key) = self.map.next_key::<String>()? {
            if !T::read(self.fields, &key, &mut self.map)? {
                return seed.deserialize(key.into_deserializer()).map(Some);
            }
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}
