//! `refrain mesh`: the operator's commands for credentials of roles.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use refrain_service_kit::clock;
use refrain_service_kit::mesh::{CredentialIssuer, MeshRole, RoleCredential};

use crate::role::Role;

/// Seconds of a day.
const DAY_S: u64 = 86_400;

/// Most days for which a credential is valid.
const DAYS_MAX: u64 = 3_650;

/// Arguments of `refrain mesh`.
#[derive(Args)]
pub struct MeshArgs {
    #[command(subcommand)]
    command: MeshCommand,
}

#[derive(Subcommand)]
enum MeshCommand {
    /// Make the key that signs credentials. Its private half goes to a new file, its public half is printed.
    Issuer {
        /// The file for the private half. Only the operator may have it.
        #[arg(long)]
        key_file: PathBuf,
    },
    /// Print a credential for one process, for the file that its mesh.credential_file names.
    Credential {
        /// The role of the process.
        #[arg(long, value_parser = role())]
        role: MeshRole,
        /// Its name. For a worker it is worker.id. `pool-a-*` is for all workers whose worker.id begins so.
        #[arg(long)]
        name: String,
        /// Days for which the credential is valid.
        #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u64).range(1..=DAYS_MAX))]
        days: u64,
        /// The file with the private half of the issuer's key.
        #[arg(long, env = "REFRAIN_ISSUER_KEY_FILE")]
        issuer_key_file: PathBuf,
    },
}

/// Reads the name of a role.
fn role() -> impl TypedValueParser<Value = MeshRole> {
    PossibleValuesParser::new(MeshRole::ALL.map(MeshRole::as_str)).try_map(|name| {
        let mut all = MeshRole::ALL.into_iter();
        all.find(|role| role.as_str() == name)
            .ok_or("there is no such role")
    })
}

/// Runs the command.
///
/// # Errors
/// A file cannot be written or read, or has no key.
pub fn run(args: MeshArgs) -> anyhow::Result<()> {
    match args.command {
        MeshCommand::Issuer { key_file } => {
            let (issuer, private) = CredentialIssuer::generate()?;
            write_new(&key_file, &private)?;
            println!("# Keep {} with the operator only.", key_file.display());
            println!("[mesh]\nissuer_public_keys = [\"{}\"]", issuer.public_key());
        }
        MeshCommand::Credential {
            role,
            name,
            days,
            issuer_key_file,
        } => {
            let text = std::fs::read_to_string(&issuer_key_file)
                .with_context(|| issuer_key_file.display().to_string())?;
            let issuer = CredentialIssuer::from_hex(&text)
                .with_context(|| issuer_key_file.display().to_string())?;
            let now_s = clock::unix_s();
            let token = issuer.issue(role, &name, now_s, now_s + days * DAY_S)?;
            println!("{token}");
        }
    }
    Ok(())
}

/// Writes a file that only its owner can read. An earlier key is never overwritten.
fn write_new(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let file = options.open(path);
    let mut file = file.with_context(|| format!("{} cannot be made", path.display()))?;
    writeln!(file, "{text}")?;
    file.sync_all()?;
    Ok(())
}

/// Checks that a process has a credential of its own role.
///
/// # Errors
/// The credential is of another role, or of another worker.
pub(crate) fn check_own(role: Role, worker_id: &str, own: &RoleCredential) -> anyhow::Result<()> {
    let expected = match role {
        Role::Up => return Ok(()),
        Role::Gateway => MeshRole::Gateway,
        Role::Scheduler => MeshRole::Scheduler,
        Role::Worker => MeshRole::Worker,
        Role::DraftStore => MeshRole::DraftStore,
        Role::ReferenceEngine => MeshRole::Engine,
    };
    anyhow::ensure!(
        own.role == expected,
        "the credential is of the role {}, but this process is a {expected}",
        own.role
    );
    anyhow::ensure!(
        own.role != MeshRole::Worker || own.is_of(worker_id),
        "the credential is of the worker {:?}, but worker.id is {worker_id:?}",
        own.name
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_process_needs_a_credential_of_its_own_role_and_a_worker_of_its_own_name() {
        let own = |role, name: &str| RoleCredential {
            role,
            name: name.into(),
            issued_at_s: 0,
            expires_at_s: 0,
            kid: String::new(),
        };
        let check = |role, own| check_own(role, "w-1", &own).is_ok();
        assert!(check(Role::Worker, own(MeshRole::Worker, "w-1")));
        assert!(!check(Role::Worker, own(MeshRole::Worker, "w-2")));
        assert!(check(Role::Worker, own(MeshRole::Worker, "w-*")));
        assert!(!check(Role::Worker, own(MeshRole::Worker, "v-*")));
        assert!(!check(Role::Worker, own(MeshRole::Operator, "w-1")));
        assert!(check(Role::DraftStore, own(MeshRole::DraftStore, "any")));
        assert!(check(Role::ReferenceEngine, own(MeshRole::Engine, "any")));
    }

    #[test]
    fn the_issuers_key_is_for_its_owner_only_and_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let key_file = dir.path().join("issuer.key");
        let issuer = || {
            run(MeshArgs {
                command: MeshCommand::Issuer {
                    key_file: key_file.clone(),
                },
            })
        };
        issuer().unwrap();
        assert_eq!(std::fs::metadata(&key_file).unwrap().mode() & 0o777, 0o600);
        let text = std::fs::read_to_string(&key_file).unwrap();
        assert!(CredentialIssuer::from_hex(&text).is_ok());
        assert!(issuer().is_err());
        assert_eq!(std::fs::read_to_string(&key_file).unwrap(), text);
    }
}
