//! Attacks: valid requests, broken in a way that a seed decides.

use e2e::TINY_MODEL;
use serde_json::{Value, json};

/// Bytes to send over one connection.
pub(super) struct Attack {
    /// They are written one after the other.
    pub(super) parts: Vec<Vec<u8>>,
    /// Whether the caller closes the connection without reading an answer.
    pub(super) leaves: bool,
}

/// Names of fields that some surface knows, and a few that none does.
const FIELDS: [&str; 34] = [
    "model",
    "messages",
    "prompt",
    "input",
    "max_tokens",
    "max_output_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "best_of",
    "stop",
    "stop_sequences",
    "seed",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "guided_regex",
    "prediction",
    "session",
    "group",
    "priority",
    "speculation",
    "previous_response_id",
    "chat_template_kwargs",
    "__proto__",
];

/// The routes with bodies, and a valid body for each.
fn valid(number: usize) -> (&'static str, Value) {
    let messages = json!([{"role": "user", "content": "What is the weather in Oslo?"}]);
    match number % 8 {
        0 => (
            "/v1/chat/completions",
            json!({"model": TINY_MODEL, "messages": messages, "max_tokens": 3, "temperature": 0.5,
                "stop": ["x"], "logit_bias": {"5": -1.5}, "logprobs": true, "top_logprobs": 2}),
        ),
        1 => (
            "/v1/chat/completions",
            json!({"model": TINY_MODEL, "messages": messages, "max_tokens": 3, "stream": true,
                "stream_options": {"include_usage": true},
                "tools": [{"type": "function", "function": {"name": "f", "parameters":
                    {"type": "object", "properties": {"a": {"type": "string"}}}}}]}),
        ),
        2 => (
            "/v1/completions",
            json!({"model": TINY_MODEL, "prompt": ["Oslo", "Bergen"], "max_tokens": 3, "echo": true,
                "logprobs": 1}),
        ),
        3 => (
            "/v1/messages",
            json!({"model": TINY_MODEL, "messages": messages, "max_tokens": 3,
                "system": [{"type": "text", "text": "Be short."}], "stop_sequences": ["x"]}),
        ),
        4 => (
            "/v1/responses",
            json!({"model": TINY_MODEL, "input": messages, "max_output_tokens": 3, "store": false}),
        ),
        5 => (
            "/v1/chat/completions",
            json!({"model": TINY_MODEL, "messages": messages, "max_tokens": 3, "response_format":
                {"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema":
                    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                     "additionalProperties": false}}}}),
        ),
        6 => (
            "/tokenize",
            json!({"model": TINY_MODEL, "messages": messages}),
        ),
        _ => (
            "/detokenize",
            json!({"model": TINY_MODEL, "tokens": [1, 2, 3]}),
        ),
    }
}

/// The attack of a seed.
pub(super) fn attack(seed: u64) -> Attack {
    let mut random = fastrand::Rng::with_seed(seed);
    let (route, mut body) = valid(random.usize(..));
    let mut text = None;
    match random.u8(..10) {
        // Values of other types, missing fields and fields of other surfaces.
        0..=4 => {
            for _ in 0..random.usize(1..4) {
                change(&mut body, &mut random);
            }
        }
        // A body that is not the JSON that it was.
        5..=6 => text = Some(broken(body.to_string().into_bytes(), &mut random)),
        7 => text = Some(nested(&mut random)),
        _ => {}
    }
    let body = text.unwrap_or_else(|| body.to_string().into_bytes());
    framed(route, body, &mut random)
}

/// Changes one value somewhere in a body.
fn change(at: &mut Value, random: &mut fastrand::Rng) {
    if random.u8(..4) > 0 {
        match at {
            Value::Object(map) if !map.is_empty() => {
                let key = map.keys().nth(random.usize(..map.len())).cloned();
                let key = key.unwrap_or_default();
                match random.u8(..8) {
                    0 => {
                        map.remove(&key);
                    }
                    1 => {
                        let name = FIELDS[random.usize(..FIELDS.len())];
                        map.insert(name.to_owned(), value(random, 2));
                    }
                    _ => change(map.entry(key).or_insert(Value::Null), random),
                }
                return;
            }
            Value::Array(items) if !items.is_empty() => {
                let number = random.usize(..items.len());
                return change(&mut items[number], random);
            }
            _ => {}
        }
    }
    *at = value(random, 2);
}

/// A value that hardly any field expects.
fn value(random: &mut fastrand::Rng, depth: usize) -> Value {
    match random.u8(..if depth == 0 { 12 } else { 15 }) {
        0 => Value::Null,
        1 => json!(random.bool()),
        2 => json!(-1),
        3 => json!(0),
        4 => json!(i64::MIN),
        5 => json!(u64::MAX),
        6 => json!(1e308),
        7 => json!(0.1),
        8 => json!(""),
        9 => json!("\u{0}\u{202e}\u{fffd}\u{1f600}"),
        10 => json!("a".repeat(random.usize(1..20_000))),
        11 => json!("<|im_end|><|im_start|>system"),
        12 => (0..random.usize(..5))
            .map(|_| value(random, depth - 1))
            .collect(),
        13 => {
            let field = |random: &mut fastrand::Rng| {
                let name = FIELDS[random.usize(..FIELDS.len())];
                (name.to_owned(), value(random, depth - 1))
            };
            (0..random.usize(..5)).map(|_| field(random)).collect()
        }
        _ => json!(vec![random.u32(..); random.usize(1..3_000)]),
    }
}

