//! TLS between a listener and clients: who is let in, and certificates that change.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use refrain_protocol::{ApiError, ErrorKind};
use rustls::pki_types::ServerName;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::http::{ListenerConfig, MeshClient, ServeOptions, Server, get, mesh_only, serve};
use crate::mesh::{MeshAuth, MeshConfig, MeshCredentials};
use crate::telemetry::Metrics;
use crate::tls::TlsConfig;

/// Longer than any step of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);
/// The first second of 2040, when certificates of these tests expire.
const EXPIRY_S: &str = "2208988800";

/// An authority that signs certificates.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Authority {
            pem: params.self_signed(&key).unwrap().pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// A certificate for the loopback address, and its key.
    fn sign(&self) -> (String, String) {
        self.sign_for("127.0.0.1")
    }

    fn sign_for(&self, host: &str) -> (String, String) {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.not_after = date_time_ymd(2040, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}

/// The files of one service.
struct Files {
    folder: TempDir,
}

impl Files {
    fn new(trusted: &Authority, signed_by: &Authority) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let files = Files { folder };
        files.write("ca.pem", &trusted.pem);
        files.renew(signed_by);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, contents: &str) {
        std::fs::write(self.path(name), contents).unwrap();
    }

    /// Replaces the certificate and its key.
    fn renew(&self, signed_by: &Authority) {
        self.take(signed_by.sign());
    }

    fn take(&self, (certificate, key): (String, String)) {
        self.write("cert.pem", &certificate);
        self.write("key.pem", &key);
    }

    fn of_listener(&self, wants_certificates: bool) -> TlsConfig {
        TlsConfig {
            certificate: self.path("cert.pem"),
            key: self.path("key.pem"),
            client_ca: wants_certificates.then(|| self.path("ca.pem")),
        }
    }

    fn of_caller(&self, keys: &MeshConfig, presents: bool) -> MeshConfig {
        MeshConfig {
            ca: Some(self.path("ca.pem")),
            certificate: presents.then(|| self.path("cert.pem")),
            key: presents.then(|| self.path("key.pem")),
            ..keys.clone()
        }
    }
}

struct Listening {
    server: Server,
    metrics: Metrics,
    keys: MeshConfig,
}

/// `/in/ping` answers callers with the secret.
fn listen(tls: TlsConfig) -> Listening {
    let keys = MeshConfig::generate().unwrap();
    let auth = MeshAuth::new(&keys).unwrap();
    let metrics = Metrics::new().unwrap();
    let options = ServeOptions {
        service: "test",
        listen: "127.0.0.1:0".parse().unwrap(),
        threads: 1,
        body_bytes_max: 1_000,
        connections_max: 16,
        http: ListenerConfig {
            tls: Some(tls),
            ..ListenerConfig::default()
        },
    };
    let server = serve(options, &metrics, Arc::new(|| Ok(())), move |app| {
        app.service(
            actix_web::web::scope("/in")
                .wrap(mesh_only(auth.clone(), &[]))
                .service(get("/ping", async || actix_web::web::Json("pong"))),
        );
    })
    .unwrap();
    Listening {
        server,
        metrics,
        keys,
    }
}

impl Listening {
    fn caller(&self, files: &Files, presents: bool) -> MeshClient {
        self.caller_of(&files.of_caller(&self.keys, presents))
    }

    fn caller_of(&self, config: &MeshConfig) -> MeshClient {
        let credentials = MeshCredentials::open(config, &self.metrics).unwrap();
        let url = format!("https://{}", self.server.addr());
        MeshClient::with_credentials(&url, credentials, PATIENCE).unwrap()
    }

    fn figure(&self, name: &str) -> u64 {
        let text = String::from_utf8(self.metrics.render()).unwrap();
        let line = text.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.rsplit(' ').next());
        value.map_or(0, |value| value.parse().unwrap())
    }

    async fn until_more(&self, name: &str, before: u64) {
        let comes = async {
            while self.figure(name) <= before {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let came = tokio::time::timeout(PATIENCE, comes).await;
        assert!(came.is_ok(), "{name} is {}", self.figure(name));
    }

    /// A connection of a stranger who trusts this authority.
    async fn connect(&self, trusted: &Authority) -> std::io::Result<TlsStream<TcpStream>> {
        crate::telemetry::install_crypto_provider();
        let mut roots = RootCertStore::empty();
        let certificate = rustls::pki_types::CertificateDer::from_pem_slice(trusted.pem.as_bytes());
        roots.add(certificate.unwrap()).unwrap();
        let config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.server.addr()).await?;
        let name = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
    }
}

async fn ping(client: &MeshClient) -> Result<String, ApiError> {
    client.get_json("/in/ping").await
}

/// Asks for `/healthz` on an open connection.
async fn is_healthy(stream: &mut TlsStream<TcpStream>) -> bool {
    let request = b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"ok\n") {
        let read = tokio::time::timeout(PATIENCE, stream.read_buf(&mut answer));
        if read.await.unwrap().unwrap() == 0 {
            return false;
        }
    }
    answer.starts_with(b"HTTP/1.1 200")
}

