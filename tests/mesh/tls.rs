//! A mesh whose services let only those in that present a certificate of the mesh's own authority.

use std::path::Path;

use anyhow::ensure;
use e2e::{Chat, HttpMesh, PATIENCE, Service, wait_until};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use refrain::config::MeshFile;
use refrain_protocol::ErrorKind;
use refrain_protocol::document::StoreStats;
use refrain_rpc::{HttpScheduler, Scheduler as _};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshConfig, MeshCredentials};
use refrain_service_kit::telemetry::Metrics;
use refrain_service_kit::tls::TlsConfig;

/// Writes an authority, and a certificate for the loopback address with its key.
fn write_files(folder: &Path) -> anyhow::Result<()> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_key = KeyPair::generate()?;
    let ca = authority.self_signed(&authority_key)?.pem();
    let issuer = Issuer::new(authority, authority_key);
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
    let certificate = certificate.signed_by(&key, &issuer)?.pem();
    std::fs::write(folder.join("ca.pem"), ca)?;
    std::fs::write(folder.join("cert.pem"), certificate)?;
    std::fs::write(folder.join("key.pem"), key.serialize_pem())?;
    Ok(())
}

fn with_tls(folder: &Path, service: Service, file: &mut MeshFile) {
    let path = |name: &str| folder.join(name);
    let tls = Some(TlsConfig {
        certificate: path("cert.pem"),
        key: path("key.pem"),
        client_ca: Some(path("ca.pem")),
    });
    match service {
        Service::Scheduler | Service::Standby => file.scheduler.http.tls = tls,
        Service::DraftStore => file.draft_store.http.tls = tls,
        Service::Engine(_) => file.engine.http.tls = tls,
        Service::Worker(_) => file.worker.http.tls = tls,
        Service::Gateway => {}
    }
    file.mesh = presenting(folder, file.mesh.clone());
}

fn presenting(folder: &Path, mesh: MeshConfig) -> MeshConfig {
    MeshConfig {
        ca: Some(folder.join("ca.pem")),
        certificate: Some(folder.join("cert.pem")),
        key: Some(folder.join("key.pem")),
        ..mesh
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn services_with_certificates_serve_each_other_and_nobody_else() -> anyhow::Result<()> {
    let (own, foreign) = (tempfile::tempdir()?, tempfile::tempdir()?);
    write_files(own.path())?;
    write_files(foreign.path())?;
    let tune = |service, file: &mut MeshFile| with_tls(own.path(), service, file);
    let mesh = HttpMesh::start_here_with_tls(1, tune).await?;
    let chat = Chat::new("Tell me a story about the sea.").max_tokens(24);
    let first = mesh.client().chat(&chat).await?;
    let second = mesh.client().chat(&chat).await?;
    ensure!(
        first.text == second.text,
        "{} / {}",
        first.text,
        second.text
    );

    let caller = |config: MeshConfig| {
        let credentials = MeshCredentials::open(&config, &Metrics::new()?)?;
        let client = MeshClient::with_credentials("", credentials, PATIENCE)?;
        anyhow::Ok(HttpScheduler::new(client.at(&mesh.url(Service::Scheduler))))
    };
    let keys = mesh.keys().clone();
    let member = presenting(own.path(), keys.clone());
    caller(member.clone())?.models().await?;
    let credentials = MeshCredentials::open(&member, &Metrics::new()?)?;
    let store = mesh.url(Service::DraftStore);
    let store = MeshClient::with_credentials(&store, credentials, PATIENCE)?;
    wait_until("the store has an output", async || {
        let stats: StoreStats = store.get_json("/internal/v1/stats").await.ok()?;
        (stats.documents > 0).then_some(())
    })
    .await;
    // The certificate does not replace the secret, nor the secret the certificate.
    let wrong_secret = MeshConfig {
        secret: "0".repeat(64),
        ..member.clone()
    };
    let refused = caller(wrong_secret)?.models().await.map(drop);
    ensure!(
        refused
            .as_ref()
            .is_err_and(|error| error.kind == ErrorKind::Unauthorized),
        "{refused:?}"
    );
    let unnamed = MeshConfig {
        certificate: None,
        key: None,
        ..member.clone()
    };
    let stranger = MeshConfig {
        certificate: presenting(foreign.path(), keys.clone()).certificate,
        key: presenting(foreign.path(), keys).key,
        ..member
    };
    for config in [unnamed, stranger] {
        let refused = caller(config)?.models().await.map(drop);
        let is_refused = refused.as_ref().is_err_and(|error| {
            [ErrorKind::Unavailable, ErrorKind::Upstream].contains(&error.kind)
        });
        ensure!(is_refused, "{refused:?}");
    }
    mesh.stop().await
}
