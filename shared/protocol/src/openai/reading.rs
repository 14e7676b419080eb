//! How those fields of a body are read that come in several shapes or can be long. Derived code would keep a copy of
//! everything until it knows the shape, at many times the bytes that it takes as JSON.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::{LOGIT_BIAS_MAX, PROMPTS_READ_MAX, Prompt, STOPS_MAX, Stop};
use crate::TokenId;

/// `logit_bias`, which may be null.
pub(super) fn logit_bias<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<BTreeMap<String, f64>>, D::Error> {
    Ok(Option::<Biases>::deserialize(deserializer)?.map(|biases| biases.0))
}

struct Biases(BTreeMap<String, f64>);

impl<'de> Deserialize<'de> for Biases {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Biases;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of token ids and numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Biases, A::Error> {
                let mut biases = BTreeMap::new();
                while let Some((token, bias)) = map.next_entry()? {
                    biases.insert(token, bias);
                    if biases.len() > LOGIT_BIAS_MAX {
                        return Err(too_many(LOGIT_BIAS_MAX, "tokens"));
                    }
                }
                Ok(Biases(biases))
            }
        }
        deserializer.deserialize_map(Shape)
    }
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Stop;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text or a list of texts")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Stop, E> {
                Ok(Stop::One(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Stop, A::Error> {
                let mut texts = Vec::new();
                while let Some(text) = list.next_element()? {
                    if texts.len() == STOPS_MAX {
                        return Err(too_many(STOPS_MAX, "texts"));
                    }
                    texts.push(text);
                }
                Ok(Stop::Several(texts))
            }
        }
        deserializer.deserialize_any(Shape)
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Prompt;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text, a list of tokens, or a list of several of either")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompt, A::Error> {
                let mut prompt = match list.next_element()? {
                    None => return Ok(Prompt::Tokens(Vec::new())),
                    Some(Item::Token(token)) => Prompt::Tokens(vec![token]),
                    Some(Item::Text(text)) => Prompt::Texts(vec![text]),
                    Some(Item::Tokens(tokens)) => Prompt::TokenLists(vec![tokens]),
                };
                while let Some(item) = list.next_element()? {
                    let prompts = match (&mut prompt, item) {
                        (Prompt::Tokens(tokens), Item::Token(token)) => {
                            tokens.push(token);
                            1
                        }
                        (Prompt::Texts(texts), Item::Text(text)) => {
                            texts.push(text);
                            texts.len()
                        }
                        (Prompt::TokenLists(lists), Item::Tokens(tokens)) => {
                            lists.push(tokens);
                            lists.len()
                        }
                        _ => {
                            return Err(A::Error::custom(
                                "either all are tokens, or texts, or lists",
                            ));
                        }
                    };
                    if prompts > PROMPTS_READ_MAX {
                        return Err(too_many(PROMPTS_READ_MAX, "prompts"));
                    }
                }
                Ok(prompt)
            }
        }
        deserializer.deserialize_any(Shape)
    }
}

/// One entry of a list of prompts.
enum Item {
    Token(TokenId),
    Text(String),
    Tokens(Vec<TokenId>),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Item;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a token, a text or a list of tokens")
            }

            fn visit_u64<E: Error>(self, token: u64) -> Result<Item, E> {
                let token = TokenId::try_from(token);
                token
                    .map(Item::Token)
                    .map_err(|_| E::custom("no token has so large a number"))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Item, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = list.next_element()? {
                    tokens.push(token);
                }
                Ok(Item::Tokens(tokens))
            }
        }
        deserializer.deserialize_any(Shape)
    }
}

fn too_many<E: Error>(most: usize, what: &str) -> E {
    E::custom(format_args!("at most {most} {what}"))
}
