//! Every route of the store, called by those who must not. They learn nothing, not even whether there is something.

use std::sync::Arc;

use actix_web::http::Method;
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengthsRequest, PromptHash};
use refrain_protocol::pull::{NamespacePull, PullReply, PullRequest, Scope, ScopeNews, ScopePull};
use refrain_protocol::segment::{
    DocumentsRequest, SegmentPieceRequest, SegmentsReply, SegmentsRequest,
};
use refrain_protocol::{ErrorKind, MESH_SECRET_HEADER};
use refrain_rpc::{
    BINCODE_CONTENT_TYPE, HttpDraftStore, StoreAdmin as _, decode_bincode, encode_bincode,
};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::telemetry::install_crypto_provider;
use serde::Serialize;

use super::*;

/// The answer of a route: status and body, without headers that could reveal content.
async fn answer(
    store: &Store,
    method: &Method,
    path: &str,
    secret: Option<&str>,
    body: Vec<u8>,
) -> (u16, Vec<u8>) {
    let url = format!("http://{}{path}", store.server.addr().unwrap());
    let method = reqwest::Method::from_bytes(method.as_str().as_bytes()).unwrap();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut request = client
        .request(method, url)
        .header("content-type", BINCODE_CONTENT_TYPE)
        .body(body);
    if let Some(secret) = secret {
        request = request.header(MESH_SECRET_HEADER, secret);
    }
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    (status, response.bytes().await.unwrap().to_vec())
}

fn body(message: &impl Serialize) -> Vec<u8> {
    encode_bincode(message).unwrap()
}

/// The calls that name a namespace, for this namespace and this segment, whoever it belongs to.
fn named_calls(namespace: SignedNamespace, segment: u64) -> Vec<(&'static str, Vec<u8>)> {
    let mut grouped = update(1, 0, &[6; 10]);
    grouped.head.group = Some("g".into());
    vec![
        (
            "/internal/v1/append",
            body(&AppendRequest {
                namespace: namespace.clone(),
                updates: vec![grouped],
                waited_ms: 0,
                acknowledgement: None,
            }),
        ),
        (
            "/internal/v1/segments",
            body(&SegmentsRequest {
                namespace: namespace.clone(),
            }),
        ),
        (
            "/internal/v1/segments/piece",
            body(&SegmentPieceRequest {
                namespace: namespace.clone(),
                segment,
                offset: 0,
                max_words: 100,
            }),
        ),
        (
            "/internal/v1/documents",
            body(&DocumentsRequest {
                namespace: namespace.clone(),
                documents: vec![DocumentId(1)],
                max_tokens: 1_000,
            }),
        ),
        (
            "/internal/v1/touch",
            body(&TouchRequest {
                namespace: namespace.clone(),
                documents: vec![DocumentId(1)],
            }),
        ),
        (
            "/internal/v1/groups/register",
            body(&RegisterGroupRequest {
                namespace: namespace.clone(),
                group: "g".into(),
                ttl_ms: 1_000,
            }),
        ),
        (
            "/internal/v1/pull",
            body(&PullRequest {
                namespaces: vec![NamespacePull {
                    namespace: namespace.clone(),
                    scopes: [Scope::Namespace, Scope::Group("g".into())]
                        .map(|scope| ScopePull {
                            scope,
                            after: FeedCursor::default(),
                            own: Vec::new(),
                        })
                        .into(),
                }],
                max_tokens: 1_000,
                wait_ms: 0,
            }),
        ),
        (
            "/internal/v1/output-lengths",
            body(&OutputLengthsRequest {
                namespace,
                prompt: PromptHash(7),
            }),
        ),
    ]
}

const PLAIN_ROUTES: [(Method, &str); 8] = [
    (Method::GET, "/internal/v1/stats"),
    (Method::GET, "/debug/state"),
    (Method::GET, "/admin/v1/stats"),
    (Method::POST, "/admin/v1/import"),
    (Method::POST, "/admin/v1/export"),
    (Method::POST, "/admin/v1/verify"),
    (Method::POST, "/admin/v1/compact"),
    (Method::POST, "/admin/v1/erase"),
];

async fn listening(dir: &Path) -> Store {
    install_crypto_provider();
    Store::start(DraftStoreConfig {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        ..config(dir)
    })
    .await
}

/// Gives tenant a something to hide, some of it in a segment. Returns the segment.
async fn filled(store: &Store) -> u64 {
    let register = RegisterGroupRequest {
        namespace: store.sign("a"),
        group: "g".into(),
        ttl_ms: 60_000,
    };
    store.handle().register_group(register).await.unwrap();
    for document in 1..30 {
        let mut secret = update(document, 0, &[4_242; 50]);
        secret.head.group = Some("g".into());
        store.append("a", vec![secret]).await.unwrap();
    }
    let sealed: Vec<_> = (30..60)
        .map(|document| finished(update(document, 0, &[4_242; 50])))
        .collect();
    store.append("a", sealed).await.unwrap();
    store.handle().compact().await.unwrap();
    let namespace = store.sign("a");
    let listed = store.handle().segments(SegmentsRequest { namespace }).await;
    listed.unwrap().segments[0].segment
}

