//! Places that say which engines there are, and how they are looked up.

mod cluster_engines;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use refrain_rpc::EngineAddress;
use refrain_service_kit::cluster_api::ClusterApi;
use reqwest::Url;

use self::cluster_engines::ClusterEngines;

/// Longest time of a look-up.
const LOOKUP_WAIT: Duration = Duration::from_secs(5);

/// Largest file with the URLs of engines, bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The spellings of a source, for errors.
const SPELLINGS: &str = "must be such as dns+http://vllm:8000, file:///etc/refrain/engines.txt, \
    kubernetes://inference/services/vllm?port=8000, kubernetes://inference/pods?port=8000&selector=app=vllm or \
    kubernetes://inference/inferencepools/vllm";

/// A place that says which engines there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EngineSource {
    /// Each address of a name has an engine at this port.
    Dns { host: String, port: u16 },
    /// A file with a URL on each line.
    File(PathBuf),
    /// The API of a Kubernetes cluster.
    Cluster(ClusterEngines),
}

impl EngineSource {
    /// Reads the text of a configuration.
    ///
    /// # Errors
    /// It is no source.
    pub(crate) fn read(text: &str) -> anyhow::Result<Self> {
        let (scheme, rest) = text.split_once(':').context(SPELLINGS)?;
        match scheme {
            "dns+http" => {
                let address = EngineAddress::read(&format!("http:{rest}"));
                let address = address.ok().context(SPELLINGS)?;
                let port = address.id.rsplit_once(':').map(|(_, port)| port.parse());
                Ok(EngineSource::Dns {
                    host: address.host,
                    port: port.context(SPELLINGS)??,
                })
            }
            // A certificate is for the name, and each engine is called by its address.
            "dns+https" => bail!("engines found by their addresses are called by http:// alone"),
            "file" => {
                let path = Path::new(rest.strip_prefix("//").unwrap_or(rest));
                ensure!(path.is_absolute(), "the path of a file must be absolute");
                Ok(EngineSource::File(path.to_owned()))
            }
            "kubernetes" => {
                let engines = Url::parse(text)
                    .ok()
                    .as_ref()
                    .and_then(ClusterEngines::read);
                engines.map(EngineSource::Cluster).context(SPELLINGS)
            }
            _ => bail!(SPELLINGS),
        }
    }

    /// Whether it asks the API of a cluster.
    pub(crate) fn needs_cluster(&self) -> bool {
        matches!(self, EngineSource::Cluster(_))
    }

    /// Looks up which engines there are now.
    ///
    /// # Errors
    /// The source cannot be asked, or what it says cannot be read.
    pub(crate) async fn look_up(
        &self,
        cluster: Option<&ClusterApi>,
    ) -> anyhow::Result<BTreeSet<String>> {
        let found = async {
            match self {
                EngineSource::Dns { host, port } => {
                    // The brackets of an address belong to URLs.
                    let host = host.trim_start_matches('[').trim_end_matches(']');
                    let found = tokio::net::lookup_host((host, *port)).await?;
                    let found: Vec<_> = found.collect();
                    // An engine with addresses of both versions must not be driven twice.
                    let has_ipv4 = found.iter().any(SocketAddr::is_ipv4);
                    let kept = found.iter().filter(|it| it.is_ipv4() || !has_ipv4);
                    Ok(kept.map(|address| format!("http://{address}")).collect())
                }
                EngineSource::File(path) => read_file(path).await,
                EngineSource::Cluster(engines) => {
                    let cluster = cluster.context("this process runs in no Kubernetes cluster")?;
                    engines.look_up(cluster).await
                }
            }
        };
        let found = tokio::time::timeout(LOOKUP_WAIT, found).await;
        found.with_context(|| format!("no answer within {LOOKUP_WAIT:?}"))?
    }
}

async fn read_file(path: &Path) -> anyhow::Result<BTreeSet<String>> {
    let bytes = tokio::fs::metadata(path).await?.len();
    ensure!(
        bytes <= FILE_BYTES_MAX,
        "it has {bytes} bytes, and {FILE_BYTES_MAX} are the limit"
    );
    let text = tokio::fs::read_to_string(path).await?;
    let lines = (1..).zip(text.lines().map(str::trim));
    let urls = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    urls.map(|(number, line)| {
        let address = EngineAddress::read(line);
        let address = address.map_err(|error| anyhow::anyhow!("line {number}: {error}"));
        address.map(|address| address.url)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_name_a_file_or_a_place_in_a_cluster() {
        let dns = |host: &str, port| EngineSource::Dns {
            host: host.to_owned(),
            port,
        };
        for (text, source) in [
            ("dns+http://vllm:8000", dns("vllm", 8000)),
            ("dns+http://vllm.svc.example", dns("vllm.svc.example", 80)),
            ("dns+http://[::1]:1", dns("[::1]", 1)),
            ("file:///a/b.txt", EngineSource::File("/a/b.txt".into())),
            ("file:/a", EngineSource::File("/a".into())),
        ] {
            assert_eq!(EngineSource::read(text).unwrap(), source, "{text}");
        }
        for text in [
            "",
            "vllm:8000",
            "http://vllm:8000",
            "dns+http://vllm:8000/v1",
            "dns+http://",
            "dns+https://vllm:8000",
            "file://engines.txt",
            "kubernetes://inference",
            "kubernetes://inference/nodes/a",
        ] {
            assert!(EngineSource::read(text).is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_file_has_a_url_on_each_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("engines.txt");
        let source = EngineSource::File(path.clone());
        let error = source.look_up(None).await.unwrap_err();
        assert!(error.to_string().contains("No such file"), "{error}");
        std::fs::write(&path, "# two\nhttp://b:2/\n\n http://a:1 \nhttp://b:2\n").unwrap();
        let found = source.look_up(None).await.unwrap();
        assert!(found.iter().eq(["http://a:1", "http://b:2"]));
        std::fs::write(&path, "http://a:1\nftp://b").unwrap();
        let error = source.look_up(None).await.unwrap_err();
        assert!(error.to_string().contains("line 2"), "{error}");
        std::fs::write(&path, "").unwrap();
        assert!(source.look_up(None).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_name_has_an_engine_at_each_address() {
        let source = EngineSource::read("dns+http://localhost:7").unwrap();
        let found = source.look_up(None).await.unwrap();
        assert!(found.contains("http://127.0.0.1:7") || found.contains("http://[::1]:7"));
        let source = EngineSource::read("dns+http://no-such-name.invalid:7").unwrap();
        assert!(source.look_up(None).await.is_err());
        let source = EngineSource::read("kubernetes://a/inferencepools/b").unwrap();
        assert!(source.look_up(None).await.is_err());
    }
}
