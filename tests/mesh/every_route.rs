//! Every route of every listener, and every kind of key, token and secret: who gets in.
//!
//! `mesh_roles.rs` has the internal routes, and which role may call each. `trust.rs` has signatures of namespaces.

use anyhow::{Context as _, Error, ensure};
use e2e::{Client, HttpMesh, free_addr, repository};
use refrain_accounts::OperatorToken;
use refrain_accounts::tenants::file::{
    KeyEndpoint, KeyEntry, TenantEntry, TenantsFile, expiry_text,
};
use refrain_accounts::tenants::key::NewKey;
use refrain_protocol::{MESH_SECRET_HEADER, TenantName};
use refrain_service_kit::clock;
use reqwest::Method;
use serde_json::json;

use crate::mesh_roles::{ROUTES, SECOND_ADOPTS};

/// The guard of a route.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Guard {
    /// Everybody may call it.
    Open,
    /// A key with this endpoint in its scope.
    Key(KeyEndpoint),
    /// Any valid key.
    AnyKey,
    /// The token of an operator.
    Operator,
    /// The mesh secret.
    Mesh,
}

use Guard::{AnyKey, Key, Mesh, Open, Operator};

/// A method, a path and its guard.
type Route = (&'static str, &'static str, Guard);

const PUBLIC: &[Route] = &[
    ("POST", "/v1/chat/completions", Key(KeyEndpoint::Chat)),
    ("POST", "/v1/completions", Key(KeyEndpoint::Completions)),
    ("POST", "/v1/messages", Key(KeyEndpoint::Messages)),
    (
        "POST",
        "/v1/messages/count_tokens",
        Key(KeyEndpoint::Messages),
    ),
    ("POST", "/v1/responses", Key(KeyEndpoint::Responses)),
    (
        "POST",
        "/v1/responses/input_tokens",
        Key(KeyEndpoint::Responses),
    ),
    ("GET", "/v1/responses/resp_0", Key(KeyEndpoint::Responses)),
    (
        "DELETE",
        "/v1/responses/resp_0",
        Key(KeyEndpoint::Responses),
    ),
    (
        "GET",
        "/v1/responses/resp_0/input_items",
        Key(KeyEndpoint::Responses),
    ),
    (
        "POST",
        "/v1/responses/resp_0/cancel",
        Key(KeyEndpoint::Responses),
    ),
    ("POST", "/tokenize", Key(KeyEndpoint::Tokenize)),
    ("POST", "/detokenize", Key(KeyEndpoint::Tokenize)),
    ("GET", "/v1/models", AnyKey),
    ("GET", "/v1/models/refrain-tiny", AnyKey),
    ("GET", "/health", Open),
    ("GET", "/ping", Open),
    ("POST", "/ping", Open),
    ("GET", "/version", Open),
];

/// Routes that every listener has. The public one lacks the metrics where there is one for operators.
const EVERYWHERE: &[Route] = &[("GET", "/healthz", Open), ("GET", "/readyz", Open)];

/// `/admin/try` is missing: it asks for a key of a tenant besides, see the gateway's own tests.
const OPERATIONS: &[Route] = &[
    ("GET", "/metrics", Open),
    ("GET", "/version", Open),
    ("GET", "/admin/tenants", Operator),
    ("POST", "/admin/tenants", Operator),
    ("GET", "/admin/tenants/acme", Operator),
    ("PATCH", "/admin/tenants/acme", Operator),
    ("DELETE", "/admin/tenants/acme", Operator),
    ("GET", "/admin/tenants/acme/keys", Operator),
    ("POST", "/admin/tenants/acme/keys", Operator),
    ("DELETE", "/admin/keys/x", Operator),
    ("POST", "/admin/keys/x/rotate", Operator),
    ("GET", "/admin/usage", Operator),
    ("GET", "/admin/figures", Operator),
    ("POST", "/admin/workers/x/drain", Operator),
    ("DELETE", "/admin/workers/x/drain", Operator),
    ("POST", "/admin/erasures", Operator),
    ("POST", "/admin/compactions", Operator),
    ("GET", "/admin/v1/stats", Operator),
    ("POST", "/admin/v1/import", Operator),
    ("POST", "/admin/v1/export", Operator),
    ("POST", "/admin/v1/verify", Operator),
    ("POST", "/admin/v1/compact", Operator),
    ("POST", "/admin/v1/erase", Operator),
    ("POST", "/admin/v1/confirm", Operator),
    ("POST", "/admin/v1/usage/rows", Operator),
    ("POST", "/admin/v1/usage/erase", Operator),
    ("GET", "/console/", Open),
    ("GET", "/console/main.js", Open),
];

