//! `refrain health`: asks a running process whether it can serve, for images without a shell.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use refrain_service_kit::mesh::MeshConfig;
use reqwest::Identity;

use crate::command;
use crate::config::MeshFile;
use crate::role::Role;

/// Arguments of `refrain health`.
#[derive(Args)]
pub struct HealthArgs {
    /// The command that started the process.
    #[arg(long, env = "REFRAIN_ROLE", default_value = "up", value_parser = role())]
    role: Role,
    /// The configuration file of the process, if it has one.
    #[arg(long, env = "REFRAIN_CONFIG")]
    config: Option<PathBuf>,
    /// In place of the configuration: base URL of a listener, such as `http://127.0.0.1:8202`.
    #[arg(long)]
    url: Option<String>,
    /// Ask only whether the process lives, as a probe does that restarts it otherwise.
    #[arg(long)]
    alive: bool,
    /// Milliseconds that the answer may take.
    #[arg(long, default_value_t = 3_000, value_parser = clap::value_parser!(u64).range(1..))]
    timeout_ms: u64,
}

/// Reads the name of a command that starts services.
pub(crate) fn role() -> impl TypedValueParser<Value = Role> {
    PossibleValuesParser::new(Role::ALL.map(Role::command)).try_map(|name| {
        let mut all = Role::ALL.into_iter();
        all.find(|role| role.command() == name)
            .ok_or("there is no such role")
    })
}

/// Asks the process. It is an error if the process cannot serve now.
///
/// # Errors
/// The configuration has faults, nobody answers in time, or the process is not ready and says why.
pub fn run(args: &HealthArgs) -> anyhow::Result<()> {
    let (base, identity) = match &args.url {
        Some(url) => (url.trim_end_matches('/').to_owned(), None),
        None => {
            let file = MeshFile::load(args.role, args.config.as_deref())?;
            let (url, wants_certificate) = listener_url(args.role, &file)?;
            (url, identity(&file.mesh, wants_certificate)?)
        }
    };
    let path = if args.alive { "healthz" } else { "readyz" };
    let timeout = Duration::from_millis(args.timeout_ms);
    command::run(ask(format!("{base}/{path}"), identity, timeout))
}

async fn ask(url: String, identity: Option<Identity>, timeout: Duration) -> anyhow::Result<()> {
    let client = reqwest::Client::builder()
        .timeout(timeout)
        .no_proxy()
        // The certificate names the host of the service. The process on this machine is asked by a loopback address.
        .danger_accept_invalid_certs(true);
    let client = match identity {
        Some(identity) => client.identity(identity).build()?,
        None => client.build()?,
    };
    let answer = client.get(&url).send().await;
    let answer = answer.with_context(|| format!("{url} does not answer"))?;
    let status = answer.status();
    let text = answer.text().await.unwrap_or_default();
    ensure!(
        status.is_success(),
        "{url} answers with status {}: {}",
        status.as_u16(),
        text.trim()
    );
    println!("{}", text.trim());
    Ok(())
}

/// The certificate that the process presents to others of the mesh, for a listener that asks for one.
fn identity(mesh: &MeshConfig, is_wanted: bool) -> anyhow::Result<Option<Identity>> {
    let (true, Some(certificate), Some(key)) = (is_wanted, &mesh.certificate, &mesh.key) else {
        return Ok(None);
    };
    let read = |path: &PathBuf| std::fs::read(path).with_context(|| path.display().to_string());
    let pem = [read(certificate)?, read(key)?].join(&b'\n');
    let identity = Identity::from_pem(&pem).context("mesh.certificate and mesh.key")?;
    Ok(Some(identity))
}

