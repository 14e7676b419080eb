//! The engines that a Kubernetes cluster knows.
//!
//! Three kinds of objects are read, and lists of them are asked for again and again rather than watched. A list of
//! the pods of one pool is some kilobytes, an API server answers it from memory, and a list has no state that can be
//! lost.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::ensure;
use refrain_service_kit::cluster_api::{ClusterApi, is_object_name as is_name};
use reqwest::Url;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Maximum number of objects of a list. Longer ones are refused, since a part of the engines must not look like all.
const OBJECTS_MAX: usize = 1_000;

/// The engines of one place in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterEngines {
    /// `None`: the namespace of this process.
    namespace: Option<String>,
    place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// The ready endpoints of a service.
    Service { name: String, port: u16 },
    /// The ready pods with these labels.
    Pods { selector: String, port: u16 },
    /// The ready pods of an InferencePool, at each of its ports.
    InferencePool { name: String },
}

impl ClusterEngines {
    /// Reads `kubernetes://NAMESPACE/…`. `None` if it names no place.
    pub(super) fn read(url: &Url) -> Option<Self> {
        let value = |key: &str| {
            let pair = url.query_pairs().find(|(known, _)| known == key);
            pair.map(|(_, value)| value.into_owned())
        };
        let port = || value("port")?.parse().ok().filter(|port| *port > 0);
        let path: Vec<_> = url.path_segments()?.collect();
        let place = match path[..] {
            ["services", name] if is_name(name) => Place::Service {
                name: name.to_owned(),
                port: port()?,
            },
            ["pods"] => Place::Pods {
                selector: value("selector").filter(|selector| !selector.is_empty())?,
                port: port()?,
            },
            ["inferencepools", name] if is_name(name) => Place::InferencePool {
                name: name.to_owned(),
            },
            _ => return None,
        };
        let namespace = url.host_str().filter(|name| !name.is_empty());
        namespace.is_none_or(is_name).then(|| ClusterEngines {
            namespace: namespace.map(str::to_owned),
            place,
        })
    }

    /// The URLs of the engines that are ready.
    ///
    /// # Errors
    /// The API does not answer, refuses, or says what cannot be read.
    pub(super) async fn look_up(&self, api: &ClusterApi) -> anyhow::Result<BTreeSet<String>> {
        let namespace = match &self.namespace {
            Some(namespace) => namespace.clone(),
            None => api.own_namespace().await?,
        };
        match &self.place {
            Place::Service { name, port } => {
                let path =
                    format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices");
                let selector = format!("kubernetes.io/service-name={name}");
                let slices: List<EndpointSlice> = list(api, &path, &selector).await?;
                // A service with addresses of both versions has slices of both, with the same engines.
                let is_ipv4 = |slice: &EndpointSlice| slice.address_type == "IPv4";
                let has_ipv4 = slices.items.iter().any(is_ipv4);
                let kept = slices.items.into_iter();
                let kept = kept.filter(|slice| is_ipv4(slice) || !has_ipv4);
                let endpoints = kept.flat_map(|slice| slice.endpoints);
                // Without a word on it an endpoint counts as ready.
                let ready = endpoints.filter(|endpoint| endpoint.conditions.ready.unwrap_or(true));
                let addresses = ready.filter_map(|endpoint| endpoint.addresses.into_iter().next());
                Ok(addresses
                    .map(|address| engine_url(&address, *port))
                    .collect())
            }
            Place::Pods { selector, port } => ready_pods(api, &namespace, selector, &[*port]).await,
            Place::InferencePool { name } => {
                let path = format!(
                    "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/{name}"
                );
                let pool: InferencePool = api.get(&path, &[]).await?;
                let labels = pool.spec.selector.match_labels;
                ensure!(!labels.is_empty(), "the pool {name} selects no pods");
                let labels: Vec<_> = labels
                    .iter()
                    .map(|(key, is)| format!("{key}={is}"))
                    .collect();
                let ports = pool.spec.target_ports.iter().map(|port| port.number);
                let ports: Vec<u16> = ports.collect();
                ready_pods(api, &namespace, &labels.join(","), &ports).await
            }
        }
    }
}

fn engine_url(address: &str, port: u16) -> String {
    match address.contains(':') {
        true => format!("http://[{address}]:{port}"),
        false => format!("http://{address}:{port}"),
    }
}

