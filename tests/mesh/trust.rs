//! No service accepts calls without the mesh secret, and only the gateway can name a tenant.

use std::sync::Arc;

use anyhow::ensure;
use e2e::{Client, HttpMesh, PATIENCE, Service, TINY_MODEL};
use refrain_protocol::chunk::{ChunkBudget, ChunkRequest, DraftRules, Speculation, Urgency};
use refrain_protocol::document::{AppendRequest, TouchRequest};
use refrain_protocol::engine::Sampling;
use refrain_protocol::scheduling::{LeaseRequest, TenantWeight};
use refrain_protocol::{
    ApiError, ErrorKind, LeaseId, MESH_SECRET_HEADER, Namespace, RequestId, SignedNamespace,
};
use refrain_rpc::testing::ScopeReader;
use refrain_rpc::{
    DraftStore as _, HttpDraftStore, HttpScheduler, HttpWorkers, Scheduler as _, Workers as _,
};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use reqwest::Method;

const ENDPOINTS: &[(Service, &[&str], &[&str])] = &[
    (
        Service::Scheduler,
        &[
            "/internal/v1/lease",
            "/internal/v1/finish",
            "/internal/v1/heartbeat",
        ],
        &[
            "/internal/v1/models",
            "/internal/v1/workers",
            "/debug/state",
        ],
    ),
    (
        Service::Worker(0),
        &[
            "/internal/v1/chunk",
            "/internal/v1/cut",
            "/internal/v1/drain",
            "/internal/v1/order",
        ],
        &[],
    ),
    (
        Service::DraftStore,
        &[
            "/internal/v1/append",
            "/internal/v1/pull",
            "/internal/v1/touch",
        ],
        &["/internal/v1/stats"],
    ),
    (
        Service::Engine(0),
        &[
            "/engine/v1/step",
            "/engine/v1/close",
            "/engine/v1/abort",
            "/engine/v1/order",
            "/engine/v1/tokenize",
            "/engine/v1/detokenize",
        ],
        &["/engine/v1/capabilities", "/engine/v1/load"],
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn internal_listeners_serve_only_the_mesh() -> anyhow::Result<()> {
    let mesh = HttpMesh::start_here(1, "").await?;
    for (service, posts, gets) in ENDPOINTS {
        let client = mesh.client_of(*service);
        let posts = posts.iter().map(|path| (Method::POST, *path));
        for (method, path) in posts.chain(gets.iter().map(|path| (Method::GET, *path))) {
            for secret in [None, Some("0".repeat(64)), Some(String::new())] {
                let mut request = client.request(method.clone(), path).body("{}");
                if let Some(secret) = &secret {
                    request = request.header(MESH_SECRET_HEADER, secret);
                }
                let reply = client.send(request).await?;
                ensure!(
                    reply.status == 401,
                    "{path} answered {} to a stranger: {}",
                    reply.status,
                    reply.text
                );
            }
            // The same call with the secret passes the check, and then fails because its body is empty.
            let request = client
                .request(method, path)
                .body("{}")
                .header(MESH_SECRET_HEADER, &mesh.keys().secret);
            let reply = client.send(request).await?;
            ensure!(
                reply.status != 401 && reply.status != 404,
                "{path} answered {}: {}",
                reply.status,
                reply.text
            );
        }
    }
    // The gateway has no internal routes, and API keys give access to no other service.
    let reply = Client::new(&mesh.url(Service::Gateway), &mesh.keys().secret)
        .get("/v1/models")
        .await?;
    ensure!(
        reply.status == 401,
        "the mesh secret is no API key: {}",
        reply.status
    );
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_with_a_wrong_signature_is_refused_everywhere() -> anyhow::Result<()> {
    let mesh = HttpMesh::start_here(1, "").await?;
    let namespace = Namespace {
        tenant: "one".into(),
        model: TINY_MODEL.into(),
        tokenizer: "any".into(),
    };
    let stranger = NamespaceSigner::new(&MeshConfig::generate()?)?.sign(namespace.clone());
    // The gateway of this mesh has signed it, but for another tenant.
    let mut altered = NamespaceSigner::new(mesh.keys())?.sign(namespace);
    Arc::make_mut(&mut altered.namespace).tenant = "another".into();
    for signed in [stranger, altered] {
        for (call, outcome) in calls(&mesh, signed).await? {
            let kind = outcome.err().map(|error| error.kind);
            ensure!(
                kind == Some(ErrorKind::Unauthorized),
                "{call} answered {kind:?}"
            );
        }
    }
    mesh.stop().await
}

/// Makes every call that names a namespace, with the mesh secret.
async fn calls(
    mesh: &HttpMesh,
    namespace: SignedNamespace,
) -> anyhow::Result<Vec<(&'static str, Result<(), ApiError>)>> {
    let client = MeshClient::new("", &mesh.keys().secret, PATIENCE)?;
    let scheduler = HttpScheduler::new(client.at(&mesh.url(Service::Scheduler)));
    let store = HttpDraftStore::new(client.at(&mesh.url(Service::DraftStore)));
    let worker = HttpWorkers::new(client).at(&mesh.url(Service::Worker(0)));
    let lease = LeaseRequest {
        request: RequestId(1),
        namespace: namespace.clone(),
        group: None,
        session: None,
        class: Default::default(),
        weight: TenantWeight::default(),
        age_ms: 0,
        epoch_seen: 0,
        ended: None,
        expected_tokens: None,
        prefixes: Vec::new(),
        chunk_tokens: None,
        context_tokens: 1,
        generated_tokens: 0,
        max_new_tokens: 1,
        prefer: None,
        transferred: false,
        exclude: Vec::new(),
    };
    let chunk = ChunkRequest {
        resumes: None,
        alive_within_ms: None,
        transferred: false,
        lease: LeaseId(1),
        epoch: 1,
        request: RequestId(1),
        namespace: namespace.clone(),
        session: None,
        group: None,
        tokens: vec![1],
        prompt_len: 1,
        sampling: Sampling::default(),
        max_new_tokens: 1,
        chunk_tokens: None,
        speculation: Speculation::Off,
        drafts: DraftRules::default(),
        urgency: Urgency::default(),
        budget: ChunkBudget::default(),
        expected_tokens: None,
        prediction: Vec::new(),
    };
    let append = AppendRequest {
        namespace: namespace.clone(),
        updates: Vec::new(),
        waited_ms: 0,
        acknowledgement: None,
    };
    let reader = ScopeReader::new(namespace.clone());
    let touch = TouchRequest {
        namespace,
        documents: Vec::new(),
    };
    let worker: Arc<dyn refrain_rpc::Worker> = worker;
    Ok(vec![
        ("lease", scheduler.lease(lease).await.map(drop)),
        ("chunk", worker.chunk(chunk).await.map(drop)),
        ("append", store.append(append).await.map(drop)),
        ("pull", reader.read(&store).await.map(drop)),
        ("touch", store.touch(touch).await),
    ])
}
