//! `refrain tenants` and `refrain keys`: the operator's commands for tenants, in a file or at a gateway.
//!
//! Each command that changes something is an act. On a file it is carried out here: a new file is put in the place
//! of the old one, gateways follow it, and an audit log beside it has a line. At a gateway it is a call of the admin
//! API.

mod audit;
mod source;
mod standing;

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use refrain_accounts::OperatorToken;
use refrain_accounts::tenants::act::{self, TenantAct};
use refrain_accounts::tenants::file::{
    KeyEndpoint, KeyEntry, LimitsEntry, TenantEntry, TenantsFile, expiry_text,
};
use refrain_lab::text_table::text_table;
use refrain_protocol::names::{TenantName, shown};
use refrain_service_kit::clock;
use refrain_service_kit::mesh::MeshConfig;

use self::source::{AdminClient, Source};
use self::standing::StandingArgs;
use crate::local_operator;

/// Arguments of `refrain tenants`.
#[derive(Args)]
pub struct TenantsArgs {
    #[command(subcommand)]
    command: TenantsCommand,
    #[command(flatten)]
    source: SourceArgs,
}

/// Arguments of `refrain keys`.
#[derive(Args)]
pub struct KeysArgs {
    /// Without a command: print fresh keys for the [mesh] section of a configuration file.
    #[command(subcommand)]
    command: Option<KeysCommand>,
    #[command(flatten)]
    source: SourceArgs,
}

#[derive(Args)]
struct SourceArgs {
    /// The file of tenants, as gateway.tenants_file names it [default: the `refrain up` that runs with --data-dir].
    #[arg(long, global = true, env = "REFRAIN_GATEWAY__TENANTS_FILE")]
    file: Option<PathBuf>,
    /// In place of a file: URL of the operations listener of a gateway with gateway.tenants_in_store.
    #[arg(long, global = true)]
    url: Option<String>,
    /// In place of both: the data directory of a `refrain up` that runs on this machine [default: refrain-data, if
    /// none of the others is named].
    #[arg(long, global = true, conflicts_with = "url")]
    data_dir: Option<PathBuf>,
    /// File with the token of an operator, for --url [default: the variable REFRAIN_OPERATOR_TOKEN].
    #[arg(long, global = true)]
    token_file: Option<PathBuf>,
}

impl SourceArgs {
    fn open(self) -> anyhow::Result<Source> {
        // A folder that is named goes before a file that the environment names.
        let file = self.file.filter(|_| self.data_dir.is_none());
        let url = match (self.url, file) {
            (Some(url), _) => url,
            (None, Some(file)) => return Ok(Source::File(file)),
            (None, None) => {
                let data_dir = self.data_dir.unwrap_or_else(|| "refrain-data".into());
                let up = local_operator::find(&data_dir)?;
                let up = up.with_context(|| {
                    format!(
                        "no `refrain up` with an operator of its own runs in {}: name its --data-dir, the --url of a \
                         gateway's operations listener, or with --file the file of gateway.tenants_file",
                        data_dir.display()
                    )
                })?;
                return Ok(Source::Gateway(AdminClient::new(&up.url, &up.token)?));
            }
        };
        let token = match self.token_file {
            Some(path) => std::fs::read_to_string(&path)
                .with_context(|| format!("--token-file: cannot read {}", path.display()))?,
            None => std::env::var("REFRAIN_OPERATOR_TOKEN").context(
                "--url needs the token of an operator: give --token-file or REFRAIN_OPERATOR_TOKEN",
            )?,
        };
        Ok(Source::Gateway(AdminClient::new(&url, token.trim())?))
    }
}

#[derive(Subcommand)]
enum TenantsCommand {
    /// List the tenants with their limits.
    List,
    /// Add a tenant.
    Add(TenantArgs),
    /// Change a tenant. Values that are not named stay.
    Set(TenantArgs),
    /// Remove a tenant and its keys. Its data stays; `refrain store erase --tenant NAME --everything` erases it.
    Remove {
        /// Name of the tenant.
        name: String,
    },
}

