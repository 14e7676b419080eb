//! Conversations on four engines: what each placement makes them read again.

use anyhow::ensure;
use e2e::{Chat, Client, HttpMesh, Service, TINY_MODEL, wait_until};
use futures_util::future::try_join_all;
use serde_json::{Value, json};

const ENGINES: usize = 4;
/// Not a multiple of the engines, so that taking turns does not bring a conversation back by chance.
const CONVERSATIONS: usize = 9;
const TURNS: usize = 5;

/// The tokens of all conversations under one placement.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Prompt tokens of all turns.
    prompt: f64,
    /// Context tokens that the engines read, by their own count.
    prefilled: f64,
}

/// The text of a user in one turn. No two turns have a long common prefix.
fn says(conversation: usize, turn: usize) -> String {
    let lines = (0..4).map(|line| {
        let number = conversation * 1_000 + turn * 10 + line;
        format!(
            "{number}: shelf {} has {} boxes of lamps.",
            number % 7,
            number % 23
        )
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// One conversation, in which each turn follows the answer to the one before. Returns the tokens of its prompts.
async fn converse(client: Client, conversation: usize) -> anyhow::Result<f64> {
    let mut messages: Vec<Value> = Vec::new();
    let mut prompt = 0.0;
    for turn in 0..TURNS {
        messages.push(json!({"role": "user", "content": says(conversation, turn)}));
        let chat = Chat::new("").set("messages", messages.clone());
        let chat = chat.max_tokens(16).endless().speculation("off");
        let answer = client.chat(&chat).await?;
        prompt += answer.prompt_tokens() as f64;
        messages.push(json!({"role": "assistant", "content": answer.text}));
    }
    Ok(prompt)
}

async fn cost_of(placement: &str) -> anyhow::Result<Cost> {
    let settings = format!(
        "[scheduler]\nplacement = \"{placement}\"\n\
         [engine]\nkv_tokens_max = 3072\n\
         [worker]\nrunning_max = 4\n"
    );
    let mesh = HttpMesh::start_here_tuned(ENGINES, &settings, |_, file| {
        file.worker.profile_ms_max = 0;
    })
    .await?;
    mesh.workers_report(ENGINES).await;
    wait_until("the gateway knows the model", async || {
        let models = mesh.client().get("/v1/models").await.ok()?;
        models.text.contains(TINY_MODEL).then_some(())
    })
    .await;
    let conversations = (0..CONVERSATIONS).map(|number| converse(mesh.client(), number));
    let prompt = try_join_all(conversations).await?.into_iter().sum();
    let mut computed = Vec::new();
    let mut cached = 0.0;
    for engine in 0..ENGINES {
        let scrape = mesh.scrape(Service::Engine(engine)).await?;
        computed.push(scrape.sum("refrain_engine_computed_tokens_total", &[]));
        cached += scrape.sum("refrain_engine_cached_tokens_total", &[]);
    }
    mesh.stop().await?;
    let prefilled = prompt - cached;
    let mean = computed.iter().sum::<f64>() / ENGINES as f64;
    let load = computed.iter().copied().fold(0.0, f64::max) / mean;
    // docs/scheduling.md has these figures.
    println!("{placement}: {prefilled} of {prompt} tokens read, load {load:.2} of the mean");
    Ok(Cost { prompt, prefilled })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_read_least_where_their_cache_lies() -> anyhow::Result<()> {
    let [kv, cache_aware, least_loaded, round_robin] = [
        cost_of("kv").await?,
        cost_of("cache_aware").await?,
        cost_of("least_loaded").await?,
        cost_of("round_robin").await?,
    ];
    for other in [least_loaded, round_robin] {
        ensure!(other.prompt == kv.prompt, "a placement changed an output");
        ensure!(
            kv.prefilled < 0.9 * other.prefilled,
            "{kv:?} is not better than {other:?}"
        );
    }
    // The rule of SGLang's gateway knows no load below 64 requests, so it reads each conversation once. `kv` also
    // moves one where its worker is busier than the reading is worth.
    ensure!(
        kv.prefilled < 2.0 * cache_aware.prefilled,
        "{kv:?} reads too much more than {cache_aware:?}"
    );
    Ok(())
}
