//! The file of tenants, in TOML. It has no secrets: keys are there as their SHA-256.

use std::collections::HashSet;
use std::path::Path;

use anyhow::Context as _;
use refrain_protocol::TenantName;
use refrain_protocol::names::NAME_BYTES_MAX;
use refrain_protocol::scheduling::{RequestClass, TenantWeight};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Largest file, bytes: some hundred thousand keys.
const BYTES_MAX: u64 = 64 << 20;

/// All tenants.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TenantsFile {
    /// The tenants. Those of `gateway.keys` may be among them, to have limits.
    pub tenants: Vec<TenantEntry>,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantEntry {
    /// Its name, which namespaces have.
    pub name: TenantName,
    /// Its share of the engines among the tenants that wait, relative to theirs: 0.01 to 100.
    #[serde(default, skip_serializing_if = "TenantWeight::is_default")]
    pub weight: TenantWeight,
    /// The highest class of its requests. With `rollout`, its interactive requests run as rollouts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub class_max: RequestClass,
    /// Percent of its tokens, 0 to 100, that may be urgent, which is a `priority` of `high` or a `tpot_ms`. Without
    /// it 25. Urgent requests past it are ordinary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub urgent_percent_max: Option<u8>,
    /// How far its drafts, histories, groups and KV caches reach.
    #[serde(default, skip_serializing_if = "is_default")]
    pub isolation: Isolation,
    /// The shape of the events of its streams.
    #[serde(default, skip_serializing_if = "is_default")]
    pub stream_shaping: StreamShaping,
    /// Milliseconds per token of its paced streams, at least 1. Without it 40.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_pace_ms: Option<u16>,
    /// Whether its answers are without `metrics`, and their usage without numbers of cached and predicted tokens.
    #[serde(default, skip_serializing_if = "is_default")]
    pub hides_metrics: bool,
    /// Its drafts: a match of p tokens allows alpha * p draft tokens. Without it, the setting of the worker holds, or
    /// of the plugin inside its engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f32>,
    /// Draft tokens that are less likely than this are left out. Without it, the same holds as for alpha.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_token_prob: Option<f32>,
    /// Most draft tokens of a request in a step, of whatever source; 0 turns drafts off. The worker's limits hold as
    /// well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_spec_tokens: Option<u32>,
    /// The limits on all of its keys together.
    #[serde(default, skip_serializing_if = "LimitsEntry::is_empty")]
    pub limits: LimitsEntry,
    /// Its keys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<KeyEntry>,
}

impl TenantEntry {
    /// A tenant of this name without keys and limits.
    pub fn named(name: TenantName) -> Self {
        TenantEntry {
            name,
            weight: TenantWeight::default(),
            class_max: RequestClass::default(),
            urgent_percent_max: None,
            isolation: Isolation::default(),
            stream_shaping: StreamShaping::default(),
            stream_pace_ms: None,
            hides_metrics: false,
            alpha: None,
            min_token_prob: None,
            max_spec_tokens: None,
            limits: LimitsEntry::default(),
            keys: Vec::new(),
        }
    }
}

/// How far drafts, histories, groups and KV caches reach within a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// All callers of the tenant share them.
    #[default]
    Tenant,
    /// Each key has its own.
    Key,
    /// Each end user has their own: `safety_identifier`, else `user`. A request without either has those of its key.
    User,
}

/// The traces of engine steps in the events of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamShaping {
    /// Events have what an engine step brought.
    #[default]
    Off,
    /// Events have equal numbers of tokens.
    Size,
    /// Events have equal numbers of tokens, and come at equal times. Whole answers come when their stream would end.
    Pace,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A key of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeyEntry {
    /// Its name, for people.
    pub name: String,
    /// Its public id.
    pub id: String,
    /// SHA-256 of the key, in hex.
    pub sha256: String,
    /// The models that it may use. Empty: all of its tenant.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<String>,
    /// The endpoints that it may call. Empty: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub endpoints: Vec<KeyEndpoint>,
    /// When it ends, as in RFC 3339: `2027-01-31T00:00:00Z`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// The limits on this key, beside those of its tenant.
    #[serde(skip_serializing_if = "LimitsEntry::is_empty")]
    pub limits: LimitsEntry,
}

/// An endpoint, or several of one kind. The list of models is open to every key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyEndpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/messages` and its count of tokens.
    Messages,
    /// `/v1/responses` and all below it.
    Responses,
    /// `/tokenize` and `/detokenize`.
    Tokenize,
    /// The routes of other servers.
    Passthrough,
}

/// Limits on use. A missing one does not limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsEntry {
    /// Requests per minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<u64>,
    /// Tokens of prompts and outputs together, per minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<u64>,
    /// Tokens of prompts per minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_tokens_per_minute: Option<u64>,
    /// Tokens of outputs per minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_tokens_per_minute: Option<u64>,
    /// Tokens of prompts and outputs together, per day of the calendar in UTC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_day: Option<u64>,
    /// The same per month.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_month: Option<u64>,
    /// Requests at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_in_flight_max: Option<u64>,
}