#[derive(Args)]
struct TenantArgs {
    /// Name of the tenant.
    name: String,
    #[command(flatten)]
    standing: StandingArgs,
    #[command(flatten)]
    limits: LimitArgs,
}

#[derive(Subcommand)]
enum KeysCommand {
    /// Make a token for an operator of gateways, and print it with the lines of their configuration.
    Operator {
        /// Name of the operator, which audit logs have.
        name: String,
    },
    /// List the keys of all tenants, without the keys themselves.
    List,
    /// Make a key and print it. It is shown only once.
    Add(AddKeyArgs),
    /// Make a key in place of another one, which goes on for a while.
    Rotate {
        /// Public id of the key that ends.
        id: String,
        /// Hours until it ends.
        #[arg(long, default_value_t = 24)]
        grace_hours: u32,
    },
    /// Remove a key. Requests that it began go on.
    Revoke {
        /// Public id of the key.
        id: String,
    },
}

#[derive(Args)]
struct AddKeyArgs {
    /// Name of the tenant.
    tenant: String,
    /// Name of the key, for people.
    #[arg(long)]
    name: String,
    /// Models that it may use, separated by commas [default: all of the tenant].
    #[arg(long, value_delimiter = ',')]
    models: Vec<String>,
    /// Endpoints that it may call, separated by commas: chat, completions, messages, responses, tokenize, passthrough
    /// [default: all].
    #[arg(long, value_delimiter = ',', value_parser = endpoint)]
    endpoints: Vec<KeyEndpoint>,
    /// Days until it ends [default: it does not end].
    #[arg(long)]
    days: Option<u32>,
    #[command(flatten)]
    limits: LimitArgs,
}

#[derive(Args, Clone, Copy)]
struct LimitArgs {
    /// Requests per minute; 0 for no limit.
    #[arg(long)]
    requests_per_minute: Option<u64>,
    /// Tokens of prompts and outputs per minute; 0 for no limit.
    #[arg(long)]
    tokens_per_minute: Option<u64>,
    /// Tokens of prompts per minute; 0 for no limit.
    #[arg(long)]
    input_tokens_per_minute: Option<u64>,
    /// Tokens of outputs per minute; 0 for no limit.
    #[arg(long)]
    output_tokens_per_minute: Option<u64>,
    /// Tokens of prompts and outputs per day of the calendar in UTC; 0 for no budget.
    #[arg(long)]
    tokens_per_day: Option<u64>,
    /// The same per month.
    #[arg(long)]
    tokens_per_month: Option<u64>,
    /// Requests at once; 0 for no limit.
    #[arg(long)]
    requests_in_flight_max: Option<u64>,
}

impl LimitArgs {
    /// The limits with these changes.
    fn over(self, before: LimitsEntry) -> LimitsEntry {
        let changed = |given: Option<u64>, before| match given {
            None => before,
            Some(0) => None,
            Some(limit) => Some(limit),
        };
        LimitsEntry {
            requests_per_minute: changed(self.requests_per_minute, before.requests_per_minute),
            tokens_per_minute: changed(self.tokens_per_minute, before.tokens_per_minute),
            input_tokens_per_minute: changed(
                self.input_tokens_per_minute,
                before.input_tokens_per_minute,
            ),
            output_tokens_per_minute: changed(
                self.output_tokens_per_minute,
                before.output_tokens_per_minute,
            ),
            tokens_per_day: changed(self.tokens_per_day, before.tokens_per_day),
            tokens_per_month: changed(self.tokens_per_month, before.tokens_per_month),
            requests_in_flight_max: changed(
                self.requests_in_flight_max,
                before.requests_in_flight_max,
            ),
        }
    }
}