/// The listener for trainers asks nobody for anything.
const TRAINER_ROUTES: usize = 84;

/// Routes that the listener for trainers has as others do.
const SHARED: [&str; 8] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/models",
    "/health",
    "/metrics",
    "/ping",
];

/// The routes of the listener for trainers, as its source has them.
fn trainer_routes() -> anyhow::Result<Vec<(&'static str, String)>> {
    let path = "services/trainer/src/routes.rs";
    let source = std::fs::read_to_string(repository().join(path))?;
    let (passed_on, own) = source
        .split_once("pub(super) fn add")
        .context("the table has another form")?;
    let quoted = |text: &str| -> Vec<String> {
        let words = text.split('"').skip(1).step_by(2);
        let paths = words.filter(|word| word.starts_with('/') && !word.contains("{{"));
        let named = |path: &str| path.replace("{id:.*}", "w0").replace("{id}", "w0");
        paths.map(named).collect()
    };
    let mut routes: Vec<_> = quoted(passed_on)
        .into_iter()
        .map(|path| ("POST", path))
        .collect();
    for path in quoted(own) {
        let is_post = own.contains(&format!("post(\"{path}\""))
            || own.contains(&format!("agent_route(\"{path}\""))
            || own.contains(&format!("post(\n            \"{path}\""));
        routes.push((if is_post { "POST" } else { "GET" }, path));
    }
    routes.push(("POST", "/workers".to_owned()));
    routes.push(("DELETE", "/workers/w0".to_owned()));
    routes.push(("POST", "/sessions".to_owned()));
    routes.push(("DELETE", "/sessions/w0".to_owned()));
    Ok(routes)
}

/// Something that a caller presents.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Credential {
    Nothing,
    UnknownKey,
    ExpiredKey,
    RevokedKey,
    /// A key for everything but the route's endpoint.
    OutOfScopeKey,
    RightKey,
    OtherTenantsKey,
    UnknownOperator,
    RightOperator,
    WrongSecret,
    RightSecret,
}

use Credential::{
    ExpiredKey, Nothing, OtherTenantsKey, OutOfScopeKey, RevokedKey, RightKey, RightOperator,
    RightSecret, UnknownKey, UnknownOperator, WrongSecret,
};

const CREDENTIALS: [Credential; 11] = [
    Nothing,
    UnknownKey,
    ExpiredKey,
    RevokedKey,
    OutOfScopeKey,
    RightKey,
    OtherTenantsKey,
    UnknownOperator,
    RightOperator,
    WrongSecret,
    RightSecret,
];

/// The status with which a caller is turned away, or `None` if it gets in.
fn refusal(guard: Guard, credential: Credential) -> Option<u16> {
    let gets_in = match guard {
        Open => true,
        Key(_) if credential == OutOfScopeKey => return Some(403),
        Key(_) => [RightKey, OtherTenantsKey].contains(&credential),
        AnyKey => [RightKey, OtherTenantsKey, OutOfScopeKey].contains(&credential),
        Operator => credential == RightOperator,
        Mesh => credential == RightSecret,
    };
    (!gets_in).then_some(401)
}

const ENDPOINTS: [KeyEndpoint; 5] = [
    KeyEndpoint::Chat,
    KeyEndpoint::Completions,
    KeyEndpoint::Messages,
    KeyEndpoint::Responses,
    KeyEndpoint::Tokenize,
];

/// The keys, tokens and secrets.
struct Ring {
    expired: String,
    revoked: String,
    right: String,
    others: String,
    /// For each endpoint, a key for everything else.
    all_but: Vec<(KeyEndpoint, String)>,
    unknown_operator: String,
    operator: String,
    secret: String,
}

impl Ring {
    /// A request of a caller. Keys and tokens come as bearers, secrets in their header.
    fn present(
        &self,
        request: reqwest::RequestBuilder,
        credential: Credential,
        guard: Guard,
    ) -> reqwest::RequestBuilder {
        let bearer = match credential {
            Nothing => return request,
            WrongSecret => return request.header(MESH_SECRET_HEADER, "an-earlier-secret"),
            RightSecret => {
                return request
                    .header(MESH_SECRET_HEADER, &self.secret)
                    .bearer_auth(&self.secret);
            }
            UnknownKey => "rk-unknown",
            ExpiredKey => &self.expired,
            RevokedKey => &self.revoked,
            OutOfScopeKey => {
                let of = self
                    .all_but
                    .iter()
                    .find(|(but, _)| guard == Key(*but) || guard == AnyKey);
                of.map_or("rk-unknown", |(_, key)| key)
            }
            RightKey => &self.right,
            OtherTenantsKey => &self.others,
            UnknownOperator => &self.unknown_operator,
            RightOperator => &self.operator,
        };
        request.bearer_auth(bearer)
    }
}

