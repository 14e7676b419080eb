//! The two places of tenants: a file, and a gateway whose draft store has them.

use std::fs::File;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use refrain_accounts::tenants::act::TenantAct;
use refrain_accounts::tenants::file::{TenantEntry, TenantsFile};
use refrain_protocol::ApiError;
use refrain_service_kit::clock;
use refrain_service_kit::telemetry::install_crypto_provider;
use reqwest::Method;
use serde_json::{Value, json};

use super::audit;

/// How long a call may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The place of the tenants.
pub(super) enum Source {
    File(PathBuf),
    Gateway(AdminClient),
}

/// A caller of the admin API.
pub(super) struct AdminClient {
    url: String,
    token: String,
    client: reqwest::Client,
    runtime: tokio::runtime::Runtime,
}

impl Source {
    /// All tenants with their keys, for reading.
    pub(super) fn tenants(&self) -> anyhow::Result<TenantsFile> {
        match self {
            Source::File(path) => read(path),
            Source::Gateway(gateway) => gateway.tenants(),
        }
    }

    /// A tenant, and its version at a gateway.
    pub(super) fn tenant(&self, name: &str) -> anyhow::Result<(TenantEntry, Option<u64>)> {
        match self {
            Source::File(path) => {
                let mut tenants = read(path)?.tenants.into_iter();
                let found = tenants.find(|tenant| tenant.name == name);
                let found = found.with_context(|| {
                    format!("there is no tenant {name}; `refrain tenants add {name}` adds it")
                });
                Ok((found?, None))
            }
            Source::Gateway(gateway) => {
                let tenant = gateway.call(Method::GET, &["tenants", name], None, None)?;
                tenant_of(tenant)
            }
        }
    }

    /// Carries an act out. Returns the key that was made. With `version`, a tenant that has another one meanwhile is
    /// not changed.
    pub(super) fn carry_out(
        &self,
        act: TenantAct,
        version: Option<u64>,
    ) -> anyhow::Result<Option<String>> {
        match self {
            Source::File(path) => edit(path, act),
            Source::Gateway(gateway) => gateway.carry_out(act, version),
        }
    }
}

/// The message of an error, for a terminal.
fn said(error: ApiError) -> anyhow::Error {
    anyhow::Error::msg(error.message)
}

fn read(path: &Path) -> anyhow::Result<TenantsFile> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("{}: cannot be read", path.display()))?;
    TenantsFile::parse(&text).map_err(|faults| anyhow::anyhow!("{}: {faults}", path.display()))
}

/// Changes the file. Nobody else edits it meanwhile, and who reads it sees either state. Before that, the audit log
/// gets a line.
fn edit(path: &Path, mut act: TenantAct) -> anyhow::Result<Option<String>> {
    let name = || format!("{}: cannot be written", path.display());
    let lock = beside(path, "lock");
    let lock = File::create(lock).with_context(name)?;
    lock.lock().with_context(name)?;
    let mut file = match path.exists() {
        true => read(path)?,
        false => TenantsFile::default(),
    };
    let key = act.make_key().map_err(said)?;
    let now = clock::unix_s().cast_signed();
    act.apply(&mut file, now).map_err(said)?;
    let faults = file.faults();
    if !faults.is_empty() {
        bail!("{}", faults.join("; "));
    }
    // The log comes first: an act that is not logged does not happen.
    audit::append(&beside(path, "audit.jsonl"), &act.description())?;
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let mut new = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
    std::io::Write::write_all(&mut new, file.to_text()?.as_bytes()).with_context(name)?;
    // Gateways run as other users than operators, and the file has no secrets.
    let mut mode = 0o644;
    if let Ok(before) = std::fs::metadata(path) {
        mode = before.permissions().mode();
        // Only root may give files away. Others own what they may replace.
        let _ = std::os::unix::fs::fchown(new.as_file(), Some(before.uid()), Some(before.gid()));
    }
    let permissions = std::fs::Permissions::from_mode(mode);
    new.as_file()
        .set_permissions(permissions)
        .with_context(name)?;
    new.as_file().sync_all().with_context(name)?;
    new.persist(path).with_context(name)?;
    let folder = File::open(folder.unwrap_or(Path::new("."))).with_context(name)?;
    folder.sync_all().with_context(name)?;
    // A key that no gateway knows is refused, and its owner would not see why.
    eprintln!(
        "{0} is written; gateways with gateway.tenants_file = {0:?} take it over",
        path.display()
    );
    Ok(key.map(|key| key.key))
}