fn endpoint(text: &str) -> Result<KeyEndpoint, String> {
    let value = serde_json::Value::from(text);
    serde_json::from_value(value).map_err(|_| {
        "must be one of chat, completions, messages, responses, tokenize and passthrough".to_owned()
    })
}

/// Runs `refrain tenants`.
///
/// # Errors
/// A file with faults, a name that is there already or is unknown, a file that cannot be written, or a refusal by the
/// gateway.
pub fn tenants(args: TenantsArgs) -> anyhow::Result<()> {
    let source = args.source.open()?;
    match args.command {
        TenantsCommand::List => print!("{}", tenants_table(&source.tenants()?)),
        TenantsCommand::Add(TenantArgs {
            name,
            standing,
            limits,
        }) => {
            let name = name.parse::<TenantName>();
            let name = name.map_err(|fault| anyhow!("NAME: {fault}"))?;
            let mut entry = TenantEntry {
                limits: limits.over(LimitsEntry::default()),
                ..TenantEntry::named(name)
            };
            standing.apply(&mut entry);
            source.carry_out(TenantAct::AddTenant(entry), None)?;
        }
        TenantsCommand::Set(TenantArgs {
            name,
            standing,
            limits,
        }) => {
            let (before, version) = source.tenant(&name)?;
            let mut after = before.clone();
            standing.apply(&mut after);
            after.limits = limits.over(before.limits);
            let patch = act::difference(&before, &after)?;
            source.carry_out(TenantAct::ChangeTenant { name, patch }, version)?;
        }
        TenantsCommand::Remove { name } => {
            source.carry_out(TenantAct::RemoveTenant { name }, None)?;
        }
    }
    Ok(())
}

/// Runs `refrain keys`.
///
/// # Errors
/// As [`tenants`].
pub fn keys(args: KeysArgs) -> anyhow::Result<()> {
    let now = clock::unix_s().cast_signed();
    let act = match args.command {
        None => return print_mesh_keys(),
        Some(KeysCommand::Operator { name }) => return print_operator(&name),
        Some(KeysCommand::List) => {
            print!("{}", keys_table(&args.source.open()?.tenants()?));
            return Ok(());
        }
        Some(KeysCommand::Add(args)) => {
            let ends = args.days.map(|days| now + i64::from(days) * 24 * 3_600);
            let entry = KeyEntry {
                name: args.name,
                models: args.models,
                endpoints: args.endpoints,
                expires_at: ends.map(expiry_text).transpose()?,
                limits: args.limits.over(LimitsEntry::default()),
                ..KeyEntry::default()
            };
            TenantAct::AddKey {
                tenant: args.tenant,
                entry,
            }
        }
        Some(KeysCommand::Rotate { id, grace_hours }) => TenantAct::RotateKey {
            id,
            grace_hours,
            new: KeyEntry::default(),
        },
        Some(KeysCommand::Revoke { id }) => TenantAct::RevokeKey { id },
    };
    if let Some(key) = args.source.open()?.carry_out(act, None)? {
        println!("{key}");
    }
    Ok(())
}

fn print_mesh_keys() -> anyhow::Result<()> {
    let keys = MeshConfig::generate()?;
    println!("[mesh]\n# For every service.");
    println!("secret = \"{}\"", keys.secret);
    println!("namespace_public_key = \"{}\"", keys.namespace_public_key);
    println!("# For gateways only.");
    println!("namespace_signing_key = \"{}\"", keys.namespace_signing_key);
    Ok(())
}

/// Prints a new token, and the lines of the configuration that let it in.
fn print_operator(name: &str) -> anyhow::Result<()> {
    let made = OperatorToken::random()?;
    println!(
        "# The token of {name}, which is shown only once: {}",
        made.token
    );
    println!("[[gateway.operators]]");
    println!("name = {}", toml::Value::from(name));
    println!("token_sha256 = \"{}\"", made.sha256);
    Ok(())
}

