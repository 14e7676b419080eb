//! Request fields that come in several shapes or may be long.
//!
//! They are read by hand. Derived code would keep a copy of the whole value until it knows the shape, which takes
//! many times the bytes of the JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::TokenId;

/// Most entries of `logit_bias`.
pub(super) const LOGIT_BIAS_MAX: usize = 1024;
/// Most texts in `stop`: more than OpenAI allows, since agents of other servers send more. Each costs a search per
/// token.
const STOPS_MAX: usize = 64;
/// Most texts in `bad_words`.
const BAD_WORDS_MAX: usize = 128;
/// Most prompts of a body that are read. The gateway allows fewer.
const PROMPTS_READ_MAX: usize = 65_536;

/// `stop`: one text or several, at most 64.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stop(pub Vec<String>);

/// `bad_words`: a list of texts, at most 128.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BadWords(pub Vec<String>);

/// `logit_bias`: values by token id, at most 1024.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitBias(pub BTreeMap<String, f64>);

/// `prompt`: one or several, at most 65,536.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Prompts as text.
    Texts(Vec<String>),
    /// Prompts of tokens. A list without entries is one prompt without tokens.
    Tokens(Vec<Vec<TokenId>>),
}

/// A [`Prompt`], and whether it came as a list of prompts, which may have a single one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPrompt {
    /// The prompts.
    pub prompt: Prompt,
    /// Whether they are a list.
    pub is_list: bool,
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ListedPrompt::deserialize(deserializer).map(|listed| listed.prompt)
    }
}

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = LogitBias;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of token ids and numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
                let mut biases = BTreeMap::new();
                while let Some((token, bias)) = map.next_entry()? {
                    biases.insert(token, bias);
                    if biases.len() > LOGIT_BIAS_MAX {
                        return Err(too_many(LOGIT_BIAS_MAX, "tokens"));
                    }
                }
                Ok(LogitBias(biases))
            }
        }
        deserializer.deserialize_map(Shape)
    }
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        texts::<_, STOPS_MAX>(deserializer).map(Stop)
    }
}

impl<'de> Deserialize<'de> for BadWords {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        texts::<_, BAD_WORDS_MAX>(deserializer).map(BadWords)
    }
}

/// Reads a text, or a list of at most `MOST` texts.
fn texts<'de, D: Deserializer<'de>, const MOST: usize>(
    deserializer: D,
) -> Result<Vec<String>, D::Error> {
    struct Shape<const MOST: usize>;
    impl<'de, const MOST: usize> Visitor<'de> for Shape<MOST> {
        type Value = Vec<String>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a text or a list of texts")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Vec<String>, E> {
            Ok(vec![text.to_owned()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
            let mut texts = Vec::new();
            while let Some(text) = list.next_element()? {
                if texts.len() == MOST {
                    return Err(too_many(MOST, "texts"));
                }
                texts.push(text);
            }
            Ok(texts)
        }
    }
    deserializer.deserialize_any(Shape::<MOST>)
}

impl<'de> Deserialize<'de> for ListedPrompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = ListedPrompt;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text, a list of tokens, or a list of several of either")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<ListedPrompt, E> {
                Ok(ListedPrompt {
                    prompt: Prompt::Texts(vec![text.to_owned()]),
                    is_list: false,
                })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ListedPrompt, A::Error> {
                let (mut tokens, mut texts, mut lists) = (Vec::new(), Vec::new(), Vec::new());
                while let Some(item) = list.next_element()? {
                    match item {
                        PromptItem::Token(token) => tokens.push(token),
                        PromptItem::Text(text) => texts.push(text),
                        PromptItem::Tokens(tokens) => lists.push(tokens),
                    }
                    if texts.len().max(lists.len()) > PROMPTS_READ_MAX {
                        return Err(too_many(PROMPTS_READ_MAX, "prompts"));
                    }
                }
                let is_list = !texts.is_empty() || !lists.is_empty();
                let prompt = match (tokens.is_empty(), texts.is_empty(), lists.is_empty()) {
                    (_, true, true) => Prompt::Tokens(vec![tokens]),
                    (true, false, true) => Prompt::Texts(texts),
                    (true, true, false) => Prompt::Tokens(lists),
                    _ => {
                        let message =
                            "all entries must be tokens, or all texts, or all lists of tokens";
                        return Err(A::Error::custom(message));
                    }
                };
                Ok(ListedPrompt { prompt, is_list })
            }
        }
        deserializer.deserialize_any(Shape)
    }
}

