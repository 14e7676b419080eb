//! The record that only one scheduler can hold.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use async_nats::jetstream::kv::{self, CreateErrorKind, UpdateErrorKind};
use async_nats::jetstream::stream::{self, DiscardPolicy};
use async_nats::{ConnectOptions, jetstream};
use async_trait::async_trait;
use refrain_service_kit::cluster_api::ClusterApi;
use reqwest::Method;
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description};
use tokio::sync::OnceCell;

use crate::config::StandbyConfig;

/// The content of the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The scheduler that leads; empty if none does.
    pub(super) holder: String,
    /// Changes with each write.
    pub(super) version: String,
}

/// A place with one record, in which of two writers that expect the same version one fails.
#[async_trait]
pub(super) trait LeaderRecord: Send + Sync {
    /// Reads it. `None`: there is none.
    async fn read(&self) -> anyhow::Result<Option<Entry>>;

    /// Writes it if it has the expected version; `None`: if there is none. Returns the new version, or `None` if it
    /// had another one.
    async fn write(&self, holder: &str, expected: Option<&str>) -> anyhow::Result<Option<String>>;
}

/// Opens the record that a configuration names. Each call may take `wait_max`.
///
/// # Errors
/// This process is in no Kubernetes cluster although the record is there.
pub(super) fn open(
    config: &StandbyConfig,
    wait_max: Duration,
) -> anyhow::Result<Box<dyn LeaderRecord>> {
    let record: Box<dyn LeaderRecord> = match &config.kubernetes_lease {
        None => Box::new(BucketRecord {
            servers: config.servers.clone(),
            bucket: config.bucket.clone(),
            replicas: config.bucket_replicas,
            context: OnceCell::new(),
            store: tokio::sync::Mutex::default(),
        }),
        Some(name) => {
            let api = match &config.cluster {
                Some((url, folder)) => ClusterApi::at(url.clone(), folder)?,
                None => ClusterApi::of_pod()?,
            };
            let name = name.clone();
            // The API counts in whole seconds. Only people read this number: candidates go by their own clocks.
            let lease_s = config.lease_ms.div_ceil(1_000);
            Box::new(LeaseRecord { api, name, lease_s })
        }
    };
    Ok(Box::new(Timely { record, wait_max }))
}

/// A record whose calls end in time.
struct Timely {
    record: Box<dyn LeaderRecord>,
    wait_max: Duration,
}

#[async_trait]
impl LeaderRecord for Timely {
    async fn read(&self) -> anyhow::Result<Option<Entry>> {
        let read = tokio::time::timeout(self.wait_max, self.record.read()).await;
        read.context("no answer in time")?
    }

    async fn write(&self, holder: &str, expected: Option<&str>) -> anyhow::Result<Option<String>> {
        let write = self.record.write(holder, expected);
        let written = tokio::time::timeout(self.wait_max, write).await;
        written.context("no answer in time")?
    }
}

/// A key in a bucket of JetStream. Its version is its revision there.
struct BucketRecord {
    servers: Vec<String>,
    bucket: String,
    replicas: usize,
    /// The connection, which is made again by itself when it is lost.
    context: OnceCell<jetstream::Context>,
    /// `None` after a fault: the broker may have lost the bucket, which is then made again.
    store: tokio::sync::Mutex<Option<kv::Store>>,
}

/// Pause between two attempts to reach a broker.
const RECONNECT_PAUSE: Duration = Duration::from_millis(250);

/// The key of the record.
const KEY: &str = "leader";

impl BucketRecord {
    async fn open(&self) -> anyhow::Result<kv::Store> {
        let connect = || async {
            let options = ConnectOptions::new()
                .name("refrain scheduler")
                .reconnect_delay_callback(|_| RECONNECT_PAUSE)
                // Whoever asks for the record learns whether there is a connection.
                .event_callback(|_| async {})
                .retry_on_initial_connect();
            anyhow::Ok(jetstream::new(options.connect(&self.servers).await?))
        };
        let context = self.context.get_or_try_init(connect).await?;
        if let Ok(store) = context.get_key_value(&self.bucket).await {
            return Ok(store);
        }
        // A bucket is a stream of this form. The call that makes one by itself asks for the account first, and
        // cannot read the answers of servers before 2.10.
        let stream = stream::Config {
            name: format!("KV_{}", self.bucket),
            subjects: vec![format!("$KV.{}.>", self.bucket)],
            description: Some("which scheduler of Refrain leads".to_owned()),
            max_messages_per_subject: 1,
            discard: DiscardPolicy::New,
            allow_rollup: true,
            allow_direct: true,
            deny_delete: true,
            num_replicas: self.replicas,
            ..stream::Config::default()
        };
        // Creating what exists is no error if it is the same.
        context.create_stream(stream).await?;
        Ok(context.get_key_value(&self.bucket).await?)
    }

