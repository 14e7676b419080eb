//! The configuration of the pool of KV blocks.

use std::path::PathBuf;

use refrain_service_kit::config::is_http_url;
use serde::{Deserialize, Serialize};

/// The ending of the name of the pool's file. A file with another name is never overwritten.
const FILE_ENDING: &str = "kvpool";

/// Most other engines. Each question goes to all of them.
pub(crate) const PEERS_MAX: usize = 64;

/// The start of a URL that stands for all addresses of its host.
const ALL_ADDRESSES: &str = "dns+";

/// The `[engine.kv_pool]` section: blocks of KV that outlive their sessions, and that engines take from each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct KvPoolConfig {
    /// Maximum number of bytes of blocks in memory, beside `kv_tokens_max`. 0: there is no pool.
    pub memory_bytes_max: u64,
    /// A file for blocks, so that they outlive the process. Its name ends in `.kvpool`, and it holds texts of tenants
    /// as tokens. Leave it out for none.
    pub file: Option<PathBuf>,
    /// Maximum number of bytes of that file.
    pub file_bytes_max: u64,
    /// Base URLs of other engines with the same model, such as `http://engine-2:8300`. They are asked for blocks that
    /// this one lacks. `dns+http://engines:8300` is an engine at each address that the name has, such as the pods of
    /// a headless Service. The name is looked up again from time to time, and this engine may be among them.
    pub peers: Vec<String>,
    /// Longest wait of a new session for blocks from the file or from other engines, in milliseconds. It then reads
    /// its text.
    pub wait_ms: u64,
    /// Fewest tokens that other engines are asked for.
    pub fetch_tokens_min: u32,
    /// Maximum number of bytes that other engines are asked for, per session.
    pub fetch_bytes_max: u64,
}

impl Default for KvPoolConfig {
    fn default() -> Self {
        KvPoolConfig {
            memory_bytes_max: 0,
            file: None,
            file_bytes_max: 4 << 30,
            peers: Vec::new(),
            wait_ms: 500,
            fetch_tokens_min: 128,
            fetch_bytes_max: 64 << 20,
        }
    }
}

impl KvPoolConfig {
    /// Everything that is wrong with the section, by key.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut fault = |is_wrong: bool, text: &str| {
            if is_wrong {
                faults.push(format!("kv_pool.{text}"));
            }
        };
        let is_off = self.memory_bytes_max == 0;
        fault(
            is_off && (self.file.is_some() || !self.peers.is_empty()),
            "memory_bytes_max: must be above 0, because blocks pass through the memory",
        );
        let ending = self.file.as_ref().map(|file| file.extension());
        fault(
            ending.is_some_and(|ending| ending != Some(FILE_ENDING.as_ref())),
            "file: must end in .kvpool, so that no other file is overwritten",
        );
        fault(self.wait_ms == 0, "wait_ms: must be at least 1");
        fault(
            self.peers.len() > PEERS_MAX,
            &format!("peers: must be at most {PEERS_MAX}"),
        );
        let is_peer = |url: &String| is_http_url(url) || PeerName::parse(url).is_some();
        fault(
            !self.peers.iter().all(is_peer),
            "peers: must be http:// or https:// URLs, or such as dns+http://engines:8300",
        );
        faults
    }
}

/// A host whose addresses have an engine each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerName {
    /// `http` or `https`.
    pub(crate) scheme: String,
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl PeerName {
    /// Reads a URL such as `dns+http://engines:8300`. `None`: it is another one.
    pub(crate) fn parse(url: &str) -> Option<Self> {
        let (scheme, rest) = url.strip_prefix(ALL_ADDRESSES)?.split_once("://")?;
        let (host, port) = rest.trim_end_matches('/').rsplit_once(':')?;
        let is_host = !host.is_empty() && !host.contains(['/', ':', '@']);
        (is_host && matches!(scheme, "http" | "https")).then_some(())?;
        Some(PeerName {
            scheme: scheme.to_owned(),
            host: host.to_owned(),
            port: port.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_needs_memory_a_file_its_ending_and_peers_urls() {
        let faults = |toml: &str| {
            let config: KvPoolConfig = serde_json::from_str(toml).unwrap();
            config.faults().join("\n")
        };
        assert_eq!(faults("{}"), "");
        let right = r#"{"memory_bytes_max": 1, "file": "a/b.kvpool", "peers": ["http://a:1"]}"#;
        assert_eq!(faults(right), "");
        let by_name = r#"{"memory_bytes_max": 1, "peers": ["dns+https://engines.llm.svc:8204"]}"#;
        assert_eq!(faults(by_name), "");
        for (wrong, key) in [
            (r#"{"file": "b.kvpool"}"#, "memory_bytes_max"),
            (r#"{"peers": ["http://a:1"]}"#, "memory_bytes_max"),
            (r#"{"memory_bytes_max": 1, "file": "/etc/passwd"}"#, "file"),
            (r#"{"memory_bytes_max": 1, "peers": ["engine-2"]}"#, "peers"),
            (
                r#"{"memory_bytes_max": 1, "peers": ["dns+http://engines"]}"#,
                "peers",
            ),
            (
                r#"{"memory_bytes_max": 1, "peers": ["dns+ftp://engines:1"]}"#,
                "peers",
            ),
            (r#"{"wait_ms": 0}"#, "wait_ms"),
        ] {
            assert!(
                faults(wrong).starts_with(&format!("kv_pool.{key}: ")),
                "{wrong}"
            );
        }
    }
}
