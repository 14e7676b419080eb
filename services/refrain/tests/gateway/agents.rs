//! The ways of agents' programs: other names of models, limits beyond the context, compressed bodies, tools of Codex,
//! and names of their sessions.

use std::io::Write as _;

use refrain_gateway::{BeyondContext, GatewayConfig, ModelConfig};
use serde_json::{Value, json};

use crate::mesh::{Bench, WITH_TOOLS, chat, config};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

fn with(model: ModelConfig) -> GatewayConfig {
    let mut config = config();
    config.models = vec![ModelConfig {
        id: "tiny".into(),
        files: WITH_TOOLS.into(),
        tool_parser: Some("hermes".into()),
        ..model
    }];
    config
}

/// A body of each API with this model, output limit and text of the user.
fn bodies(model: &str, limit: u64, text: &str) -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": text}]);
    [
        (
            CHAT,
            json!({"model": model, "max_tokens": limit, "messages": messages}),
        ),
        (
            TEXT,
            json!({"model": model, "max_tokens": limit, "prompt": text}),
        ),
        (
            MESSAGES,
            json!({"model": model, "max_tokens": limit, "messages": messages}),
        ),
        (
            RESPONSES,
            json!({"model": model, "max_output_tokens": limit, "input": text}),
        ),
    ]
}

#[tokio::test]
async fn a_limit_beyond_the_context_is_cut_to_the_room_that_is_left() {
    let bench = Bench::with(with(ModelConfig::default())).await;
    bench.mesh.script().reply = vec![b'a'.into(); 1_000];
    for (path, body) in bodies("tiny", 32_000, "hi") {
        let (status, answer) = bench.json(path, &body).await;
        assert_eq!(status, 200, "{answer}");
        let end = match path {
            MESSAGES => &answer["stop_reason"],
            RESPONSES => &answer["incomplete_details"]["reason"],
            _ => &answer["choices"][0]["finish_reason"],
        };
        let expected = match path {
            MESSAGES => "max_tokens",
            RESPONSES => "max_output_tokens",
            _ => "length",
        };
        assert_eq!(end, expected, "{path}");
        let usage = &answer["usage"];
        let of = |names: [&str; 2]| names.iter().find_map(|name| usage[*name].as_u64());
        let cached = usage["cache_read_input_tokens"].as_u64().unwrap_or(0);
        let read = of(["prompt_tokens", "input_tokens"]).unwrap() + cached;
        let written = of(["completion_tokens", "output_tokens"]).unwrap();
        assert_eq!(read + written, 256, "{path}: {usage}");
    }
}

#[tokio::test]
async fn refusals_for_lack_of_context_have_the_words_that_programs_know() {
    let model = ModelConfig {
        beyond_context: BeyondContext::Refuse,
        ..ModelConfig::default()
    };
    let bench = Bench::with(with(model)).await;
    let long = "a b ".repeat(500);
    for (limit, text) in [(32_000, "hi"), (9, long.as_str())] {
        for (path, body) in bodies("tiny", limit, text) {
            let (status, answer) = bench.json(path, &body).await;
            let message = answer["error"]["message"].as_str().unwrap();
            assert_eq!(status, 400, "{answer}");
            let words = match (path, limit) {
                (MESSAGES, 9) => "prompt is too long: ",
                (MESSAGES, _) => "input length and `max_tokens` exceed context limit: ",
                _ => "This model's maximum context length is 256 tokens. However, ",
            };
            assert!(message.starts_with(words), "{path}: {message}");
            let end = match limit {
                9 => "tokens > 256 maximum",
                _ => " + 32000 > 256, decrease",
            };
            assert!(path != MESSAGES || message.contains(end), "{message}");
            if path != MESSAGES {
                assert_eq!(answer["error"]["code"], "context_length_exceeded");
            }
        }
    }
}

