//! The adapters over HTTP, against a server that says what it is told to.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use refrain_protocol::engine::{Draft, Sampling};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, RequestId};
use refrain_tokenization::testing::byte_level_files;
use refrain_worker::{
    DraftVerifier, DriveMode, EngineConfig, EngineKind, ExpectedModel, GenerateRequest, Generated,
    GeneratedEnd, StreamingEngine, VerifyMethod, VerifyRequest, WorkerEngine, connect_third_party,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What a route answers: status, content type, body; and whether the connection stays open after it.
#[derive(Clone)]
pub(crate) struct Answer(
    pub(crate) u16,
    pub(crate) &'static str,
    pub(crate) String,
    pub(crate) bool,
);

pub(crate) fn json(body: &str) -> Answer {
    Answer(200, "application/json", body.to_owned(), false)
}

pub(crate) fn events(body: &str, hangs: bool) -> Answer {
    Answer(200, "text/event-stream", body.to_owned(), hangs)
}

/// A server with canned answers by path.
pub(crate) struct Canned {
    url: String,
    answers: Arc<Mutex<Vec<(&'static str, Answer)>>>,
    /// Requests as they came, head and body.
    heard: Arc<Mutex<Vec<String>>>,
    /// Connections that the other side closed while an answer hung.
    closed: Arc<Mutex<u32>>,
}

impl Canned {
    async fn start(answers: &[(&'static str, Answer)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let canned = Canned {
            url: format!("http://{}", listener.local_addr().unwrap()),
            answers: Arc::new(Mutex::new(answers.to_vec())),
            heard: Arc::default(),
            closed: Arc::default(),
        };
        let (answers, heard) = (canned.answers.clone(), canned.heard.clone());
        let closed = canned.closed.clone();
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                let (answers, heard) = (answers.clone(), heard.clone());
                let closed = closed.clone();
                tokio::spawn(async move {
                    if serve(connection, &answers, &heard).await {
                        *closed.lock().unwrap() += 1;
                    }
                });
            }
        });
        canned
    }

    pub(crate) fn set(&self, path: &'static str, answer: Answer) {
        let mut answers = self.answers.lock().unwrap();
        answers.retain(|(known, _)| *known != path);
        answers.push((path, answer));
    }

    pub(crate) fn heard(&self, path: &str) -> Vec<String> {
        let heard = self.heard.lock().unwrap();
        let of_path = heard
            .iter()
            .filter(|text| text.contains(&format!(" {path} ")));
        of_path.cloned().collect()
    }

    pub(crate) async fn connect(
        &self,
        kind: EngineKind,
    ) -> Result<Arc<dyn StreamingEngine>, ApiError> {
        match self.connect_as(kind, DriveMode::Off).await? {
            WorkerEngine::Streaming {
                engine,
                verifier: None,
            } => Ok(engine),
            _ => panic!("an engine that is not driven"),
        }
    }

    /// The engine as a judge of drafts, if it is one.
    async fn connect_driven(
        &self,
        kind: EngineKind,
    ) -> Result<Option<Arc<dyn DraftVerifier>>, ApiError> {
        match self.connect_as(kind, DriveMode::Auto).await? {
            WorkerEngine::Streaming { verifier, .. } => Ok(verifier),
            WorkerEngine::Verifying(_) => panic!("a streaming engine"),
        }
    }

    async fn connect_as(
        &self,
        kind: EngineKind,
        drive: DriveMode,
    ) -> Result<WorkerEngine, ApiError> {
        let config = EngineConfig {
            kind,
            drive,
            api_key: Some("engine-key".into()),
            call_ms_max: 2_000,
            ..EngineConfig::default()
        };
        let expected = ExpectedModel {
            model: "public".into(),
            served_model: "m".into(),
            tokenizer: Arc::new(byte_level_files().tokenizer().unwrap()),
            max_context: Some(512),
        };
        connect_third_party(&config, &self.url, expected).await
    }
}

