//! A replica of the draft store as a child process, and calls to it.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use e2e::{Program, Scrape};
use refrain_protocol::admin::{EraseReply, EraseRequest, VerifyReply};
use refrain_protocol::document::{Acknowledgement, AppendRequest, DocumentUpdate};
use refrain_protocol::segment::DocumentsRequest;
use refrain_protocol::{ApiError, DocumentId, Namespace, SignedNamespace};
use refrain_rpc::{DraftStore as _, HttpDraftStore, HttpStoreAdmin, StoreAdmin as _};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::install_crypto_provider;
use toml::{Table, Value};

use crate::disk::SmallDisk;
use crate::network::{NODES, Network, Node, Port};

/// The stream of the only shard.
pub(crate) const STREAM: &str = "refrain-0";

/// Tenants of the documents.
pub(crate) const TENANTS: usize = 2;

/// Longest time of a call of a writer. Stores answer within ten seconds.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// Documents that are read at once.
const DOCUMENTS_PER_CALL: usize = 1_024;

/// A replica that keeps its data when it is killed and started again.
pub(crate) struct Store {
    number: usize,
    dir: PathBuf,
    /// The disk that can be made full. It is unmounted after the process has ended.
    program: Option<Program>,
    pub(crate) disk: Option<SmallDisk>,
    pub(crate) calls: Calls,
    /// Output of processes that were killed.
    earlier: String,
}

impl Store {
    /// Writes the configuration of a store, which is not started yet.
    pub(crate) fn prepare(
        dir: &Path,
        number: usize,
        network: &Network,
        keys: &MeshConfig,
        with_disk: bool,
    ) -> anyhow::Result<Store> {
        let dir = dir.join(format!("store-{number}"));
        let disk = match with_disk {
            true => Some(SmallDisk::mount(&dir.join("disk"))?),
            false => None,
        };
        std::fs::create_dir_all(dir.join("disk"))?;
        let node = Node::Store(number);
        let listen = network.listen(node, Port::Calls);
        let servers = (0..NODES)
            .map(|broker| network.reach(node, Node::Broker(broker), Port::Clients))
            .map(|addr| Value::from(format!("nats://{addr}")));
        // The own URL may be among them.
        let peers = (0..NODES)
            .map(|store| network.listen(Node::Store(store), Port::Calls))
            .map(|addr| Value::from(format!("http://{addr}")));
        let (servers, peers): (Vec<_>, Vec<_>) = (servers.collect(), peers.collect());
        let feed = Table::from_iter([
            ("servers".to_owned(), servers.into()),
            ("peers".to_owned(), peers.into()),
            ("stream_replicas".to_owned(), 3.into()),
            ("max_bytes".to_owned(), (512 << 20).into()),
            ("silent_s".to_owned(), 1.into()),
            ("acknowledgement_wait_ms".to_owned(), 3_000.into()),
            // So small that a replica that has lost its disk joins.
            ("lag_max".to_owned(), 300.into()),
        ]);
        let data_dir = dir.join("disk").join("data");
        let section = Table::from_iter([
            ("listen".to_owned(), listen.to_string().into()),
            (
                "data_dir".to_owned(),
                data_dir.to_string_lossy().into_owned().into(),
            ),
            // A disk that is full refuses writes itself.
            ("disk_reserve_bytes".to_owned(), 0.into()),
            ("seal_after_s".to_owned(), 2.into()),
            ("seal_tokens".to_owned(), 4_096.into()),
            ("feed".to_owned(), feed.into()),
        ]);
        let mesh = Table::from_iter([
            ("secret".to_owned(), keys.secret.clone().into()),
            (
                "namespace_public_key".to_owned(),
                keys.namespace_public_key.clone().into(),
            ),
        ]);
        let file = Table::from_iter([
            ("mesh".to_owned(), mesh.into()),
            ("draft_store".to_owned(), section.into()),
        ]);
        std::fs::write(dir.join("store.toml"), file.to_string())?;
        Ok(Store {
            number,
            dir,
            program: None,
            disk,
            calls: Calls::new(format!("http://{listen}"), keys)?,
            earlier: String::new(),
        })
    }

    pub(crate) fn is_running(&self) -> bool {
        self.program.is_some()
    }

    /// Starts the process, and waits until it listens.
    pub(crate) async fn start(&mut self, network: &Network) -> anyhow::Result<()> {
        ensure!(self.program.is_none(), "store {} runs", self.number);
        let config = self.dir.join("store.toml");
        let config = config.to_string_lossy();
        let through = network.through(Node::Store(self.number));
        let arguments = ["draft-store", "--config", &*config];
        let program = Program::start_through(&through, &self.dir, &arguments, &[])?;
        let program = self.program.insert(program);
        program.line_with("listens on").await?;
        Ok(())
    }

