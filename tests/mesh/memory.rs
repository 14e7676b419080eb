//! Outputs are remembered across requests, restarts and crashes, and only for their tenant.

use std::path::Path;

use anyhow::ensure;
use e2e::{Chat, Client, Program, UpMesh, wait_until};

const TOKENS: u32 = 120;

fn chat(number: usize) -> Chat {
    Chat::random(number).max_tokens(TOKENS)
}

/// Draft tokens accepted from the tenant's namespace while the request ran.
async fn accepted_from_tenant(client: &Client, chat: &Chat) -> anyhow::Result<f64> {
    let before = client.scrape().await?.accepted_from("tenant");
    client.chat(chat).await?;
    Ok(client.scrape().await?.accepted_from("tenant") - before)
}

/// Waits until all outputs are in the store.
async fn uploaded(client: &Client) {
    wait_until("all outputs are acknowledged", async || {
        let scrape = client.scrape().await.ok()?;
        let pending = scrape.sum("refrain_upload_pending_tokens", &[]);
        let running = scrape.sum("refrain_worker_chunks_running", &[]);
        (pending == 0.0 && running == 0.0).then_some(())
    })
    .await;
}

/// Makes a restarted worker follow the store, with a small request, and waits until its replica is complete.
async fn followed(client: &Client) -> anyhow::Result<()> {
    client
        .chat(&Chat::new("a").max_tokens(1).speculation("off"))
        .await?;
    wait_until("the worker has its copy of the drafts", async || {
        let scrape = client.scrape().await.ok()?;
        let stored = scrape.sum("refrain_draft_store_tokens", &[]);
        (stored > 0.0 && scrape.sum("refrain_replica_tokens", &[]) >= stored).then_some(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_request_drafts_from_the_first_one_of_its_tenant_only() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let first = accepted_from_tenant(&client, &chat(1)).await?;
    let second = accepted_from_tenant(&client, &chat(1)).await?;
    ensure!(
        second > first && second > f64::from(TOKENS) / 2.0,
        "{first} accepted, then {second}"
    );

    let another = mesh.client_of_another();
    let answer = another.chat(&chat(1)).await?;
    ensure!(
        answer.number("/usage/prompt_tokens_details/cached_tokens") == 0,
        "another tenant found this one's KV"
    );
    let stranger = accepted_from_tenant(&mesh.client_of_another(), &chat(2)).await?;
    accepted_from_tenant(&client, &chat(2)).await?;
    let again = accepted_from_tenant(&client, &chat(2)).await?;
    ensure!(
        stranger < again / 4.0,
        "a prompt new to the tenant: {stranger} accepted; known to it: {again}"
    );
    mesh.stop().await;
    Ok(())
}

/// A mesh that uses drafts even if they do not pay on this machine, so that no run depends on measured times.
async fn eager_mesh(data_dir: &Path) -> anyhow::Result<UpMesh> {
    let settings = "[worker.speculation]\nrouter = \"score\"\nfallback = \"off\"\n\
                    alpha = 1.0\nmin_token_prob = 0.1";
    UpMesh::start_tuned(data_dir, settings, |file| {
        file.worker.speculation.gain_min = 0.0;
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_predicted_output_is_drafted_and_reported() -> anyhow::Result<()> {
    let data = tempfile::tempdir()?;
    let mesh = eager_mesh(data.path()).await?;
    let said = mesh.client().chat(&chat(6)).await?;
    // This tenant has never had the output, so drafts of it can only come from the prediction.
    let prediction = serde_json::json!({"type": "content", "content": said.text.clone()});
    let predicted = mesh
        .client_of_another()
        .chat(&chat(6).set("prediction", prediction))
        .await?;
    mesh.stop().await;
    ensure!(
        predicted.text == said.text,
        "a prediction changed the output"
    );
    let accepted = predicted.number("/usage/completion_tokens_details/accepted_prediction_tokens");
    ensure!(
        accepted == predicted.accepted_from("prediction") && accepted > u64::from(TOKENS) / 2,
        "{accepted} tokens of the prediction accepted"
    );
    ensure!(
        said.body
            .pointer("/usage/completion_tokens_details")
            .is_none(),
        "an answer without a prediction reports one"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outputs_of_one_tenant_change_nothing_for_another() -> anyhow::Result<()> {
    let mut counts = Vec::new();
    for said_before in [0, 3] {
        let data = tempfile::tempdir()?;
        let mesh = eager_mesh(data.path()).await?;
        for _ in 0..said_before {
            mesh.client().chat(&chat(3)).await?;
        }
        // A request also drafts from its own output, so some tokens are accepted. But the numbers of steps, drafts
        // and accepted tokens are the same as in an empty mesh.
        let answer = mesh.client_of_another().chat(&chat(3)).await?;
        counts.push(answer.body["metrics"]["speculative_decoding"].clone());
        mesh.stop().await;
    }
    ensure!(
        counts[0] == counts[1],
        "alone: {}; after another tenant: {}",
        counts[0],
        counts[1]
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_survive_an_orderly_restart() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let mesh = UpMesh::start_in(dir.path(), "").await?;
    // An output right before the stop is kept, whether the store has acknowledged it or not.
    let said = mesh.client().chat(&chat(4)).await?;
    mesh.stop().await;

    let mesh = UpMesh::start_in(dir.path(), "").await?;
    followed(&mesh.client()).await?;
    let before = mesh.client().scrape().await?.accepted_from("tenant");
    let again = mesh.client().chat(&chat(4)).await?;
    let gained = mesh.client().scrape().await?.accepted_from("tenant") - before;
    ensure!(
        said.text == again.text,
        "the same request has another answer after a restart"
    );
    ensure!(
        gained > f64::from(TOKENS) / 2.0,
        "{gained} accepted after a restart"
    );
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_outputs_survive_a_crash() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (program, url) = Program::up(dir.path(), &[], &[]).await?;
    let client = Client::new(&url, "refrain-dev");
    client.chat(&chat(5)).await?;
    uploaded(&client).await;
    let stored = client
        .scrape()
        .await?
        .sum("refrain_draft_store_tokens", &[]);
    ensure!(stored >= f64::from(TOKENS), "{stored} tokens stored");
    program.kill().await?;

    let (_program, url) = Program::up(dir.path(), &[], &[]).await?;
    let client = Client::new(&url, "refrain-dev");
    let found = client
        .scrape()
        .await?
        .sum("refrain_draft_store_tokens", &[]);
    ensure!(
        found == stored,
        "{stored} tokens were acknowledged, {found} are left"
    );
    followed(&client).await?;
    let gained = accepted_from_tenant(&client, &chat(5)).await?;
    ensure!(
        gained > f64::from(TOKENS) / 2.0,
        "{gained} accepted after a crash"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_output_is_kept_too() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let long = chat(6).max_tokens(1500).speculation("off");
    let mut stream = client.stream(&long).await?;
    stream.read_pieces(60).await?;
    drop(stream);
    uploaded(&client).await;
    let kept = client
        .scrape()
        .await?
        .sum("refrain_draft_store_tokens", &[]);
    ensure!(
        (60.0..1500.0).contains(&kept),
        "{kept} tokens kept of a cancelled output"
    );
    let gained = accepted_from_tenant(&client, &chat(6).max_tokens(60)).await?;
    ensure!(gained > 30.0, "{gained} accepted from a cancelled output");
    mesh.stop().await;
    Ok(())
}