#[tokio::test]
async fn strangers_and_forgers_get_the_same_answer_whatever_is_stored() {
    let (empty_dir, full_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (empty, full) = (
        listening(empty_dir.path()).await,
        listening(full_dir.path()).await,
    );
    let secret_segment = filled(&full).await;
    let before = full.handle().stats().await.unwrap();
    let mut tried = 0;
    for (stranger_secret, secret_is_right) in
        [(None, false), (Some("0".repeat(64)), false), (None, true)]
    {
        let mut answers = Vec::new();
        for store in [&empty, &full] {
            let secret = if secret_is_right {
                Some(store.mesh.secret.clone())
            } else {
                stranger_secret.clone()
            };
            // Signed for b and renamed to a; signed by another mesh; signed long ago.
            let mut renamed = store.sign("b");
            Arc::make_mut(&mut renamed.namespace).tenant = "a".into();
            let strange = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
            let strange = strange.sign(store.sign("a").namespace);
            let mut old = store.sign("a");
            old.issued_at_s -= 48 * 3600;
            let mut of_store = Vec::new();
            for namespace in [renamed, strange, old] {
                for (path, body) in named_calls(namespace, secret_segment) {
                    let (status, body) =
                        answer(store, &Method::POST, path, secret.as_deref(), body).await;
                    if secret_is_right && path.ends_with("/pull") {
                        // Each scope is refused by itself.
                        let reply: PullReply = decode_bincode(&body).unwrap();
                        let kinds = reply.deltas.iter().map(|delta| match &delta.news {
                            ScopeNews::Refused { kind, .. } => *kind,
                            other => panic!("{other:?}"),
                        });
                        let kinds: Vec<ErrorKind> = kinds.collect();
                        assert_eq!(
                            (status, &kinds[..]),
                            (200, &[ErrorKind::Unauthorized; 2][..])
                        );
                    } else {
                        assert_eq!(status, 401, "{path}");
                    }
                    of_store.push((path, status, body));
                }
            }
            if !secret_is_right {
                for (path, body) in named_calls(store.sign("a"), secret_segment) {
                    let (status, body) =
                        answer(store, &Method::POST, path, secret.as_deref(), body).await;
                    assert_eq!(status, 401, "{path}");
                    of_store.push((path, status, body));
                }
                for (method, path) in &PLAIN_ROUTES {
                    let (status, body) =
                        answer(store, method, path, secret.as_deref(), Vec::new()).await;
                    assert_eq!(status, 401, "{path}");
                    of_store.push((path, status, body));
                }
            }
            tried += of_store.len();
            answers.push(of_store);
        }
        assert_eq!(answers[0], answers[1], "an answer shows what is stored");
    }
    assert!(tried > 100, "{tried}");
    let after = full.handle().stats().await.unwrap();
    assert_eq!(
        (after.documents, after.tokens),
        (before.documents, before.tokens)
    );
    empty.stop().await;
    full.stop().await;
}

#[tokio::test]
async fn another_tenant_sees_an_empty_store() {
    let (empty_dir, full_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (empty, full) = (
        listening(empty_dir.path()).await,
        listening(full_dir.path()).await,
    );
    let secret_segment = filled(&full).await;
    let mut answers = Vec::new();
    for store in [&empty, &full] {
        let mut of_store = Vec::new();
        // Tenant b, and a's own gateway for another model of a.
        let mut names = store.sign("a").namespace;
        Arc::make_mut(&mut names).model = "another".into();
        let other_model = NamespaceSigner::new(&store.mesh).unwrap().sign(names);
        for namespace in [store.sign("b"), other_model] {
            for (path, request) in named_calls(namespace, secret_segment).into_iter().skip(1) {
                let secret = Some(store.mesh.secret.as_str());
                let (status, answer) = answer(store, &Method::POST, path, secret, request).await;
                let is_there = !path.ends_with("/piece");
                assert_eq!(status, if is_there { 200 } else { 404 }, "{path}");
                if path.ends_with("/segments") {
                    let mut reply: SegmentsReply = decode_bincode(&answer).unwrap();
                    reply.cursor.generation = 0;
                    assert_eq!(reply, SegmentsReply::default());
                } else if path.ends_with("/pull") {
                    let mut reply: PullReply = decode_bincode(&answer).unwrap();
                    assert_eq!(reply.deltas.len(), 2);
                    for delta in &mut reply.deltas {
                        let ScopeNews::Changes { delta, .. } = &mut delta.news else {
                            panic!("{delta:?}");
                        };
                        assert!(delta.events.is_empty() && delta.caught_up);
                        // This is random. All else is as in an empty store.
                        delta.cursor.generation = 0;
                    }
                    of_store.push((path, body(&reply)));
                } else {
                    of_store.push((path, answer));
                }
            }
        }
        answers.push(of_store);
    }
    assert_eq!(answers[0], answers[1]);
    // Uses, evictions and groups of b with the same names leave those of a unchanged.
    let secret = &full.mesh.secret;
    let url = format!("http://{}", full.server.addr().unwrap());
    let http = HttpDraftStore::new(MeshClient::new(&url, secret, PATIENCE).unwrap());
    let theirs = AppendRequest {
        namespace: full.sign("b"),
        updates: vec![update(1, 10, &[1]), update(2, 0, &[1])],
        waited_ms: 0,
        acknowledgement: None,
    };
    assert_eq!(http.append(theirs).await.unwrap().lengths, [0, 1]);
    let mut follower = Follower::default();
    follower.catch_up(&full, "b").await;
    assert_eq!(follower.texts.into_keys().collect::<Vec<_>>(), [2]);
    let mut follower = Follower::default();
    follower.catch_up(&full, "a").await;
    assert_eq!(follower.texts.len(), 59);
    assert!(follower.texts.values().all(|text| *text == [4_242; 50]));
    let refused = full.handle().erase(Default::default()).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::InvalidRequest);
    empty.stop().await;
    full.stop().await;
}
