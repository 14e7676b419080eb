//! Fields that the gateway does not carry out: those that it refuses by name, and those that nobody knows.

use std::fmt;

use refrain_protocol::ApiError;
use refrain_tokenization::JsonValue;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::end_user::EndUserFields;
use super::refusal::{invalid, unsupported};

/// Fields of other servers that would change the output. Those with a number have it as their neutral value; all are
/// neutral if they are null, false or empty.
const UNSUPPORTED: [(&str, Option<f64>); 33] = [
    ("allowed_token_ids", None),
    ("audio", None),
    ("chat_template", None),
    ("custom_logit_processor", None),
    ("custom_params", None),
    ("documents", None),
    ("dry_multiplier", Some(0.0)),
    ("early_stopping", None),
    ("echo", None),
    ("enforced_str", None),
    ("function_call", None),
    ("functions", None),
    ("guided_decoding_backend", None),
    ("guided_whitespace_pattern", None),
    ("kv_transfer_params", None),
    ("length_penalty", Some(1.0)),
    ("logits_processors", None),
    ("lora_path", None),
    ("mirostat", Some(0.0)),
    ("mm_processor_kwargs", None),
    ("prompt_embeds", None),
    ("repeat_penalty", Some(1.0)),
    ("repetition_detection", None),
    ("structural_tag", None),
    ("thinking_token_budget", None),
    ("top_a", Some(0.0)),
    ("top_n_sigma", Some(-1.0)),
    ("typical_p", Some(1.0)),
    ("use_beam_search", None),
    ("vllm_xargs", None),
    ("web_search_options", None),
    ("xtc_probability", Some(0.0)),
    ("logprob_token_ids", None),
];

/// Fields that change no output, or only as a hint: clients send them to every server.
const WITHOUT_EFFECT: [&str; 13] = [
    "add_special_tokens",
    "cache_salt",
    "include_reasoning",
    "modalities",
    "parallel_tool_calls",
    "prompt_cache_retention",
    "reasoning_effort",
    "request_id",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "verbosity",
    "return_prompt_text",
];

/// Most unknown fields of a request that are named.
const UNKNOWN_MAX: usize = 8;
/// Longest name that is named, bytes.
const NAME_BYTES_MAX: usize = 64;

/// The fields of a body that are neither parameters nor fields of its endpoint.
#[derive(Debug, Default)]
pub(super) struct OtherFields {
    unsupported: Option<&'static str>,
    /// The metadata of the client. Nothing depends on them.
    metadata: Option<JsonValue>,
    pub(super) end_user: EndUserFields,
    /// The name by which requests of one conversation find a cache.
    pub(super) prompt_cache_key: Option<String>,
    /// Names that nobody knows, the first few.
    unknown: Vec<String>,
}

impl OtherFields {
    /// Reads the value of a field, and keeps nothing of it.
    pub(super) fn read<'de, A: MapAccess<'de>>(
        &mut self,
        name: String,
        map: &mut A,
    ) -> Result<(), A::Error> {
        if let Some((name, neutral)) = UNSUPPORTED.iter().find(|(other, _)| *other == name) {
            let changes = match map.next_value::<Setting>()? {
                Setting::Nothing => false,
                Setting::Number(value) => *neutral != Some(value),
                Setting::Something => true,
            };
            if changes {
                self.unsupported.get_or_insert(name);
            }
            return Ok(());
        }
        if EndUserFields::has(&name) {
            let value = map.next_value::<JsonValue>()?;
            self.end_user.note(&name, value.as_str());
            return Ok(());
        }
        if name == PROMPT_CACHE_KEY {
            let value = map.next_value::<JsonValue>()?;
            self.prompt_cache_key = value.as_str().map(str::to_owned);
            return Ok(());
        }
        if name == METADATA {
            self.metadata = map.next_value()?;
            return Ok(());
        }
        map.next_value::<IgnoredAny>()?;
        let is_known = WITHOUT_EFFECT.contains(&name.as_str());
        if !is_known && self.unknown.len() < UNKNOWN_MAX && name.len() <= NAME_BYTES_MAX {
            self.unknown.push(name);
        }
        Ok(())
    }

    /// The fields of an object that stands in this field of the body.
    pub(super) fn inside(mut self, place: &str) -> Self {
        for name in &mut self.unknown {
            *name = format!("{place}.{name}");
        }
        self
    }