/// Answers one request. Returns whether the other side left while the answer hung.
async fn serve(
    mut connection: TcpStream,
    answers: &Mutex<Vec<(&'static str, Answer)>>,
    heard: &Mutex<Vec<String>>,
) -> bool {
    let mut request = Vec::new();
    let mut piece = [0u8; 4096];
    loop {
        let read = connection.read(&mut piece).await.unwrap_or(0);
        if read == 0 {
            return false;
        }
        request.extend_from_slice(&piece[..read]);
        let text = String::from_utf8_lossy(&request);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head.lines().find_map(|line| {
            line.to_lowercase()
                .strip_prefix("content-length: ")?
                .parse()
                .ok()
        });
        if body.len() >= length.unwrap_or(0) {
            break;
        }
    }
    let request = String::from_utf8_lossy(&request).into_owned();
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    heard.lock().unwrap().push(request);
    let found = answers
        .lock()
        .unwrap()
        .iter()
        .find(|(known, _)| *known == path)
        .cloned();
    let Answer(status, kind, body, hangs) = found.map_or_else(
        || Answer(404, "application/json", "{}".into(), false),
        |(_, answer)| answer,
    );
    let head = format!("HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n");
    connection.write_all(head.as_bytes()).await.unwrap();
    connection.write_all(body.as_bytes()).await.unwrap();
    if hangs {
        return connection.read(&mut piece).await.unwrap_or(0) == 0;
    }
    false
}

/// A llama-server: `merges` are the alphanumeric tokens of more than a byte, in the order of their ids.
fn llama() -> Vec<(&'static str, Answer)> {
    vec![
        ("/health", json("{\"status\":\"ok\"}")),
        (
            "/v1/models",
            json(
                "{\"data\":[{\"id\":\"m\",\"meta\":{\"n_vocab\":263,\"n_params\":1,\"size\":2}}]}",
            ),
        ),
        (
            "/props",
            json("{\"default_generation_settings\":{\"n_ctx\":300}}"),
        ),
        ("/detokenize", json("{\"content\":\"hellhellhello\"}")),
        (
            "/metrics",
            Answer(
                200,
                "text/plain",
                "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n".into(),
                false,
            ),
        ),
    ]
}

/// An SGLang that takes aborts.
fn sglang() -> Vec<(&'static str, Answer)> {
    let models = "{\"data\":[{\"id\":\"m\",\"max_model_len\":400}]}";
    vec![
        ("/health", json("{}")),
        ("/v1/models", json(models)),
        ("/abort_request", json("{}")),
    ]
}

fn sglang_piece(count: u32, finish: &str) -> String {
    format!(
        "data: {{\"output_ids\":[9],\"meta_info\":{{\"finish_reason\":{finish},\"completion_tokens\":{count}}}}}\n\n"
    )
}

pub(crate) fn request() -> GenerateRequest {
    GenerateRequest {
        request: RequestId(1),
        call: 3,
        namespace: NamespaceId(2),
        tokens: vec![5, 6],
        prompt_len: 2,
        tokens_max: 4,
        sampling: Sampling::default(),
        priority: None,
        attached: None,
    }
}

async fn generated(engine: &dyn StreamingEngine) -> Result<Vec<Generated>, ApiError> {
    let mut stream = engine.generate(request()).await?;
    let mut pieces = Vec::new();
    while let Some(piece) = stream.next().await {
        pieces.push(piece?);
    }
    Ok(pieces)
}

const TOKEN: &str =
    "data: {\"content\":\"a\",\"tokens\":[100],\"stop\":false,\"tokens_predicted\":1}\n\n";

#[tokio::test]
async fn an_engine_is_joined_asked_and_listened_to() {
    let server = Canned::start(&llama()).await;
    let engine = server.connect(EngineKind::LlamaCpp).await.unwrap();
    assert_eq!(engine.capabilities().model, "public");
    assert_eq!(engine.capabilities().max_context, 300);
    let load = engine.load().await.unwrap();
    assert_eq!(
        (load.running, load.waiting, load.kv_usage),
        (Some(2.0), Some(1.0), None)
    );
    let shown = engine.metrics().await.unwrap();
    assert_eq!(
        shown,
        "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
    );
    let end = "data: {\"stop\":true,\"stop_type\":\"limit\",\"tokens_predicted\":1}\n\n";
    server.set("/completion", events(&format!("{TOKEN}{end}"), false));
    let pieces = generated(&*engine).await.unwrap();
    assert_eq!(pieces.len(), 2);
    assert_eq!(pieces[1], Generated::End(GeneratedEnd::Length));
    let asked = server.heard("/completion");
    assert!(
        asked[0]
            .to_lowercase()
            .contains("authorization: bearer engine-key")
    );
    // The mesh's own secret is not for engines of other makers.
    assert!(!asked[0].to_lowercase().contains("refrain"));
    // Another model under the same name is no longer this engine.
    engine.confirm().await.unwrap();
    server.set(
        "/v1/models",
        json("{\"data\":[{\"id\":\"m\",\"meta\":{\"n_vocab\":263,\"n_params\":9,\"size\":2}}]}"),
    );
    assert_eq!(
        engine.confirm().await.unwrap_err().kind,
        ErrorKind::Unavailable
    );
}

#[tokio::test]
async fn what_is_not_the_engine_is_told_at_once() {
    for (path, answer, kind, part) in [
        (
            "/v1/models",
            json("{\"data\":[{\"id\":\"other\"}]}"),
            ErrorKind::InvalidRequest,
            "serves other, not m",
        ),
        (
            "/v1/models",
            json("{\"data\":[{\"id\":\"m\",\"meta\":{\"n_vocab\":9}}]}"),
            ErrorKind::InvalidRequest,
            "another tokenizer",
        ),
        (
            "/detokenize",
            json("{\"content\":\"hehell\"}"),
            ErrorKind::InvalidRequest,
            "another tokenizer",
        ),
        (
            "/detokenize",
            json("{}"),
            ErrorKind::Upstream,
            "unexpected response",
        ),
        (
            "/v1/models",
            Answer(200, "text/html", "<html>".into(), false),
            ErrorKind::Upstream,
            "unexpected response",
        ),
        (
            "/health",
            Answer(
                503,
                "application/json",
                "{\"error\":{\"message\":\"Loading model\"}}".into(),
                false,
            ),
            ErrorKind::Unavailable,
            "Loading model",
        ),
        (
            "/v1/models",
            Answer(401, "application/json", "{}".into(), false),
            ErrorKind::Upstream,
            "api_key",
        ),
    ] {
        let server = Canned::start(&llama()).await;
        server.set(path, answer);
        let error = server.connect(EngineKind::LlamaCpp).await.err().unwrap();
        assert_eq!(error.kind, kind, "{}", error.message);
        assert!(error.message.contains(part), "{}", error.message);
    }
    let nobody = Canned {
        url: "http://127.0.0.1:9".into(),
        ..Canned::start(&[]).await
    };
    let error = nobody.connect(EngineKind::LlamaCpp).await.err().unwrap();
    assert_eq!(
        (error.kind, error.code.as_deref()),
        (ErrorKind::Unavailable, Some("engine_unreachable"))
    );
}

#[tokio::test]
async fn garbage_and_broken_answers_are_errors() {
    let server = Canned::start(&llama()).await;
    let engine = server.connect(EngineKind::LlamaCpp).await.unwrap();
    for (answer, kind, part) in [
        (
            events("data: <html>\n\n", false),
            ErrorKind::Upstream,
            "unexpected response",
        ),
        (
            events(TOKEN, false),
            ErrorKind::Upstream,
            "without an end event",
        ),
        (json("{}"), ErrorKind::Upstream, "unexpected response"),
        (
            Answer(
                400,
                "application/json",
                "{\"error\":{\"message\":\"too long\"}}".into(),
                false,
            ),
            ErrorKind::InvalidRequest,
            "too long",
        ),
        (
            events(
                "data: {\"error\":{\"code\":500,\"message\":\"compute error\"}}\n\n",
                false,
            ),
            ErrorKind::Upstream,
            "compute error",
        ),
    ] {
        server.set("/completion", answer);
        let error = generated(&*engine).await.unwrap_err();
        assert_eq!(error.kind, kind, "{}", error.message);
        assert!(error.message.contains(part), "{}", error.message);
    }
}

#[tokio::test]
async fn dropping_an_answer_closes_its_connection_and_aborts_where_that_is_asked_for() {
    let llama_server = Canned::start(&llama()).await;
    llama_server.set("/completion", events(TOKEN, true));
    let engine = llama_server.connect(EngineKind::LlamaCpp).await.unwrap();
    let mut stream = engine.generate(request()).await.unwrap();
    stream.next().await.unwrap().unwrap();
    drop(stream);
    crate::bench::eventually("the connection is closed", || {
        *llama_server.closed.lock().unwrap() == 1
    })
    .await;

    let sglang = Canned::start(&sglang()).await;
    let engine = sglang.connect(EngineKind::Sglang).await.unwrap();
    assert_eq!(engine.capabilities().max_context, 400);
    let whole = sglang_piece(1, "null") + &sglang_piece(2, "{\"type\":\"length\"}");
    sglang.set("/generate", events(&whole, false));
    assert_eq!(generated(&*engine).await.unwrap().len(), 3);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(sglang.heard("/abort_request").is_empty());
    sglang.set("/generate", events(&sglang_piece(1, "null"), true));
    let mut stream = engine.generate(request()).await.unwrap();
    stream.next().await.unwrap().unwrap();
    drop(stream);
    crate::bench::eventually("the abort is heard", || {
        sglang
            .heard("/abort_request")
            .iter()
            .any(|text| text.contains("-0000000002-0000000000000003\""))
    })
    .await;
}

#[tokio::test]
async fn an_abort_outlives_the_thread_that_listened() {
    let sglang = Canned::start(&sglang()).await;
    let engine = sglang.connect(EngineKind::Sglang).await.unwrap();
    sglang.set("/generate", events(&sglang_piece(1, "null"), true));
    let listener = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async move {
            let mut stream = engine.generate(request()).await.unwrap();
            stream.next().await.unwrap().unwrap();
            // It is dropped with the runtime.
            tokio::spawn(async move { stream.next().await });
        });
    });
    listener.await.unwrap();
    crate::bench::eventually("the abort is heard", || {
        sglang.heard("/abort_request").len() == 1
    })
    .await;
}