#[tokio::test]
async fn answers_have_the_name_by_which_the_model_was_asked() {
    let model = ModelConfig {
        also: vec!["claude-*".into(), "gpt-5".into()],
        ..ModelConfig::default()
    };
    let bench = Bench::with(with(model)).await;
    for name in ["tiny", "gpt-5", "claude-opus-5-5"] {
        for (path, body) in bodies(name, 20, "hi") {
            let (status, answer) = bench.json(path, &body).await;
            assert_eq!((status, &answer["model"]), (200, &json!(name)), "{path}");
        }
        let url = format!("{}/v1/models/{name}", bench.url);
        let card = bench.client.get(url).bearer_auth("sk-acme").send().await;
        let card: Value = card.unwrap().json().await.unwrap();
        assert_eq!(card["id"], name);
    }
    let (status, _) = bench.json(CHAT, &bodies("gpt-6", 9, "hi")[0].1).await;
    assert_eq!(status, 404);
    // All of it is the one model behind these names.
    assert!(
        bench
            .mesh
            .log()
            .leases
            .iter()
            .all(|lease| lease.namespace.namespace.model == "tiny")
    );
}

/// A body in these encodings.
fn compressed(body: &[u8]) -> [(&'static str, Vec<u8>); 5] {
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    let level = Compression::fast();
    let mut gzip = GzEncoder::new(Vec::new(), level);
    gzip.write_all(body).unwrap();
    let mut zlib = ZlibEncoder::new(Vec::new(), level);
    zlib.write_all(body).unwrap();
    let mut raw = DeflateEncoder::new(Vec::new(), level);
    raw.write_all(body).unwrap();
    [
        ("gzip", gzip.finish().unwrap()),
        ("deflate", zlib.finish().unwrap()),
        ("Deflate", raw.finish().unwrap()),
        ("zstd", zstd::encode_all(body, 1).unwrap()),
        ("identity", body.to_vec()),
    ]
}

async fn post(bench: &Bench, encoding: &str, body: Vec<u8>) -> (u16, Value) {
    let request = bench.client.post(format!("{}{CHAT}", bench.url));
    let request = request
        .bearer_auth("sk-acme")
        .header("content-encoding", encoding)
        .body(body);
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test]
async fn compressed_bodies_are_read_within_the_limit_of_their_texts() {
    let mut config = with(ModelConfig::default());
    config.body_bytes_max = 200_000;
    let bench = Bench::with(config).await;
    let body = chat(json!({})).to_string().into_bytes();
    for (encoding, body) in compressed(&body) {
        let (status, answer) = post(&bench, encoding, body).await;
        assert_eq!(status, 200, "{encoding}: {answer}");
    }
    // `printf '{}' | brotli`: a chat without messages.
    let (status, answer) = post(&bench, "br", vec![0x8b, 0x00, 0x80, b'{', b'}', 0x03]).await;
    assert_eq!(
        (status, &answer["error"]["param"]),
        (400, &json!("messages"))
    );
    let bomb = vec![b' '; 10 << 20];
    for (encoding, body) in compressed(&bomb).into_iter().take(4) {
        assert!(body.len() < 200_000);
        let (status, answer) = post(&bench, encoding, body).await;
        assert_eq!(status, 413, "{encoding}: {answer}");
    }
    // `head -c 10M /dev/zero | tr '\\0' ' ' | brotli`, ten megabytes of blanks.
    let bomb = [
        0xcb, 0xff, 0xff, 0x3f, 0xf8, 0x25, 0x40, 0xe2, 0xb1, 0x40, 0x20, 0xf7, 0xfe, 0x2f, 0xff,
        0xff, 0x3f, 0xf0, 0x4b, 0x00, 0xc4, 0x61, 0x11, 0x80, 0xee, 0xfd, 0x07,
    ];
    let (status, answer) = post(&bench, "br", bomb.to_vec()).await;
    assert_eq!(status, 413, "{answer}");
    for encoding in ["gzip", "deflate", "br", "zstd"] {
        let (status, answer) = post(&bench, encoding, b"{\"model\": 1}".to_vec()).await;
        assert_eq!(status, 400, "{encoding}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("content-encoding"),
            "{encoding}: {message}"
        );
    }
    let (status, answer) = post(&bench, "gzip, br", body).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("unsupported_encoding"))
    );
}