/// The path with another extension after its own.
pub(super) fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{extension}"));
    beside.into()
}

/// A tenant of an answer, and its version.
fn tenant_of(mut answer: Value) -> anyhow::Result<(TenantEntry, Option<u64>)> {
    let version = answer
        .as_object_mut()
        .and_then(|fields| fields.remove("version"));
    let entry = serde_json::from_value(answer);
    let entry = entry.context("the gateway's answer is of another version of Refrain")?;
    Ok((entry, version.and_then(|version| version.as_u64())))
}

impl AdminClient {
    /// A caller of the operations listener at this URL.
    pub(super) fn new(url: &str, token: &str) -> anyhow::Result<Self> {
        install_crypto_provider();
        ensure!(
            url.starts_with("http://") || url.starts_with("https://"),
            "--url: must be the http:// or https:// URL of a gateway's operations listener"
        );
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        Ok(AdminClient {
            url: url.trim_end_matches('/').to_owned(),
            token: token.to_owned(),
            client: reqwest::Client::builder().timeout(TIMEOUT).build()?,
            runtime,
        })
    }

    fn tenants(&self) -> anyhow::Result<TenantsFile> {
        let mut answer = self.call(Method::GET, &["tenants"], None, None)?;
        let list = answer["data"].as_array_mut().map(std::mem::take);
        let tenants = list.unwrap_or_default().into_iter();
        let tenants = tenants.map(|tenant| Ok(tenant_of(tenant)?.0));
        Ok(TenantsFile {
            tenants: tenants.collect::<anyhow::Result<_>>()?,
        })
    }

    fn carry_out(&self, act: TenantAct, version: Option<u64>) -> anyhow::Result<Option<String>> {
        let answer = match act {
            TenantAct::AddTenant(entry) => {
                let body = serde_json::to_value(entry)?;
                self.call(Method::POST, &["tenants"], Some(body), version)
            }
            TenantAct::ChangeTenant { name, patch } => {
                self.call(Method::PATCH, &["tenants", &name], Some(patch), version)
            }
            TenantAct::RemoveTenant { name } => {
                self.call(Method::DELETE, &["tenants", &name], None, version)
            }
            TenantAct::AddKey { tenant, entry } => {
                let body = serde_json::to_value(entry)?;
                let path = ["tenants", &tenant, "keys"];
                self.call(Method::POST, &path, Some(body), version)
            }
            TenantAct::RotateKey {
                id, grace_hours, ..
            } => {
                let body = json!({"grace_hours": grace_hours});
                let path = ["keys", &id, "rotate"];
                self.call(Method::POST, &path, Some(body), version)
            }
            TenantAct::RevokeKey { id } => self.call(Method::DELETE, &["keys", &id], None, version),
        };
        Ok(answer?["key"].as_str().map(str::to_owned))
    }

    /// Makes a call, with the version that the tenant must have. Returns the answer.
    fn call(
        &self,
        method: Method,
        path: &[&str],
        body: Option<Value>,
        version: Option<u64>,
    ) -> anyhow::Result<Value> {
        let mut url = reqwest::Url::parse(&self.url).context("--url")?;
        url.path_segments_mut()
            .map_err(|()| anyhow::anyhow!("--url: cannot have paths"))?
            .pop_if_empty()
            .push("admin")
            .extend(path);
        let mut request = self.client.request(method, url).bearer_auth(&self.token);
        if let Some(version) = version {
            request = request.header("if-match", format!("\"{version}\""));
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        self.runtime.block_on(async {
            let answer = request.send().await;
            let answer = answer.with_context(|| format!("{} cannot be reached", self.url))?;
            let status = answer.status();
            let body: Value = answer.json().await.unwrap_or_default();
            if status.is_success() {
                return Ok(body);
            }
            let message = body["error"]["message"].as_str();
            let message =
                message.unwrap_or("the answer has no message; is this an operations listener?");
            bail!("{message} (status {})", status.as_u16())
        })
    }
}
