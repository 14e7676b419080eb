//! A mesh with all services in the test's own process.

use std::path::Path;

use refrain::config::MeshFile;
use refrain::role::Role;
use refrain::roles::Process;
use tempfile::TempDir;

use crate::Client;
use crate::settings::{SCHEDULER_PATIENCE, api_keys, set_defaults};

/// The API key of the first tenant.
pub const KEY: &str = "key-of-one-tenant";
/// The API key of the second tenant.
pub const KEY_OF_ANOTHER: &str = "key-of-another-tenant";

/// A mesh as `refrain up` starts it, on free ports and with its own data directory.
pub struct UpMesh {
    process: Process,
    url: String,
    // It is dropped last, because the store writes there until the end.
    _data: Option<TempDir>,
}

impl UpMesh {
    /// Starts a mesh with default settings.
    ///
    /// # Errors
    /// The mesh does not start.
    pub async fn start() -> anyhow::Result<Self> {
        UpMesh::start_with("").await
    }

    /// Starts a mesh with settings in TOML.
    ///
    /// # Errors
    /// The settings are invalid, or the mesh does not start.
    pub async fn start_with(settings: &str) -> anyhow::Result<Self> {
        let data = tempfile::tempdir()?;
        let mut mesh = Box::pin(UpMesh::start_in(data.path(), settings)).await?;
        mesh._data = Some(data);
        Ok(mesh)
    }

    /// Starts a mesh on a data directory that outlives it.
    ///
    /// # Errors
    /// As [`UpMesh::start_with`].
    pub async fn start_in(data_dir: &Path, settings: &str) -> anyhow::Result<Self> {
        Box::pin(UpMesh::start_tuned(data_dir, settings, |_| {})).await
    }

    /// [`start_in`](Self::start_in) with values that no configuration has: `tune` sets fields that are not
    /// deserialised.
    ///
    /// # Errors
    /// As [`UpMesh::start_with`].
    pub async fn start_tuned(
        data_dir: &Path,
        settings: &str,
        tune: impl FnOnce(&mut MeshFile),
    ) -> anyhow::Result<Self> {
        let mut table: toml::Table = settings.parse()?;
        let keys = [(KEY, "one"), (KEY_OF_ANOTHER, "another")];
        let gateway = [("listen", "127.0.0.1:0".into()), ("keys", api_keys(&keys))];
        set_defaults(&mut table, "gateway", gateway);
        let patience = SCHEDULER_PATIENCE.map(|(key, value)| (key, value.into()));
        set_defaults(&mut table, "scheduler", patience);
        let data_dir = data_dir.display().to_string();
        set_defaults(&mut table, "draft_store", [("data_dir", data_dir.into())]);
        let mut file: MeshFile = table.try_into()?;
        // Without a profile, the step times of a busy machine do not decide which drafts are used.
        file.worker.profile_ms_max = 0;
        // Tests read the metrics at the address of clients.
        file.gateway.shows_metrics = true;
        tune(&mut file);
        let process = Box::pin(Process::start(Role::Up, file)).await?;
        let addr = process
            .addr()
            .ok_or_else(|| anyhow::anyhow!("a gateway without a listener"))?;
        let mesh = UpMesh {
            process,
            url: format!("http://{addr}"),
            _data: None,
        };
        mesh.client().ready("the mesh").await;
        Ok(mesh)
    }

    /// A client of the first tenant.
    pub fn client(&self) -> Client {
        Client::new(&self.url, KEY)
    }

    /// A client of the second tenant.
    pub fn client_of_another(&self) -> Client {
        Client::new(&self.url, KEY_OF_ANOTHER)
    }

    /// Stops the mesh as a signal would.
    pub async fn stop(self) {
        self.process.drain().await;
    }
}