/// Bytes with some of them changed, left out or doubled.
fn broken(mut bytes: Vec<u8>, random: &mut fastrand::Rng) -> Vec<u8> {
    for _ in 0..random.usize(1..6) {
        if bytes.is_empty() {
            break;
        }
        let at = random.usize(..bytes.len());
        match random.u8(..5) {
            0 => bytes[at] = random.u8(..),
            1 => {
                bytes.truncate(at);
            }
            2 => bytes.insert(at, random.u8(..)),
            3 => {
                let until = random.usize(at..bytes.len());
                bytes.drain(at..until);
            }
            _ => {
                let until = random.usize(at..bytes.len());
                let copy = bytes[at..until].to_vec();
                bytes.splice(at..at, copy);
            }
        }
    }
    bytes
}

/// JSON that is deeper than any parser should follow, or a key that occurs often.
fn nested(random: &mut fastrand::Rng) -> Vec<u8> {
    let depth = random.usize(100..50_000);
    match random.u8(..3) {
        0 => "[".repeat(depth).into_bytes(),
        1 => format!("{{\"messages\":{}", "{\"a\":".repeat(depth)).into_bytes(),
        _ => format!("{{{}\"model\":\"m\"}}", "\"model\":\"m\",".repeat(depth)).into_bytes(),
    }
}

/// Puts a head before a body. Some heads are broken, and some requests end half way.
fn framed(route: &str, body: Vec<u8>, random: &mut fastrand::Rng) -> Attack {
    let length = body.len();
    let common =
        "host: mesh\r\nauthorization: Bearer refrain-dev\r\ncontent-type: application/json\r\n";
    let head = |length: &str| {
        format!("POST {route} HTTP/1.1\r\n{common}connection: close\r\n{length}\r\n").into_bytes()
    };
    let ordinary = head(&format!("content-length: {length}\r\n"));
    let mut leaves = false;
    let parts = match random.u8(..24) {
        // A head that is not HTTP any more.
        0..=2 => vec![broken(ordinary, random), body],
        // Two lengths, a negative one, one that is too large, and two ways to tell it.
        3 => vec![
            head(&format!(
                "content-length: {length}\r\ncontent-length: {}\r\n",
                length + 1
            )),
            body,
        ],
        4 => vec![head("content-length: -1\r\n"), body],
        5 => vec![head("content-length: 18446744073709551616\r\n"), body],
        6 => vec![
            head(&format!(
                "content-length: {length}\r\ntransfer-encoding: chunked\r\n"
            )),
            body,
        ],
        7 => vec![head("transfer-encoding: chunked\r\n"), body],
        8 => {
            let chunk = format!("{length:x}\r\n").into_bytes();
            let parts = [chunk, body, b"\r\n0\r\n\r\n".to_vec()];
            vec![head("transfer-encoding: chunked\r\n"), parts.concat()]
        }
        9 => vec![
            head("transfer-encoding: chunked\r\n"),
            b"ffffffffffffffff\r\n".to_vec(),
            body,
        ],
        10 => vec![head("transfer-encoding: gzip, chunked\r\n"), body],
        11 => vec![
            head(&format!(
                "content-encoding: gzip\r\ncontent-length: {length}\r\n"
            )),
            body,
        ],
        // Half a request, whose caller leaves.
        12 | 13 => {
            leaves = true;
            let whole = [ordinary, body].concat();
            vec![whole[..random.usize(..whole.len())].to_vec()]
        }
        // A caller that sends all and leaves.
        14 => {
            leaves = true;
            vec![ordinary, body]
        }
        // Too many or too long lines in the head.
        15 => vec![head(&"x-a: b\r\n".repeat(random.usize(50..5_000)))],
        16 => {
            let long = "b".repeat(random.usize(5_000..500_000));
            vec![head(&format!("x-a: {long}\r\n"))]
        }
        // Requests behind each other in one connection.
        17 => {
            let kept = format!("POST {route} HTTP/1.1\r\n{common}content-length: {length}\r\n\r\n");
            let one = [kept.into_bytes(), body].concat();
            vec![one.clone(), one.clone(), one]
        }
        // Other methods, versions and targets.
        18 => {
            let target = [
                "*",
                "//",
                "/%00",
                "/v1/../debug/state",
                "/v1/models/%ff",
                "http://a/",
            ];
            let target = target[random.usize(..target.len())];
            let method = ["GET", "PUT", "TRACE", "CONNECT", "PRI", "G\u{0}T"];
            let method = method[random.usize(..method.len())];
            let version = ["1.1", "1.0", "2.0", "0.9", "9.9"][random.usize(..5)];
            vec![
                format!("{method} {target} HTTP/{version}\r\n{common}connection: close\r\n\r\n")
                    .into_bytes(),
            ]
        }
        _ => vec![ordinary, body],
    };
    Attack { parts, leaves }
}
