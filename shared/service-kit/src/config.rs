//! Reads the configuration from a file and the environment into a typed value, and reports all faults at once.
//!
//! A file is TOML. One whose name ends in `.json` is JSON with the same keys, for tools that write files. There, null
//! is no value.
//!
//! A variable `REFRAIN_WORKER__MAX_RUNNING=8` overrides the key `max_running` in the table `worker`: a double
//! underscore after the prefix goes one table down. A value is read as TOML if possible, otherwise as a string.
//!
//! The prefix alone does not make a variable a setting. Kubernetes gives every container
//! `REFRAIN_GATEWAY_SERVICE_HOST` and six more variables for a service called `refrain-gateway`. So a variable is a
//! setting if it has a double underscore after the prefix, or if [`EnvRule`] lists it as a key of the top level.
//! Other variables are ignored. A setting that names no key, or is not UTF-8, is a fault.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{anyhow, bail};
use serde::de::DeserializeOwned;
use toml::{Table, Value};

/// A configuration that checks its own values.
pub trait Validate {
    /// The faults of the values, one sentence per fault. Each names its key.
    fn faults(&self) -> Vec<String>;
}

/// The rule that tells which environment variables are settings. The documentation of the module explains it.
#[derive(Clone, Copy, Debug)]
pub struct EnvRule {
    /// Prefix of their names, such as `REFRAIN_`.
    pub prefix: &'static str,
    /// Keys outside all tables that may be set by a variable: the name after the prefix, in upper case.
    pub top_level: &'static [&'static str],
}

impl EnvRule {
    /// The path of the key that a variable sets; `None` if the variable is not a setting.
    fn path(self, name: &str) -> Option<Vec<String>> {
        let rest = name.strip_prefix(self.prefix)?;
        if !rest.contains("__") && !self.top_level.contains(&rest) {
            return None;
        }
        Some(rest.split("__").map(str::to_ascii_lowercase).collect())
    }
}

/// Reads `file`, if there is one, overrides it by the environment, and checks the result by `rules`.
///
/// # Errors
/// The file cannot be read, or the configuration has faults: unknown keys, wrong types or broken rules.
pub fn load<T: DeserializeOwned>(
    file: Option<&Path>,
    env_rule: EnvRule,
    env: impl Iterator<Item = (OsString, OsString)>,
    rules: impl Fn(&T) -> Vec<String>,
) -> anyhow::Result<T> {
    let mut table = match file {
        None => Table::new(),
        Some(path) => {
            let name = path.display();
            let text = std::fs::read_to_string(path)
                .map_err(|error| anyhow!("cannot read {name}: {error}"))?;
            if path
                .extension()
                .is_some_and(|extension| extension == "json")
            {
                serde_json::from_str::<serde_json::Value>(&text)
                    .and_then(|json| serde_json::from_value(without_nulls(json)))
                    .map_err(|error| anyhow!("{name} is not JSON: {error}"))?
            } else {
                text.parse()
                    .map_err(|error| anyhow!("{name} is not TOML: {error}"))?
            }
        }
    };
    let mut faults = overlay(&mut table, env_rule, env);
    let config = deserialize::<T>(table, &mut faults);
    if let Some(config) = &config {
        faults.extend(rules(config));
    }
    match config {
        Some(config) if faults.is_empty() => Ok(config),
        _ => bail!(
            "configuration has {} fault(s):\n  - {}",
            faults.len(),
            faults.join("\n  - ")
        ),
    }
}

/// A value without the keys whose value is null, which TOML does not have.
fn without_nulls(json: serde_json::Value) -> serde_json::Value {
    use serde_json::Value as Json;
    match json {
        Json::Object(keys) => {
            let set = keys.into_iter().filter(|(_, value)| !value.is_null());
            Json::Object(
                set.map(|(key, value)| (key, without_nulls(value)))
                    .collect(),
            )
        }
        Json::Array(values) => Json::Array(values.into_iter().map(without_nulls).collect()),
        value => value,
    }
}

