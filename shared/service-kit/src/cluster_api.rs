//! The API of the Kubernetes cluster in which this process runs: a few calls with JSON, by the token of its pod.
//!
//! The crates for this API bring watches, caches and types of all objects. Refrain asks for a list now and then, and
//! writes one small object.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use reqwest::{Certificate, Method, Url};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::telemetry::install_crypto_provider;

/// Largest answer of the API, bytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Longest time of a call.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

const CONNECT_WAIT: Duration = Duration::from_secs(2);

/// The folder in which a pod finds the certificate of its API server, its token and its namespace.
const POD_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Whether a text can be the name of an object. It becomes a part of a path.
pub fn is_object_name(text: &str) -> bool {
    let is_plain =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    !text.is_empty() && text.len() <= 253 && text.bytes().all(is_plain) && !text.starts_with('.')
}

/// The API of the cluster.
pub struct ClusterApi {
    client: reqwest::Client,
    url: String,
    folder: PathBuf,
}

impl ClusterApi {
    /// The API of the own cluster.
    ///
    /// # Errors
    /// This process runs in none.
    pub fn of_pod() -> anyhow::Result<Self> {
        let variable = |name: &str| {
            std::env::var(name).with_context(|| {
                format!("{name} is not set: this process runs in no Kubernetes cluster")
            })
        };
        let host = variable("KUBERNETES_SERVICE_HOST")?;
        let port = variable("KUBERNETES_SERVICE_PORT")?;
        let host = match host.contains(':') {
            true => format!("[{host}]"),
            false => host,
        };
        ClusterApi::at(format!("https://{host}:{port}"), Path::new(POD_FOLDER))
    }

    /// The API at this URL. `folder` has the files of a pod.
    ///
    /// # Errors
    /// The certificate cannot be read.
    pub fn at(url: String, folder: &Path) -> anyhow::Result<Self> {
        install_crypto_provider();
        let mut builder = reqwest::Client::builder()
            .connect_timeout(CONNECT_WAIT)
            .timeout(ANSWER_WAIT)
            .no_proxy()
            // Calls carry the token of this process, which is for the API alone.
            .redirect(reqwest::redirect::Policy::none());
        if url.starts_with("https:") {
            let path = folder.join("ca.crt");
            let name = || path.display().to_string();
            let roots = std::fs::read(&path).with_context(name)?;
            let roots = Certificate::from_pem_bundle(&roots).with_context(name)?;
            builder = builder.tls_certs_only(roots);
        }
        Ok(ClusterApi {
            client: builder.build()?,
            url,
            folder: folder.to_owned(),
        })
    }

    /// The namespace of this process.
    ///
    /// # Errors
    /// The file that names it cannot be read.
    pub async fn own_namespace(&self) -> anyhow::Result<String> {
        let namespace = self.file("namespace").await?;
        ensure!(
            is_object_name(&namespace),
            "{namespace:?} is no name of a namespace"
        );
        Ok(namespace)
    }

    /// A file of the pod. The token is replaced now and then, so it is read for each call.
    async fn file(&self, name: &str) -> anyhow::Result<String> {
        let path = self.folder.join(name);
        let text = tokio::fs::read_to_string(&path).await;
        let text = text.with_context(|| path.display().to_string())?;
        Ok(text.trim().to_owned())
    }

    /// Reads an object, or a list of them.
    ///
    /// # Errors
    /// The API does not answer, refuses, or says what cannot be read.
    pub async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(&str, &str)],
    ) -> anyhow::Result<T> {
        let (status, body) = self.call(Method::GET, path, query, None).await?;
        ensure!(
            status == 200,
            "{path} answers with status {status}; this process needs the right to read it"
        );
        serde_json::from_slice(&body).with_context(|| format!("the answer of {path}"))
    }

    /// Makes a call. Returns the status and the body of the answer.
    ///
    /// # Errors
    /// The API does not answer, or says too much.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: Option<&Value>,
    ) -> anyhow::Result<(u16, Vec<u8>)> {
        let mut url = Url::parse(&format!("{}{path}", self.url))?;
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let mut call = self.client.request(method, url);
        call = call.bearer_auth(self.file("token").await?);
        if let Some(body) = body {
            call = call.json(body);
        }
        let mut answer = call.send().await?;
        let status = answer.status().as_u16();
        let mut body = Vec::new();
        while let Some(piece) = answer.chunk().await? {
            body.extend_from_slice(&piece);
            ensure!(
                body.len() <= ANSWER_BYTES_MAX,
                "{path} answers more than {ANSWER_BYTES_MAX} bytes"
            );
        }
        Ok((status, body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_an_object_cannot_leave_its_path() {
        assert!(is_object_name("vllm-0.a") && is_object_name("a"));
        for wrong in ["", "..", "a/b", "A", "a?b", "a b", &"a".repeat(254)] {
            assert!(!is_object_name(wrong), "{wrong}");
        }
    }
}
