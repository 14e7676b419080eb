//! The bodies of both endpoints, each read in one pass.
//!
//! [`Parameters`] are the same for both. serde's `flatten` would keep a copy of everything and lose the place of a
//! fault, so they are read by their own derived code, from which the fields of one endpoint alone are held back.

use std::fmt;

use refrain_protocol::openai::{Parameters, Prompt, ResponseFormat};
use refrain_tokenization::{ChatInput, JsonList, JsonMap, JsonValue};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, Visitor};

/// A body: what both endpoints have, and what is beside it.
#[derive(Debug)]
pub(super) struct Body<T> {
    pub(super) parameters: Parameters,
    pub(super) beside: T,
}

/// The fields of a chat alone.
#[derive(Debug)]
pub(super) struct Chat {
    /// Messages, tools, and variables of the template.
    pub(super) input: ChatInput,
    /// Whether to report log-probabilities.
    pub(super) logprobs: Option<bool>,
    /// How many most likely tokens are reported beside the chosen one.
    pub(super) top_logprobs: Option<u64>,
    /// The shape of the answer.
    pub(super) response_format: Option<ResponseFormat>,
    /// Whether a function has to be called.
    pub(super) tool_choice: Option<JsonValue>,
    /// OpenAI's Predicted Outputs.
    pub(super) prediction: Option<JsonValue>,
}

/// The fields of a text completion alone.
#[derive(Debug)]
pub(super) struct Completion {
    /// One prompt or several, as text or as tokens.
    pub(super) prompt: Prompt,
    /// Report log-probabilities, and those of this many most likely tokens.
    pub(super) logprobs: Option<u64>,
    /// Whether the answer begins with the prompt.
    pub(super) echo: Option<bool>,
    /// How many to draw and choose `n` from.
    pub(super) best_of: Option<u64>,
    /// Text after the insertion.
    pub(super) suffix: Option<String>,
}

/// Fields that stand beside the parameters.
pub(super) trait Beside: Sized {
    /// Those that have come so far.
    type Fields: Default;

    /// Reads the value of `key` if it is one of these fields; whether it is.
    fn read<'de, A: MapAccess<'de>>(
        fields: &mut Self::Fields,
        key: &str,
        map: &mut A,
    ) -> Result<bool, A::Error>;

    /// All of them, once the body has ended.
    fn whole<E: Error>(fields: Self::Fields) -> Result<Self, E>;
}

/// A field that has come or not; null is as good as missing.
type Field<T> = Option<Option<T>>;

#[derive(Default)]
pub(super) struct ChatFields {
    messages: Option<JsonList>,
    tools: Field<JsonList>,
    chat_template_kwargs: Field<JsonMap>,
    logprobs: Field<bool>,
    top_logprobs: Field<u64>,
    response_format: Field<ResponseFormat>,
    tool_choice: Field<JsonValue>,
    prediction: Field<JsonValue>,
}

impl Beside for Chat {
    type Fields = ChatFields;

    fn read<'de, A: MapAccess<'de>>(
        fields: &mut ChatFields,
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

    fn whole<E: Error>(fields: ChatFields) -> Result<Self, E> {
        let messages = fields.messages.ok_or(E::missing_field("messages"))?;
        let (tools, kwargs) = (fields.tools, fields.chat_template_kwargs);
        Ok(Chat {
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
pub(super) struct CompletionFields {
    prompt: Option<Prompt>,
    logprobs: Field<u64>,
    echo: Field<bool>,
    best_of: Field<u64>,
    suffix: Field<String>,
}

impl Beside for Completion {
    type Fields = CompletionFields;

    fn read<'de, A: MapAccess<'de>>(
        fields: &mut CompletionFields,
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

    fn whole<E: Error>(fields: CompletionFields) -> Result<Self, E> {
        Ok(Completion {
            prompt: fields.prompt.ok_or(E::missing_field("prompt"))?,
            logprobs: fields.logprobs.flatten(),
            echo: fields.echo.flatten(),
            best_of: fields.best_of.flatten(),
            suffix: fields.suffix.flatten(),
        })
    }
}

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

impl<'de, T: Beside> Deserialize<'de> for Body<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BodyVisitor(std::marker::PhantomData))
    }
}

struct BodyVisitor<T>(std::marker::PhantomData<T>);

impl<'de, T: Beside> Visitor<'de> for BodyVisitor<T> {
    type Value = Body<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Body<T>, A::Error> {
        let mut fields = T::Fields::default();
        let others = HoldBack::<A, T> {
            map,
            fields: &mut fields,
        };
        let parameters = Parameters::deserialize(MapAccessDeserializer::new(others))?;
        let beside = T::whole(fields)?;
        Ok(Body { parameters, beside })
    }
}

/// An object without the fields of `T`, which it reads by itself.
struct HoldBack<'a, A, T: Beside> {
    map: A,
    fields: &'a mut T::Fields,
}

impl<'de, A: MapAccess<'de>, T: Beside> MapAccess<'de> for HoldBack<'_, A, T> {
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