/// A value that must be a JSON object. The derived code of a struct would accept a list of its fields' values too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JsonObject<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for JsonObject<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Shape<T> {
            type Value = JsonObject<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<JsonObject<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(JsonObject)
            }
        }
        deserializer.deserialize_map(Shape(PhantomData))
    }
}

/// An entry of `prompt`.
enum PromptItem {
    Token(TokenId),
    Text(String),
    Tokens(Vec<TokenId>),
}

impl<'de> Deserialize<'de> for PromptItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = PromptItem;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a token, a text or a list of tokens")
            }

            fn visit_u64<E: Error>(self, token: u64) -> Result<PromptItem, E> {
                let token = TokenId::try_from(token);
                token
                    .map(PromptItem::Token)
                    .map_err(|_| E::custom("the number is too large for a token id"))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<PromptItem, E> {
                Ok(PromptItem::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptItem, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = list.next_element()? {
                    tokens.push(token);
                }
                Ok(PromptItem::Tokens(tokens))
            }
        }
        deserializer.deserialize_any(Shape)
    }
}

fn too_many<E: Error>(most: usize, what: &str) -> E {
    E::custom(format_args!("at most {most} {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_come_in_four_shapes() {
        let read = |json: &str| serde_json::from_str::<Prompt>(json).unwrap();
        assert_eq!(read("\"a\""), Prompt::Texts(vec!["a".into()]));
        assert_eq!(read("[\"a\"]"), Prompt::Texts(vec!["a".into()]));
        assert_eq!(read("[1, 2]"), Prompt::Tokens(vec![vec![1, 2]]));
        assert_eq!(read("[]"), Prompt::Tokens(vec![Vec::new()]));
        assert_eq!(read("[[1], [2]]"), Prompt::Tokens(vec![vec![1], vec![2]]));
        for json in [
            "[1, \"a\"]",
            "[\"a\", [1]]",
            "[-1]",
            "[0.5]",
            "[4294967296]",
            "7",
            "{}",
            "[[\"a\"]]",
        ] {
            assert!(serde_json::from_str::<Prompt>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn an_object_is_no_list_of_its_values() {
        #[derive(Debug, PartialEq, serde::Deserialize)]
        struct Pair {
            first: u32,
            second: Option<u32>,
        }
        let read = |json: &str| {
            let read = serde_json::from_str::<JsonObject<Pair>>(json);
            read.map(|JsonObject(pair)| (pair.first, pair.second))
                .map_err(|error| error.to_string())
        };
        assert_eq!(read(r#"{"first":1,"other":[]}"#), Ok((1, None)));
        for json in ["[1, 2]", "[1, null]", "[]", "1", "null", "\"a\""] {
            let error = read(json).unwrap_err();
            assert!(error.contains("expected an object"), "{json}: {error}");
        }
        assert!(read("{}").unwrap_err().contains("missing field `first`"));
    }

    #[test]
    fn lists_end_where_they_would_be_refused() {
        let prompts = |count: usize| format!("[{}\"\"]", "\"\",".repeat(count - 1));
        assert!(serde_json::from_str::<Stop>(&prompts(STOPS_MAX)).is_ok());
        assert!(serde_json::from_str::<Stop>(&prompts(STOPS_MAX + 1)).is_err());
        assert!(serde_json::from_str::<BadWords>(&prompts(BAD_WORDS_MAX)).is_ok());
        assert!(serde_json::from_str::<BadWords>(&prompts(BAD_WORDS_MAX + 1)).is_err());
        assert!(serde_json::from_str::<Prompt>(&prompts(PROMPTS_READ_MAX)).is_ok());
        assert!(serde_json::from_str::<Prompt>(&prompts(PROMPTS_READ_MAX + 1)).is_err());
    }
}