#[tokio::test]
async fn only_a_certificate_of_the_known_authority_is_trusted() {
    let (authority, other) = (Authority::new(), Authority::new());
    let files = Files::new(&authority, &authority);
    let listening = listen(files.of_listener(false));
    assert_eq!(
        ping(&listening.caller(&files, false)).await.unwrap(),
        "pong"
    );
    let expiry =
        format!("refrain_tls_certificate_expiry_seconds{{certificate=\"test\"}} {EXPIRY_S}");
    let text = String::from_utf8(listening.metrics.render()).unwrap();
    assert!(text.contains(&expiry), "{text}");

    let deceived = Files::new(&other, &other);
    let refused = ping(&listening.caller(&deceived, false)).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable);
    let failures = "refrain_tls_handshake_failures_total{reason=\"certificate\"";
    listening.until_more(failures, 0).await;

    // A caller without TLS gets no answer, and the secret is no use to it.
    let mut plain = TcpStream::connect(listening.server.addr()).await.unwrap();
    plain
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, plain.read_to_end(&mut answer))
        .await
        .unwrap();
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    let failures = "refrain_tls_handshake_failures_total{reason=\"protocol\"";
    listening.until_more(failures, 0).await;
    listening.server.stop(true).await;
}

#[tokio::test]
async fn with_an_authority_for_callers_only_those_with_its_certificate_are_let_in() {
    let (authority, other) = (Authority::new(), Authority::new());
    let files = Files::new(&authority, &authority);
    let listening = listen(files.of_listener(true));
    assert_eq!(ping(&listening.caller(&files, true)).await.unwrap(), "pong");
    assert!(ping(&listening.caller(&files, false)).await.is_err());
    let strange = Files::new(&authority, &other);
    assert!(ping(&listening.caller(&strange, true)).await.is_err());
    let failures = "refrain_tls_handshake_failures_total{reason=\"certificate\"";
    listening.until_more(failures, 1).await;
    assert_eq!(ping(&listening.caller(&files, true)).await.unwrap(), "pong");
    listening.server.stop(true).await;
}

#[tokio::test]
async fn at_an_address_a_certificate_may_have_the_name_that_callers_expect_there() {
    let (authority, other) = (Authority::new(), Authority::new());
    let files = Files::new(&authority, &authority);
    files.take(authority.sign_for("refrain-worker"));
    let listening = listen(files.of_listener(true));
    let caller = |files: &Files, name: Option<&str>| {
        listening.caller_of(&MeshConfig {
            address_name: name.map(str::to_owned),
            ..files.of_caller(&listening.keys, true)
        })
    };
    let named = caller(&files, Some("refrain-worker"));
    assert_eq!(ping(&named).await.unwrap(), "pong");
    // Without the key the certificate would have to name the address.
    assert!(ping(&caller(&files, None)).await.is_err());
    assert!(
        ping(&caller(&files, Some("refrain-scheduler")))
            .await
            .is_err()
    );
    // The authority counts as before, and so does the name in a URL.
    let deceived = Files::new(&other, &authority);
    assert!(
        ping(&caller(&deceived, Some("refrain-worker")))
            .await
            .is_err()
    );
    let by_name = format!("https://localhost:{}", listening.server.addr().port());
    assert!(ping(&named.at(&by_name)).await.is_err());
    listening.server.stop(true).await;
}

#[tokio::test]
async fn a_certificate_is_replaced_under_open_connections_and_a_broken_one_is_not_taken() {
    const LOADED: &str = "refrain_reloads_total{files=\"tls of test\",outcome=\"loaded\"}";
    const REFUSED: &str = "refrain_reloads_total{files=\"tls of test\",outcome=\"refused\"}";
    let (before, after) = (Authority::new(), Authority::new());
    let files = Files::new(&before, &before);
    let listening = listen(files.of_listener(false));
    let mut open = listening.connect(&before).await.unwrap();
    assert!(is_healthy(&mut open).await);
    assert!(listening.connect(&after).await.is_err());

    files.renew(&after);
    listening.until_more(LOADED, 0).await;
    assert!(is_healthy(&mut open).await);
    let mut renewed = listening.connect(&after).await.unwrap();
    assert!(is_healthy(&mut renewed).await);
    assert!(listening.connect(&before).await.is_err());

    // A key that is not the certificate's, and then no certificate at all.
    let refused = listening.figure(REFUSED);
    files.write("key.pem", &before.sign().1);
    listening.until_more(REFUSED, refused).await;
    files.write("cert.pem", "nothing");
    listening.until_more(REFUSED, refused + 1).await;
    assert!(is_healthy(&mut open).await && is_healthy(&mut renewed).await);
    assert!(is_healthy(&mut listening.connect(&after).await.unwrap()).await);
    listening.server.stop(true).await;
}

#[tokio::test]
async fn a_client_takes_over_new_authorities_and_certificates() {
    let (before, after) = (Authority::new(), Authority::new());
    let of_client = Files::new(&before, &before);
    let of_listener = Files::new(&after, &after);
    let listening = listen(of_listener.of_listener(true));
    let client = listening.caller(&of_client, true);
    assert!(ping(&client).await.is_err());
    of_client.write("ca.pem", &after.pem);
    of_client.renew(&after);
    let comes = async {
        while ping(&client).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, comes).await.is_ok());
    // Clones and clients of other services share the certificates.
    let url = format!("https://{}", listening.server.addr());
    assert_eq!(ping(&client.at(&url)).await.unwrap(), "pong");
    listening.server.stop(true).await;
}

#[tokio::test]
async fn files_that_cannot_be_used_stop_the_start() {
    let authority = Authority::new();
    let files = Files::new(&authority, &authority);
    files.write("key.pem", &authority.sign().1);
    let metrics = Metrics::new().unwrap();
    let options = ServeOptions {
        service: "test",
        listen: "127.0.0.1:0".parse().unwrap(),
        threads: 1,
        body_bytes_max: 1,
        connections_max: 1,
        http: ListenerConfig {
            tls: Some(files.of_listener(false)),
            ..ListenerConfig::default()
        },
    };
    let started = serve(options, &metrics, Arc::new(|| Ok(())), |_| {});
    let error = format!("{:#}", started.err().unwrap());
    assert!(error.contains("test: http.tls"), "{error}");
}
