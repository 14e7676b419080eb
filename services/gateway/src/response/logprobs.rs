//! Log-probabilities in the two shapes of OpenAI. There is always one entry per token.

use std::collections::BTreeMap;

use refrain_protocol::TokenId;
use refrain_protocol::openai::{
    ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs, PromptPlace,
    TopLogprob,
};
use refrain_tokenization::Tokenizer;

use crate::relay::OutputToken;

/// The value for all less likely tokens. JSON cannot express minus infinity.
const LOGPROB_MIN: f64 = -9999.0;

fn clamped(logprob: f32) -> f64 {
    // `max` also replaces NaN.
    f64::from(logprob).max(LOGPROB_MIN)
}

/// The log-probability of the token itself.
pub fn chosen(token: &OutputToken) -> f64 {
    let entry = token.logprob.as_ref();
    entry.map_or(LOGPROB_MIN, |entry| clamped(entry.logprob))
}

/// The most likely tokens in its place, at most `most`.
pub fn top(token: &OutputToken, most: u32) -> impl Iterator<Item = (TokenId, f64)> {
    let top = token.logprob.iter().flat_map(|entry| &entry.top);
    let top = top.take(most as usize);
    top.map(|(id, logprob)| (*id, clamped(*logprob)))
}

/// The names of tokens in log-probabilities.
#[derive(Clone, Copy)]
pub struct TokenNames<'a> {
    /// The tokenizer of the model.
    pub tokenizer: &'a Tokenizer,
    /// Whether a name is the id, as in `token_id:123`, and not the text. It is the spelling of vLLM, and prime-rl
    /// takes no other.
    pub are_ids: bool,
}

impl TokenNames<'_> {
    /// A token as text, or its bytes in the notation of OpenAI if they are not UTF-8.
    fn spelt(self, id: TokenId) -> String {
        let bytes = self.tokenizer.token_bytes(id);
        match std::str::from_utf8(bytes) {
            _ if self.are_ids => format!("token_id:{id}"),
            Ok(text) => text.to_owned(),
            Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| {
                text + &format!("\\x{byte:02x}")
            }),
        }
    }
}

/// The shape of chats, with `most` likely tokens in each place.
pub fn chat_logprobs(names: TokenNames<'_>, tokens: &[OutputToken], most: u32) -> ChatLogprobs {
    let of = |id: TokenId, logprob: f64| {
        let bytes = names.tokenizer.token_bytes(id);
        TopLogprob {
            token: match names.are_ids {
                true => names.spelt(id),
                false => String::from_utf8_lossy(bytes).into_owned(),
            },
            logprob,
            bytes: bytes.to_vec(),
        }
    };
    let content = tokens.iter().map(|token| ChatTokenLogprob {
        chosen: of(token.id, chosen(token)),
        top_logprobs: top(token, most)
            .map(|(id, logprob)| of(id, logprob))
            .collect(),
    });
    ChatLogprobs {
        content: content.collect(),
        refusal: None,
    }
}

/// The shape of text completions, with `most` likely tokens in each place beside the chosen one. `offset` is the
/// place of the first token in the text, and moves past the last one.
pub(super) fn completion_logprobs(
    names: TokenNames<'_>,
    tokens: &[OutputToken],
    most: u32,
    offset: &mut u64,
) -> CompletionLogprobs {
    let mut logprobs = CompletionLogprobs::default();
    for token in tokens {
        let scored = token.logprob.is_some().then(|| {
            let logprob = chosen(token);
            let mut top: BTreeMap<String, f64> = top(token, most)
                .map(|(id, logprob)| (names.spelt(id), logprob))
                .collect();
            // As with OpenAI, the chosen token is always among them.
            top.insert(names.spelt(token.id), logprob);
            (logprob, top)
        });
        let (logprob, top) = scored.unzip();
        logprobs.tokens.push(names.spelt(token.id));
        logprobs.token_logprobs.push(logprob);
        logprobs.top_logprobs.push(top);
        logprobs.text_offset.push(*offset);
        let tokenizer = names.tokenizer;
        if !tokenizer.is_special(token.id) {
            // A character counts with the token that has its first byte.
            let begins = tokenizer
                .token_bytes(token.id)
                .iter()
                .filter(|byte| **byte & 0xC0 != 0x80);
            *offset += begins.count() as u64;
        }
    }
    logprobs
}

