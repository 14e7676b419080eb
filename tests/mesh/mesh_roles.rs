//! Credentials of roles: which role may call which internal route, and a mesh that has nothing else.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use e2e::{Chat, HttpMesh, PATIENCE, Service, refrain_binary, repository, wait_until};
use refrain::config::MeshFile;
use refrain_protocol::WorkerId;
use refrain_protocol::document::StoreStats;
use refrain_protocol::scheduling::{Heartbeat, HeartbeatReply};
use refrain_protocol::{ErrorKind, MESH_SECRET_HEADER};
use refrain_service_kit::clock;
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{CredentialIssuer, MeshRole};
use reqwest::Method;

use MeshRole::{DraftStore, Engine, Gateway, Operator, Worker};

const DRAFTERS: &[MeshRole] = &[Worker, Engine];

/// A method, a path, and the roles that may call it.
pub(crate) type RouteRoles = (&'static str, &'static str, &'static [MeshRole]);

/// Every internal route of every service, and the roles that may call it.
pub(crate) const ROUTES: &[(Service, &str, &[RouteRoles])] = &[
    (
        Service::Scheduler,
        "services/scheduler/src/http.rs",
        &[
            ("POST", "/internal/v1/lease", &[Gateway]),
            ("POST", "/internal/v1/finish", &[Gateway]),
            ("POST", "/internal/v1/heartbeat", &[Worker]),
            ("GET", "/internal/v1/models", &[Gateway, Operator]),
            ("GET", "/internal/v1/workers", &[Gateway, Operator]),
            ("GET", "/debug/state", &[Operator]),
        ],
    ),
    (
        Service::Worker(0),
        "services/worker/src/service/http.rs",
        &[
            ("POST", "/internal/v1/chunk", &[Gateway]),
            ("POST", "/internal/v1/cut", &[Gateway]),
            ("POST", "/internal/v1/drain", &[Operator]),
            ("POST", "/internal/v1/order", &[Gateway]),
            ("POST", "/internal/v1/forget", &[Operator]),
        ],
    ),
    (
        Service::Worker(1),
        "services/worker/src/adoption/http.rs",
        &[
            ("GET", "/internal/v1/engines", &[Gateway, Operator]),
            ("POST", "/internal/v1/engines/adopt", &[Gateway]),
            ("POST", "/internal/v1/engines/release", &[Gateway]),
        ],
    ),
    (
        Service::Engine(0),
        "services/reference-engine/src/service/http.rs",
        &[
            ("GET", "/engine/v1/capabilities", &[Worker]),
            ("GET", "/engine/v1/load", &[Worker]),
            ("GET", "/engine/v1/kv", &[Worker]),
            ("POST", "/engine/v1/kv/blocks", &[Engine]),
            ("POST", "/engine/v1/step", &[Worker]),
            ("POST", "/engine/v1/close", &[Worker]),
            ("POST", "/engine/v1/abort", &[Worker]),
            ("POST", "/engine/v1/order", &[Worker]),
            ("POST", "/engine/v1/forget", &[Worker]),
            ("POST", "/engine/v1/tokenize", &[Worker]),
            ("POST", "/engine/v1/detokenize", &[Worker]),
        ],
    ),
    (
        Service::DraftStore,
        "services/draft-store/src/service/routes.rs",
        &[
            ("POST", "/internal/v1/append", DRAFTERS),
            ("POST", "/internal/v1/pull", DRAFTERS),
            ("POST", "/internal/v1/touch", DRAFTERS),
            (
                "POST",
                "/internal/v1/groups/register",
                &[Gateway, Worker, Engine],
            ),
            ("POST", "/internal/v1/output-lengths", &[Gateway]),
            ("POST", "/internal/v1/segments", DRAFTERS),
            ("POST", "/internal/v1/segments/piece", DRAFTERS),
            ("POST", "/internal/v1/documents", DRAFTERS),
            ("POST", "/internal/v1/documents/unknown", DRAFTERS),
            ("POST", "/internal/v1/acceptance-stats", DRAFTERS),
            ("POST", "/internal/v1/tenants", &[Gateway, Operator]),
            ("POST", "/internal/v1/tenants/change", &[Gateway, Operator]),
            ("POST", "/internal/v1/usage/record", &[Gateway]),
            ("POST", "/internal/v1/usage/rows", &[Gateway, Operator]),
            ("GET", "/internal/v1/replica", &[DraftStore, Operator]),
            (
                "GET",
                "/internal/v1/directory",
                &[Gateway, Worker, Engine, DraftStore, Operator],
            ),
            ("POST", "/internal/v1/join/offer", &[DraftStore]),
            ("POST", "/internal/v1/join/list", &[DraftStore]),
            ("POST", "/internal/v1/join/piece", &[DraftStore]),
            ("POST", "/internal/v1/join/documents", &[DraftStore]),
            ("GET", "/internal/v1/stats", &[Operator]),
            ("GET", "/admin/v1/stats", &[Operator]),
            ("POST", "/admin/v1/import", &[Operator]),
            ("POST", "/admin/v1/export", &[Operator]),
            ("POST", "/admin/v1/verify", &[Operator]),
            ("POST", "/admin/v1/compact", &[Operator]),
            ("POST", "/admin/v1/erase", &[Operator]),
            ("POST", "/admin/v1/confirm", &[Operator]),
            ("POST", "/admin/v1/usage/erase", &[Operator]),
            ("GET", "/debug/state", &[Operator]),
        ],
    ),
];

/// The paths in the table of a service's roles, and how many routes it has.
fn routes_in_source(path: &str) -> anyhow::Result<(BTreeSet<String>, usize)> {
    let text = std::fs::read_to_string(repository().join(path))?;
    let quoted = text.split('"').skip(1).step_by(2);
    let is_internal = |text: &&str| {
        let starts = ["/internal/v1/", "/engine/v1/", "/admin/v1/", "/debug/"];
        starts.iter().any(|start| text.starts_with(start))
    };
    let paths = quoted.filter(is_internal).map(str::to_owned).collect();
    let open = text.matches("get(\"/engine_metrics\"").count();
    let routes = text.matches(".service(get(\"").count() + text.matches(".service(post(\"").count();
    let resources = text.matches("web::resource(\"").count();
    Ok((paths, routes + resources - open))
}

#[test]
fn the_table_of_this_test_has_every_internal_route() -> anyhow::Result<()> {
    for (_, source, routes) in ROUTES {
        let (paths, count) = routes_in_source(source)?;
        let known: BTreeSet<String> = routes.iter().map(|(_, path, _)| (*path).into()).collect();
        ensure!(paths == known, "{source}: {paths:?}");
        ensure!(count == routes.len(), "{source} has {count} routes");
    }
    Ok(())
}

/// A credential that is valid from an hour ago, for `for_s` seconds.
fn credential(issuer: &CredentialIssuer, role: MeshRole, name: &str, for_s: u64) -> String {
    let from_s = clock::unix_s() - 3_600;
    issuer
        .issue(role, name, from_s, from_s + for_s)
        .unwrap_or_default()
}

const VALID_S: u64 = 7_200;

/// The role and the name that a service of a test's mesh proves.
fn own_role(service: Service) -> (MeshRole, String) {
    match service {
        Service::Scheduler | Service::Standby => (MeshRole::Scheduler, "scheduler".into()),
        Service::DraftStore => (DraftStore, "store".into()),
        Service::Engine(number) => (Engine, format!("engine-{number}")),
        Service::Worker(number) => (Worker, format!("worker-{number}")),
        Service::Gateway => (Gateway, "gateway".into()),
    }
}

/// Writes the credential of a service, and returns its file.
fn write(folder: &Path, issuer: &CredentialIssuer, service: Service) -> anyhow::Result<PathBuf> {
    let (role, name) = own_role(service);
    let path = folder.join(&name);
    std::fs::write(&path, credential(issuer, role, &name, VALID_S))?;
    Ok(path)
}

/// The second worker has no engine, and adopts those that register.
pub(crate) const SECOND_ADOPTS: &str = "[worker-1.adoption]\nengines_max = 1\n";

async fn start(
    workers: usize,
    settings: &str,
    folder: &Path,
    issuer: &CredentialIssuer,
) -> anyhow::Result<HttpMesh> {
    let tune = |service, file: &mut MeshFile| {
        file.mesh.secret.clear();
        file.mesh.issuer_public_keys = vec![issuer.public_key()];
        file.mesh.credential_file = write(folder, issuer, service).ok();
    };
    Box::pin(HttpMesh::start_here_tuned(workers, settings, tune)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_internal_route_is_for_its_roles_only() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (issuer, _) = CredentialIssuer::generate()?;
    let (stranger, _) = CredentialIssuer::generate()?;
    let mesh = start(2, SECOND_ADOPTS, folder.path(), &issuer).await?;
    let mut calls = 0;
    for (service, _, routes) in ROUTES {
        let client = mesh.client_of(*service);
        for (method, path, allowed) in *routes {
            let status = async |carried: Option<&str>| {
                let method: Method = method.parse()?;
                let mut request = client.request(method, path).body("{}");
                if let Some(carried) = carried {
                    request = request.header(MESH_SECRET_HEADER, carried);
                }
                anyhow::Ok(client.send(request).await?.status)
            };
            ensure!(status(None).await? == 401, "{path} without anything");
            let secret = &mesh.keys().secret;
            ensure!(status(Some(secret)).await? == 401, "{path} with a secret");
            for role in MeshRole::ALL {
                let foreign = credential(&stranger, role, "x", VALID_S);
                ensure!(
                    status(Some(&foreign)).await? == 401,
                    "{path}: foreign {role}"
                );
                let expired = credential(&issuer, role, "x", 3_599);
                ensure!(
                    status(Some(&expired)).await? == 401,
                    "{path}: expired {role}"
                );
                let right = credential(&issuer, role, "x", VALID_S);
                let status = status(Some(&right)).await?;
                calls += 1;
                let is_let_in = ![401, 403, 405].contains(&status);
                ensure!(
                    is_let_in == allowed.contains(&role) && (is_let_in || status == 403),
                    "{path} answers {status} to the role {role}"
                );
            }
        }
    }
    ensure!(calls == 6 * 55, "{calls} calls");
    mesh.stop().await
}

fn heartbeat(worker: &str) -> Heartbeat {
    Heartbeat {
        worker: WorkerId(worker.into()),
        incarnation: 1,
        url: "http://127.0.0.1:1".into(),
        model: "m".into(),
        tokenizer: "t".into(),
        max_context: 1,
        max_running: 4_096,
        running: Vec::new(),
        epoch_seen: 0,
        draining: false,
        trouble: None,
        leaves: false,
        compiles_forms: false,
        eagle3: None,
        fallback: None,
        state: None,
        kv: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_reports_under_anothers_name_is_refused() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (issuer, _) = CredentialIssuer::generate()?;
    let mesh = start(1, "", folder.path(), &issuer).await?;
    let url = mesh.url(Service::Scheduler);
    let report = async |role, own: &str, named: &str| {
        let carried = credential(&issuer, role, own, VALID_S);
        let client = MeshClient::new(&url, &carried, PATIENCE)?;
        let path = "/internal/v1/heartbeat";
        let heartbeat = heartbeat(named);
        let reply = client.post_json::<_, HeartbeatReply>(path, &heartbeat, None);
        anyhow::Ok(reply.await.map(drop).map_err(|error| error.kind))
    };
    ensure!(report(Worker, "evil", "worker-0").await? == Err(ErrorKind::Forbidden));
    ensure!(report(Engine, "worker-0", "worker-0").await? == Err(ErrorKind::Forbidden));
    ensure!(report(Worker, "evil", "evil").await? == Ok(()));
    // A worker speaks for the engines that it has adopted, and for those of no other.
    ensure!(report(Worker, "evil", "evil@10.0.0.1:1").await? == Ok(()));
    ensure!(report(Worker, "evil", "worker-0@10.0.0.1:1").await? == Err(ErrorKind::Forbidden));
    ensure!(report(Worker, "evil", "evil2@10.0.0.1:1").await? == Err(ErrorKind::Forbidden));
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_with_credentials_only_serve_draft_and_are_administered() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (issuer, _) = CredentialIssuer::generate()?;
    let credential_of = |service| write(folder.path(), &issuer, service);
    let public_key = issuer.public_key();
    let mesh = HttpMesh::start_children_with_credentials(2, &public_key, credential_of).await?;
    mesh.workers_report(2).await;
    let chat = Chat::new("Tell me a story about the sea.").max_tokens(24);
    let first = mesh.client().chat(&chat).await?;
    let operator = credential(&issuer, Operator, "me", VALID_S);
    let store = mesh.url(Service::DraftStore);
    let store = MeshClient::new(&store, &operator, PATIENCE)?;
    wait_until("the store has the output", async || {
        let stats: StoreStats = store.get_json("/admin/v1/stats").await.ok()?;
        (stats.documents > 0).then_some(())
    })
    .await;
    let second = mesh.client().chat(&chat).await?;
    ensure!(
        first.text == second.text,
        "{} / {}",
        first.text,
        second.text
    );
    // The command for operators takes their credential, and that of a worker is refused.
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).map(|()| path.display().to_string())
    };
    let as_operator = file("operator", &operator)?;
    let as_worker = file(
        "a-worker",
        &credential(&issuer, Worker, "worker-0", VALID_S),
    )?;
    let url = mesh.url(Service::DraftStore);
    for (path, is_allowed) in [(as_operator, true), (as_worker, false)] {
        let arguments = ["store", "stats", "--url", &url, "--credential-file", &path];
        let output = std::process::Command::new(refrain_binary()?)
            .args(arguments)
            .output()
            .context("refrain store")?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success() == is_allowed, "{path}: {text}");
        ensure!(is_allowed || text.contains("role worker"), "{text}");
    }
    mesh.stop().await
}
