//! A mesh with troubles: its engine fails, its Redis is away, and a key ends soon. It has metrics that others lack.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use e2e::{Client, UpMesh, free_addr, serve_http};
use rcgen::{CertificateParams, KeyPair};
use refrain::config::MeshFile;
use refrain_service_kit::clock::unix_s;
use refrain_service_kit::mesh::{CredentialIssuer, MeshConfig, MeshRole};
use reqwest::Method;
use serde_json::json;
use tempfile::TempDir;

const MODEL: &str = "model-of-a-failing-engine";

/// The page of an engine, as SGLang has it.
const ENGINE_PAGE: &str =
    "sglang:num_running_reqs 1\nsglang:num_queue_reqs 2\nsglang:token_usage 0.5\n";

/// The mesh, and its folder.
pub(crate) struct TroubledMesh {
    mesh: UpMesh,
    operations: SocketAddr,
    dir: TempDir,
}

impl TroubledMesh {
    /// Starts the mesh in front of an engine that serves its model, and fails every request to generate.
    ///
    /// # Errors
    /// The mesh does not start.
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let engine = serve_http(|first_line, _| match first_line {
            line if line.starts_with("POST /generate ") => {
                let planned = json!({"error": {"message": "planned", "code": 500}});
                ("500 Internal Server Error", planned.to_string())
            }
            line if line.starts_with("GET /metrics ") => ("200 OK", ENGINE_PAGE.to_owned()),
            _ => (
                "200 OK",
                json!({"data": [{"id": MODEL, "max_model_len": 512}]}).to_string(),
            ),
        });
        let (engine, dir, operations) = (engine.await?, tempfile::tempdir()?, free_addr()?);
        let path = |name: &str| dir.path().join(name).display().to_string();
        write_certificate(&dir)?;
        let (issuer, _) = CredentialIssuer::generate()?;
        let now = unix_s();
        let credential = issuer.issue(MeshRole::Gateway, "gateway", now - 60, now + 3_600);
        std::fs::write(path("credential"), credential.context("no credential")?)?;
        let ends = refrain_accounts::tenants::file::expiry_text(now.cast_signed() + 2 * 86_400)?;
        std::fs::write(
            path("tenants.toml"),
            format!(
                "[[tenants]]\nname = \"acme\"\n[tenants.limits]\nrequests_per_minute = 1000000\n\
                 [[tenants.keys]]\nname = \"ci\"\nid = \"3f09c2a71b44\"\nsha256 = \"{}\"\nexpires_at = \"{ends}\"\n",
                "ab".repeat(32)
            ),
        )?;
        // Nobody listens on port 1, so there is no Redis.
        let settings = format!(
            "urls.engine = \"{engine}\"\n\
             [gateway]\ntenants_file = \"{}\"\noperations_listen = \"{operations}\"\n\
             [gateway.limits_redis]\nurl = \"redis://127.0.0.1:1\"\n\
             [gateway.operations_http.tls]\ncertificate = \"{}\"\nkey = \"{}\"\n\
             [worker.engine]\nkind = \"sglang\"\nmodel = \"{MODEL}\"\nfiles = \"builtin:refrain-tiny\"\n\
             [[gateway.models]]\nid = \"{MODEL}\"\nfiles = \"builtin:refrain-tiny\"\n",
            path("tenants.toml"),
            path("certificate.pem"),
            path("key.pem"),
        );
        let mesh = MeshConfig {
            secret: String::new(),
            credential_file: Some(dir.path().join("credential")),
            issuer_public_keys: vec![issuer.public_key()],
            ..MeshConfig::generate()?
        };
        let tune = |file: &mut MeshFile| {
            file.mesh = mesh.clone();
            file.worker.engine.retry_backoff_ms = 1;
            file.worker.engine.breaker_failures_max = 2;
            file.gateway.tuning.retry_backoff = Duration::from_millis(1);
        };
        let data = dir.path().join("data");
        let mesh = UpMesh::start_tuned(&data, &settings, tune).await?;
        Ok(TroubledMesh {
            mesh,
            operations,
            dir,
        })
    }

    /// The address of its metrics.
    pub(crate) fn target(&self) -> String {
        format!("https://{}", self.operations)
    }

    /// Asks the engine in vain, renews the certificate, and knocks at the operations listener without TLS.
    ///
    /// # Errors
    /// The mesh does not answer.
    pub(crate) async fn stir(&self) -> anyhow::Result<()> {
        let client = self.mesh.client();
        let body = json!({"model": MODEL, "prompt": "CREATE", "max_tokens": 5});
        let request = client.request(Method::POST, "/v1/completions").json(&body);
        client.send(request).await?;
        write_certificate(&self.dir)?;
        let plain = format!("http://{}", self.operations);
        // The listener closes the connection.
        let _ = Client::new(&plain, "").get("/healthz").await;
        Ok(())
    }

    /// Stops the mesh as a signal would.
    pub(crate) async fn stop(self) {
        self.mesh.stop().await;
    }
}

/// Writes a certificate for the loopback address that nobody has signed, with its key.
fn write_certificate(dir: &TempDir) -> anyhow::Result<()> {
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
    let certificate = certificate.self_signed(&key)?.pem();
    std::fs::write(dir.path().join("certificate.pem"), certificate)?;
    std::fs::write(dir.path().join("key.pem"), key.serialize_pem())?;
    Ok(())
}
