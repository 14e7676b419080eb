//! The settings of a listener that are an operator's.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::tls::TlsConfig;

/// The certificate and the time limits of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct ListenerConfig {
    /// The certificate of the listener. Without it, the listener speaks plain HTTP.
    pub tls: Option<TlsConfig>,
    /// Longest time that the head of a request may take to arrive, and the longest TLS handshake. A connection whose
    /// head is late is closed, the first one with a 408.
    pub head_ms_max: u64,
    /// Longest time that the body of a request may take to arrive: enough for the largest body over a slow line. A
    /// later one gets a 408.
    pub body_ms_max: u64,
}

impl Default for ListenerConfig {
    fn default() -> Self {
        ListenerConfig {
            tls: None,
            head_ms_max: 5_000,
            body_ms_max: 60_000,
        }
    }
}

/// Longest time limit, an hour. It is there to find a wrong unit.
const MS_MAX: u64 = 3_600_000;

impl ListenerConfig {
    /// The faults of the values, one sentence each. `section` is the key that holds this configuration.
    pub fn faults(&self, section: &str) -> Vec<String> {
        let limits = [
            ("head_ms_max", self.head_ms_max),
            ("body_ms_max", self.body_ms_max),
        ];
        limits
            .into_iter()
            .filter(|(_, limit)| !(1..=MS_MAX).contains(limit))
            .map(|(key, _)| format!("{section}.{key}: must be from 1 to {MS_MAX}"))
            .collect()
    }

    /// The scheme of the URLs that lead to the listener.
    pub fn scheme(&self) -> &'static str {
        match self.tls {
            Some(_) => "https",
            None => "http",
        }
    }

    pub(super) fn head_time_max(&self) -> Duration {
        Duration::from_millis(self.head_ms_max)
    }

    /// The longest time that a body may take to arrive.
    pub fn body_time_max(&self) -> Duration {
        Duration::from_millis(self.body_ms_max)
    }
}
