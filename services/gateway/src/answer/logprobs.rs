//! Log-probabilities in the two shapes that OpenAI has for them. One entry per token, always.

use std::collections::BTreeMap;

use refrain_protocol::TokenId;
use refrain_protocol::openai::{ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob};
use refrain_tokenization::Tokenizer;

use crate::choice::OutputToken;

/// What stands for everything less likely, minus infinity included, which JSON cannot say.
const LOGPROB_MIN: f64 = -9999.0;

fn clamped(logprob: f32) -> f64 {
    // `max` also turns NaN into the bound.
    f64::from(logprob).max(LOGPROB_MIN)
}

/// For chats.
pub(super) fn chat_logprobs(tokenizer: &Tokenizer, tokens: &[OutputToken]) -> ChatLogprobs {
    let text = |id: TokenId| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
    let content = tokens.iter().map(|token| ChatTokenLogprob {
        token: text(token.id),
        logprob: token
            .logprob
            .as_ref()
            .map_or(LOGPROB_MIN, |entry| clamped(entry.logprob)),
        bytes: tokenizer.token_bytes(token.id).to_vec(),
        top_logprobs: token
            .logprob
            .iter()
            .flat_map(|entry| &entry.top)
            .map(|(id, logprob)| TopLogprob {
                token: text(*id),
                logprob: clamped(*logprob),
                bytes: tokenizer.token_bytes(*id).to_vec(),
            })
            .collect(),
    });
    ChatLogprobs {
        content: content.collect(),
        refusal: None,
    }
}

/// For text completions. `offset` is where the first token's text begins, and moves on.
pub(super) fn completion_logprobs(
    tokenizer: &Tokenizer,
    tokens: &[OutputToken],
    offset: &mut u64,
) -> CompletionLogprobs {
    let mut logprobs = CompletionLogprobs::default();
    for token in tokens {
        let logprob = token
            .logprob
            .as_ref()
            .map_or(LOGPROB_MIN, |entry| clamped(entry.logprob));
        let mut top: BTreeMap<String, f64> = token
            .logprob
            .iter()
            .flat_map(|entry| &entry.top)
            .map(|(id, logprob)| (spelt(tokenizer, *id), clamped(*logprob)))
            .collect();
        // The chosen token is always among them, as OpenAI has it.
        top.insert(spelt(tokenizer, token.id), logprob);
        logprobs.tokens.push(spelt(tokenizer, token.id));
        logprobs.token_logprobs.push(logprob);
        logprobs.top_logprobs.push(top);
        logprobs.text_offset.push(*offset);
        if !tokenizer.is_special(token.id) {
            // A character counts where it begins.
            let begins = tokenizer
                .token_bytes(token.id)
                .iter()
                .filter(|byte| **byte & 0xC0 != 0x80);
            *offset += begins.count() as u64;
        }
    }
    logprobs
}

/// A token as text, or its bytes in OpenAI's notation if it is no text by itself.
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
    fn the_very_unlikely_has_a_number() {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let logprobs = chat_logprobs(&tokenizer, &[token(b'a', f32::NAN), token(0xC3, -0.5)]);
        assert_eq!(logprobs.content[0].logprob, LOGPROB_MIN);
        assert_eq!(logprobs.content[0].top_logprobs[0].logprob, LOGPROB_MIN);
        assert_eq!(logprobs.content[1].logprob, -0.5);
        assert_eq!(logprobs.content[1].bytes, [0xC3]);
    }

    #[test]
    fn offsets_count_characters_and_half_characters_are_spelt_out() {
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
        assert_eq!(logprobs.top_logprobs[0]["a"], -1.0);
    }
}
