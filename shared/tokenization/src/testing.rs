//! A small model for tests: every byte is a token, a few pairs are merged, and ChatML's markers are special tokens.

use std::collections::BTreeMap;

use serde_json::json;

use crate::ModelFiles;

/// The id of `<|endoftext|>` in [`byte_level_files`].
pub const END_OF_TEXT: crate::TokenId = 0;
/// The id of `<|im_start|>`.
pub const IM_START: crate::TokenId = 1;
/// The id of `<|im_end|>`, which ends an answer.
pub const IM_END: crate::TokenId = 2;
/// The id of byte 0. Byte `b` has the id `FIRST_BYTE + b`.
pub const FIRST_BYTE: crate::TokenId = 3;

/// The chat template of [`byte_level_files`]: ChatML.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}\
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// The character that represents a byte in byte-level vocabularies. It is computed here, independently of the table
/// under test.
fn stand_in(byte: u8) -> char {
    let own = |byte: u8| (33..=126).contains(&byte) || (161..=172).contains(&byte) || byte >= 174;
    if own(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|earlier| !own(*earlier)).count();
    char::from_u32(256 + place as u32).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The files of a byte-level BPE model with a context of 512 tokens. Ids 0 to 2 are `<|endoftext|>`, `<|im_start|>`
/// and `<|im_end|>`. Then come the 256 bytes, and then the merges `he`, `ll`, `hell` and `hello`.
pub fn byte_level_files() -> ModelFiles {
    let mut vocab = BTreeMap::new();
    let markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    for (id, text) in markers.iter().enumerate() {
        vocab.insert((*text).to_owned(), id as u32);
    }
    for byte in 0..=255u8 {
        vocab.insert(stand_in(byte).to_string(), FIRST_BYTE + u32::from(byte));
    }
    let merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")];
    for (left, right) in merges {
        let next = vocab.len() as u32;
        vocab.insert(format!("{left}{right}"), next);
    }
    let added: Vec<_> = markers
        .iter()
        .enumerate()
        .map(|(id, text)| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let merges: Vec<_> = merges.iter().map(|(left, right)| [left, right]).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "ignore_merges": false, "vocab": vocab, "merges": merges},
    });
    let config = json!({"max_position_embeddings": 512, "eos_token_id": IM_END});
    let tokenizer_config =
        json!({"bos_token": null, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"});
    ModelFiles {
        config_json: Some(config.to_string().into_bytes()),
        generation_config_json: None,
        tokenizer_json: tokenizer.to_string().into_bytes(),
        tokenizer_config_json: Some(tokenizer_config.to_string().into_bytes()),
        chat_template: Some(CHAT_TEMPLATE.into()),
        tool_chat_template: None,
    }
}
