//! Opens the store that a command names.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use refrain_draft_store::{ClosedStore, DraftStoreConfig, DraftStoreServer};
use refrain_rpc::{
    HttpScheduler, HttpStoreAdmin, HttpUsageStore, HttpWorkers, StoreAdmin, UsageReplica,
    UsageStore,
};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, MeshCredentials};
use refrain_service_kit::telemetry::Metrics;

use super::replicas::{Replica, Replicas};
use crate::config::MeshFile;
use crate::local_operator;
use crate::role::Role;

/// Deadline of a call. A batch of an import waits for one commit.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long a store that was opened here may take to write its last updates.
const CLOSE_GRACE: Duration = Duration::from_secs(60);

/// Arguments that name the store.
#[derive(Args, Clone, Default)]
pub(crate) struct TargetArgs {
    /// URL of one running draft store.
    #[arg(long)]
    pub(crate) url: Option<String>,
    /// URLs of some replicas of a store with a feed, separated by commas [default: urls.draft_stores in --config].
    /// They name the others, and the command is for all shards.
    #[arg(long, value_delimiter = ',', conflicts_with = "url")]
    pub(crate) cluster: Vec<String>,
    /// The mesh's secret [default: the one in --config].
    #[arg(long, env = "REFRAIN_MESH__SECRET", hide_env_values = true)]
    pub(crate) secret: Option<String>,
    /// File with an operator's credential, in place of the secret. A credential of another role may not administer a
    /// store.
    #[arg(long, env = "REFRAIN_OPERATOR_CREDENTIAL_FILE")]
    pub(crate) credential_file: Option<PathBuf>,
    /// Configuration file with the draft store's address and the mesh's secret.
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Directory of a store that is not running, or of a `refrain up` that is. The command goes through its
    /// operations listener then [default: refrain-data, if none of the others is named].
    #[arg(long, conflicts_with_all = ["url", "cluster", "config"])]
    pub(crate) data_dir: Option<PathBuf>,
}

/// Whether a command changes the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read it and leave it unchanged.
    Read,
    /// Change it.
    Write,
}

/// An open store.
pub(crate) enum Target {
    /// A running one, or a directory that is only read.
    Store(Arc<dyn StoreAdmin>, Arc<dyn UsageStore>),
    /// A directory, which is served for as long as the command takes.
    Opened(Box<dyn StoreAdmin>, DraftStoreServer),
    /// Replicas of one or several shards.
    Replicas(Replicas),
    /// That of a running `refrain up`, which passes the calls of its operator on.
    Up(HttpStoreAdmin, MeshClient),
}

impl TargetArgs {
    /// Reads the configuration file, if there is one.
    fn file(&self) -> anyhow::Result<Option<MeshFile>> {
        let Some(path) = &self.config else {
            return Ok(None);
        };
        let mut file = MeshFile::load(Role::DraftStore, Some(path))?;
        // The credential of the store in that file is no operator's.
        file.mesh.credential_file = self.credential_file.clone();
        Ok(Some(file))
    }

    fn credentials(&self, file: Option<&MeshFile>) -> anyhow::Result<MeshCredentials> {
        let of_file = file.map(|file| MeshCredentials::open(&file.mesh, &Metrics::new()?));
        Ok(match (&self.secret, &self.credential_file, of_file.transpose()?) {
            (_, Some(_), Some(of_file)) => of_file,
            (_, Some(path), None) => {
                let token = std::fs::read_to_string(path);
                let token = token.with_context(|| path.display().to_string())?;
                MeshCredentials::of_secret(token.trim())
            }
            (Some(secret), None, Some(of_file)) => of_file.with_secret(secret),
            (Some(secret), None, None) => MeshCredentials::of_secret(secret),
            (None, None, of_file) => of_file.context(
                "a running mesh needs a credential or its secret: give --credential-file, --secret or --config",
            )?,
        })
    }

    /// Callers of the scheduler at `url` and of its workers, or of those in the configuration file. `None`: neither
    /// names one.
    ///
    /// # Errors
    /// There are no credentials.
    pub(super) fn scheduler(
        &self,
        url: Option<&str>,
    ) -> anyhow::Result<Option<(HttpScheduler, HttpWorkers)>> {
        let file = self.file()?;
        let urls = match (url, &file) {
            (Some(url), _) => vec![url.to_owned()],
            (None, Some(file)) => file.urls.schedulers().to_vec(),
            (None, None) => Vec::new(),
        };
        if urls.iter().all(String::is_empty) {
            return Ok(None);
        }
        let credentials = self.credentials(file.as_ref())?;
        let client = MeshClient::with_credentials("", credentials, TIMEOUT)?;
        let scheduler = HttpScheduler::of(urls.iter().map(|url| client.at(url)).collect());
        Ok(Some((scheduler, HttpWorkers::new(client))))
    }
}