/// Writes the variables that are settings into the table. Returns the faults.
fn overlay(
    table: &mut Table,
    rule: EnvRule,
    env: impl Iterator<Item = (OsString, OsString)>,
) -> Vec<String> {
    let mut faults = Vec::new();
    let mut variables: Vec<_> = env
        // All keys are UTF-8, so the names of settings are as well.
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter_map(|(name, value)| Some((rule.path(&name)?, name, value)))
        .collect();
    variables.sort();
    for (path, name, value) in variables {
        let Some(text) = value.to_str() else {
            faults.push(format!("{name}: is not UTF-8"));
            continue;
        };
        if let Err(key) = insert(table, &path, parse_value(text)) {
            faults.push(format!(
                "{name}: the file has a value for {key}, which must be a table"
            ));
        }
    }
    faults
}

fn parse_value(text: &str) -> Value {
    let table = format!("value = {text}").parse::<Table>().ok();
    table
        .filter(|table| table.len() == 1)
        .and_then(|mut table| table.remove("value"))
        .unwrap_or_else(|| Value::String(text.to_owned()))
}

fn insert(table: &mut Table, path: &[String], value: Value) -> Result<(), String> {
    match path {
        [] => Ok(()),
        [key] => {
            table.insert(key.clone(), value);
            Ok(())
        }
        [key, rest @ ..] => match table
            .entry(key.clone())
            .or_insert_with(|| Value::Table(Table::new()))
        {
            Value::Table(inner) => insert(inner, rest, value),
            _ => Err(key.clone()),
        },
    }
}

/// Deserializes the table. After a fault it removes the faulty key and tries again, so that one run finds all faults.
fn deserialize<T: DeserializeOwned>(mut table: Table, faults: &mut Vec<String>) -> Option<T> {
    // Each round removes one key, so the number of keys bounds the rounds. Nobody wants to read more than 64 faults.
    for _ in 0..64 {
        let mut unknown = Vec::new();
        let mut track = serde_path_to_error::Track::new();
        let outcome = {
            let deserializer =
                serde_path_to_error::Deserializer::new(Value::Table(table.clone()), &mut track);
            serde_ignored::deserialize::<_, _, T>(deserializer, |path| {
                unknown.push(path.to_string());
            })
        };
        match outcome {
            Ok(config) => {
                let unknown = unknown.iter();
                faults.extend(unknown.map(|path| format!("{path}: unknown key")));
                return Some(config);
            }
            Err(error) => {
                let path = track.path();
                let message = error.to_string();
                let message = message.trim().replace('\n', " ");
                faults.push(format!("{path}: {message}"));
                let keys: Vec<String> = path.iter().map(|segment| segment.to_string()).collect();
                // With `deny_unknown_fields` the path ends at the parent, and the message names the key.
                let named = message.split('`').nth(1).map(str::to_owned);
                let parents = keys.iter().filter(|key| *key != ".").cloned();
                let unknown: Vec<String> = parents.chain(named.clone()).collect();
                if !remove(&mut table, &keys) && (named.is_none() || !remove(&mut table, &unknown))
                {
                    return None;
                }
            }
        }
    }
    None
}

