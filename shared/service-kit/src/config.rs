//! Reads the configuration from a file and the environment into a typed value, and reports all faults at once.
//!
//! A file is TOML. One whose name ends in `.json` is JSON with the same keys, for tools that write files. There, null
//! is no value.
//!
//! A variable `REFRAIN_WORKER__MAX_RUNNING=8` overrides the key `max_running` in the table `worker`: a double
//! underscore after the prefix goes one table down. A value is read as TOML if possible, otherwise as a string.
//!
//! A variable with the prefix that is no setting is a fault as well, since it is a setting with a typing error, such
//! as one underscore in place of two. Others are known to [`EnvRule`], and Kubernetes makes some: it gives every
//! container `REFRAIN_GATEWAY_SERVICE_HOST` and six more variables for a service called `refrain-gateway`. A setting
//! that names no key, or is not UTF-8, is a fault.

mod schema_keys;
mod set_keys;
mod similar_keys;

use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{anyhow, bail};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

pub use self::schema_keys::{Key, keys};
pub use self::set_keys::{HIDDEN, SetBy, SetKey, set_keys};
use self::similar_keys::similar_key;

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
    /// Variables with the prefix that others read, by the name after the prefix. One that ends in an underscore
    /// stands for all that begin like it.
    pub others: &'static [&'static str],
}

/// A variable that is a setting, or is taken for one.
struct Setting {
    name: String,
    /// The path of the key that it sets; `None` if it has no such form.
    path: Option<Vec<String>>,
}

impl EnvRule {
    /// The setting that a variable is; `None` for one of somebody else.
    fn setting(self, name: &str, value: &OsStr) -> Option<Setting> {
        let rest = name.strip_prefix(self.prefix)?;
        let is_of =
            |other: &&str| rest == *other || other.ends_with('_') && rest.starts_with(*other);
        if self.others.iter().any(is_of) || is_of_kubernetes(rest, value) {
            return None;
        }
        let is_key = rest.contains("__") || self.top_level.contains(&rest);
        let path = || rest.split("__").map(str::to_ascii_lowercase).collect();
        Some(Setting {
            name: name.to_owned(),
            path: is_key.then(path),
        })
    }

    /// The variable that was probably meant by a name that sets no key of `T`: the same words with other underscores.
    fn meant<T: DeserializeOwned>(self, name: &str) -> Option<String> {
        let rest = name.strip_prefix(self.prefix)?.to_ascii_lowercase();
        let words: Vec<&str> = rest.split('_').filter(|word| !word.is_empty()).collect();
        let gaps = words
            .len()
            .checked_sub(1)
            .filter(|gaps| *gaps <= GAPS_MAX)?;
        // Each bit says whether a gap between two words is one between a table and its key.
        let rests = (0..1_u32 << gaps).map(|tables| {
            let parted = words.iter().enumerate().map(|(at, word)| match at {
                0 => (*word).to_owned(),
                _ if tables >> (at - 1) & 1 == 1 => format!("__{word}"),
                _ => format!("_{word}"),
            });
            parted.collect::<String>()
        });
        let mut rests = rests.filter(|rest| {
            rest.contains("__") || self.top_level.contains(&&*rest.to_ascii_uppercase())
        });
        let meant = rests.find(|rest| {
            let path: Vec<String> = rest.split("__").map(str::to_owned).collect();
            is_key::<T>(&path)
        });
        Some(format!("{}{}", self.prefix, meant?.to_ascii_uppercase()))
    }
}

/// Maximum number of gaps between the words of a variable for which another reading is looked for.
const GAPS_MAX: usize = 8;

/// Whether Kubernetes makes a variable for a service, by its name and its value.
fn is_of_kubernetes(rest: &str, value: &OsStr) -> bool {
    let is_url = value.to_str().is_some_and(|value| value.contains("://"));
    let rest = format!("_{rest}");
    let of_port = rest.rsplit_once("_PORT_").is_some_and(|(_, port)| {
        let mut parts = port.split('_');
        let number = parts.next().unwrap_or_default();
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        is_number && matches!(parts.next(), Some("TCP" | "UDP" | "SCTP"))
    });
    rest.ends_with("_SERVICE_HOST")
        || rest.ends_with("_SERVICE_PORT")
        || rest.contains("_SERVICE_PORT_")
        || rest.ends_with("_PORT") && is_url
        || of_port
}

