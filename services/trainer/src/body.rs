//! The bodies of the data routes: prompts, which may be long, and other fields, which are few.

use std::fmt;

use refrain_gateway::check_supported;
use refrain_protocol::ApiError;
use refrain_protocol::openai::ListedPrompt;
use serde::de::{DeserializeOwned, Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Names of fields that hold prompts.
const PROMPT_FIELDS: [&str; 3] = ["input_ids", "token_ids", "text"];

/// Longest name of a request, bytes.
const NAME_BYTES_MAX: usize = 256;
/// Most names of a request: as many as it may have choices.
const NAMES_MAX: usize = 128;

/// Fields of SGLang and vLLM beside the sampling parameters that would change the output or the answer.
pub(super) const UNSUPPORTED: &[&str] = &[
    "audio_data",
    "beam_width",
    "features",
    "flat_logprobs",
    "image_data",
    "input_embeds",
    "lora_id",
    "return_hidden_states",
    "return_indexer_topk",
    "return_routed_experts",
    "session_params",
    "stop_regex",
    "token_ids_logprob",
    "video_data",
];

/// A body.
#[derive(Debug, Default)]
pub(super) struct TrainerBody {
    prompts: Vec<(&'static str, ListedPrompt)>,
    /// All other fields.
    pub(super) fields: Map<String, Value>,
}

/// A value, or one for each prompt.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(untagged)]
pub(super) enum OneOrMore<T> {
    /// The same for all prompts.
    One(T),
    /// One for each.
    More(Vec<T>),
}

impl<T: PartialEq> OneOrMore<T> {
    /// The value, which has to be the same for all prompts.
    ///
    /// # Errors
    /// There are different ones, or none.
    pub(super) fn only(self, name: &str) -> Result<T, ApiError> {
        match self {
            OneOrMore::One(value) => Ok(value),
            OneOrMore::More(mut values) => match values.pop() {
                Some(value) if values.iter().all(|other| *other == value) => Ok(value),
                _ => {
                    let message = format!(
                        "{name}: must be the same for all prompts of a request; send prompts with other values apart"
                    );
                    Err(ApiError::invalid(name, message))
                }
            },
        }
    }
}

impl TrainerBody {
    /// Reads a body.
    ///
    /// # Errors
    /// It is not a JSON object, or a prompt is neither text nor token ids.
    pub(super) fn read(body: &[u8]) -> Result<Self, ApiError> {
        refrain_gateway::read(body)
    }

    /// Takes the prompts, which must be in one field. `fields` are its names, for the error.
    ///
    /// # Errors
    /// There is none, or more than one.
    pub(super) fn take_prompt(&mut self, fields: &str) -> Result<ListedPrompt, ApiError> {
        let prompt = self.prompts.pop();
        match (prompt, self.prompts.is_empty()) {
            (Some((_, prompt)), true) => Ok(prompt),
            (None, _) => Err(ApiError::invalid(
                fields,
                format!("{fields}: the prompt is missing"),
            )),
            (Some((name, _)), false) => Err(ApiError::invalid(
                name,
                format!(
                    "{name}: the body has its prompt in another field as well; send one of {fields}"
                ),
            )),
        }
    }

    /// Takes a field out. Null counts as missing.
    ///
    /// # Errors
    /// It has another shape.
    pub(super) fn take<T: DeserializeOwned>(
        &mut self,
        name: &str,
        shape: &str,
    ) -> Result<Option<T>, ApiError> {
        match self.fields.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let read = serde_json::from_value(value);
                read.map(Some)
                    .map_err(|_| ApiError::invalid(name, format!("{name}: must be {shape}")))
            }
        }
    }

    /// Checks the fields that nobody has taken. Unknown ones are ignored.
    ///
    /// # Errors
    /// One of them would change the output, and cannot be carried out.
    pub(super) fn check_rest(&self) -> Result<(), ApiError> {
        check_supported("", &self.fields, UNSUPPORTED)
    }

    /// Takes the names of the request.
    ///
    /// # Errors
    /// They are no texts, too many, or too long.
    pub(super) fn take_names(&mut self, name: &str) -> Result<Vec<String>, ApiError> {
        let shape = "a text, or a list of texts";
        checked_names(name, self.take(name, shape)?)
    }
}

/// The names of a request, which stand in the field `field`.
///
/// # Errors
/// They are too many, or too long.
pub(super) fn checked_names(
    field: &str,
    names: Option<OneOrMore<String>>,
) -> Result<Vec<String>, ApiError> {
    let names = match names {
        None => Vec::new(),
        Some(OneOrMore::One(one)) => vec![one],
        Some(OneOrMore::More(all)) => all,
    };
    if names.len() > NAMES_MAX || names.iter().any(|one| one.len() > NAME_BYTES_MAX) {
        let message =
            format!("{field}: at most {NAMES_MAX} names of at most {NAME_BYTES_MAX} bytes");
        return Err(ApiError::invalid(field, message));
    }
    Ok(names)
}

impl<'de> Deserialize<'de> for TrainerBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = TrainerBody;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TrainerBody, A::Error> {
                let mut body = TrainerBody::default();
                while let Some(name) = map.next_key::<String>()? {
                    match PROMPT_FIELDS.iter().find(|field| **field == name) {
                        Some(field) if body.prompts.iter().any(|(other, _)| other == field) => {
                            return Err(A::Error::duplicate_field(field));
                        }
                        Some(field) => {
                            if let Some(prompt) = map.next_value()? {
                                body.prompts.push((field, prompt));
                            }
                        }
                        None => {
                            let value = map.next_value()?;
                            body.fields.insert(name, value);
                        }
                    }
                }
                Ok(body)
            }
        }
        deserializer.deserialize_map(Object)
    }
}