fn limit_columns(limits: &LimitsEntry) -> [String; 3] {
    let text = |limit: Option<u64>| limit.map_or("-".to_owned(), |limit| limit.to_string());
    let tokens = [
        (limits.tokens_per_minute, " a minute"),
        (limits.input_tokens_per_minute, " in a minute"),
        (limits.output_tokens_per_minute, " out a minute"),
        (limits.tokens_per_day, " a day"),
        (limits.tokens_per_month, " a month"),
    ];
    let tokens: Vec<String> = tokens
        .into_iter()
        .filter_map(|(limit, what)| Some(format!("{}{what}", limit?)))
        .collect();
    let tokens = match tokens.is_empty() {
        true => "-".to_owned(),
        false => tokens.join(", "),
    };
    [
        text(limits.requests_per_minute),
        tokens,
        text(limits.requests_in_flight_max),
    ]
}

fn tenants_table(file: &TenantsFile) -> String {
    let rows = file.tenants.iter().map(|tenant| {
        let mut row = vec![
            tenant.name.to_string(),
            tenant.keys.len().to_string(),
            f64::from(tenant.weight).to_string(),
            format!("{:?}", tenant.isolation).to_lowercase(),
        ];
        row.extend(limit_columns(&tenant.limits));
        row
    });
    let head = [
        "tenant",
        "keys",
        "weight",
        "isolation",
        "requests/min",
        "tokens",
        "at once",
    ];
    text_table(1, &head, rows)
}