/// The shape of vLLM for a prompt. `rest` are the tokens after the first one, which nothing comes before.
pub fn prompt_logprobs(tokenizer: &Tokenizer, rest: &[OutputToken], most: u32) -> PromptLogprobs {
    let text = |id| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
    let of = |token: &OutputToken| {
        let entry = |id, logprob, rank| {
            let decoded_token = text(id);
            (
                id,
                PromptLogprob {
                    logprob,
                    rank,
                    decoded_token,
                },
            )
        };
        let (own, others): (Vec<_>, Vec<_>) = (1u32..)
            .zip(top(token, most))
            .map(|(rank, (id, logprob))| entry(id, logprob, Some(rank)))
            .partition(|(id, _)| *id == token.id);
        // The engine tells only the best ones apart.
        let own = own
            .into_iter()
            .next()
            .unwrap_or_else(|| entry(token.id, chosen(token), None));
        let entries = std::iter::once(own).chain(others).collect();
        Some(PromptPlace(entries))
    };
    std::iter::once(None).chain(rest.iter().map(of)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::engine::TokenLogprob;
    use refrain_tokenization::testing::{FIRST_BYTE, byte_level_files};
    use serde_json::json;

    fn token(byte: u8, logprob: f32) -> OutputToken {
        let top = vec![(FIRST_BYTE + u32::from(b'z'), f32::NEG_INFINITY)];
        OutputToken {
            id: FIRST_BYTE + u32::from(byte),
            logprob: Some(TokenLogprob { logprob, top }),
            weight_version: 0,
        }
    }

    fn names(tokenizer: &Tokenizer) -> TokenNames<'_> {
        TokenNames {
            tokenizer,
            are_ids: false,
        }
    }

    #[test]
    fn tokens_may_be_named_by_their_ids() {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let by_id = TokenNames {
            are_ids: true,
            ..names(&tokenizer)
        };
        let (a, z) = (FIRST_BYTE + u32::from(b'a'), FIRST_BYTE + u32::from(b'z'));
        let logprobs = completion_logprobs(by_id, &[token(b'a', -0.5)], 1, &mut 0);
        assert_eq!(logprobs.tokens, [format!("token_id:{a}")]);
        let top = logprobs.top_logprobs[0].as_ref().unwrap();
        assert_eq!(top[&format!("token_id:{z}")], LOGPROB_MIN);
        assert_eq!(top[&format!("token_id:{a}")], -0.5);
        let logprobs = chat_logprobs(by_id, &[token(b'a', -0.5)], 0);
        assert_eq!(logprobs.content[0].chosen.token, format!("token_id:{a}"));
    }

    #[test]
    fn a_very_unlikely_token_has_a_finite_value() {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let logprobs = chat_logprobs(
            names(&tokenizer),
            &[token(b'a', f32::NAN), token(0xC3, -0.5)],
            1,
        );
        assert_eq!(logprobs.content[0].chosen.logprob, LOGPROB_MIN);
        assert_eq!(logprobs.content[0].top_logprobs[0].logprob, LOGPROB_MIN);
        assert_eq!(logprobs.content[1].chosen.logprob, -0.5);
        assert_eq!(logprobs.content[1].chosen.bytes, [0xC3]);
    }

    #[test]
    fn offsets_count_characters_and_parts_of_characters_are_spelt_as_bytes() {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let tokens = [
            token(b'a', -1.0),
            token(0xC3, -1.0),
            token(0xA9, -1.0),
            token(b'b', -1.0),
        ];
        let mut offset = 2;
        let logprobs = completion_logprobs(names(&tokenizer), &tokens, 0, &mut offset);
        assert_eq!(logprobs.text_offset, [2, 3, 4, 4]);
        assert_eq!(offset, 5);
        assert_eq!(logprobs.tokens, ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]);
        assert_eq!(logprobs.top_logprobs[0].as_ref().unwrap()["a"], -1.0);
    }

    #[test]
    fn a_prompt_has_its_own_tokens_among_the_best() {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let id = |byte: u8| FIRST_BYTE + u32::from(byte);
        let mut best = token(b'z', -0.5);
        best.logprob.as_mut().unwrap().top = vec![(id(b'z'), -0.5), (id(b'y'), -1.5)];
        let rest = [token(b'a', -3.0), best];
        let shown = |most| {
            let logprobs = prompt_logprobs(&tokenizer, &rest, most);
            serde_json::to_value(logprobs).unwrap()
        };
        let entry = |logprob: f64, rank: Option<u32>, text: &str| json!({"logprob": logprob, "rank": rank, "decoded_token": text});
        let (a, y, z) = (
            id(b'a').to_string(),
            id(b'y').to_string(),
            id(b'z').to_string(),
        );
        assert_eq!(
            shown(0),
            json!([null, {&a: entry(-3.0, None, "a")}, {&z: entry(-0.5, None, "z")}])
        );
        assert_eq!(
            shown(2),
            json!([
                null,
                {&a: entry(-3.0, None, "a"), &z: entry(LOGPROB_MIN, Some(1), "z")},
                {&z: entry(-0.5, Some(1), "z"), &y: entry(-1.5, Some(2), "y")},
            ])
        );
    }

    #[test]
    fn the_token_of_a_prompt_comes_before_likelier_ones() {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let (a, z) = (FIRST_BYTE + u32::from(b'a'), FIRST_BYTE + u32::from(b'z'));
        let mut unlikely = token(b'z', -3.0);
        unlikely.logprob.as_mut().unwrap().top = vec![(a, -0.1)];
        let shown = serde_json::to_string(&prompt_logprobs(&tokenizer, &[unlikely], 1)).unwrap();
        let place = |id: u32| shown.find(&format!("\"{id}\":")).unwrap();
        assert!(place(z) < place(a), "{shown}");
    }
}
