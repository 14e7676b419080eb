//! `refrain bench`: what drafting is worth on a running mesh.
//!
//! Every round sends the same calls in every mode, in an order that turns from round to round, so that drift
//! of the machine meets all modes alike. Each mode has tenants of its own: none finds what another said, in
//! the index or in the engine's KV cache. Time per token is that of decoding alone: from the first token to
//! the last, as the worker measured it.

mod workload;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures_util::StreamExt;
use serde::Serialize;
use serde_json::{Value, json};

use workload::{Call, Part};

/// What to run.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The gateway's URL.
    pub url: String,
    /// API keys, each of a tenant of its own; at least one for every mode.
    pub api_keys: Vec<String>,
    /// The model; the first that the gateway lists, if none is given.
    pub model: Option<String>,
    /// Rounds of each part.
    pub rounds: u64,
    /// Calls of a round.
    pub calls: usize,
    /// Calls under way at once.
    pub concurrency: usize,
    /// Everything follows from it.
    pub seed: u64,
    /// Values of `speculation` to compare; `off` is the baseline.
    pub modes: Vec<String>,
}

/// One mode on one part.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    /// Calls answered.
    pub calls: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Output tokens per second of wall time, all calls together.
    pub tokens_per_s: f64,
    /// Milliseconds per output token while decoding, prefill apart.
    pub decode_ms_per_token: f64,
    /// Milliseconds until the first token, mean over calls.
    pub prefill_ms: f64,
    /// Tokens per engine step.
    pub accepted_length: f64,
    /// Draft tokens per engine step.
    pub drafted_per_step: f64,
    /// Accepted / drafted.
    pub acceptance_rate: f64,
}

/// The outcome.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Part -> mode -> figures.
    pub parts: BTreeMap<String, BTreeMap<String, Figures>>,
    /// Part -> mode -> decode time per token of `off` / that of the mode: median over rounds.
    pub decode_speedup: BTreeMap<String, BTreeMap<String, f64>>,
    /// Calls at temperature 0 or with a seed whose text differed between modes: must be 0.
    pub outputs_that_differ: u64,
}

#[derive(Clone, Debug, Default)]
struct Sums {
    calls: u64,
    prompt_tokens: u64,
    output_tokens: u64,
    decoded_tokens: u64,
    decode_s: f64,
    prefill_s: f64,
    wall_s: f64,
    steps: u64,
    drafted: u64,
    accepted: u64,
}

impl Sums {
    fn add(&mut self, other: &Sums) {
        self.calls += other.calls;
        self.prompt_tokens += other.prompt_tokens;
        self.output_tokens += other.output_tokens;
        self.decoded_tokens += other.decoded_tokens;
        self.decode_s += other.decode_s;
        self.prefill_s += other.prefill_s;
        self.wall_s += other.wall_s;
        self.steps += other.steps;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }

    fn decode_s_per_token(&self) -> f64 {
        self.decode_s / (self.decoded_tokens.max(1)) as f64
    }

    fn figures(&self) -> Figures {
        Figures {
            calls: self.calls,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            tokens_per_s: self.output_tokens as f64 / self.wall_s.max(1e-9),
            decode_ms_per_token: self.decode_s_per_token() * 1e3,
            prefill_ms: self.prefill_s / self.calls.max(1) as f64 * 1e3,
            accepted_length: self.output_tokens as f64 / self.steps.max(1) as f64,
            drafted_per_step: self.drafted as f64 / self.steps.max(1) as f64,
            acceptance_rate: self.accepted as f64 / self.drafted.max(1) as f64,
        }
    }
}