    /// Does something with the bucket, which is opened first if it is not open.
    async fn with<T>(
        &self,
        call: impl AsyncFnOnce(&kv::Store) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let mut store = self.store.lock().await;
        let open = match store.take() {
            Some(store) => store,
            None => self.open().await?,
        };
        let done = call(&open).await?;
        *store = Some(open);
        Ok(done)
    }
}

#[async_trait]
impl LeaderRecord for BucketRecord {
    async fn read(&self) -> anyhow::Result<Option<Entry>> {
        let entry = self.with(async |store| Ok(store.entry(KEY).await?)).await?;
        let entry = entry.filter(|entry| entry.operation == kv::Operation::Put);
        entry
            .map(|entry| {
                Ok(Entry {
                    holder: String::from_utf8(entry.value.to_vec())?,
                    version: entry.revision.to_string(),
                })
            })
            .transpose()
    }

    async fn write(&self, holder: &str, expected: Option<&str>) -> anyhow::Result<Option<String>> {
        let value = holder.to_owned().into();
        let expected = expected.map(str::parse).transpose()?;
        let revision = self.with(async |store| match expected {
            None => match store.create(KEY, value).await {
                Err(error) if error.kind() == CreateErrorKind::AlreadyExists => Ok(None),
                created => Ok(Some(created?)),
            },
            Some(revision) => match store.update(KEY, value, revision).await {
                Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => Ok(None),
                updated => Ok(Some(updated?)),
            },
        });
        Ok(revision.await?.map(|revision| revision.to_string()))
    }
}

/// A Lease of Kubernetes, in the namespace of this process.
struct LeaseRecord {
    api: ClusterApi,
    name: String,
    lease_s: u64,
}

impl LeaseRecord {
    async fn collection(&self) -> anyhow::Result<String> {
        let namespace = self.api.own_namespace().await?;
        Ok(format!(
            "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        ))
    }

    fn entry(body: &[u8]) -> anyhow::Result<Entry> {
        let lease: Value = serde_json::from_slice(body)?;
        let version = lease["metadata"]["resourceVersion"].as_str();
        let holder = lease["spec"]["holderIdentity"].as_str();
        Ok(Entry {
            holder: holder.unwrap_or_default().to_owned(),
            version: version.context("a Lease without a version")?.to_owned(),
        })
    }
}

/// The time of day as the API wants it: with six digits behind the second.
fn now() -> anyhow::Result<String> {
    let format = format_description::parse_borrowed::<2>(
        "[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z",
    )?;
    Ok(OffsetDateTime::now_utc().format(&format)?)
}

#[async_trait]
impl LeaderRecord for LeaseRecord {
    async fn read(&self) -> anyhow::Result<Option<Entry>> {
        let path = format!("{}/{}", self.collection().await?, self.name);
        let (status, body) = self.api.call(Method::GET, &path, &[], None).await?;
        match status {
            200 => LeaseRecord::entry(&body).map(Some),
            404 => Ok(None),
            status => bail!(
                "{path} answers with status {status}; this process needs the right to read it"
            ),
        }
    }

    async fn write(&self, holder: &str, expected: Option<&str>) -> anyhow::Result<Option<String>> {
        let collection = self.collection().await?;
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "resourceVersion": expected},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": self.lease_s,
                "renewTime": now()?,
            },
        });
        let (method, path) = match expected {
            None => (Method::POST, collection),
            Some(_) => (Method::PUT, format!("{collection}/{}", self.name)),
        };
        let (status, body) = self.api.call(method, &path, &[], Some(&lease)).await?;
        // It has another version, or somebody has deleted it: it is read again first.
        if matches!(status, 404 | 409) {
            return Ok(None);
        }
        ensure!(
            matches!(status, 200 | 201),
            "{path} answers with status {status}; this process needs the right to write it"
        );
        LeaseRecord::entry(&body).map(|entry| Some(entry.version))
    }
}