/// Makes a key of a tenant. The entry has the rest.
fn add(tenant: &mut TenantEntry, entry: KeyEntry) -> anyhow::Result<String> {
    let made = NewKey::random()?;
    tenant.keys.push(KeyEntry {
        name: format!("key {}", tenant.keys.len()),
        id: made.id,
        sha256: made.sha256,
        ..entry
    });
    Ok(made.key)
}

/// The public routes that are in the source and not in the table.
fn unknown_public_routes() -> anyhow::Result<Vec<String>> {
    let source = std::fs::read_to_string(repository().join("services/gateway/src/http.rs"))?;
    let routes = source.split("operations_routes").next().unwrap_or_default();
    let paths = routes.split('"').skip(1).step_by(2);
    let is_known = |path: &str| {
        let pattern = path
            .replace("{id}", "resp_0")
            .replace("{id:.*}", "refrain-tiny");
        PUBLIC.iter().any(|(_, known, _)| *known == pattern)
    };
    let unknown = paths.filter(|path| path.starts_with('/') && !is_known(path));
    Ok(unknown.map(str::to_owned).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_lets_in_whom_its_guard_allows_and_nobody_else() -> anyhow::Result<()> {
    let unknown = unknown_public_routes()?;
    ensure!(unknown.is_empty(), "not in the table: {unknown:?}");
    let dir = tempfile::tempdir()?;
    let now = clock::unix_s().cast_signed();
    let named = |name: &str| {
        anyhow::Ok(TenantEntry::named(
            name.parse::<TenantName>().map_err(Error::msg)?,
        ))
    };
    let (mut acme, mut bolt) = (named("acme")?, named("bolt")?);
    let revoked = add(&mut acme, KeyEntry::default())?;
    acme.keys.clear();
    let expired = KeyEntry {
        expires_at: Some(expiry_text(now - 1)?),
        ..KeyEntry::default()
    };
    let expired = add(&mut acme, expired)?;
    let all_but = ENDPOINTS.map(|but| {
        let endpoints = ENDPOINTS.into_iter().filter(|endpoint| *endpoint != but);
        let entry = KeyEntry {
            endpoints: endpoints.collect(),
            ..KeyEntry::default()
        };
        anyhow::Ok((but, add(&mut acme, entry)?))
    });
    let all_but = all_but.into_iter().collect::<anyhow::Result<_>>()?;
    let right = add(&mut acme, KeyEntry::default())?;
    let others = add(&mut bolt, KeyEntry::default())?;
    let tenants = TenantsFile {
        tenants: vec![acme, bolt],
    };
    std::fs::write(dir.path().join("tenants.toml"), tenants.to_text()?)?;
    let (operator, operations) = (OperatorToken::random()?, free_addr()?);
    let trainer = free_addr()?;
    let settings = format!(
        "[gateway]\nconsole = true\noperations_listen = \"{operations}\"\ntenants_file = \"{0}/tenants.toml\"\n\
         audit_file = \"{0}/audit.jsonl\"\n\
         operators = [{{ name = \"ann\", token_sha256 = \"{1}\" }}]\n\
         [gateway.trainer]\nlisten = \"{trainer}\"\ntenant = \"acme\"\n{SECOND_ADOPTS}",
        dir.path().display(),
        operator.sha256
    );
    let mesh = Box::pin(HttpMesh::start_here(2, &settings)).await?;
    let ring = Ring {
        expired,
        revoked,
        right,
        others,
        all_but,
        unknown_operator: OperatorToken::random()?.token,
        operator: operator.token,
        secret: mesh.keys().secret.clone(),
    };
    let public = mesh.client().without_key();
    let operations = Client::new(&format!("http://{operations}"), "").without_key();
    let internal = ROUTES.iter().map(|(service, _, routes)| {
        let routes = routes
            .iter()
            .map(|(method, path, _)| (*method, *path, Mesh));
        (mesh.client_of(*service).without_key(), routes.collect())
    });
    let of_gateway = [
        (public.clone(), [PUBLIC, EVERYWHERE].concat()),
        (operations.clone(), [OPERATIONS, EVERYWHERE].concat()),
    ];
    let listeners: Vec<(Client, Vec<Route>)> = of_gateway.into_iter().chain(internal).collect();
    let mut calls = 0;
    for (listener, routes) in &listeners {
        for (method, path, guard) in routes {
            for credential in CREDENTIALS {
                let call: Method = method.parse()?;
                // The body is a fault everywhere, so nothing happens even where the caller gets in.
                let request = listener.request(call, path).body("{");
                let reply = listener
                    .send(ring.present(request, credential, *guard))
                    .await?;
                let status = reply.status;
                let case = format!("{method} {path} with {credential:?} gets {status}");
                match refusal(*guard, credential) {
                    Some(refusal) => ensure!(status == refusal, "{case}, not {refusal}"),
                    None => ensure!(
                        ![401, 403, 405].contains(&status) && status < 500,
                        "{case}: {}",
                        reply.text
                    ),
                }
                calls += 1;
            }
        }
    }
    let routes: usize = listeners.iter().map(|(_, routes)| routes.len()).sum();
    ensure!(
        calls == routes * CREDENTIALS.len() && routes > 70,
        "{calls}"
    );

    // The listener for trainers lets everybody in, and has nothing of the others.
    let trainer = Client::new(&format!("http://{trainer}"), "").without_key();
    let of_trainers = trainer_routes()?;
    ensure!(
        of_trainers.len() == TRAINER_ROUTES,
        "{} routes of trainers",
        of_trainers.len()
    );
    for (method, path) in &of_trainers {
        for credential in CREDENTIALS {
            let request = trainer.request(method.parse()?, path).body("{");
            let request = ring.present(request, credential, Open);
            let reply = trainer.send(request).await?;
            ensure!(
                ![401, 403, 405].contains(&reply.status) && reply.status < 500,
                "{method} {path} with {credential:?} gets {}: {}",
                reply.status,
                reply.text
            );
        }
        let is_shared = SHARED.contains(&path.as_str());
        for listener in [&public, &operations] {
            let reply = listener
                .send(listener.request(method.parse()?, path).body("{"))
                .await?;
            ensure!(
                is_shared || reply.status == 404,
                "{method} {path}: {}",
                reply.status
            );
        }
    }
    let of_others = [OPERATIONS, PUBLIC].concat();
    for (method, path, guard) in of_others {
        let is_shared = SHARED.contains(&path);
        for credential in [RightKey, RightOperator, RightSecret] {
            let request = trainer.request(method.parse()?, path).body("{");
            let reply = trainer
                .send(ring.present(request, credential, guard))
                .await?;
            ensure!(
                is_shared || reply.status == 404,
                "{method} {path}: {}",
                reply.status
            );
        }
    }

    // No listener has the routes of another one, whatever the caller presents.
    let is_elsewhere = |path: &str| {
        let starts = ["/admin", "/console", "/metrics"];
        starts.iter().any(|start| path.starts_with(start))
    };
    let misplaced = [
        (&public, OPERATIONS.to_vec()),
        (&operations, PUBLIC.to_vec()),
        (&public, listeners[2].1.clone()),
        (&operations, listeners[2].1.clone()),
    ];
    for (listener, routes) in misplaced {
        for (method, path, guard) in routes {
            let is_shared = guard == Open && !is_elsewhere(path);
            if is_shared {
                continue;
            }
            for credential in [RightKey, RightOperator, RightSecret] {
                let request = listener.request(method.parse()?, path).body("{");
                let reply = listener
                    .send(ring.present(request, credential, guard))
                    .await?;
                ensure!(reply.status == 404, "{method} {path}: {}", reply.status);
            }
        }
    }

    // One tenant cannot read a response of another one.
    let body = json!({"model": "refrain-tiny", "input": "Hi", "max_output_tokens": 2}).to_string();
    let request = public.request(Method::POST, "/v1/responses").body(body);
    let stored = public.send(request.bearer_auth(&ring.right)).await?;
    let id = stored.json()["id"].as_str().map(str::to_owned);
    let path = format!("/v1/responses/{}", id.context(stored.text)?);
    for (key, status) in [(&ring.others, 404), (&ring.right, 200)] {
        let request = public.request(Method::GET, &path).bearer_auth(key);
        ensure!(public.send(request).await?.status == status, "{path}");
    }
    mesh.stop().await
}
