//! Streams in the shape of OpenAI's completions, written by hand.

use refrain_protocol::engine::Sampling;
use refrain_tokenization::testing::{IM_END, IM_START, byte_level_files};

use super::super::tests::{decode_recorded, test_request};
use super::*;

fn dialect() -> TextOnly {
    TextOnly {
        model: "m".into(),
        tokenizer: Arc::new(byte_level_files().tokenizer().unwrap()),
    }
}

#[test]
fn prompts_are_sent_only_if_their_text_gives_the_same_tokens() {
    let dialect = dialect();
    let encode = |text: &str| dialect.tokenizer.encode(text).unwrap();
    let mut tokens = vec![IM_START];
    tokens.extend(encode("user\nhello"));
    tokens.push(IM_END);
    let body = dialect
        .body(&test_request(&tokens, Sampling::default()))
        .unwrap();
    assert_eq!(body["prompt"], "<|im_start|>user\nhello<|im_end|>");
    for stranger in [
        "top_k",
        "stop_token_ids",
        "return_token_ids",
        "stream_options",
    ] {
        assert!(body.get(stranger).is_none(), "{stranger}");
    }
    // A user's text must not become a marker, and a part of a character is no text.
    let written = encode("<|im_end|>");
    let half = encode("é")[..1].to_vec();
    for tokens in [written, half] {
        let error = dialect
            .body(&test_request(&tokens, Sampling::default()))
            .unwrap_err();
        assert_eq!(error.kind, refrain_protocol::ErrorKind::InvalidRequest);
    }
}

#[test]
fn an_output_in_pieces_that_cut_words_can_be_continued() {
    // The shipped model's tokenizer has whole words, so the place of a cut matters.
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference-engine/model");
    let files = refrain_tokenization::ModelFiles::from_dir(model).unwrap();
    let dialect = TextOnly {
        model: "m".into(),
        tokenizer: Arc::new(files.tokenizer().unwrap()),
    };
    let prompt = dialect.tokenizer.encode("CREATE TABLE orders").unwrap();
    let mut tokens = prompt.clone();
    let recorded: String = ["SEL", "ECT ave", "rage", " FRO", "M é"]
        .map(|text| json!({ "choices": [{ "text": text, "finish_reason": null }] }))
        .map(|event| format!("data: {event}\n\n"))
        .concat();
    let decoder = dialect.decoder(&test_request(&prompt, Sampling::default()));
    for piece in decode_recorded(decoder, &recorded).unwrap() {
        if let Generated::Tokens { tokens: output, .. } = piece {
            tokens.extend(output);
        }
    }
    let whole = "CREATE TABLE ordersSELECT average FROM é";
    assert_ne!(tokens, dialect.tokenizer.encode(whole).unwrap());
    let mut goes_on = test_request(&tokens, Sampling::default());
    goes_on.prompt_len = prompt.len() as u32;
    assert_eq!(dialect.body(&goes_on).unwrap()["prompt"], whole);
    // A part of a character is no text.
    goes_on.tokens.pop();
    assert!(dialect.body(&goes_on).is_err());
}

#[test]
fn text_is_read_with_our_tokenizer() {
    let dialect = dialect();
    let recorded = "data: {\"choices\":[{\"text\":\"hello é\",\"index\":0,\"finish_reason\":null}]}\n\n\
                    data: {\"choices\":[{\"text\":\"!\",\"index\":0,\"finish_reason\":\"stop\"}]}\n\n\
                    data: {\"choices\":[],\"usage\":{}}\n\ndata: [DONE]\n\n";
    let decoder = dialect.decoder(&test_request(&[1], Sampling::default()));
    let pieces = decode_recorded(decoder, recorded).unwrap();
    let mut text = String::new();
    for piece in &pieces {
        if let Generated::Tokens { tokens, .. } = piece {
            text += &dialect.tokenizer.decode(tokens);
        }
    }
    assert_eq!(text, "hello é!");
    let stop = crate::engine::GeneratedEnd::Stop;
    assert_eq!(pieces.last(), Some(&Generated::End(stop)));
    assert!(
        dialect
            .capabilities()
            .tokenizer
            .starts_with(TEXT_ONLY_PREFIX)
    );
}
