//! The keys that a configuration sets, with their values and who sets them. Secrets are left out.

use std::ffi::OsString;
use std::path::Path;

use schemars::JsonSchema;
use toml::{Table, Value};

use super::schema_keys::keys;
use super::{EnvRule, overlay, read_table};

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetKey {
    /// Its path, such as `worker.engine.kind`.
    pub path: String,
    /// Its value as TOML. A secret is shown by [`HIDDEN`].
    pub value: String,
    /// The one that set it.
    pub by: SetBy,
}

/// The one that set a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetBy {
    /// The configuration file.
    File,
    /// This environment variable.
    Variable(String),
    /// Nobody, so it has its default.
    Default,
}

/// The text in place of a secret.
pub const HIDDEN: &str = "<hidden>";

/// Every key that has a value, in the order of [`keys`]: those of the file and of the environment as they are
/// written, and all others at their defaults.
///
/// # Errors
/// The file cannot be read.
pub fn set_keys<T: JsonSchema>(
    file: Option<&Path>,
    rule: EnvRule,
    env: impl Iterator<Item = (OsString, OsString)>,
) -> anyhow::Result<Vec<SetKey>> {
    let mut table = read_table(file)?;
    let settings = overlay(&mut table, rule, env, &mut Vec::new());
    let all = keys::<T>().into_iter();
    let shown = all.filter_map(|key| {
        // Elements are shown with their list.
        let is_element = key.path.contains("[]") || key.path.contains(".NAME");
        let (value, by) = match find(&table, &key.path) {
            _ if is_element => return None,
            Some(value) => {
                let setting = settings.iter().find(|setting| setting.is_at(&key.path));
                let by = setting.map_or(SetBy::File, |it| SetBy::Variable(it.name.clone()));
                (hidden(&key.path, value.clone()).to_string(), by)
            }
            None => (key.default()?, SetBy::Default),
        };
        Some(SetKey {
            path: key.path,
            value,
            by,
        })
    });
    Ok(shown.collect())
}

fn find<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    let (head, rest) = path
        .split_once('.')
        .map_or((path, None), |(head, rest)| (head, Some(rest)));
    match (table.get(head)?, rest) {
        (value, None) => Some(value),
        (Value::Table(inner), Some(rest)) => find(inner, rest),
        _ => None,
    }
}

/// A value without the secrets in it. The value of a key that may be secret is hidden whatever its form, since one of
/// a wrong form is shown as well.
fn hidden(path: &str, value: Value) -> Value {
    match value {
        Value::Table(table) => {
            let entries = table.into_iter().map(|(name, value)| {
                let value = hidden(&name, value);
                (name, value)
            });
            Value::Table(entries.collect())
        }
        Value::Array(values) => {
            let values = values.into_iter().map(|value| hidden(path, value));
            Value::Array(values.collect())
        }
        Value::String(text) if text.is_empty() || !(may_be_secret(path) || has_user(&text)) => {
            Value::String(text)
        }
        value @ (Value::Boolean(_) | Value::Float(_)) => value,
        value @ Value::Integer(_) if !may_be_secret(path) => value,
        _ => Value::String(HIDDEN.to_owned()),
    }
}

/// Whether the value of a key may be a secret, by its name. Paths of files, digests and public keys are none.
fn may_be_secret(path: &str) -> bool {
    let name = path.rsplit('.').next().unwrap_or(path);
    let words: Vec<&str> = name.split('_').collect();
    let is_secret =
        |word: &&str| ["secret", "secrets", "token", "password", "key", "keys"].contains(word);
    let is_harmless = |word: &&str| ["public", "file", "sha256", "max"].contains(word);
    words.iter().any(is_secret) && !words.iter().any(is_harmless)
}

/// Whether a text is an address with a user before its host, and so perhaps with a password.
fn has_user(text: &str) -> bool {
    let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or(rest);
    host.contains('@')
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Default, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Config {
        name: String,
        count_max: u32,
        secret: String,
        keys: Vec<Entry>,
        broker: Broker,
    }

    #[derive(Default, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Entry {
        key: String,
        tenant: String,
    }

    #[derive(Default, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Broker {
        servers: Vec<String>,
        public_key: String,
    }

    #[test]
    fn each_key_has_its_value_and_who_set_it_and_no_secret_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        let text = "name = \"a\"\nsecret = \"s3cret\"\nkeys = [{ key = \"s3cret\", tenant = \"t\" }]\n\
                    [broker]\nservers = [\"nats://user:s3cret@h:1\"]\npublic_key = \"p\"";
        std::fs::write(&path, text).unwrap();
        let rule = EnvRule {
            prefix: "X_",
            top_level: &["COUNT_MAX"],
            others: &[],
        };
        let env = [("X_COUNT_MAX", "3"), ("X_BROKER__PUBLIC_KEY", "q")];
        let env = env.map(|(name, value)| (name.into(), value.into()));
        let shown = set_keys::<Config>(Some(&path), rule, env.into_iter()).unwrap();
        let text = format!("{shown:?}");
        assert!(!text.contains("s3cret"), "{text}");
        let of = |path: &str| {
            let key = shown.iter().find(|key| key.path == path).unwrap();
            (key.value.as_str(), key.by.clone())
        };
        assert_eq!(of("name"), ("\"a\"", SetBy::File));
        assert_eq!(
            of("count_max"),
            ("3", SetBy::Variable("X_COUNT_MAX".into()))
        );
        let by = SetBy::Variable("X_BROKER__PUBLIC_KEY".into());
        assert_eq!(of("broker.public_key"), ("\"q\"", by));
        assert!(of("keys").0.contains("tenant = \"t\""));
        for (path, text) in [
            ("mesh.secrets_accepted", "s"),
            ("mesh.secret", "/s"),
            ("standby.servers", "user:s@nats:4222"),
            ("urls.engine", "http://user:s@h/v1"),
        ] {
            let shown = hidden(path, Value::Array(vec![text.into()])).to_string();
            assert!(shown.contains(HIDDEN), "{path}: {shown}");
        }
        assert!(
            hidden("redis.password", Value::Integer(12))
                .to_string()
                .contains(HIDDEN)
        );
        for (path, text) in [
            ("mesh.secret_file", "/run/secret"),
            ("urls.engine", "http://h:1/a@b"),
            ("gateway.operators.token_sha256", "ab"),
        ] {
            assert!(
                hidden(path, text.into()).to_string().contains(text),
                "{path}"
            );
        }
        assert!(of("secret").0.contains(HIDDEN) && of("broker.servers").0.contains(HIDDEN));
        let none = set_keys::<Config>(None, rule, std::iter::empty()).unwrap();
        assert!(none.iter().all(|key| key.by == SetBy::Default));
        assert_eq!(none.len(), 6);
    }
}