/// Runs the workload. `progress` is told after each round.
///
/// # Errors
/// The gateway cannot be reached or refuses.
pub async fn run(options: &BenchOptions, mut progress: impl FnMut(&str)) -> anyhow::Result<Report> {
    refrain_service_kit::telemetry::install_crypto_provider();
    let tenants = match options.api_keys.len().checked_div(options.modes.len()) {
        None => bail!("no mode to run: name some, such as suffix,off"),
        Some(0) => bail!(
            "{} API keys for {} modes: each mode needs a tenant of its own, or it would draft from what \
             another said; give more keys or fewer modes",
            options.api_keys.len(),
            options.modes.len()
        ),
        Some(tenants) => tenants,
    };
    let client = Arc::new(Client::connect(options).await?);
    let mut totals: BTreeMap<(&str, &str), Sums> = BTreeMap::new();
    let mut ratios: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    let mut outputs_that_differ = 0;
    for part in [Part::Repetitive, Part::Unique] {
        for round in 0..options.rounds {
            let calls = workload::calls(part, options.seed, round, options.calls, tenants);
            let mut seconds = BTreeMap::new();
            let mut texts: Option<Vec<String>> = None;
            for turn in 0..options.modes.len() {
                let place = (turn + round as usize) % options.modes.len();
                let mode = &options.modes[place];
                let keys = &options.api_keys[place * tenants..][..tenants];
                let (sums, said) = pass(&client, mode, keys, &calls, options.concurrency).await?;
                seconds.insert(mode.as_str(), sums.decode_s_per_token());
                totals.entry((part.name(), mode)).or_default().add(&sums);
                let first = texts.get_or_insert_with(|| said.clone());
                outputs_that_differ +=
                    first.iter().zip(&said).filter(|(a, b)| a != b).count() as u64;
            }
            if let Some(off) = seconds.get("off").copied() {
                for (mode, mode_s) in seconds {
                    ratios
                        .entry((part.name(), mode))
                        .or_default()
                        .push(off / mode_s);
                }
            }
            progress(&format!(
                "{} round {} of {}",
                part.name(),
                round + 1,
                options.rounds
            ));
        }
    }
    let mut report = Report {
        parts: BTreeMap::new(),
        decode_speedup: BTreeMap::new(),
        outputs_that_differ,
    };
    for ((part, mode), sums) in totals {
        report
            .parts
            .entry(part.into())
            .or_default()
            .insert(mode.into(), sums.figures());
    }
    for ((part, mode), mut values) in ratios {
        values.sort_by(f64::total_cmp);
        let median = (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0;
        report
            .decode_speedup
            .entry(part.into())
            .or_default()
            .insert(mode.into(), median);
    }
    Ok(report)
}

async fn pass(
    client: &Arc<Client>,
    mode: &str,
    api_keys: &[String],
    calls: &[Call],
    concurrency: usize,
) -> anyhow::Result<(Sums, Vec<String>)> {
    let started = Instant::now();
    let answers: Vec<anyhow::Result<(Sums, String)>> =
        futures_util::stream::iter(calls.iter().cloned())
            .map(|call| {
                let client = client.clone();
                async move { client.call(&call, mode, &api_keys[call.tenant]).await }
            })
            .buffered(concurrency.max(1))
            .collect()
            .await;
    let mut sums = Sums::default();
    let mut texts = Vec::with_capacity(answers.len());
    for answer in answers {
        let (call, text) = answer?;
        sums.add(&call);
        texts.push(text);
    }
    sums.wall_s = started.elapsed().as_secs_f64();
    Ok((sums, texts))
}

struct Client {
    http: reqwest::Client,
    url: String,
    model: String,
}

impl Client {
    async fn connect(options: &BenchOptions) -> anyhow::Result<Self> {
        let Some(key) = options.api_keys.first() else {
            bail!("at least one API key is needed")
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
                    answer(http.get(format!("{url}/v1/models")).bearer_auth(key)).await?;
                models["data"][0]["id"]
                    .as_str()
                    .context("the gateway lists no model")?
                    .to_owned()
            }
        };
        Ok(Client { http, url, model })
    }

    async fn call(&self, call: &Call, mode: &str, api_key: &str) -> anyhow::Result<(Sums, String)> {
        let body = json!({
            "model": self.model,
            "messages": call.messages,
            "temperature": call.temperature,
            "seed": call.seed,
            "max_tokens": call.max_tokens,
            "session": call.session,
            "speculation": mode,
        });
        let request = self
            .http
            .post(format!("{}/v1/chat/completions", self.url))
            .bearer_auth(api_key)
            .json(&body);
        let answer = answer(request).await?;
        let spec = &answer["metrics"]["speculative_decoding"];
        let timings = &answer["metrics"]["timings"];
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        let output_tokens = count(&answer["usage"]["completion_tokens"]);
        let sums = Sums {
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

async fn answer(request: reqwest::RequestBuilder) -> anyhow::Result<Value> {
    let response = request
        .send()
        .await
        .context("is a mesh running there? `refrain up` starts one")?;
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

impl Report {
    /// The report as a table for people.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{:<12} {:<8} {:>6} {:>8} {:>9} {:>11} {:>10} {:>9} {:>9} {:>8} {:>8}\n",
            "part",
            "mode",
            "calls",
            "tokens",
            "tokens/s",
            "decode",
            "prefill",
            "accepted",
            "drafted",
            "accept",
            "speed-up"
        );
        text += &format!(
            "{:<12} {:<8} {:>6} {:>8} {:>9} {:>11} {:>10} {:>9} {:>9} {:>8} {:>8}\n",
            "", "", "", "", "", "ms/token", "ms", "length", "per step", "rate", "median"
        );
        for (part, modes) in &self.parts {
            for (mode, figures) in modes {
                let speedup = self
                    .decode_speedup
                    .get(part)
                    .and_then(|modes| modes.get(mode));
                text += &format!(
                    "{:<12} {:<8} {:>6} {:>8} {:>9.1} {:>11.3} {:>10.2} {:>9.2} {:>9.2} {:>8.3} {:>8}\n",
                    part,
                    mode,
                    figures.calls,
                    figures.output_tokens,
                    figures.tokens_per_s,
                    figures.decode_ms_per_token,
                    figures.prefill_ms,
                    figures.accepted_length,
                    figures.drafted_per_step,
                    figures.acceptance_rate,
                    speedup.map_or("-".into(), |speedup| format!("{speedup:.2}x")),
                );
            }
        }
        text += &format!(
            "outputs that differ between modes: {}\n",
            self.outputs_that_differ
        );
        text
    }
}