impl Target {
    /// Opens the store that the arguments name.
    pub(crate) async fn open(args: &TargetArgs, access: Access) -> anyhow::Result<Self> {
        if args.url.is_none() && args.cluster.is_empty() && args.config.is_none() {
            let default = DraftStoreConfig::default().data_dir;
            let dir = args.data_dir.as_ref().unwrap_or(&default);
            if let Some(up) = local_operator::find(dir)? {
                let client = MeshClient::of_operator(&up.url, &up.token, TIMEOUT)?;
                return Ok(Target::Up(HttpStoreAdmin::new(client.clone()), client));
            }
            ensure!(
                args.data_dir.is_some(),
                "no `refrain up` with an operator of its own runs in {}: name the store with --url, --cluster, --config \
                 or --data-dir",
                dir.display()
            );
        }
        if let Some(dir) = &args.data_dir {
            return match access {
                Access::Read => {
                    let dir = dir.clone();
                    let store =
                        tokio::task::spawn_blocking(move || ClosedStore::open(dir)).await??;
                    let store = Arc::new(store);
                    Ok(Target::Store(store.clone(), store))
                }
                Access::Write => {
                    // No other process calls this store, so fresh keys serve.
                    let auth = MeshAuth::new(&MeshConfig::generate()?)?;
                    let config = DraftStoreConfig::without_budgets(dir.clone());
                    let running =
                        refrain_draft_store::start(config, auth, &Metrics::new()?).await?;
                    Ok(Target::Opened(Box::new(running.handle()), running))
                }
            };
        }
        let file = args.file()?;
        let store = file.as_ref().map(|file| &file.draft_store);
        let listener = store.and_then(|store| Some((store.listen?, store.http.scheme())));
        let urls = file.as_ref().map(|file| &*file.urls.draft_stores);
        let cluster = match (&args.url, &*args.cluster) {
            (Some(_), _) => &[],
            (None, []) => urls.unwrap_or_default(),
            (None, named) => named,
        };
        let url = match (&args.url, listener) {
            _ if !cluster.is_empty() => String::new(),
            (Some(url), _) => url.clone(),
            (None, Some((listen, scheme))) => format!("{scheme}://{listen}"),
            (None, None) => {
                bail!("--config names no store: set draft_store.listen or urls.draft_stores there")
            }
        };
        let cluster = cluster.to_vec();
        let credentials = args.credentials(file.as_ref())?;
        let client = MeshClient::with_credentials(&url, credentials, TIMEOUT)?;
        match cluster.is_empty() {
            true => {
                let usage = Arc::new(HttpUsageStore::new(client.clone()));
                Ok(Target::Store(Arc::new(HttpStoreAdmin::new(client)), usage))
            }
            false => Ok(Target::Replicas(Replicas::find(&client, &cluster).await?)),
        }
    }

    pub(super) fn store(&self) -> &dyn StoreAdmin {
        match self {
            Target::Store(store, _) => &**store,
            Target::Opened(store, _) => &**store,
            Target::Replicas(replicas) => replicas,
            Target::Up(store, _) => store,
        }
    }

    /// The stores of usage, one per replica.
    pub(crate) fn usage_replicas(&self) -> Vec<UsageReplica> {
        let one = |store| {
            vec![UsageReplica {
                name: "draft store".to_owned(),
                store,
            }]
        };
        match self {
            Target::Store(_, usage) => one(usage.clone()),
            Target::Opened(_, running) => one(Arc::new(running.handle())),
            Target::Replicas(replicas) => replicas.iter().map(Replica::usage).collect(),
            Target::Up(_, client) => one(Arc::new(HttpUsageStore::of_operator(client.clone()))),
        }
    }

    /// Closes the store, if it was opened here.
    pub(crate) async fn close(self) {
        if let Target::Opened(store, running) = self {
            drop(store);
            running.drain(CLOSE_GRACE).await;
        }
    }
}