async fn ready_pods(
    api: &ClusterApi,
    namespace: &str,
    selector: &str,
    ports: &[u16],
) -> anyhow::Result<BTreeSet<String>> {
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    let pods: List<Pod> = list(api, &path, selector).await?;
    let ready = pods.items.into_iter().filter(Pod::is_ready);
    let addresses = ready.filter_map(|pod| pod.status.pod_ip);
    let urls = addresses.flat_map(|address| {
        let urls = ports.iter().map(|port| engine_url(&address, *port));
        urls.collect::<Vec<_>>()
    });
    Ok(urls.collect())
}

async fn list<T: DeserializeOwned>(
    api: &ClusterApi,
    path: &str,
    selector: &str,
) -> anyhow::Result<List<T>> {
    let limit = OBJECTS_MAX.to_string();
    let query = [("labelSelector", selector), ("limit", &limit)];
    let list: List<T> = api.get(path, &query).await?;
    ensure!(
        list.metadata
            .next_page
            .as_ref()
            .is_none_or(String::is_empty),
        "{path} has more than {OBJECTS_MAX} objects for {selector:?}"
    );
    Ok(list)
}

#[derive(Deserialize)]
struct List<T> {
    #[serde(default)]
    metadata: ListMetadata,
    items: Vec<T>,
}

#[derive(Default, Deserialize)]
struct ListMetadata {
    #[serde(rename = "continue")]
    next_page: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EndpointSlice {
    address_type: String,
    /// The API writes null for none.
    #[serde(default, deserialize_with = "or_default")]
    endpoints: Vec<Endpoint>,
}

#[derive(Deserialize)]
struct Endpoint {
    addresses: Vec<String>,
    #[serde(default)]
    conditions: EndpointConditions,
}

#[derive(Default, Deserialize)]
struct EndpointConditions {
    ready: Option<bool>,
}

#[derive(Deserialize)]
struct Pod {
    metadata: PodMetadata,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodMetadata {
    deletion_timestamp: Option<String>,
}

#[derive(Default, Deserialize)]
struct PodStatus {
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    conditions: Vec<PodCondition>,
}

#[derive(Deserialize)]
struct PodCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

impl Pod {
    /// Whether it takes requests, and is not about to end.
    fn is_ready(&self) -> bool {
        let mut conditions = self.status.conditions.iter();
        let is_ready = conditions.any(|it| it.kind == "Ready" && it.status == "True");
        is_ready && self.metadata.deletion_timestamp.is_none()
    }
}

#[derive(Deserialize)]
struct InferencePool {
    spec: InferencePoolSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct InferencePoolSpec {
    selector: LabelSelector,
    target_ports: Vec<TargetPort>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LabelSelector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct TargetPort {
    number: u16,
}

fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_in_a_cluster_is_a_service_pods_or_a_pool() {
        let read = |text: &str| ClusterEngines::read(&Url::parse(text).unwrap());
        let place = |text: &str| read(text).unwrap().place;
        assert_eq!(
            place("kubernetes://a/services/vllm?port=8000"),
            Place::Service {
                name: "vllm".into(),
                port: 8000
            }
        );
        assert_eq!(
            place("kubernetes://a/pods?port=80&selector=app=vllm,tier!=old"),
            Place::Pods {
                selector: "app=vllm,tier!=old".into(),
                port: 80
            }
        );
        let pool = read("kubernetes:///inferencepools/vllm").unwrap();
        assert_eq!(pool.namespace, None);
        assert_eq!(
            read("kubernetes://b/inferencepools/p").unwrap().namespace,
            Some("b".into())
        );
        for text in [
            "kubernetes://a/services/vllm",
            "kubernetes://a/services/vllm?port=0",
            "kubernetes://a/services/../x?port=1",
            "kubernetes://a/pods?port=1",
            "kubernetes://a/pods?selector=app=vllm",
            "kubernetes://a/inferencepools/",
            "kubernetes://A_B/inferencepools/p",
            "kubernetes://a",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn addresses_of_both_versions_become_urls() {
        assert_eq!(engine_url("10.0.0.1", 8), "http://10.0.0.1:8");
        assert_eq!(engine_url("fd00::1", 8), "http://[fd00::1]:8");
    }
}
