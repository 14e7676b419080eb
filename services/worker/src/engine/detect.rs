//! Finds out which kind of engine listens at an address.

use std::time::Duration;

use bytes::Bytes;
use refrain_protocol::ApiError;
use reqwest::Method;
use serde_json::Value;

use super::client::EngineClient;
use super::dialect::sglang_version;
use crate::config::{EngineConfig, EngineKind};

/// An engine that was found at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoundEngine {
    /// `None` for one of no kind that is known.
    pub(crate) kind: Option<EngineKind>,
    /// The version of its weights, if it says so.
    pub(crate) weight_version: Option<u64>,
}

/// Routes that only SGLang has, in its newer and its older form.
const SGLANG_FACTS: [&str; 2] = ["/model_info", "/get_model_info"];

/// Asks an engine which kind it is.
///
/// # Errors
/// It does not answer.
pub(crate) async fn find_engine(config: &EngineConfig, url: &str) -> Result<FoundEngine, ApiError> {
    let call_timeout = Duration::from_millis(config.call_ms_max);
    let client =
        EngineClient::new(url, config.api_key.clone(), call_timeout).map_err(ApiError::internal)?;
    for path in SGLANG_FACTS {
        if let Some(version) = sglang_facts(&ask(&client, path, call_timeout).await?) {
            return Ok(FoundEngine {
                kind: Some(EngineKind::Sglang),
                weight_version: version,
            });
        }
    }
    let is_vllm = is_vllm(&ask(&client, "/version", call_timeout).await?);
    Ok(FoundEngine {
        kind: is_vllm.then_some(EngineKind::Vllm),
        weight_version: None,
    })
}

/// A whole answer with its status.
type Answer = (u16, Bytes);

async fn ask(client: &EngineClient, path: &str, timeout: Duration) -> Result<Answer, ApiError> {
    let asked = client.call(Method::GET, path, None);
    match tokio::time::timeout(timeout, asked).await {
        Ok(answer) => answer,
        Err(_) => Err(ApiError::new(
            refrain_protocol::ErrorKind::Timeout,
            format!(
                "the engine at {} does not answer {path} in time",
                client.base_url()
            ),
        )),
    }
}

fn fields((status, body): &Answer) -> Option<Value> {
    let read: Value = serde_json::from_slice(body).ok()?;
    (*status == 200 && read.is_object()).then_some(read)
}

/// The version of the weights, if these are the facts of an SGLang.
fn sglang_facts(answer: &Answer) -> Option<Option<u64>> {
    let facts = fields(answer)?;
    let is_sglang = facts["model_path"].is_string() && facts["is_generation"].is_boolean();
    is_sglang.then(|| sglang_version(&facts["weight_version"]))
}

fn is_vllm(answer: &Answer) -> bool {
    fields(answer).is_some_and(|fields| fields["version"].is_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &'static str) -> Answer {
        (status, Bytes::from_static(body.as_bytes()))
    }

    #[test]
    fn engines_are_known_by_what_only_they_say() {
        let facts = r#"{"model_path":"/m","is_generation":true,"weight_version":"7"}"#;
        assert_eq!(sglang_facts(&answer(200, facts)), Some(Some(7)));
        let older = r#"{"model_path":"/m","is_generation":true}"#;
        assert_eq!(sglang_facts(&answer(200, older)), Some(None));
        let first = r#"{"model_path":"/m","is_generation":true,"weight_version":"default"}"#;
        assert_eq!(sglang_facts(&answer(200, first)), Some(Some(0)));
        for (status, body) in [
            (404, facts),
            (200, ""),
            (200, "[]"),
            (200, r#"{"detail":"Not Found"}"#),
            (200, r#"{"version":"0.32.0"}"#),
        ] {
            assert_eq!(sglang_facts(&answer(status, body)), None, "{status} {body}");
        }
        assert!(is_vllm(&answer(200, r#"{"version":"0.32.0"}"#)));
        assert!(!is_vllm(&answer(404, r#"{"version":"0.32.0"}"#)));
        assert!(!is_vllm(&answer(200, "<html>")));
    }
}