impl LimitsEntry {
    /// Whether it limits nothing.
    pub fn is_empty(&self) -> bool {
        *self == LimitsEntry::default()
    }

    /// Whether it has a budget per day or month.
    pub(crate) fn has_budget(&self) -> bool {
        self.tokens_per_day.is_some() || self.tokens_per_month.is_some()
    }

    fn faults(&self, place: &str, faults: &mut Vec<String>) {
        for (name, limit) in [
            ("requests_per_minute", self.requests_per_minute),
            ("tokens_per_minute", self.tokens_per_minute),
            ("input_tokens_per_minute", self.input_tokens_per_minute),
            ("output_tokens_per_minute", self.output_tokens_per_minute),
            ("tokens_per_day", self.tokens_per_day),
            ("tokens_per_month", self.tokens_per_month),
            ("requests_in_flight_max", self.requests_in_flight_max),
        ] {
            if limit == Some(0) {
                faults.push(format!(
                    "{place}.limits.{name}: at least 1; to keep everybody out, remove the keys"
                ));
            }
        }
    }
}

impl KeyEntry {
    /// When it ends, in Unix seconds.
    ///
    /// # Errors
    /// The text is not a time of RFC 3339.
    pub fn expires_unix_s(&self) -> Result<Option<i64>, String> {
        let Some(text) = &self.expires_at else {
            return Ok(None);
        };
        let time = OffsetDateTime::parse(text, &Rfc3339);
        let time = time.map_err(|_| "not a time such as 2027-01-31T00:00:00Z".to_owned())?;
        Ok(Some(time.unix_timestamp()))
    }
}

/// A time as the file has it.
///
/// # Errors
/// The time is past the year 9999.
pub fn expiry_text(unix_s: i64) -> anyhow::Result<String> {
    Ok(OffsetDateTime::from_unix_timestamp(unix_s)?.format(&Rfc3339)?)
}

