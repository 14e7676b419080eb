//! The operator of `refrain up` on one's own machine: whoever may read its token in the data directory.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use refrain_accounts::tenants::key::NewKey;
use refrain_accounts::{OperatorConfig, OperatorToken};
use refrain_gateway::GatewayConfig;

use crate::config::MeshFile;

/// The file of the token, in the data directory.
const TOKEN_FILE: &str = "operator-token";

/// The file with the URL of the operations listener, in the data directory.
const URL_FILE: &str = "operations-url";

/// The file of the API key that a first start makes, in the data directory.
const KEY_FILE: &str = "api-key";

/// The file of the audit log, if the configuration names none.
const AUDIT_FILE: &str = "audit.jsonl";

/// Whether a gateway gets the operator: it has none, and only this machine reaches its operations listener, or
/// `is_for_others`.
fn is_wanted(gateway: &GatewayConfig, is_for_others: bool) -> bool {
    let listen = gateway.operations_listen;
    listen.is_some_and(|listen| is_for_others || listen.ip().is_loopback())
        && gateway.operators.is_empty()
}

/// The file with the token of the operator that `refrain up` adds, if it adds one.
pub(crate) fn token_file(file: &MeshFile) -> Option<PathBuf> {
    is_wanted(&file.gateway, file.has_operator_for_others)
        .then(|| file.draft_store.data_dir.join(TOKEN_FILE))
}

/// Adds an operator to a gateway that has none, if only this machine reaches its operations listener, or
/// `is_for_others`. The token stays the same over restarts. Returns whether it was added.
///
/// # Errors
/// The token cannot be read or written.
pub(crate) fn add(
    gateway: &mut GatewayConfig,
    is_for_others: bool,
    data_dir: &Path,
) -> anyhow::Result<bool> {
    if !is_wanted(gateway, is_for_others) {
        return Ok(false);
    }
    let token = secret_of(&data_dir.join(TOKEN_FILE), || {
        Ok(OperatorToken::random()?.token)
    })?;
    gateway.operators.push(OperatorConfig {
        name: "local".into(),
        token_sha256: OperatorToken::sha256_of(&token),
        read_only: false,
    });
    let audit_file = || data_dir.join(AUDIT_FILE);
    gateway.audit_file.get_or_insert_with(audit_file);
    Ok(true)
}

/// The API key that the first start makes, and its file, which only its owner may read.
///
/// # Errors
/// The key cannot be read or written.
pub(crate) fn own_key(data_dir: &Path) -> anyhow::Result<(String, PathBuf)> {
    std::fs::create_dir_all(data_dir)
        .with_context(|| format!("{}: cannot be created", data_dir.display()))?;
    let path = data_dir.join(KEY_FILE);
    let key = secret_of(&path, || Ok(NewKey::random()?.key))?;
    Ok((key, path))
}

/// Reads a secret from its file. If there is none, it is made, and only the owner may read it.
fn secret_of(path: &Path, make: impl Fn() -> anyhow::Result<String>) -> anyhow::Result<String> {
    let name = || format!("{}: cannot be read or written", path.display());
    match std::fs::read_to_string(path) {
        Ok(secret) => Ok(secret.trim().to_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let made = make()?;
            let mut options = std::fs::OpenOptions::new();
            options.write(true).create_new(true).mode(0o600);
            let mut file = options.open(path).with_context(name)?;
            writeln!(file, "{made}").with_context(name)?;
            Ok(made)
        }
        Err(error) => Err(error).with_context(name),
    }
}

/// A `refrain up` that runs on this machine, and its operator.
#[derive(Debug)]
pub(crate) struct LocalUp {
    /// The URL of its operations listener.
    pub(crate) url: String,
    /// The token of its operator.
    pub(crate) token: String,
}

