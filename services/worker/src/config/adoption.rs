//! Engines that come and go while the process runs.

use std::path::PathBuf;

use serde::Deserialize;

use super::engine::EngineConfig;
use crate::engine_source::EngineSource;

/// Which engines a process adopts, because they register with it or because a source names them. A process that
/// adopts engines has none of its own at `urls.engine`. Each engine gets a worker with the settings of the section
/// `worker`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct AdoptionConfig {
    /// Maximum number of engines. 0: none, and the process has an engine of its own.
    pub engines_max: u32,
    /// Places that name engines, which come and go without a restart. `dns+http://vllm:8000` is every address of a
    /// name, and `file:///PATH` is a file with a URL on each line. In a Kubernetes cluster,
    /// `kubernetes://NAMESPACE/services/NAME?port=8000` is the ready endpoints of a service,
    /// `kubernetes://NAMESPACE/pods?port=8000&selector=app=vllm` is ready pods by their labels, and
    /// `kubernetes://NAMESPACE/inferencepools/NAME` is those of an InferencePool. No two processes should have the
    /// same source, since both would drive its engines.
    pub sources: Vec<String>,
    /// Pause between two readings of the sources, milliseconds.
    pub lookup_interval_ms: u64,
    /// How long no source has to name an engine before it is given up, milliseconds. A source that cannot be read
    /// changes nothing.
    pub absence_ms_max: u64,
    /// The hosts of engines that register: names, addresses, and networks such as `10.0.0.0/8`. `.example` stands for
    /// all names with this end. Others are refused, since the process calls whatever registers.
    pub allowed_hosts: Vec<String>,
    /// Whether an engine is asked if it is an SGLang or a vLLM. Otherwise it has the kind `worker.engine.kind`.
    /// `refrain` is never found: such an engine is sent the secret of the mesh.
    pub finds_kind: bool,
    /// Port of the first engine's worker; those of further engines follow. Without it, it is the one after the port
    /// of `worker.listen`.
    pub first_port: Option<u16>,
    /// File that keeps the URLs of engines that registered, so that they are still known after a restart of the
    /// process. Without it, they have to register again.
    pub file: Option<PathBuf>,
    /// The URL of the cluster's API and the folder with a pod's files, for tests.
    #[serde(skip)]
    pub cluster: Option<(String, PathBuf)>,
}

impl Default for AdoptionConfig {
    fn default() -> Self {
        let loopback = ["localhost", "127.0.0.0/8", "::1"];
        AdoptionConfig {
            engines_max: 0,
            sources: Vec::new(),
            lookup_interval_ms: 2_000,
            absence_ms_max: 10_000,
            allowed_hosts: loopback.map(str::to_owned).to_vec(),
            finds_kind: true,
            first_port: None,
            file: None,
            cluster: None,
        }
    }
}

impl AdoptionConfig {
    /// Whether the process adopts engines.
    pub fn is_on(&self) -> bool {
        self.engines_max > 0
    }

    pub(super) fn check(&self, engine: &EngineConfig, check: &mut impl FnMut(bool, &str)) {
        check(
            self.sources.is_empty() || self.is_on(),
            "adoption.engines_max: must be the largest number of engines that adoption.sources may name",
        );
        if !self.is_on() {
            return;
        }
        for source in &self.sources {
            if let Err(error) = EngineSource::read(source) {
                check(false, &format!("adoption.sources: {source:?}: {error:#}"));
            }
        }
        check(
            self.lookup_interval_ms >= 100,
            "adoption.lookup_interval_ms: at least 100",
        );
        check(
            !engine.model.is_empty(),
            "engine.model: must be the public name of the model that adopted engines serve",
        );
        check(
            !engine.files.is_empty(),
            "engine.files: must be a folder with the tokenizer.json of the model that adopted engines serve, or \
             builtin:name",
        );
        check(
            !self.finds_kind || !engine.is_external(),
            "adoption.finds_kind: leave out engine.kind, or set this to false",
        );
        check(
            self.first_port
                .is_none_or(|port| self.engines_max <= u32::from(u16::MAX - port) + 1),
            "adoption.first_port: there must be as many ports from it on as engines",
        );
        for host in &self.allowed_hosts {
            let fault = format!("adoption.allowed_hosts: {host:?} is no host and no network");
            check(is_host(host), &fault);
        }
    }
}

/// Whether a text can be the name of a host, the end of one, an address, or a network.
fn is_host(text: &str) -> bool {
    let is_network = text.parse::<ipnet::IpNet>().is_ok();
    let is_address = text.parse::<std::net::IpAddr>().is_ok();
    let is_name = |name: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        !name.is_empty() && name.bytes().all(is_plain)
    };
    is_network || is_address || is_name(text.trim_start_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineKind;

    fn faults(change: impl FnOnce(&mut AdoptionConfig, &mut EngineConfig)) -> String {
        let mut adoption = AdoptionConfig {
            engines_max: 4,
            ..AdoptionConfig::default()
        };
        let mut engine = EngineConfig {
            model: "m".into(),
            files: "f".into(),
            ..EngineConfig::default()
        };
        change(&mut adoption, &mut engine);
        let mut faults = Vec::new();
        adoption.check(&engine, &mut |holds, fault| {
            if !holds {
                faults.push(fault.to_owned());
            }
        });
        faults.join("\n")
    }

    #[test]
    fn a_process_that_adopts_engines_has_to_know_their_model_and_whom_to_call() {
        assert_eq!(faults(|_, _| {}), "");
        let unknown = faults(|_, engine| *engine = EngineConfig::default());
        assert!(unknown.contains("engine.model") && unknown.contains("engine.files"));
        assert_eq!(faults(|adoption, _| adoption.engines_max = 0), "");
        let guessed = faults(|_, engine| engine.kind = EngineKind::Vllm);
        assert!(guessed.contains("finds_kind"));
        let told = |adoption: &mut AdoptionConfig, engine: &mut EngineConfig| {
            engine.kind = EngineKind::Vllm;
            adoption.finds_kind = false;
        };
        assert_eq!(faults(told), "");
        let ports = faults(|adoption, _| adoption.first_port = Some(u16::MAX - 2));
        assert!(ports.contains("first_port"));
        let named = |sources: &[&str]| {
            let sources = sources.iter().map(|source| (*source).to_owned()).collect();
            faults(|adoption, _| adoption.sources = sources)
        };
        assert_eq!(named(&["dns+http://vllm:8000", "file:///engines"]), "");
        assert!(named(&["vllm:8000"]).contains("dns+http://vllm:8000"));
        let none = faults(|adoption, _| {
            adoption.sources = vec!["file:///engines".into()];
            adoption.engines_max = 0;
        });
        assert!(none.contains("adoption.engines_max"));
        for wrong in ["", "http://h", "h:1", "10.0.0.0/40", "a b"] {
            let found = faults(|adoption, _| adoption.allowed_hosts = vec![wrong.into()]);
            assert!(found.contains("allowed_hosts"), "{wrong:?}");
        }
        let right = [".svc", "h-1.example", "10.0.0.0/8", "fd00::/8", "10.1.2.3"];
        assert_eq!(
            faults(|adoption, _| adoption.allowed_hosts = right.map(str::to_owned).to_vec()),
            ""
        );
    }
}