fn keys_table(file: &TenantsFile) -> String {
    let all = |names: Vec<String>| match names.is_empty() {
        true => "all".to_owned(),
        false => names.join(", "),
    };
    let keys = file
        .tenants
        .iter()
        .flat_map(|tenant| tenant.keys.iter().map(|key| (&tenant.name, key)));
    let rows = keys.map(|(tenant, key)| {
        let endpoints = key.endpoints.iter();
        let endpoints = endpoints.map(|endpoint| format!("{endpoint:?}").to_lowercase());
        let mut row = vec![
            key.id.clone(),
            tenant.to_string(),
            shown(&key.name).into_owned(),
            all(key.models.clone()),
            all(endpoints.collect()),
            key.expires_at.clone().unwrap_or_else(|| "never".to_owned()),
        ];
        row.extend(limit_columns(&key.limits));
        row
    });
    let head = [
        "id",
        "tenant",
        "name",
        "models",
        "endpoints",
        "ends",
        "requests/min",
        "tokens",
        "at once",
    ];
    text_table(6, &head, rows)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use super::source::beside;
    use super::*;

    fn source(path: &Path) -> SourceArgs {
        SourceArgs {
            file: Some(path.to_owned()),
            url: None,
            data_dir: None,
            token_file: None,
        }
    }

    fn read(path: &Path) -> anyhow::Result<TenantsFile> {
        source(path).open()?.tenants()
    }

    fn limits() -> LimitArgs {
        LimitArgs {
            requests_per_minute: None,
            tokens_per_minute: None,
            input_tokens_per_minute: None,
            output_tokens_per_minute: None,
            tokens_per_day: None,
            tokens_per_month: None,
            requests_in_flight_max: None,
        }
    }

    fn run_tenants(path: &Path, command: TenantsCommand) -> anyhow::Result<()> {
        let source = source(path);
        tenants(TenantsArgs { command, source })
    }

    fn run_keys(path: &Path, command: KeysCommand) -> anyhow::Result<()> {
        let (command, source) = (Some(command), source(path));
        keys(KeysArgs { command, source })
    }

    #[test]
    fn commands_edit_the_file_and_each_change_is_logged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tenants.toml");
        let tenant = |limits| TenantArgs {
            standing: StandingArgs::default(),
            name: "acme".into(),
            limits,
        };
        let limited = LimitArgs {
            requests_per_minute: Some(600),
            tokens_per_minute: Some(9_000),
            tokens_per_day: Some(70_000),
            ..limits()
        };
        run_tenants(&path, TenantsCommand::Add(tenant(limited))).unwrap();
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o644, "a gateway of another user has to read it");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(run_tenants(&path, TenantsCommand::Add(tenant(limits()))).is_err());
        // The file keeps its mode. A limit of 0 is none, and those that are not named stay.
        let changed = LimitArgs {
            requests_per_minute: Some(0),
            ..limits()
        };
        run_tenants(&path, TenantsCommand::Set(tenant(changed))).unwrap();
        assert_eq!(mode(), 0o640);
        let add = AddKeyArgs {
            tenant: "acme".into(),
            name: "ci".into(),
            models: vec!["m".into()],
            endpoints: vec![endpoint("chat").unwrap()],
            days: Some(30),
            limits: limits(),
        };
        run_keys(&path, KeysCommand::Add(add)).unwrap();
        let file = read(&path).unwrap();
        let [only] = &*file.tenants else {
            panic!("{file:?}");
        };
        assert_eq!(only.limits.requests_per_minute, None);
        assert_eq!(only.limits.tokens_per_minute, Some(9_000));
        assert_eq!(only.limits.tokens_per_day, Some(70_000));
        let all = tenants_table(&file);
        assert!(all.contains("9000 a minute, 70000 a day"), "{all}");
        let first = only.keys[0].clone();
        let table = keys_table(&file);
        assert!(
            table.contains(&first.id) && !table.contains(&first.sha256),
            "{table}"
        );
        let rotate = KeysCommand::Rotate {
            id: first.id.clone(),
            grace_hours: 1,
        };
        run_keys(&path, rotate).unwrap();
        let file = read(&path).unwrap();
        let [old, new] = &*file.tenants[0].keys else {
            panic!("{file:?}");
        };
        assert!(old.expires_unix_s().unwrap() < first.expires_unix_s().unwrap());
        assert_eq!((&new.name, &new.models), (&first.name, &first.models));
        assert_eq!(
            new.expires_at, first.expires_at,
            "the new one lives as long as planned"
        );
        let revoke = |id: &str| run_keys(&path, KeysCommand::Revoke { id: id.to_owned() });
        revoke(&first.id).unwrap();
        assert!(
            revoke(&first.id)
                .unwrap_err()
                .to_string()
                .contains("no key")
        );
        run_tenants(
            &path,
            TenantsCommand::Remove {
                name: "acme".into(),
            },
        )
        .unwrap();
        assert_eq!(read(&path).unwrap(), TenantsFile::default());
        let log = std::fs::read_to_string(beside(&path, "audit.jsonl")).unwrap();
        let acts: Vec<serde_json::Value> = log
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(acts.len(), 6, "{log}");
        assert_eq!(acts[0]["act"], "tenant acme added");
        assert!(acts[0]["at"].as_str().unwrap().ends_with('Z') && acts[0]["uid"].is_u64());
    }

    #[test]
    fn no_name_paints_the_terminal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tenants.toml");
        let add = |name: &str| TenantArgs {
            standing: StandingArgs::default(),
            name: name.into(),
            limits: limits(),
        };
        let refused = run_tenants(&path, TenantsCommand::Add(add("evil\u{1b}[31mred")));
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .contains("control characters")
        );
        run_tenants(&path, TenantsCommand::Add(add("acme"))).unwrap();
        // Somebody wrote this name into the file.
        let mut file = read(&path).unwrap();
        file.tenants[0].keys.push(KeyEntry {
            name: "a\u{1b}[31m\nb".into(),
            id: "1f".into(),
            sha256: "00".repeat(32),
            ..KeyEntry::default()
        });
        let table = keys_table(&file);
        assert!(table.contains("a\\u{1b}[31m\\nb"), "{table}");
        assert!(!table.contains('\u{1b}'), "{table}");
    }

    #[test]
    fn an_unknown_endpoint_is_refused() {
        assert!(endpoint("chats").unwrap_err().contains("completions"));
    }
}