impl TenantsFile {
    /// The text of a file.
    ///
    /// # Errors
    /// The file cannot be read, or is larger than any list of tenants.
    pub(super) fn read_text(path: &Path) -> anyhow::Result<String> {
        let name = || format!("the file of tenants, {}, cannot be read", path.display());
        let bytes = std::fs::metadata(path).with_context(name)?.len();
        anyhow::ensure!(
            bytes <= BYTES_MAX,
            "the file of tenants, {}, has {bytes} bytes; at most {BYTES_MAX} are read",
            path.display()
        );
        std::fs::read_to_string(path).with_context(name)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// All faults, with their places.
    pub fn parse(text: &str) -> Result<Self, String> {
        // The whole error would show the line, and somebody may have written a key there.
        let described = |error: toml::de::Error| {
            let before = error.span().and_then(|span| text.get(..span.start));
            let line = before.map_or(1, |before| before.matches('\n').count() + 1);
            format!("line {line}: {}", error.message())
        };
        let file: TenantsFile = toml::from_str(text).map_err(described)?;
        let faults = file.faults();
        match faults.is_empty() {
            true => Ok(file),
            false => Err(faults.join("; ")),
        }
    }

    /// The text of the file.
    ///
    /// # Errors
    /// A number is larger than TOML has.
    pub fn to_text(&self) -> anyhow::Result<String> {
        let body = toml::to_string(self)?;
        Ok(format!(
            "# Tenants and their keys. `refrain tenants` and `refrain keys` edit it, and gateways follow it.\n{body}"
        ))
    }

    /// The faults of the values, one sentence per fault.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let (mut names, mut ids, mut hashes) = (HashSet::new(), HashSet::new(), HashSet::new());
        for (number, tenant) in self.tenants.iter().enumerate() {
            let place = format!("tenants[{number}]");
            let mut check = |holds: bool, fault: String| {
                if !holds {
                    faults.push(fault);
                }
            };
            let is_name = |name: &str| !name.trim().is_empty() && name.len() <= NAME_BYTES_MAX;
            check(
                tenant.stream_pace_ms != Some(0),
                format!("{place}.stream_pace_ms: must be at least 1"),
            );
            check(
                tenant.urgent_percent_max.is_none_or(|most| most <= 100),
                format!("{place}.urgent_percent_max: must be 0 to 100"),
            );
            check(
                tenant
                    .alpha
                    .is_none_or(|alpha| alpha > 0.0 && alpha.is_finite()),
                format!("{place}.alpha: must be above 0"),
            );
            let least = tenant.min_token_prob;
            check(
                least.is_none_or(|least| (0.0..=1.0).contains(&least)),
                format!("{place}.min_token_prob: must be 0 to 1"),
            );
            check(
                names.insert(&tenant.name),
                format!("{place}.name: {} is there twice", tenant.name),
            );
            for (number, key) in tenant.keys.iter().enumerate() {
                let place = format!("{place}.keys[{number}]");
                check(
                    is_name(&key.name),
                    format!("{place}.name: must have 1 to {NAME_BYTES_MAX} bytes"),
                );
                let ends = key.expires_unix_s();
                check(
                    !key.id.is_empty() && !key.id.contains('-'),
                    format!("{place}.id: missing, or has a dash"),
                );
                check(
                    ids.insert(&key.id),
                    format!("{place}.id: {} is there twice", key.id),
                );
                check(
                    hex::decode(&key.sha256).is_ok_and(|digest| digest.len() == 32),
                    format!("{place}.sha256: must be 64 hex digits"),
                );
                check(
                    key.sha256.is_empty() || hashes.insert(key.sha256.to_ascii_lowercase()),
                    format!("{place}.sha256: another key has it, and a key has one owner"),
                );
                check(
                    ends.is_ok(),
                    format!("{place}.expires_at: {}", ends.err().unwrap_or_default()),
                );
            }
            tenant.limits.faults(&place, &mut faults);
            for (number, key) in tenant.keys.iter().enumerate() {
                key.limits
                    .faults(&format!("{place}.keys[{number}]"), &mut faults);
            }
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let file = TenantsFile {
            tenants: vec![TenantEntry {
                name: "acme".parse().unwrap(),
                weight: TenantWeight::try_from(2.5).unwrap(),
                class_max: RequestClass::Rollout,
                urgent_percent_max: Some(0),
                isolation: Isolation::User,
                stream_shaping: StreamShaping::Pace,
                stream_pace_ms: Some(25),
                hides_metrics: true,
                alpha: Some(2.5),
                min_token_prob: Some(0.25),
                max_spec_tokens: Some(16),
                limits: LimitsEntry {
                    tokens_per_minute: Some(100_000),
                    ..LimitsEntry::default()
                },
                keys: vec![KeyEntry {
                    name: "ci".into(),
                    id: "0123456789ab".into(),
                    sha256: "00".repeat(32),
                    models: vec!["m".into()],
                    endpoints: vec![KeyEndpoint::Chat],
                    expires_at: Some(expiry_text(1_800_000_000).unwrap()),
                    limits: LimitsEntry::default(),
                }],
            }],
        };
        let text = file.to_text().unwrap();
        assert_eq!(TenantsFile::parse(&text).unwrap(), file);
        assert!(!text.contains("requests_per_minute"));
        assert!(
            text.contains("weight = 2.5\nclass_max = \"rollout\""),
            "{text}"
        );
        let ends = file.tenants[0].keys[0].expires_unix_s();
        assert_eq!(ends, Ok(Some(1_800_000_000)));
    }

    #[test]
    fn all_faults_are_named_with_their_places() {
        let text = r#"
            [[tenants]]
            name = "a"
            urgent_percent_max = 101
            stream_pace_ms = 0
            alpha = 0
            min_token_prob = 1.5
            limits = { requests_per_minute = 0 }
            keys = [
                { name = "", id = "x", sha256 = "ab", expires_at = "tomorrow" },
                { name = "k", id = "x", sha256 = "AB" },
                { name = "k", id = "a-b", sha256 = "ab", limits = { tokens_per_minute = 0 } },
            ]
            [[tenants]]
            name = "a"
        "#;
        let faults = TenantsFile::parse(text).unwrap_err();
        for place in [
            "tenants[0].urgent_percent_max: must be 0 to 100",
            "tenants[0].stream_pace_ms: must be at least 1",
            "tenants[0].alpha: must be above 0",
            "tenants[0].min_token_prob: must be 0 to 1",
            "tenants[0].limits.requests_per_minute",
            "tenants[0].keys[0].name",
            "tenants[0].keys[0].sha256",
            "tenants[0].keys[0].expires_at: not a time",
            "tenants[0].keys[1].id: x is there twice",
            "tenants[0].keys[1].sha256: another key has it",
            "tenants[0].keys[2].id",
            "tenants[0].keys[2].limits.tokens_per_minute",
            "tenants[1].name: a is there twice",
        ] {
            assert!(faults.contains(place), "{place} in {faults}");
        }
        let heavy = TenantsFile::parse("[[tenants]]\nname = \"a\"\nweight = 0").unwrap_err();
        assert!(
            heavy.starts_with("line 3: a weight must be 0.01 to 100"),
            "{heavy}"
        );
        for name in ["", "acme\\u001fkey:1f", "none"] {
            let fault = TenantsFile::parse(&format!("[[tenants]]\nname = \"{name}\"")).unwrap_err();
            assert!(fault.starts_with("line 2: the name of a tenant"), "{fault}");
        }
        let unknown = TenantsFile::parse("[[tenants]]\nname = \"a\"\nkees = [\"rfk-secret\"]");
        let unknown = unknown.unwrap_err();
        assert!(
            unknown.starts_with("line 3") && unknown.contains("kees"),
            "{unknown}"
        );
        assert!(!unknown.contains("secret"), "{unknown}");
    }
}