/// Says in the data directory where the operations listener of its operator is; nowhere if it has no such operator.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn announce(data_dir: &Path, url: Option<String>) -> anyhow::Result<()> {
    let path = data_dir.join(URL_FILE);
    let written = match url {
        Some(url) => std::fs::write(&path, url + "\n"),
        None if path.exists() => std::fs::remove_file(&path),
        None => Ok(()),
    };
    written.with_context(|| format!("{}: cannot be written", path.display()))
}

/// Finds the `refrain up` that has this data directory. `None`: none runs, or it has other operators than its own.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn find(data_dir: &Path) -> anyhow::Result<Option<LocalUp>> {
    let read = |name: &str| {
        let path = data_dir.join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("{}: cannot be read", path.display())),
        }
    };
    // A process that was killed leaves its files. Whoever has its port by now is not told the token.
    let is_in_use = refrain_draft_store::is_in_use(data_dir);
    if !is_in_use.with_context(|| format!("{}: cannot be read", data_dir.display()))? {
        return Ok(None);
    }
    let (url, token) = (read(URL_FILE)?, read(TOKEN_FILE)?);
    Ok(url.zip(token).map(|(url, token)| LocalUp { url, token }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn gateway(listen: Option<&str>) -> GatewayConfig {
        GatewayConfig {
            operations_listen: listen.map(|listen| listen.parse().unwrap()),
            ..GatewayConfig::default()
        }
    }

    #[test]
    fn the_owner_of_the_data_directory_is_an_operator_on_this_machine() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = gateway(Some("127.0.0.1:0"));
        add(&mut first, false, dir.path()).unwrap();
        let token = std::fs::read_to_string(dir.path().join(TOKEN_FILE)).unwrap();
        assert_eq!(
            first.operators[0].token_sha256,
            OperatorToken::sha256_of(token.trim())
        );
        assert!(first.audit_file.as_ref().unwrap().starts_with(dir.path()));
        let metadata = std::fs::metadata(dir.path().join(TOKEN_FILE)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        // It is the same after a restart, and takes no place that somebody has.
        let mut second = gateway(Some("[::1]:0"));
        add(&mut second, false, dir.path()).unwrap();
        assert_eq!(second.operators, first.operators);
        add(&mut second, false, dir.path()).unwrap();
        assert_eq!(second.operators.len(), 1);
    }

    #[test]
    fn a_listener_that_others_reach_has_no_such_operator_unless_it_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        for listen in [None, Some("0.0.0.0:0"), Some("10.0.0.7:0")] {
            let mut gateway = gateway(listen);
            assert!(!add(&mut gateway, false, dir.path()).unwrap());
            assert!(gateway.operators.is_empty());
        }
        assert!(!dir.path().join(TOKEN_FILE).exists());
        let mut asked = gateway(Some("0.0.0.0:0"));
        assert!(add(&mut asked, true, dir.path()).unwrap());
        assert_eq!(asked.operators.len(), 1);
        assert!(!add(&mut gateway(None), true, dir.path()).unwrap());
    }

    #[test]
    fn an_own_key_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let (key, path) = own_key(&data).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(key.starts_with("rfk-") && !path.display().to_string().contains(&key));
        assert_eq!(own_key(&data).unwrap(), (key, path));
    }

    #[test]
    fn only_a_process_that_runs_is_told_the_token() {
        let dir = tempfile::tempdir().unwrap();
        let found = || find(dir.path()).unwrap().map(|up| (up.url, up.token));
        assert_eq!(found(), None);
        add(&mut gateway(Some("127.0.0.1:0")), false, dir.path()).unwrap();
        announce(dir.path(), Some("http://127.0.0.1:1".into())).unwrap();
        assert_eq!(found(), None, "it was killed, and its files are left");
        let lock = std::fs::File::create(dir.path().join("lock")).unwrap();
        lock.lock().unwrap();
        let (url, token) = found().unwrap();
        assert!(url == "http://127.0.0.1:1" && token.starts_with("rfo-"));
        announce(dir.path(), None).unwrap();
        assert_eq!(found(), None, "it has other operators");
    }
}
