//! Log-probabilities in the two shapes of OpenAI. There is always one entry per token.

use std::collections::BTreeMap;

use refrain_protocol::TokenId;
use refrain_protocol::openai::{ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob};
use refrain_tokenization::Tokenizer;

use crate::relay::OutputToken;

/// The value for all less likely tokens. JSON cannot express minus infinity.
const LOGPROB_MIN: f64 = -9999.0;

fn clamped(logprob: f32) -> f64 {
    // `max` also replaces NaN.
    f64::from(logprob).max(LOGPROB_MIN)
}

/// The log-probability of the token itself.
fn chosen(token: &OutputToken) -> f64 {
    let entry = token.logprob.as_ref();
    entry.map_or(LOGPROB_MIN, |entry| clamped(entry.logprob))
}

/// The most likely tokens in its place.
fn top(token: &OutputToken) -> impl Iterator<Item = (TokenId, f64)> {
    let top = token.logprob.iter().flat_map(|entry| &entry.top);
    top.map(|(id, logprob)| (*id, clamped(*logprob)))
}

/// The shape of chats.
pub(super) fn chat_logprobs(tokenizer: &Tokenizer, tokens: &[OutputToken]) -> ChatLogprobs {
    let of = |id: TokenId, logprob: f64| {
        let bytes = tokenizer.token_bytes(id);
        TopLogprob {
            token: String::from_utf8_lossy(bytes).into_owned(),
            logprob,
            bytes: bytes.to_vec(),
        }
    };
    let content = tokens.iter().map(|token| ChatTokenLogprob {
        chosen: of(token.id, chosen(token)),
        top_logprobs: top(token).map(|(id, logprob)| of(id, logprob)).collect(),
    });
    ChatLogprobs {
        content: content.collect(),
        refusal: None,
    }
}

/// The shape of text completions. `offset` is the place of the first token in the text, and moves past the last one.
pub(super) fn completion_logprobs(
    tokenizer: &Tokenizer,
    tokens: &[OutputToken],
    offset: &mut u64,
) -> CompletionLogprobs {
    let mut logprobs = CompletionLogprobs::default();
    for token in tokens {
        let scored = token.logprob.is_some().then(|| {
            let logprob = chosen(token);
            let mut top: BTreeMap<String, f64> = top(token)
                .map(|(id, logprob)| (spelt(tokenizer, id), logprob))
                .collect();
            // As with OpenAI, the chosen token is always among them.
            top.insert(spelt(tokenizer, token.id), logprob);
            (logprob, top)
        });
        let (logprob, top) = scored.unzip();
        logprobs.tokens.push(spelt(tokenizer, token.id));
        logprobs.token_logprobs.push(logprob);
        logprobs.top_logprobs.push(top);
        logprobs.text_offset.push(*offset);
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

/// A token as text, or its bytes in the notation of OpenAI if they are not UTF-8.
fn spelt(tokenizer: &Tokenizer, id: TokenId) -> String {
    let bytes = tokenizer.token_bytes(id);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| {
            text + &format!("\\x{byte:02x}")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::engine::TokenLogprob;
    use refrain_tokenization::testing::{FIRST_BYTE, byte_level_files};

    fn token(byte: u8, logprob: f32) -> OutputToken {
        let top = vec![(FIRST_BYTE + u32::from(b'z'), f32::NEG_INFINITY)];
        OutputToken {
            id: FIRST_BYTE + u32::from(byte),
            logprob: Some(TokenLogprob { logprob, top }),
        }
    }

    #[test]
    fn a_very_unlikely_token_has_a_finite_value() {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let logprobs = chat_logprobs(&tokenizer, &[token(b'a', f32::NAN), token(0xC3, -0.5)]);
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
        let logprobs = completion_logprobs(&tokenizer, &tokens, &mut offset);
        assert_eq!(logprobs.text_offset, [2, 3, 4, 4]);
        assert_eq!(offset, 5);
        assert_eq!(logprobs.tokens, ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]);
        assert_eq!(logprobs.top_logprobs[0].as_ref().unwrap()["a"], -1.0);
    }
}