/// Whether a text is an `http://` or `https://` URL with a host.
pub fn is_http_url(text: &str) -> bool {
    let url = reqwest::Url::parse(text);
    url.is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

/// The advice on a key that is misspelt, or that only another version has.
const NO_SUCH_KEY: &str = "; this version has no such key, so leave it out or correct its name";

/// Reads `file`, if there is one, overrides it by the environment, and checks the result by `rules`.
///
/// # Errors
/// The file cannot be read, or the configuration has faults: unknown keys, wrong types or broken rules.
pub fn load<T: DeserializeOwned + JsonSchema>(
    file: Option<&Path>,
    env_rule: EnvRule,
    env: impl Iterator<Item = (OsString, OsString)>,
    rules: impl Fn(&T) -> Vec<String>,
) -> anyhow::Result<T> {
    let mut table = read_table(file)?;
    let mut faults = Vec::new();
    let settings = overlay(&mut table, env_rule, env, &mut faults);
    let meant = |name: &str| {
        let other = env_rule.meant::<T>(name);
        other.map(|other| format!("; {other} is meant"))
    };
    let unset = settings.iter().filter(|setting| setting.path.is_none());
    faults.extend(unset.map(|Setting { name, .. }| {
        format!("{name}: is no setting{}", meant(name).unwrap_or_default())
    }));
    let (config, unknown) = deserialize::<T>(table, &mut faults);
    faults.extend(unknown.into_iter().map(|key| {
        let setting = settings.iter().find(|setting| setting.is_at(&key));
        let by = setting.map(|setting| format!(", set by {}", setting.name));
        let similar = || similar_key::<T>(&key).map(|key| format!("; {key} is meant"));
        let advice = setting.and_then(|setting| meant(&setting.name));
        let advice = advice.or_else(similar);
        let advice = advice.as_deref().unwrap_or(NO_SUCH_KEY);
        format!("{key}: unknown key{}{advice}", by.unwrap_or_default())
    }));
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

/// The table in `file`; an empty one if there is no file.
fn read_table(file: Option<&Path>) -> anyhow::Result<Table> {
    let Some(path) = file else {
        return Ok(Table::new());
    };
    let name = path.display();
    let text =
        std::fs::read_to_string(path).map_err(|error| anyhow!("cannot read {name}: {error}"))?;
    let extension = path.extension();
    if extension.is_some_and(|extension| extension == "json") {
        serde_json::from_str::<serde_json::Value>(&text)
            .and_then(|json| serde_json::from_value(without_nulls(json)))
            .map_err(|error| anyhow!("{name} is not JSON: {error}"))
    } else {
        text.parse()
            .map_err(|error| anyhow!("{name} is not TOML: {error}"))
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

impl Setting {
    /// Whether it sets this key, or a key below it.
    fn is_at(&self, key: &str) -> bool {
        let path = self.path.as_ref().map(|path| path.join("."));
        let below = path.as_ref().and_then(|path| path.strip_prefix(key));
        below.is_some_and(|below| below.is_empty() || below.starts_with('.'))
    }
}

/// Writes the variables that are settings into the table. Returns all that are meant to be settings.
fn overlay(
    table: &mut Table,
    rule: EnvRule,
    env: impl Iterator<Item = (OsString, OsString)>,
    faults: &mut Vec<String>,
) -> Vec<Setting> {
    let mut variables: Vec<_> = env
        // All keys are UTF-8, so the names of settings are as well.
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter_map(|(name, value)| Some((rule.setting(&name, &value)?, value)))
        .collect();
    variables.sort_by(|one, other| (&one.0.path, &one.0.name).cmp(&(&other.0.path, &other.0.name)));
    for (Setting { name, path }, value) in &variables {
        let Some(path) = path else {
            continue;
        };
        let Some(text) = value.to_str() else {
            faults.push(format!("{name}: is not UTF-8"));
            continue;
        };
        if let Err(key) = insert(table, path, parse_value(text)) {
            faults.push(format!(
                "{name}: the file has a value for {key}, which must be a table"
            ));
        }
    }
    variables.into_iter().map(|(setting, _)| setting).collect()
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

/// Deserializes the table, and returns the keys that nobody knows as well. After a fault it removes the faulty key
/// and tries again, so that one run finds all faults.
fn deserialize<T: DeserializeOwned>(
    mut table: Table,
    faults: &mut Vec<String>,
) -> (Option<T>, Vec<String>) {
    // Each round removes a key, so the number of keys bounds the rounds. Nobody wants to read more than 64 faults.
    let mut unknown = Vec::new();
    for _ in 0..64 {
        unknown.clear();
        match try_deserialize(table.clone(), &mut unknown) {
            Ok(config) => return (Some(config), unknown),
            Err((mut path, fault)) => {
                faults.push(fault);
                // Where the key is not in the table, as one that is missing, the table has the fault.
                while !path.is_empty() && !remove(&mut table, &path) {
                    path.pop();
                }
                if path.is_empty() {
                    break;
                }
            }
        }
    }
    (None, unknown)
}

/// Deserializes the table, and adds the keys that it has and `T` has not to `unknown`. A fault comes with its path.
fn try_deserialize<T: DeserializeOwned>(
    table: Table,
    unknown: &mut Vec<String>,
) -> Result<T, (Vec<String>, String)> {
    let mut track = serde_path_to_error::Track::new();
    let deserializer = serde_path_to_error::Deserializer::new(Value::Table(table), &mut track);
    let outcome = serde_ignored::deserialize::<_, _, T>(deserializer, |path| {
        // Question marks stand for values that may be absent.
        let path = path.to_string();
        let keys: Vec<&str> = path.split('.').filter(|key| *key != "?").collect();
        unknown.push(keys.join("."));
    });
    outcome.map_err(|error| {
        let path = track.path();
        let message = error.to_string().trim().replace('\n', " ");
        let keys = path.iter().map(|segment| segment.to_string()).collect();
        (keys, format!("{path}: {message}"))
    })
}

/// Whether `T` has a key at this path.
fn is_key<T: DeserializeOwned>(path: &[String]) -> bool {
    // No key holds both a truth value and a text, so for a key that exists one of them is a fault, at its path.
    let mut values = [Value::Boolean(true), Value::String(String::new())].into_iter();
    values.any(|value| {
        let mut table = Table::new();
        let mut unknown = Vec::new();
        let inserted = insert(&mut table, path, value).is_ok();
        let outcome = try_deserialize::<T>(table, &mut unknown);
        inserted && unknown.is_empty() && outcome.is_err_and(|(at, _)| at == path)
    })
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

    #[derive(Debug, Default, Deserialize, JsonSchema, PartialEq)]
    #[serde(default)]
    struct Inner {
        depth: u32,
        #[serde(deserialize_with = "even")]
        even: u32,
    }

    fn even<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
        let number = u32::deserialize(deserializer)?;
        match number % 2 {
            0 => Ok(number),
            _ => Err(serde::de::Error::custom(
                "use `slots` or `name` in its place",
            )),
        }
    }

    #[derive(Debug, Default, Deserialize, JsonSchema, PartialEq)]
    #[serde(default)]
    struct Example {
        name: String,
        slots: u32,
        inner: Inner,
        optional: Option<Inner>,
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
        others: &["BINARY", "CLIENT_"],
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
                inner: Inner { depth: 3, even: 0 },
                optional: None,
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
        let others = [
            ("X_INNER_SERVICE_HOST", "10.0.0.1"),
            ("X_INNER_SERVICE_PORT", "80"),
            ("X_INNER_SERVICE_PORT_HTTP", "80"),
            ("X_INNER_PORT", "tcp://10.0.0.1:80"),
            ("X_INNER_PORT_80_TCP", "tcp://10.0.0.1:80"),
            ("X_INNER_PORT_80_TCP_ADDR", "10.0.0.1"),
            ("X_SERVICE_HOST", "10.0.0.1"),
            ("X_PORT", "tcp://10.0.0.1:80"),
            ("X_BINARY", "a"),
            ("X_CLIENT_INNER__DEPTH", "1"),
            ("XINNER_DEPTH", "1"),
        ];
        assert_eq!(check("", &others), Ok(Example::default()));
    }

    #[test]
    fn a_variable_that_sets_nothing_is_a_fault_and_says_what_is_meant() {
        for (name, told) in [
            (
                "X_INNER_DEPTH",
                "X_INNER_DEPTH: is no setting; X_INNER__DEPTH is meant",
            ),
            ("X_OPTIONAL_DEPTH", "; X_OPTIONAL__DEPTH is meant"),
            (
                "X_INNER__DEPHT",
                "inner.depht: unknown key, set by X_INNER__DEPHT; inner.depth is meant",
            ),
            ("X__SLOTS", "X__SLOTS: is no setting; X_SLOTS is meant"),
            ("X_DEPTH", "X_DEPTH: is no setting"),
            ("X_PORT", "X_PORT: is no setting"),
            ("X_A_B_C_D_E_F_G_H_I_J_K", "is no setting"),
        ] {
            let error = check("", &[(name, "1")]).unwrap_err();
            assert!(error.lines().nth(1).unwrap().ends_with(told), "{error}");
            assert!(error.contains("1 fault(s)"), "{error}");
        }
    }

    #[test]
    fn a_url_has_a_scheme_and_a_host() {
        for right in ["http://a", "https://a:1/b", "http://[::1]:8"] {
            assert!(is_http_url(right), "{right}");
        }
        for wrong in [
            "",
            "a:1",
            "localhost:4317",
            "http://",
            "ftp://a",
            "//a",
            "http:a b",
        ] {
            assert!(!is_http_url(wrong), "{wrong}");
        }
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

    #[test]
    fn a_misspelt_key_is_told_the_one_that_is_meant() {
        for (toml, told) in [
            (
                "optional.dept = 1",
                "optional.dept: unknown key; optional.depth is meant",
            ),
            ("slot = 1", "slot: unknown key; slots is meant"),
            (
                "[inner]\nslots = 1",
                "inner.slots: unknown key; slots is meant",
            ),
            (
                "colour = 1",
                "colour: unknown key; this version has no such key, so leave it out or correct its name",
            ),
        ] {
            let error = check(toml, &[]).unwrap_err();
            assert!(error.ends_with(told), "{error}");
        }
    }

    #[test]
    fn a_message_that_quotes_a_key_hides_no_other_fault() {
        let toml = "name = \"a\"\nslots = \"many\"\nnane = 1\n[inner]\neven = 1\ndepth = -1";
        let error = check(toml, &[]).unwrap_err();
        assert!(error.starts_with("configuration has 4 fault(s)"), "{error}");
        for part in [
            "inner.even: use `slots`",
            "- slots: ",
            "inner.depth",
            "nane",
        ] {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
    }
}