#[tokio::test]
async fn the_tools_of_codex_are_called_by_their_own_names() {
    let bench = Bench::with(with(ModelConfig::default())).await;
    bench.mesh.reply(
        "<tool_call>{\"name\": \"agents__spawn\", \"arguments\": {\"a\": 1}}</tool_call>\
         <tool_call>{\"name\": \"apply_patch\", \"arguments\": {\"input\": \"*** Begin\\nx\"}}</tool_call>",
    );
    let tools = json!([
        {"type": "function", "name": "shell", "parameters": {"type": "object"}},
        {"type": "namespace", "name": "agents", "tools": [
            {"type": "function", "name": "spawn", "parameters": {"type": "object"}},
        ]},
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {
            "type": "grammar", "syntax": "lark", "definition": "start: \"x\"",
        }},
    ]);
    let body = json!({"model": "tiny", "input": "hi", "tools": tools, "store": false});
    let (status, answer) = bench.json(RESPONSES, &body).await;
    assert_eq!(status, 200, "{answer}");
    let output = answer["output"].as_array().unwrap();
    let facts = |item: &Value| {
        let fields = ["type", "name", "namespace", "arguments", "input"];
        fields.map(|field| item[field].as_str().unwrap_or("-").to_owned())
    };
    let expected = [
        ["function_call", "spawn", "agents", "{\"a\": 1}", "-"],
        ["custom_tool_call", "apply_patch", "-", "-", "*** Begin\nx"],
    ];
    assert_eq!(output.iter().map(facts).collect::<Vec<_>>(), expected);
    // The conversation goes on with the same names.
    let mut input = vec![json!({"role": "user", "content": "hi"})];
    input.extend(output.iter().cloned());
    for item in output {
        let kind = item["type"].as_str().unwrap();
        let result = json!({
            "type": format!("{kind}_output"), "call_id": item["call_id"], "output": "ok",
        });
        input.push(result);
    }
    let body = json!({"model": "tiny", "input": input, "tools": tools, "store": false});
    let (status, answer) = bench.json(RESPONSES, &body).await;
    assert_eq!(status, 200, "{answer}");
}

#[tokio::test]
async fn programs_name_their_sessions_in_their_own_ways() {
    let bench = Bench::new().await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chats = |fields: Value| {
        let mut body = json!({"model": "tiny", "max_tokens": 5, "messages": messages});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    let user = json!({"device_id": "d", "account_uuid": "", "session_id": "of-user"}).to_string();
    let key = json!({"model": "tiny", "input": "hi", "prompt_cache_key": "key"});
    let long = "x".repeat(257);
    for (path, heads, body, session) in [
        (CHAT, vec![], chats(json!({})), None),
        (
            CHAT,
            vec![("session-id", "codex")],
            chats(json!({})),
            Some("codex"),
        ),
        (
            CHAT,
            vec![("session_id", "pi")],
            chats(json!({})),
            Some("pi"),
        ),
        (
            CHAT,
            vec![("x-session-id", "b"), ("x-session-affinity", "a")],
            chats(json!({})),
            Some("a"),
        ),
        (
            CHAT,
            vec![("session-id", "head")],
            chats(json!({"session": "body"})),
            Some("body"),
        ),
        (
            CHAT,
            vec![("session-id", long.as_str())],
            chats(json!({})),
            None,
        ),
        (RESPONSES, vec![], key.clone(), Some("key")),
        (RESPONSES, vec![("session-id", "codex")], key, Some("codex")),
        (
            MESSAGES,
            vec![],
            chats(json!({"metadata": {"user_id": user}})),
            Some("of-user"),
        ),
        (
            MESSAGES,
            vec![
                ("x-claude-code-session-id", "s"),
                ("x-claude-code-agent-id", "sub"),
            ],
            chats(json!({"metadata": {"user_id": user}})),
            Some("s/sub"),
        ),
    ] {
        let mut request = bench.post(path, &body);
        for (name, value) in &heads {
            request = request.header(*name, *value);
        }
        assert_eq!(request.send().await.unwrap().status(), 200, "{heads:?}");
        let log = bench.mesh.log();
        let asked = log.chunks.last().unwrap().session.clone();
        assert_eq!(asked.as_deref(), session, "{path} {heads:?}");
        // The scheduler learns that the turns are of one conversation, and no name.
        let told = log.leases.last().unwrap().session;
        assert_eq!(told.is_some(), session.is_some(), "{path} {heads:?}");
    }
}
