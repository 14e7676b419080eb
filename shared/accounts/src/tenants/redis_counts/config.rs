//! Where the Redis is that counts for several gateways.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use redis::{ConnectionAddr, IntoConnectionInfo as _, RedisConnectionInfo};
use serde::Deserialize;

/// A Redis or Valkey server in which several gateways count their limits together.
#[derive(Clone, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct LimitsRedisConfig {
    /// Its address, as `redis://host:6379`, or `rediss://host:6379` with TLS. A path such as `/2` names a database.
    pub url: String,
    /// Its user. Without one, the password is that of the default user.
    pub username: Option<String>,
    /// The password.
    pub password: Option<String>,
    /// In place of `password`: a file with it in the first line, which is read for each new connection.
    pub password_file: Option<PathBuf>,
    /// PEM file with the authorities of its certificate, which is read for each new connection. Without it, those of
    /// the system are trusted.
    pub ca: Option<PathBuf>,
    /// Milliseconds that a request waits for Redis. Then this gateway counts by itself, until Redis answers again.
    pub timeout_ms: u64,
    /// The start of the names of all keys in Redis. Gateways that count together have the same.
    pub prefix: String,
    /// Milliseconds after which requests of a gateway that is gone are no longer in flight. Living gateways renew
    /// theirs three times as often.
    pub places_expire_ms: u64,
}

impl Default for LimitsRedisConfig {
    fn default() -> Self {
        LimitsRedisConfig {
            url: String::new(),
            username: None,
            password: None,
            password_file: None,
            ca: None,
            timeout_ms: 50,
            prefix: "refrain".into(),
            places_expire_ms: 30_000,
        }
    }
}

/// Written by hand, so that a configuration can be logged without the password. A URL may have one by mistake.
impl fmt::Debug for LimitsRedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = |secret: &Option<String>| if secret.is_some() { "set" } else { "missing" };
        f.debug_struct("LimitsRedisConfig")
            .field("server", &self.server().map(|server| server.name()))
            .field("username", &self.username)
            .field("password", &hidden(&self.password))
            .field("password_file", &self.password_file)
            .field("ca", &self.ca)
            .field("timeout_ms", &self.timeout_ms)
            .field("prefix", &self.prefix)
            .field("places_expire_ms", &self.places_expire_ms)
            .finish()
    }
}

/// The parts of an address.
#[derive(Clone, Debug)]
pub(super) struct RedisServer {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) has_tls: bool,
    database: i64,
}

impl RedisServer {
    /// Its name in logs.
    pub(super) fn name(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

const URL_RULE: &str = "url: must be as redis://host:6379, or rediss://host:6379 with TLS";

impl LimitsRedisConfig {
    /// The faults of the values, one sentence per fault.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        faults.extend(self.server().err());
        let mut require = |holds: bool, fault: &str| {
            if !holds {
                faults.push(fault.to_owned());
            }
        };
        require(
            self.password.is_none() || self.password_file.is_none(),
            "password_file: give it or password, not both",
        );
        let has_password = self.password.is_some() || self.password_file.is_some();
        require(
            self.username.is_none() || has_password,
            "username: needs password or password_file",
        );
        require(
            (1..=10_000).contains(&self.timeout_ms),
            "timeout_ms: must be from 1 to 10000",
        );
        require(
            !self.prefix.is_empty() && self.prefix.len() <= 64,
            "prefix: must have 1 to 64 bytes",
        );
        require(
            (300..=3_600_000).contains(&self.places_expire_ms),
            "places_expire_ms: must be from 300 to 3600000",
        );
        faults
    }

    /// How long a request waits for Redis.
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    /// The address.
    ///
    /// # Errors
    /// The URL is another one, in words that do not repeat it.
    pub(super) fn server(&self) -> Result<RedisServer, String> {
        let (has_tls, plain) = match self.url.strip_prefix("rediss://") {
            Some(rest) => (true, format!("redis://{rest}")),
            None => (false, self.url.clone()),
        };
        let info = plain
            .starts_with("redis://")
            .then(|| plain.into_connection_info());
        let info = info.and_then(Result::ok).ok_or(URL_RULE)?;
        let settings = info.redis_settings();
        if settings.password().is_some() || settings.username().is_some() {
            let rule = "url: must have no user and no password; there are keys for them";
            return Err(rule.to_owned());
        }
        match info.addr() {
            ConnectionAddr::Tcp(host, port) => Ok(RedisServer {
                host: host.clone(),
                port: *port,
                has_tls,
                database: settings.db(),
            }),
            _ => Err(URL_RULE.to_owned()),
        }
    }

    /// The login of a new connection. This reads the file with the password.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn login(&self, server: &RedisServer) -> anyhow::Result<RedisConnectionInfo> {
        let mut login = RedisConnectionInfo::default()
            .set_db(server.database)
            .set_lib_name("refrain", env!("CARGO_PKG_VERSION"));
        if let Some(username) = &self.username {
            login = login.set_username(username);
        }
        let from_file = |path: &PathBuf| {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("password_file: cannot read {}", path.display()))?;
            anyhow::Ok(text.lines().next().unwrap_or_default().trim().to_owned())
        };
        let in_file = self.password_file.as_ref().map(from_file).transpose()?;
        if let Some(password) = in_file.or_else(|| self.password.clone()) {
            login = login.set_password(password);
        }
        Ok(login)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_url(url: &str) -> LimitsRedisConfig {
        LimitsRedisConfig {
            url: url.into(),
            ..LimitsRedisConfig::default()
        }
    }

    #[test]
    fn addresses_are_read_and_other_texts_are_faults() {
        let plain = of_url("redis://10.0.0.7/2").server().unwrap();
        assert_eq!(
            (plain.name().as_str(), plain.database, plain.has_tls),
            ("10.0.0.7:6379", 2, false)
        );
        let tls = of_url("rediss://limits.example.com:7000").server().unwrap();
        assert_eq!((tls.port, tls.has_tls), (7_000, true));
        for url in [
            "",
            "10.0.0.7",
            "http://10.0.0.7",
            "redis://",
            "unix:///run/redis",
            "redis+unix:///x",
        ] {
            let faults = of_url(url).faults();
            assert_eq!(faults, [URL_RULE], "{url}");
        }
    }

    #[test]
    fn neither_faults_nor_debug_output_show_a_password() {
        let in_url = of_url("redis://me:hunter2@10.0.0.7");
        let mut config = of_url("redis://10.0.0.7");
        config.password = Some("hunter2".into());
        for config in [in_url, config] {
            let shown = format!("{config:?} {:?}", config.faults());
            assert!(!shown.contains("hunter2"), "{shown}");
        }
    }

    #[test]
    fn every_key_has_its_limits() {
        let config = LimitsRedisConfig {
            url: "redis://10.0.0.7".into(),
            username: Some("me".into()),
            timeout_ms: 0,
            prefix: String::new(),
            places_expire_ms: 1,
            ..LimitsRedisConfig::default()
        };
        let faults = config.faults().join("\n");
        for key in ["username", "timeout_ms", "prefix", "places_expire_ms"] {
            assert!(faults.contains(&format!("{key}: ")), "{key} in {faults}");
        }
        assert_eq!(of_url("redis://10.0.0.7").faults(), Vec::<String>::new());
    }
}