/// The base URL at which this machine reaches the listener with `/readyz` of a role, and whether it asks for a
/// certificate.
fn listener_url(role: Role, file: &MeshFile) -> anyhow::Result<(String, bool)> {
    let gateway = &file.gateway;
    let (key, listen, http) = match role {
        Role::Up | Role::Gateway => match gateway.operations_listen {
            Some(listen) => (
                "gateway.operations_listen",
                Some(listen),
                &gateway.operations_http,
            ),
            None => ("gateway.listen", gateway.listen.parse().ok(), &gateway.http),
        },
        Role::Scheduler => (
            "scheduler.listen",
            file.scheduler.listen,
            &file.scheduler.http,
        ),
        Role::Worker => ("worker.listen", file.worker.listen, &file.worker.http),
        Role::DraftStore => (
            "draft_store.listen",
            file.draft_store.listen,
            &file.draft_store.http,
        ),
        Role::ReferenceEngine => ("engine.listen", file.engine.listen, &file.engine.http),
    };
    let listen = listen.with_context(|| format!("{key} is missing"))?;
    if listen.port() == 0 {
        bail!("{key} has port 0, so the port is known to the process alone; give --url");
    }
    let wants_certificate = http.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    ensure!(
        !wants_certificate || file.mesh.certificate.is_some(),
        "the listener {key} asks for a certificate of its callers; set mesh.certificate, which this command presents"
    );
    let url = format!("{}://{}", http.scheme(), reachable(listen));
    Ok((url, wants_certificate))
}

/// An address that leads to a listener: one that listens on all addresses is reached by a loopback address.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    use actix_web::{App, HttpResponse, HttpServer, web};

    use super::*;

    fn url(role: Role, toml: &str) -> Result<String, String> {
        let file: MeshFile = toml::from_str(toml).unwrap();
        let found = listener_url(role, &file).map_err(|error| error.to_string())?;
        Ok(found.0)
    }

    #[test]
    fn the_listener_of_the_role_is_asked_by_an_address_of_this_machine() {
        let file = "[gateway]\nlisten = \"0.0.0.0:8080\"\noperations_listen = \"[::]:8090\"\n\
                    [gateway.operations_http.tls]\ncertificate = \"c\"\nkey = \"k\"\n\
                    [scheduler]\nlisten = \"10.0.0.7:8201\"\n\
                    [draft_store]\nlisten = \"0.0.0.0:0\"";
        assert_eq!(url(Role::Gateway, file).unwrap(), "https://[::1]:8090");
        assert_eq!(url(Role::Scheduler, file).unwrap(), "http://10.0.0.7:8201");
        assert!(url(Role::DraftStore, file).unwrap_err().contains("--url"));
        assert!(
            url(Role::Worker, file)
                .unwrap_err()
                .contains("worker.listen")
        );
        assert_eq!(url(Role::Up, "").unwrap(), "http://127.0.0.1:8080");
    }

    #[test]
    fn a_listener_for_certificates_of_callers_needs_that_of_the_mesh() {
        let listener = "[worker]\nlisten = \"0.0.0.0:8202\"\n\
                    [worker.http.tls]\ncertificate = \"c\"\nkey = \"k\"\nclient_ca = \"a\"\n";
        let error = url(Role::Worker, listener).unwrap_err();
        assert!(error.contains("worker.listen"), "{error}");
        let mesh = "[mesh]\nca = \"a\"\ncertificate = \"c\"\nkey = \"k\"";
        let file = toml::from_str(&format!("{listener}{mesh}")).unwrap();
        let (url, wants_certificate) = listener_url(Role::Worker, &file).unwrap();
        assert_eq!(url, "https://127.0.0.1:8202");
        assert!(wants_certificate);
    }

    #[actix_web::test]
    async fn a_process_that_is_not_ready_fails_the_check_and_says_why() {
        let app = || {
            let refuses = || async { HttpResponse::ServiceUnavailable().body("draining\n") };
            App::new()
                .route(
                    "/a/readyz",
                    web::get().to(|| async { HttpResponse::Ok().body("ready\n") }),
                )
                .route("/b/readyz", web::get().to(refuses))
        };
        let server = HttpServer::new(app).workers(1).bind("127.0.0.1:0").unwrap();
        let base = format!("http://{}", server.addrs()[0]);
        actix_web::rt::spawn(server.run());
        refrain_service_kit::telemetry::install_crypto_provider();
        let timeout = Duration::from_secs(10);
        let url = |path: &str| format!("{base}{path}");
        ask(url("/a/readyz"), None, timeout).await.unwrap();
        let error = ask(url("/b/readyz"), None, timeout).await.unwrap_err();
        assert!(
            error.to_string().ends_with("status 503: draining"),
            "{error}"
        );
        let nobody = ask("http://127.0.0.1:1/readyz".into(), None, timeout);
        let nobody = nobody.await.unwrap_err();
        assert!(nobody.to_string().contains("does not answer"), "{nobody}");
    }
}
