//! The operator of `refrain up` on one's own machine: whoever may read its token in the data directory.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use refrain_gateway::{GatewayConfig, OperatorConfig, OperatorToken};

use crate::config::MeshFile;

/// The file of the token, in the data directory.
const TOKEN_FILE: &str = "operator-token";

/// The file of the audit log, if the configuration names none.
const AUDIT_FILE: &str = "audit.jsonl";

/// Whether a gateway gets the operator: it has none, and only this machine reaches its operations listener.
fn is_wanted(gateway: &GatewayConfig) -> bool {
    let listen = gateway.operations_listen;
    listen.is_some_and(|listen| listen.ip().is_loopback()) && gateway.operators.is_empty()
}

/// The file with the token of the operator that `refrain up` adds, if it adds one.
pub(crate) fn token_file(file: &MeshFile) -> Option<PathBuf> {
    is_wanted(&file.gateway).then(|| file.draft_store.data_dir.join(TOKEN_FILE))
}

/// Adds an operator to a gateway that has none, if only this machine reaches its operations listener. The token stays
/// the same over restarts.
///
/// # Errors
/// The token cannot be read or written.
pub(crate) fn add(gateway: &mut GatewayConfig, data_dir: &Path) -> anyhow::Result<()> {
    if !is_wanted(gateway) {
        return Ok(());
    }
    let path = data_dir.join(TOKEN_FILE);
    let name = || format!("the operator's token, {}", path.display());
    let token = match std::fs::read_to_string(&path) {
        Ok(token) => token,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let made = OperatorToken::random()?;
            let mut options = std::fs::OpenOptions::new();
            options.write(true).create_new(true).mode(0o600);
            let mut file = options.open(&path).with_context(name)?;
            file.write_all(made.token.as_bytes()).with_context(name)?;
            made.token
        }
        Err(error) => return Err(error).with_context(name),
    };
    gateway.operators.push(OperatorConfig {
        name: "local".into(),
        token_sha256: OperatorToken::sha256_of(token.trim()),
        read_only: false,
    });
    let audit_file = || data_dir.join(AUDIT_FILE);
    gateway.audit_file.get_or_insert_with(audit_file);
    Ok(())
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
        add(&mut first, dir.path()).unwrap();
        let token = std::fs::read_to_string(dir.path().join(TOKEN_FILE)).unwrap();
        assert_eq!(
            first.operators[0].token_sha256,
            OperatorToken::sha256_of(&token)
        );
        assert!(first.audit_file.as_ref().unwrap().starts_with(dir.path()));
        let metadata = std::fs::metadata(dir.path().join(TOKEN_FILE)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        // It is the same after a restart, and takes no place that somebody has.
        let mut second = gateway(Some("[::1]:0"));
        add(&mut second, dir.path()).unwrap();
        assert_eq!(second.operators, first.operators);
        add(&mut second, dir.path()).unwrap();
        assert_eq!(second.operators.len(), 1);
    }

    #[test]
    fn a_listener_that_others_reach_has_no_such_operator() {
        let dir = tempfile::tempdir().unwrap();
        for listen in [None, Some("0.0.0.0:0"), Some("10.0.0.7:0")] {
            let mut gateway = gateway(listen);
            add(&mut gateway, dir.path()).unwrap();
            assert!(gateway.operators.is_empty());
        }
        assert!(!dir.path().join(TOKEN_FILE).exists());
    }
}
