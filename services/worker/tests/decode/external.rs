//! Third-party engines over HTTP, against a server with canned responses.

use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use refrain_protocol::engine::Sampling;
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, RequestId};
use refrain_tokenization::testing::byte_level_files;
use refrain_worker::{
    EngineConfig, EngineKind, ExpectedModel, GenerateRequest, Generated, GeneratedEnd,
    StreamingEngine, WorkerEngine, connect_third_party,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A canned response: status, content type, body, and whether the connection stays open after it.
#[derive(Clone)]
pub(crate) struct Response(
    pub(crate) u16,
    pub(crate) &'static str,
    pub(crate) String,
    pub(crate) bool,
);

pub(crate) fn json(body: &str) -> Response {
    Response(200, "application/json", body.to_owned(), false)
}

pub(crate) fn events(body: &str, hangs: bool) -> Response {
    Response(200, "text/event-stream", body.to_owned(), hangs)
}

/// A server with canned responses by path.
pub(crate) struct Canned {
    url: String,
    responses: Arc<Mutex<Vec<(&'static str, Response)>>>,
    /// The received requests, head and body.
    received: Arc<Mutex<Vec<String>>>,
    /// Number of connections that the client closed while a response hung.
    closed: Arc<Mutex<u32>>,
}

impl Canned {
    pub(crate) async fn start(responses: &[(&'static str, Response)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let canned = Canned {
            url: format!("http://{}", listener.local_addr().unwrap()),
            responses: Arc::new(Mutex::new(responses.to_vec())),
            received: Arc::default(),
            closed: Arc::default(),
        };
        let (responses, received) = (canned.responses.clone(), canned.received.clone());
        let closed = canned.closed.clone();
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                let (responses, received) = (responses.clone(), received.clone());
                let closed = closed.clone();
                tokio::spawn(async move {
                    if serve(connection, &responses, &received).await {
                        *closed.lock().unwrap() += 1;
                    }
                });
            }
        });
        canned
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn set(&self, path: &'static str, response: Response) {
        let mut responses = self.responses.lock().unwrap();
        responses.retain(|(known, _)| *known != path);
        responses.push((path, response));
    }

    pub(crate) fn received(&self, path: &str) -> Vec<String> {
        let received = self.received.lock().unwrap();
        let of_path = received
            .iter()
            .filter(|text| text.contains(&format!(" {path} ")));
        of_path.cloned().collect()
    }

    pub(crate) async fn connect(
        &self,
        kind: EngineKind,
    ) -> Result<Arc<dyn StreamingEngine>, ApiError> {
        let config = EngineConfig {
            kind,
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
        match connect_third_party(&config, &self.url, expected).await? {
            WorkerEngine::Streaming(engine) => Ok(engine),
            WorkerEngine::Verifying(_) => panic!("a streaming engine"),
        }
    }
}

/// Answers one request. Returns whether the client closed the connection while the response hung.
async fn serve(
    mut connection: TcpStream,
    responses: &Mutex<Vec<(&'static str, Response)>>,
    received: &Mutex<Vec<String>>,
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
    received.lock().unwrap().push(request);
    let found = responses
        .lock()
        .unwrap()
        .iter()
        .find(|(known, _)| *known == path)
        .cloned();
    let Response(status, kind, body, hangs) = found.map_or_else(
        || Response(404, "application/json", "{}".into(), false),
        |(_, response)| response,
    );
    let head = format!("HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n");
    connection.write_all(head.as_bytes()).await.unwrap();
    connection.write_all(body.as_bytes()).await.unwrap();
    if hangs {
        return connection.read(&mut piece).await.unwrap_or(0) == 0;
    }
    false
}

/// A llama-server. Its `/detokenize` returns the alphanumeric tokens of more than one byte, in the order of their
/// ids.
fn llama() -> Vec<(&'static str, Response)> {
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
            Response(
                200,
                "text/plain",
                "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n".into(),
                false,
            ),
        ),
    ]
}

/// An SGLang that accepts aborts.
pub(crate) fn sglang() -> Vec<(&'static str, Response)> {
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
async fn a_llama_server_is_primed_by_a_request_for_one_token() {
    let server = Canned::start(&llama()).await;
    let engine = server.connect(EngineKind::LlamaCpp).await.unwrap();
    let slot = |id, is_busy| {
        format!("{{\"id\":{id},\"speculative\":true,\"is_processing\":{is_busy},\"id_task\":7}}")
    };
    let page = format!("[{},{}]", slot(0, false), slot(1, true));
    server.set("/slots", json(&page));
    let slots = engine.slots().await.unwrap();
    assert_eq!(slots.last_request, Some(7));
    assert!(slots.is_free && slots.has_others);
    server.set("/completion", json("{\"stop\":true}"));
    engine.prime(&[5, 6, 7]).await.unwrap();
    let asked = server.received("/completion");
    let body: serde_json::Value =
        serde_json::from_str(asked[0].split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(body["prompt"], serde_json::json!([5, 6, 7]));
    assert_eq!(
        (&body["n_predict"], &body["id_slot"]),
        (&1.into(), &0.into())
    );
    assert_eq!(body["cache_prompt"], false);
    let Response(_, kind, text, hangs) = json("{\"error\":{\"code\":400,\"message\":\"no\"}}");
    server.set("/completion", Response(400, kind, text, hangs));
    let refused = engine.prime(&[5]).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::InvalidRequest);
    // Engines of another kind have nothing that could be primed.
    let other = Canned::start(&sglang()).await;
    let other = other.connect(EngineKind::Sglang).await.unwrap();
    assert!(other.slots().await.is_err() && other.prime(&[5]).await.is_err());
}

#[tokio::test]
async fn an_engine_is_connected_and_its_stream_is_relayed() {
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
    let asked = server.received("/completion");
    assert!(
        asked[0]
            .to_lowercase()
            .contains("authorization: bearer engine-key")
    );
    // A third-party engine must not receive the secret of the mesh.
    assert!(!asked[0].to_lowercase().contains("refrain"));
    // The engine is refused once it serves another model under the same name.
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
async fn connecting_to_a_wrong_engine_is_an_error() {
    for (path, response, kind, part) in [
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
            Response(200, "text/html", "<html>".into(), false),
            ErrorKind::Upstream,
            "unexpected response",
        ),
        (
            "/health",
            Response(
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
            Response(401, "application/json", "{}".into(), false),
            ErrorKind::Upstream,
            "api_key",
        ),
    ] {
        let server = Canned::start(&llama()).await;
        server.set(path, response);
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
async fn garbage_and_broken_responses_are_errors() {
    let server = Canned::start(&llama()).await;
    let engine = server.connect(EngineKind::LlamaCpp).await.unwrap();
    for (response, kind, part) in [
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
            Response(
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
        server.set("/completion", response);
        let error = generated(&*engine).await.unwrap_err();
        assert_eq!(error.kind, kind, "{}", error.message);
        assert!(error.message.contains(part), "{}", error.message);
    }
}

#[tokio::test]
async fn dropping_a_stream_closes_its_connection_and_aborts_where_needed() {
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
    // An abort would have been sent before these calls.
    engine.confirm().await.unwrap();
    assert!(sglang.received("/abort_request").is_empty());
    sglang.set("/generate", events(&sglang_piece(1, "null"), true));
    let mut stream = engine.generate(request()).await.unwrap();
    stream.next().await.unwrap().unwrap();
    drop(stream);
    crate::bench::eventually("the abort is received", || {
        sglang
            .received("/abort_request")
            .iter()
            .any(|text| text.contains("-0000000002-0000000000000003\""))
    })
    .await;
}

#[tokio::test]
async fn an_abort_outlives_the_runtime_of_its_call() {
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
            // The stream is dropped with the runtime.
            tokio::spawn(async move { stream.next().await });
        });
    });
    listener.await.unwrap();
    crate::bench::eventually("the abort is received", || {
        sglang.received("/abort_request").len() == 1
    })
    .await;
}

/// A vLLM with these routes besides the usual ones.
pub(crate) async fn vllm(responses: &[(&'static str, Response)]) -> Canned {
    let usual = [
        ("/health", json("{}")),
        (
            "/v1/models",
            json("{\"data\":[{\"id\":\"m\",\"max_model_len\":400}]}"),
        ),
        ("/detokenize", json("{\"prompt\":\"hellhellhello\"}")),
    ];
    Canned::start(&[&usual, responses].concat()).await
}