    /// Returns the names that nobody knows.
    ///
    /// # Errors
    /// A field would change the output, and cannot be carried out, or the metadata are too many.
    pub(super) fn checked(self) -> Result<Vec<String>, ApiError> {
        if let Some(metadata) = &self.metadata {
            check_metadata(metadata)?;
        }
        match self.unsupported {
            None => Ok(self.unknown),
            Some(name) => unsupported(name, &format!("{name} is not supported; leave it out")),
        }
    }
}

/// The field of OpenAI's name for requests that begin alike.
const PROMPT_CACHE_KEY: &str = "prompt_cache_key";

/// The field of a client's own notes on a request.
const METADATA: &str = "metadata";

/// Most pairs of metadata, and most characters of their keys and values: OpenAI's limits.
const METADATA_PAIRS_MAX: usize = 16;
const METADATA_KEY_CHARS_MAX: usize = 64;
const METADATA_VALUE_CHARS_MAX: usize = 512;

/// Checks the metadata of a client.
///
/// # Errors
/// `InvalidRequest` past OpenAI's limits. The error does not repeat keys or values.
pub(crate) fn check_metadata(metadata: &JsonValue) -> Result<(), ApiError> {
    if !metadata.is_object() {
        return invalid(METADATA, "must be an object whose values are texts");
    }
    for (number, key) in metadata.names().enumerate() {
        if number == METADATA_PAIRS_MAX {
            let fault = format!("at most {METADATA_PAIRS_MAX} pairs are allowed");
            return invalid(METADATA, fault);
        }
        let value = metadata.get(&key);
        let Some(value) = value.as_ref().and_then(JsonValue::as_str) else {
            return invalid(METADATA, "each value must be a text");
        };
        if key.chars().count() > METADATA_KEY_CHARS_MAX {
            let fault = format!("a key may have at most {METADATA_KEY_CHARS_MAX} characters");
            return invalid(METADATA, fault);
        }
        if value.chars().count() > METADATA_VALUE_CHARS_MAX {
            let fault = format!("a value may have at most {METADATA_VALUE_CHARS_MAX} characters");
            return invalid(METADATA, fault);
        }
    }
    Ok(())
}

/// Checks that no field of an object would change the output that cannot be carried out: those of other servers, and
/// those with these names. `place` begins the names in the error.
///
/// # Errors
/// The first such field.
pub fn check_supported(
    place: &str,
    fields: &serde_json::Map<String, serde_json::Value>,
    more: &[&str],
) -> Result<(), ApiError> {
    for (name, value) in fields {
        let known = UNSUPPORTED.iter().find(|(other, _)| other == name);
        let neutral = known.map(|(_, neutral)| *neutral);
        let neutral = neutral.or_else(|| more.contains(&name.as_str()).then_some(None));
        let Some(neutral) = neutral else { continue };
        let changes = match Setting::deserialize(value) {
            Ok(Setting::Nothing) => false,
            Ok(Setting::Number(value)) => neutral != Some(value),
            Ok(Setting::Something) | Err(_) => true,
        };
        if changes {
            let name = format!("{place}{name}");
            return unsupported(&name, &format!("{name} is not supported; leave it out"));
        }
    }
    Ok(())
}

/// A value, as far as it tells whether a field is set.
enum Setting {
    /// Null, false, or an empty text, list or object.
    Nothing,
    Number(f64),
    Something,
}

impl Setting {
    fn of(is_set: bool) -> Self {
        match is_set {
            true => Setting::Something,
            false => Setting::Nothing,
        }
    }
}

impl<'de> Deserialize<'de> for Setting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyValue;
        impl<'de> Visitor<'de> for AnyValue {
            type Value = Setting;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a value")
            }

            fn visit_unit<E: Error>(self) -> Result<Setting, E> {
                Ok(Setting::Nothing)
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Setting, E> {
                Ok(Setting::of(value))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Setting, E> {
                Ok(Setting::Number(value as f64))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Setting, E> {
                Ok(Setting::Number(value as f64))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Setting, E> {
                Ok(Setting::Number(value))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Setting, E> {
                Ok(Setting::of(!value.is_empty()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Setting, A::Error> {
                let mut is_set = false;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    is_set = true;
                }
                Ok(Setting::of(is_set))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Setting, A::Error> {
                let mut is_set = false;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    is_set = true;
                }
                Ok(Setting::of(is_set))
            }
        }
        deserializer.deserialize_any(AnyValue)
    }
}
