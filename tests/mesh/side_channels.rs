//! One caller of a tenant learns what another was told, and isolation and shapes leave nothing of it.
//!
//! In each trial a victim asks one of two questions. The attacker has another key of the same tenant. It asks both,
//! and looks at everything in the answers but their text: metrics, usage, and the number of events in the stream. It
//! guesses that the question with less work was asked before. Times are left out, since those of a test machine say
//! little; `relay/stream_shaper.rs` tests the pace.

use std::cmp::Reverse;

use anyhow::{Context, Error, ensure};
use e2e::{Chat, Client, Event, UpMesh};
use refrain_accounts::tenants::file::{
    Isolation, KeyEntry, StreamShaping, TenantEntry, TenantsFile,
};
use refrain_accounts::tenants::key::NewKey;
use refrain_protocol::TenantName;
use serde_json::{Value, json};

const TOKENS: u32 = 16;

/// The traces that the attacker sees in an answer. Less is more suspicious.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Traces {
    /// Steps by the metrics, 0 without any.
    steps: u64,
    events: u64,
    /// Tokens of the prompt that the KV cache held.
    cached: Reverse<u64>,
}

fn question(number: usize) -> Chat {
    Chat::random(number)
        .max_tokens(TOKENS)
        .speculation("suffix")
}

async fn traces(client: &Client, chat: Chat) -> anyhow::Result<Traces> {
    let chat = chat.set("stream_options", json!({"include_usage": true}));
    let mut stream = client.stream(&chat).await?;
    let (mut events, mut last) = (0, Value::Null);
    while let Some(event) = stream.next().await? {
        let Event::Data(data) = event else {
            continue;
        };
        events += u64::from(data["choices"][0]["delta"]["content"].is_string());
        if data["usage"].is_object() {
            last = data;
        }
    }
    let number = |pointer: &str| last.pointer(pointer).and_then(Value::as_u64);
    let cached = number("/usage/prompt_tokens_details/cached_tokens").context("no usage")?;
    Ok(Traces {
        steps: number("/metrics/speculative_decoding/steps").unwrap_or(0),
        events,
        cached: Reverse(cached),
    })
}

/// A tenant with keys for a victim and an attacker.
struct Tenant {
    keys: [NewKey; 2],
    entry: TenantEntry,
}

/// A tenant as it is by default.
fn usual() -> anyhow::Result<TenantEntry> {
    Ok(TenantEntry::named(
        "usual".parse::<TenantName>().map_err(Error::msg)?,
    ))
}

impl Tenant {
    fn new(name: &str, entry: TenantEntry) -> anyhow::Result<Self> {
        let keys = [NewKey::random()?, NewKey::random()?];
        let known = |key: &NewKey| KeyEntry {
            name: "key".into(),
            id: key.id.clone(),
            sha256: key.sha256.clone(),
            ..KeyEntry::default()
        };
        Ok(Tenant {
            entry: TenantEntry {
                name: name.parse::<TenantName>().map_err(Error::msg)?,
                keys: keys.iter().map(known).collect(),
                ..entry
            },
            keys,
        })
    }

    /// The share of right guesses.
    async fn right_guesses(&self, mesh: &UpMesh, trials: usize) -> anyhow::Result<f64> {
        let client = |key: &NewKey| Client::new(mesh.client().url(), &key.key);
        let [victim, attacker] = [client(&self.keys[0]), client(&self.keys[1])];
        let mut right = 0;
        for trial in 0..trials {
            let asked = trial % 2;
            victim.chat(&question(2 * trial + asked)).await?;
            let first = traces(&attacker, question(2 * trial)).await?;
            let second = traces(&attacker, question(2 * trial + 1)).await?;
            // Without a difference there is nothing to go by.
            let guess = usize::from(second < first);
            right += usize::from(guess == asked);
        }
        Ok(right as f64 / trials as f64)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attacker_with_another_key_guesses_no_better_than_by_chance_if_the_tenant_isolates_keys()
-> anyhow::Result<()> {
    let open = Tenant::new("open", usual()?)?;
    let hidden = TenantEntry {
        hides_metrics: true,
        ..usual()?
    };
    let without_metrics = Tenant::new("without metrics", hidden.clone())?;
    let shaped = TenantEntry {
        stream_shaping: StreamShaping::Size,
        ..hidden
    };
    let sized = Tenant::new("sized", shaped.clone())?;
    let isolated = TenantEntry {
        isolation: Isolation::Key,
        ..shaped
    };
    let isolated = Tenant::new("isolated", isolated)?;
    let tenants = [&open, &without_metrics, &sized, &isolated];
    let file = TenantsFile {
        tenants: tenants.map(|tenant| tenant.entry.clone()).to_vec(),
    };
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("tenants.toml");
    std::fs::write(&path, file.to_text()?)?;
    let path = path.display().to_string();
    let mesh = UpMesh::start_with(&format!("[gateway]\ntenants_file = {path:?}\n")).await?;

    let by_metrics = open.right_guesses(&mesh, 40).await?;
    let by_events = without_metrics.right_guesses(&mesh, 40).await?;
    let by_sizes = sized.right_guesses(&mesh, 40).await?;
    let by_nothing = isolated.right_guesses(&mesh, 200).await?;
    println!("right guesses: {by_metrics} {by_events} {by_sizes} {by_nothing}");
    ensure!(
        by_metrics >= 0.9,
        "metrics tell what was said: {by_metrics}"
    );
    ensure!(
        by_events >= 0.8,
        "events tell it without metrics: {by_events}"
    );
    ensure!(by_sizes <= 0.55, "events of equal sizes do not: {by_sizes}");
    ensure!(by_nothing <= 0.55, "{by_nothing}");
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_are_isolated_share_neither_drafts_nor_kv() -> anyhow::Result<()> {
    let entry = TenantEntry {
        isolation: Isolation::Key,
        ..usual()?
    };
    let tenant = Tenant::new("isolated", entry)?;
    let file = TenantsFile {
        tenants: vec![tenant.entry.clone()],
    };
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("tenants.toml");
    std::fs::write(&path, file.to_text()?)?;
    let path = path.display().to_string();
    let mesh = UpMesh::start_with(&format!("[gateway]\ntenants_file = {path:?}\n")).await?;
    let client = |key: &NewKey| Client::new(mesh.client().url(), &key.key);
    let [one, other] = [client(&tenant.keys[0]), client(&tenant.keys[1])];
    let first = one.chat(&question(1)).await?;
    let cached = "/usage/prompt_tokens_details/cached_tokens";
    let elsewhere = other.chat(&question(1)).await?;
    ensure!(elsewhere.text == first.text, "isolation changed an output");
    ensure!(elsewhere.number(cached) == 0, "the KV cache was shared");
    ensure!(
        elsewhere.accepted() == first.accepted(),
        "drafts were shared"
    );
    let again = one.chat(&question(1)).await?;
    ensure!(again.number(cached) > 0 && again.accepted() > first.accepted());
    mesh.stop().await;
    Ok(())
}