fn remove(table: &mut Table, path: &[String]) -> bool {
    match path {
        [] => false,
        [key] => table.remove(key).is_some(),
        [key, rest @ ..] => match table.get_mut(key) {
            Some(Value::Table(inner)) => remove(inner, rest),
            // A fault inside a list removes the whole list, so further faults of the list appear only after it is
            // mended.
            Some(Value::Array(_)) => table.remove(key).is_some(),
            _ => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default, deny_unknown_fields)]
    struct Inner {
        depth: u32,
    }

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default, deny_unknown_fields)]
    struct Example {
        name: String,
        slots: u32,
        inner: Inner,
    }

    impl Validate for Example {
        fn faults(&self) -> Vec<String> {
            if self.slots > 100 {
                vec!["slots: at most 100".into()]
            } else {
                vec![]
            }
        }
    }

    const RULE: EnvRule = EnvRule {
        prefix: "X_",
        top_level: &["SLOTS", "NAME"],
    };

    fn check(toml: &str, env: &[(&str, &str)]) -> Result<Example, String> {
        let dir =
            std::env::temp_dir().join(format!("refrain-config-{:?}", std::thread::current().id()));
        std::fs::write(&dir, toml).unwrap();
        let env = env
            .iter()
            .map(|(k, v)| (OsString::from(k), OsString::from(v)))
            .collect::<Vec<_>>();
        let loaded = load(Some(&dir), RULE, env.into_iter(), Example::faults)
            .map_err(|error| error.to_string());
        std::fs::remove_file(&dir).unwrap();
        loaded
    }

    #[test]
    fn the_environment_overrides_the_file() {
        let config = check(
            "name = \"a\"\nslots = 1",
            &[("X_SLOTS", "7"), ("X_INNER__DEPTH", "3"), ("Y", "1")],
        )
        .unwrap();
        assert_eq!(
            config,
            Example {
                name: "a".into(),
                slots: 7,
                inner: Inner { depth: 3 }
            }
        );
    }

    #[test]
    fn a_file_of_json_has_the_same_keys_and_faults() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("mesh.json");
        let read = |json: &str| {
            std::fs::write(&file, json).unwrap();
            load(Some(&file), RULE, std::iter::empty(), Example::faults)
                .map_err(|error| error.to_string())
        };
        let config = read(r#"{"slots": 7, "name": null, "inner": {"depth": 3}}"#).unwrap();
        assert_eq!((config.slots, config.inner.depth), (7, 3));
        let unknown = read(r#"{"inner": {"depht": 1}}"#).unwrap_err();
        assert!(unknown.contains("depht"), "{unknown}");
        let error = read("slots = 7").unwrap_err();
        assert!(error.contains("mesh.json is not JSON"), "{error}");
    }

    #[test]
    fn plain_text_in_the_environment_is_a_string() {
        assert_eq!(
            check("", &[("X_NAME", "127.0.0.1:80")]).unwrap().name,
            "127.0.0.1:80"
        );
    }

    #[test]
    fn variables_of_others_are_ignored() {
        let kubernetes = [
            ("X_INNER_SERVICE_HOST", "10.0.0.1"),
            ("X_INNER_PORT", "tcp://10.0.0.1:80"),
            ("X_DEPTH", "1"),
        ];
        assert_eq!(check("", &kubernetes), Ok(Example::default()));
        let typo = check("", &[("X_INNER__DEPHT", "1")]).unwrap_err();
        assert!(typo.contains("depht"), "{typo}");
    }

    #[cfg(unix)]
    #[test]
    fn only_settings_have_to_be_utf8() {
        use std::os::unix::ffi::OsStringExt;
        let broken = || OsString::from_vec(vec![b'a', 0xff]);
        let load = |name: OsString| {
            load(None, RULE, [(name, broken())].into_iter(), Example::faults)
                .map_err(|error| error.to_string())
        };
        assert!(load("Y".into()).is_ok());
        assert!(load(broken()).is_ok());
        let fault = load("X_INNER__DEPTH".into()).unwrap_err();
        assert!(fault.contains("X_INNER__DEPTH: is not UTF-8"), "{fault}");
    }

    #[test]
    fn every_fault_is_reported_at_once() {
        let error = check(
            "nane = 1\nslots = \"many\"\n[inner]\ndepth = -1\nwidth = 2",
            &[],
        )
        .unwrap_err();
        for part in ["nane", "slots", "inner.depth", "width"] {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
        let error = check("slots = 101\nnane = 1", &[]).unwrap_err();
        assert!(
            error.contains("at most 100") && error.contains("nane"),
            "{error}"
        );
    }
}