    /// kill -9.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(program) = self.program.take() {
            self.earlier.push_str(&program.output());
            program.kill().await?;
        }
        Ok(())
    }

    /// The exit status, if it has ended by itself.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.program.as_mut()?.status()
    }

    /// Writes the output of all processes to a file, and keeps the data of a disk that is about to go.
    pub(crate) fn keep(&self) -> anyhow::Result<()> {
        std::fs::write(self.dir.join("log"), &self.earlier)?;
        match self.disk {
            Some(_) => copy_dir(&self.data_dir(), &self.dir.join("data")),
            None => Ok(()),
        }
    }

    /// Copies the data of a store that is not running. It replaces an earlier copy.
    pub(crate) fn save_copy(&self) -> anyhow::Result<()> {
        let copy = self.dir.join("copy");
        if copy.exists() {
            std::fs::remove_dir_all(&copy)?;
        }
        copy_dir(&self.data_dir(), &copy)
    }

    pub(crate) fn has_copy(&self) -> bool {
        self.dir.join("copy").exists()
    }

    /// Brings the last copy of the data back, in place of the data.
    pub(crate) fn restore_copy(&self) -> anyhow::Result<()> {
        self.lose_data()?;
        copy_dir(&self.dir.join("copy"), &self.data_dir())
    }

    /// Deletes the data of a store that is not running.
    pub(crate) fn lose_data(&self) -> anyhow::Result<()> {
        std::fs::remove_dir_all(self.data_dir()).context("the data cannot be deleted")
    }

    fn data_dir(&self) -> PathBuf {
        self.dir.join("disk").join("data")
    }
}

/// Calls to a store.
#[derive(Clone)]
pub(crate) struct Calls {
    pub(crate) url: String,
    secret: String,
    signer: std::sync::Arc<NamespaceSigner>,
    http: reqwest::Client,
}

pub(crate) fn namespace(tenant: usize) -> Namespace {
    Namespace {
        tenant: format!("tenant-{tenant}"),
        model: "model".into(),
        tokenizer: "tokenizer".into(),
    }
}

impl Calls {
    fn new(url: String, keys: &MeshConfig) -> anyhow::Result<Calls> {
        install_crypto_provider();
        Ok(Calls {
            url,
            secret: keys.secret.clone(),
            signer: NamespaceSigner::new(keys)?.into(),
            http: reqwest::Client::builder().no_proxy().build()?,
        })
    }

    fn mesh(&self) -> anyhow::Result<MeshClient> {
        MeshClient::new(&self.url, &self.secret, CALL_TIMEOUT)
    }

    fn sign(&self, tenant: usize) -> SignedNamespace {
        self.signer.sign(namespace(tenant))
    }

    /// A client for appends.
    pub(crate) fn writer(&self) -> anyhow::Result<HttpDraftStore> {
        Ok(HttpDraftStore::new(self.mesh()?))
    }

    /// Appends one piece. Returns the length that the store has then.
    pub(crate) async fn append(
        &self,
        writer: &HttpDraftStore,
        tenant: usize,
        level: Acknowledgement,
        piece: DocumentUpdate,
    ) -> Result<u32, ApiError> {
        let request = AppendRequest {
            namespace: self.sign(tenant),
            updates: vec![piece],
            waited_ms: 0,
            acknowledgement: Some(level),
        };
        let lengths = writer.append(request).await?.lengths;
        Ok(lengths.first().copied().unwrap_or(0))
    }

    pub(crate) async fn erase_session(
        &self,
        tenant: usize,
        session: &str,
    ) -> anyhow::Result<EraseReply> {
        self.erase(EraseRequest {
            tenant: Some(namespace(tenant).tenant),
            session: Some(session.to_owned()),
            ..EraseRequest::default()
        })
        .await
    }

    pub(crate) async fn erase_tenant(&self, tenant: &str) -> anyhow::Result<EraseReply> {
        self.erase(EraseRequest {
            tenant: Some(tenant.to_owned()),
            ..EraseRequest::default()
        })
        .await
    }

    async fn erase(&self, request: EraseRequest) -> anyhow::Result<EraseReply> {
        Ok(HttpStoreAdmin::new(self.mesh()?).erase(request).await?)
    }

    pub(crate) async fn verify(&self) -> anyhow::Result<VerifyReply> {
        Ok(HttpStoreAdmin::new(self.mesh()?).verify().await?)
    }

    /// Reads documents of a tenant. Those that do not exist are left out.
    pub(crate) async fn read(
        &self,
        tenant: usize,
        numbers: &[u128],
    ) -> anyhow::Result<Vec<DocumentUpdate>> {
        let reader = HttpDraftStore::new(self.mesh()?);
        let (mut read, mut left) = (Vec::new(), numbers);
        while !left.is_empty() {
            let now = &left[..left.len().min(DOCUMENTS_PER_CALL)];
            let request = DocumentsRequest {
                namespace: self.sign(tenant),
                documents: now.iter().copied().map(DocumentId).collect(),
                max_tokens: 1 << 20,
            };
            let reply = reader.documents(request).await?;
            ensure!(reply.covered > 0, "the store covers no document");
            left = &left[reply.covered as usize..];
            read.extend(reply.updates);
        }
        Ok(read)
    }

    /// Whether the store is ready. The text says why not.
    pub(crate) async fn readiness(&self) -> anyhow::Result<Result<(), String>> {
        let url = format!("{}/readyz", self.url);
        let answer = self.http.get(url).timeout(CALL_TIMEOUT).send().await?;
        Ok(match answer.status().is_success() {
            true => Ok(()),
            false => Err(answer.text().await?),
        })
    }

    pub(crate) async fn scrape(&self) -> anyhow::Result<Scrape> {
        let url = format!("{}/metrics", self.url);
        let answer = self.http.get(url).timeout(CALL_TIMEOUT).send().await?;
        Ok(Scrape::parse(&answer.error_for_status()?.text().await?))
    }
}

fn copy_dir(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy_dir(&entry.path(), &target)?,
            false => drop(std::fs::copy(entry.path(), target)?),
        }
    }
    Ok(())
}
