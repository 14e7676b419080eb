//! Fuzz targets of the parsers: a body from anybody is either a request, or an error in OpenAI's shape.

use bytes::Bytes;
use refrain_protocol::openai::ErrorBody;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_tokenization::ModelFiles;
use refrain_tokenization::testing::byte_level_files;

use super::{COMPLETION_MAX_TOKENS, ParsedRequest, RequestReader};
use crate::config::GatewayTuning;
use crate::models::{ModelConfig, Models};

/// Valid bodies that between them have all fields.
const CHATS: [&str; 3] = [
    r#"{"model":"m","messages":[{"role":"assistant","function_call":{"name":"f","arguments":"{}"}}],"functions":[{"name":"f"}],"function_call":"auto","n":2,"stream":true,"stream_options":{"include_usage":true}}"#,
    r#"{"model":"m","messages":[{"role":"system","content":[{"type":"text","text":"a"}]},{"role":"assistant","tool_calls":[]},{"role":"tool","content":"b"}],"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto","parallel_tool_calls":false,"logprobs":true,"top_logprobs":3,"response_format":{"type":"text"},"prediction":{"type":"content","content":"x"},"chat_template_kwargs":{"a":1}}"#,
    r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"max_completion_tokens":6,"temperature":0.5,"top_p":0.9,"top_k":-1,"min_p":0.1,"stop":["a","b"],"stop_token_ids":[1],"seed":-7,"logit_bias":{"5":-1.5},"presence_penalty":0,"frequency_penalty":0,"repetition_penalty":1,"session":"s","group":"g","class":"interactive","speculation":"auto","priority":"high","tpot_ms":20,"chunk_tokens":9,"min_tokens":2,"bad_words":["a"],"add_generation_prompt":false,"continue_final_message":true,"user":"u"}"#,
];

const COMPLETIONS: [&str; 3] = [
    r#"{"model":"m","prompt":"a","max_tokens":3,"echo":true,"best_of":2,"suffix":""}"#,
    r#"{"model":"m","prompt":["a","b"],"logprobs":2,"prompt_logprobs":1,"priority":-3,"stop":"x"}"#,
    r#"{"model":"m","prompt":[[1,2],[3]],"ignore_eos":true,"seed":1,"include_stop_str_in_output":true,"skip_special_tokens":false,"return_token_ids":true,"truncate_prompt_tokens":1,"echo":true,"logprobs":1,"max_tokens":0,"guided_json":null}"#,
];

fn models() -> Models {
    let config = ModelConfig {
        id: "m".into(),
        files: "x".into(),
        ..ModelConfig::default()
    };
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    Models::new(&[config], &|_| Ok(files()), signer).unwrap()
}

/// The small model, with a template that shows tools.
fn files() -> ModelFiles {
    let mut files = byte_level_files();
    let template = files.chat_template.unwrap_or_default();
    files.chat_template = Some([&b"{{ tools or '' }}"[..], &template].concat());
    files
}

type Parse = fn(Bytes, &RequestReader<'_>) -> Result<ParsedRequest, ApiError>;

fn parsed(parse: Parse, models: &Models, body: Vec<u8>) -> Result<ParsedRequest, ApiError> {
    let reader = RequestReader {
        tenant: "tenant",
        models,
        limits: &GatewayTuning::default(),
        grammars: None,
        context_words: super::ContextWords::OpenAi,
        default_model: None,
        known_turns: None,
    };
    parse(Bytes::from(body), &reader)
}

/// Parses a body and checks the answer.
fn check(parse: Parse, models: &Models, body: Vec<u8>) {
    let error = match parsed(parse, models, body) {
        Ok(request) => {
            assert!(!request.prompts.is_empty() && request.choice_count() > 0);
            let context = models.max_context(&request.model);
            for prompt in &request.prompts {
                assert!(prompt.tokens.len() as u32 + prompt.max_new_tokens <= context);
            }
            return;
        }
        Err(error) => error,
    };
    // A model may be unknown. All other faults are those of the body.
    let unknown_model =
        error.kind == ErrorKind::NotFound && error.param.as_deref() == Some("model");
    assert!(
        unknown_model || error.kind.status() == 400,
        "{error:?} is not the client's fault"
    );
    let answer = serde_json::to_value(ErrorBody::from(&error)).unwrap();
    let fields = answer["error"].as_object().unwrap();
    assert_eq!(fields["type"], "invalid_request_error");
    assert!(!fields["message"].as_str().unwrap().is_empty());
    assert!(fields.contains_key("param") && fields.contains_key("code"));
}

/// Parses bodies that are valid ones with bytes replaced, pieces cut out or repeated, and arbitrary bytes.
fn fuzz(parse: Parse, valid: [&'static str; 3]) {
    let models = models();
    for body in valid {
        parsed(parse, &models, body.into()).unwrap();
    }
    let models = std::panic::AssertUnwindSafe(models);
    bolero::check!()
        .with_type::<(u8, Vec<(u16, u8)>, Option<(u16, u8, bool)>, Vec<u8>)>()
        .with_max_len(512)
        .for_each(|(body, edits, piece, bytes)| {
            let mut forged = valid[usize::from(*body) % valid.len()].as_bytes().to_vec();
            for (at, byte) in edits {
                let at = usize::from(*at) % forged.len();
                forged[at] = *byte;
            }
            if let Some((at, len, repeats)) = piece {
                let from = usize::from(*at) % forged.len();
                let to = (from + usize::from(*len)).min(forged.len());
                let piece = forged[from..to].to_vec();
                forged.splice(
                    from..if *repeats { from } else { to },
                    if *repeats { piece } else { Vec::new() },
                );
            }
            check(parse, &models, forged);
            check(parse, &models, bytes.clone());
        });
}

/// A fuzz target: `cargo test` runs it for a moment, `cargo bolero test -p refrain-gateway
/// request::fuzz::any_chat_is_a_request_or_an_error` for as long as wanted, guided by coverage.
#[test]
fn any_chat_is_a_request_or_an_error() {
    fuzz(ParsedRequest::chat, CHATS);
}

/// As above, for text completions.
#[test]
fn any_completion_is_a_request_or_an_error() {
    let read = |body: Bytes, reader: &RequestReader<'_>| {
        ParsedRequest::completion(body, reader, None, Some(COMPLETION_MAX_TOKENS))
    };
    fuzz(read, COMPLETIONS);
}
