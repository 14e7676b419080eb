//! Sends calls to the gateway, and reads the figures of its answers.

use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::options::BenchOptions;
use super::report::CallSums;
use super::workload::WorkloadCall;

/// A client of the gateway, for one model.
pub(super) struct BenchClient {
    http: reqwest::Client,
    url: String,
    model: String,
}

impl BenchClient {
    /// Finds the model to ask for.
    pub(super) async fn connect(options: &BenchOptions) -> anyhow::Result<Self> {
        let Some(key) = options.api_keys.first() else {
            bail!("at least one API key is needed: give --api-key")
        };
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(600))
            .build()?;
        let url = options.url.trim_end_matches('/').to_owned();
        let model = match &options.model {
            Some(model) => model.clone(),
            None => {
                let models: Value =
                    json_answer(http.get(format!("{url}/v1/models")).bearer_auth(key)).await?;
                models["data"][0]["id"]
                    .as_str()
                    .context("the gateway lists no model")?
                    .to_owned()
            }
        };
        Ok(BenchClient { http, url, model })
    }

    /// Sends one call; returns its figures and its text.
    pub(super) async fn call(
        &self,
        call: &WorkloadCall,
        mode: &str,
        api_key: &str,
    ) -> anyhow::Result<(CallSums, String)> {
        let mut body = json!({
            "model": self.model,
            "messages": call.messages,
            "temperature": call.temperature,
            "seed": call.seed,
            "max_tokens": call.max_tokens,
            "session": call.session,
            "speculation": mode,
        });
        if let Some(schema) = &call.schema {
            let schema = json!({"name": "answer", "strict": true, "schema": schema});
            body["response_format"] = json!({"type": "json_schema", "json_schema": schema});
        }
        let request = self
            .http
            .post(format!("{}/v1/chat/completions", self.url))
            .bearer_auth(api_key)
            .json(&body);
        let answer = json_answer(request).await?;
        let spec = &answer["metrics"]["speculative_decoding"];
        let timings = &answer["metrics"]["timings"];
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        let output_tokens = count(&answer["usage"]["completion_tokens"]);
        let sums = CallSums {
            calls: 1,
            prompt_tokens: count(&answer["usage"]["prompt_tokens"]),
            output_tokens,
            decoded_tokens: count(&timings["decode_tokens"]),
            decode_s: timings["decode_s"]
                .as_f64()
                .context("the gateway reports no decode time")?,
            prefill_s: timings["prefill_s"].as_f64().unwrap_or(0.0),
            wall_s: 0.0,
            steps: count(&spec["steps"]),
            drafted: count(&spec["drafted"]),
            accepted: count(&spec["accepted"]),
        };
        let text = answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        Ok((sums, text))
    }
}

async fn json_answer(request: reqwest::RequestBuilder) -> anyhow::Result<Value> {
    let response = request
        .send()
        .await
        .context("cannot reach the gateway; `refrain up` starts a mesh")?;
    let status = response.status();
    let body: Value = response.json().await.context("the answer is not JSON")?;
    if !status.is_success() {
        bail!(
            "the gateway answered {status}: {}",
            body["error"]["message"]
        );
    }
    Ok(body)
}
