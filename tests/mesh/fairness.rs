//! No tenant keeps another one from its share of the slots.

use anyhow::ensure;
use e2e::{Chat, Client, Event, UpMesh, long_task, wait_until};

const SLOTS: usize = 4;
const CHOICES: u64 = 6;
const TOKENS: u32 = 400;

/// A request with more choices than slots. Each output reaches its limit.
fn greedy_tenant() -> Chat {
    Chat::new(&long_task(1))
        .sampled(1.0, 7)
        .max_tokens(TOKENS)
        .endless()
        .speculation("off")
        .set("n", CHOICES)
}

/// The texts of all choices.
fn texts(body: &serde_json::Value) -> Vec<String> {
    let choices = body["choices"].as_array().cloned().unwrap_or_default();
    let text =
        |choice: &serde_json::Value| choice["message"]["content"].as_str().map(str::to_owned);
    choices.iter().filter_map(text).collect()
}

async fn gave_way(client: &Client) -> anyhow::Result<f64> {
    let scrape = client.scrape().await?;
    Ok(scrape.sum("refrain_worker_chunks_total", &[("outcome", "gave_way")]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newcomer_gets_a_slot_before_any_output_of_the_other_tenant_ends() -> anyhow::Result<()> {
    let mesh = UpMesh::start_with(&format!("[worker]\nrunning_max = {SLOTS}")).await?;
    let (client, newcomer) = (mesh.client(), mesh.client_of_another());
    let alone = client.chat(&greedy_tenant()).await?;
    ensure!(alone.completion_tokens() == CHOICES * u64::from(TOKENS));
    // A tenant that is alone keeps all slots.
    ensure!(gave_way(&client).await? == 0.0);

    let emitted = async || -> anyhow::Result<f64> {
        let scrape = client.scrape().await?;
        Ok(scrape.sum("refrain_spec_emitted_tokens_total", &[]))
    };
    let before = emitted().await?;
    let greedy = {
        let client = client.clone();
        tokio::spawn(async move { client.chat(&greedy_tenant()).await })
    };
    wait_until("one tenant has all slots", async || {
        let scrape = client.scrape().await.ok()?;
        (scrape.sum("refrain_worker_chunks_running", &[]) == SLOTS as f64).then_some(())
    })
    .await;
    let chat = Chat::new(&long_task(2)).max_tokens(8).endless();
    let mut stream = newcomer.stream(&chat).await?;
    loop {
        match stream.next().await? {
            Some(Event::Data(event)) if event["choices"][0]["delta"]["content"].is_string() => {
                break;
            }
            Some(_) => {}
            None => anyhow::bail!("no token came"),
        }
    }
    // If the newcomer had waited for a free slot, an output of the other tenant would be complete.
    let said = emitted().await? - before;
    let least = f64::from(TOKENS);
    ensure!(
        said < least * SLOTS as f64,
        "{said} tokens came before the newcomer's first one"
    );
    ensure!(!greedy.is_finished());
    ensure!(gave_way(&client).await? >= 1.0, "no chunk was preempted");
    drop(stream);
    // The preempted outputs went on and are complete.
    let answer = greedy.await??;
    ensure!(
        texts(&answer.body) == texts(&alone.body),
        "preemption changed the outputs"
    );
    mesh.stop().await;
    Ok(())
}