/// A vLLM with these routes beside the usual ones.
pub(crate) async fn vllm(answers: &[(&'static str, Answer)]) -> Canned {
    let usual = [
        ("/health", json("{}")),
        (
            "/v1/models",
            json("{\"data\":[{\"id\":\"m\",\"max_model_len\":400}]}"),
        ),
        ("/detokenize", json("{\"prompt\":\"hellhellhello\"}")),
    ];
    Canned::start(&[&usual, answers].concat()).await
}

#[tokio::test]
async fn how_an_engine_verifies_is_found_out_by_having_it_verify() {
    let generate = "/inference/v1/generate";
    let completions = "/v1/completions";
    let scored = |details: &str| {
        json(&format!(
            "{{\"choices\":[{{\"token_ids\":[7]}}],\"prompt_logprobs\":[null,{{\"5\":{{\"logprob\":-1.0}}}},{{\"6\":{{\"logprob\":-0.1}}}}],\
             \"usage\":{{\"prompt_tokens_details\":{details}}}}}"
        ))
    };
    let chained = scored("{\"cached_tokens\":0}");
    let two = "{\"choices\":[{\"index\":1,\"token_ids\":[8]},{\"index\":0,\"token_ids\":[7]}]}";
    let one = "{\"choices\":[{\"index\":0,\"token_ids\":[7]}]}";
    let off = Answer(403, "application/json", "{}".into(), false);
    let cases = [
        (chained.clone(), json(two), true, true),
        // The route is turned off; the server does not say what it found in its cache; answers lack a prompt's.
        (off.clone(), json(two), false, true),
        (scored("null"), json(two), false, true),
        (chained, json(one), true, false),
        (off, json("{}"), false, false),
    ];
    for (at, (scores, drawn, chain, fan_out)) in cases.into_iter().enumerate() {
        let server = vllm(&[(generate, scores), (completions, drawn)]).await;
        let verifier = server.connect_driven(EngineKind::Vllm).await.unwrap();
        let abilities = verifier.map(|verifier| verifier.abilities());
        let found = abilities.map(|abilities| (abilities.chain, abilities.fan_out));
        let expected = Some((chain, fan_out)).filter(|_| chain || fan_out);
        assert_eq!(found, expected, "case {at}");
        // An engine that is not driven receives no verify calls.
        let asked = server.heard(generate).len() + server.heard(completions).len();
        server.connect(EngineKind::Vllm).await.unwrap();
        let now = server.heard(generate).len() + server.heard(completions).len();
        assert_eq!((asked, now), (2, 2));
    }
    // One that is busy at the moment is asked again: it says nothing of what it can do.
    let busy = Answer(429, "application/json", "{}".into(), false);
    let server = vllm(&[(generate, busy), (completions, json(two))]).await;
    let error = server.connect_driven(EngineKind::Vllm).await;
    assert_eq!(error.err().unwrap().kind, ErrorKind::Overloaded);
}

#[tokio::test]
async fn a_verify_call_that_is_dropped_closes_its_connection() {
    let list = "[{\"index\":0,\"tokens\":[100]},{\"index\":1,\"tokens\":[101]}]";
    let server = Canned::start(&llama()).await;
    server.set("/completion", json(list));
    let engine = server.connect_driven(EngineKind::LlamaCpp).await.unwrap();
    let engine = engine.expect("it judges drafts");
    let draft = || VerifyRequest {
        text: request(),
        draft: Draft {
            tokens: vec![100],
            parents: vec![None],
        },
        method: VerifyMethod::FanOut,
    };
    let verdict = engine.verify(draft()).await.unwrap();
    assert_eq!(verdict.next_tokens, [Some(100), Some(101)]);
    let asked = server.heard("/completion");
    assert!(asked[asked.len() - 1].contains("\"prompt\":[[5,6],[5,6,100]]"));
    let Answer(status, kind, ..) = json("");
    server.set("/completion", Answer(status, kind, "[".into(), true));
    let call = tokio::spawn(async move { engine.verify(draft()).await });
    crate::bench::eventually("the call is heard", || {
        server.heard("/completion").len() > asked.len()
    })
    .await;
    call.abort();
    crate::bench::eventually("the connection is closed", || {
        *server.closed.lock().unwrap() == 1
    })
    .await;
}
