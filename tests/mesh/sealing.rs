//! Sealing of finished outputs while others run, and separate indexes for groups of samples. Neither changes outputs
//! or loses drafts.

use anyhow::ensure;
use e2e::{Answer, Chat, Client, UpMesh, varied_prompts, wait_until};
use refrain::config::MeshFile;

const TOKENS: u32 = 120;

/// Seals so early that hardly any output stays live.
fn seal_early(file: &mut MeshFile) {
    file.worker.replica.seal_tokens = 64;
    file.worker.replica.upkeep_ms = 5;
}

fn chat(number: usize) -> Chat {
    Chat::random(number).max_tokens(TOKENS)
}

async fn jobs(client: &Client, job: &str) -> anyhow::Result<f64> {
    let scrape = client.scrape().await?;
    Ok(scrape.sum("refrain_replica_jobs_total", &[("job", job)]))
}

/// Waits until all stored outputs are in the worker's replica, and sealed except for a small rest.
async fn sealed(client: &Client) {
    wait_until("the worker has sealed its copy of the drafts", async || {
        let scrape = client.scrape().await.ok()?;
        let figure = |name: &str| scrape.sum(name, &[]);
        let stored = figure("refrain_draft_store_tokens");
        let is_followed = stored > 0.0 && figure("refrain_replica_tokens") >= stored;
        let is_idle = figure("refrain_worker_chunks_running") == 0.0
            && figure("refrain_upload_pending_tokens") == 0.0;
        let live = figure("refrain_replica_live_tokens");
        (is_followed && is_idle && live < f64::from(TOKENS)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sealed_outputs_give_drafts_before_and_after_a_restart() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let mut said: Option<String> = None;
    for restarts in 0..2 {
        let mesh = UpMesh::start_tuned(dir.path(), "", seal_early).await?;
        let client = mesh.client();
        if restarts == 0 {
            for number in 1..5 {
                client.chat(&chat(number)).await?;
            }
        } else {
            // The worker follows the store from the first request of a namespace on.
            let small = Chat::new("a").max_tokens(1).speculation("off");
            client.chat(&small).await?;
        }
        sealed(&client).await;
        let before = client.scrape().await?;
        let segment_tokens = before.sum("refrain_replica_sealed_tokens", &[]);
        ensure!(
            segment_tokens > 3.0 * f64::from(TOKENS),
            "{segment_tokens} tokens are sealed after {restarts} restarts"
        );
        ensure!(before.sum("refrain_replica_segment_bytes", &[]) > 0.0);
        let answer = client.chat(&chat(2)).await?;
        let gained =
            client.scrape().await?.accepted_from("tenant") - before.accepted_from("tenant");
        ensure!(
            gained > f64::from(TOKENS) / 2.0,
            "{gained} accepted from what was sealed, after {restarts} restarts"
        );
        let said = said.get_or_insert_with(|| answer.text.clone());
        ensure!(*said == answer.text, "another answer after a restart");
        mesh.stop().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_does_not_depend_on_sealing() -> anyhow::Result<()> {
    let prompts = varied_prompts(12).into_iter().enumerate();
    let chats: Vec<Chat> = prompts
        .map(|(number, prompt)| {
            let chat = Chat::new(&prompt).max_tokens(32).endless();
            if number % 2 == 0 {
                chat
            } else {
                chat.sampled(0.8, number as u64)
            }
        })
        .collect();
    let dir = tempfile::tempdir()?;
    let mesh = UpMesh::start_tuned(dir.path(), "", seal_early).await?;
    let client = mesh.client();
    let plain = client.chat_all(&chats, "off", 8).await?;
    let seals_before = jobs(&client, "seal").await?;
    for mode in ["suffix", "auto", "suffix"] {
        let answers = client.chat_all(&chats, mode, 8).await?;
        for (number, (expected, answer)) in plain.iter().zip(&answers).enumerate() {
            ensure!(
                expected.text == answer.text,
                "request {number} differs with drafts {mode}"
            );
        }
        let accepted: u64 = answers.iter().map(Answer::accepted).sum();
        ensure!(accepted > 0, "no draft was accepted, with drafts {mode}");
    }
    let seals = jobs(&client, "seal").await? - seals_before;
    ensure!(seals >= 3.0, "only {seals} seals while requests ran");
    ensure!(
        jobs(&client, "merge").await? > 0.0,
        "segments were not merged"
    );
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_of_a_group_draft_from_each_other() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let tune = |file: &mut MeshFile| {
        seal_early(file);
        file.gateway.tuning.rollout_chunk_tokens = 32;
    };
    let mesh = UpMesh::start_tuned(dir.path(), "", tune).await?;
    let client = mesh.client();
    let accepted = async |client: &Client, chat: &Chat, scope: &str| {
        let before = client.scrape().await?.accepted_from(scope);
        client.chat(chat).await?;
        anyhow::Ok(client.scrape().await?.accepted_from(scope) - before)
    };
    let sample = chat(1).set("group", "a rollout").set("chunk_tokens", 32);
    let alone = accepted(&client, &sample, "group").await?;
    let second = accepted(&client, &sample, "group").await?;
    ensure!(
        alone == 0.0 && second > f64::from(TOKENS) / 2.0,
        "{alone} accepted from a group of one, then {second}"
    );
    // The samples run at the same time and differ.
    let samples = chat(2)
        .sampled(0.3, 1)
        .set("group", "another rollout")
        .set("n", 4);
    let at_once = accepted(&client, &samples, "group").await?;
    ensure!(at_once > 0.0, "samples that run at once draft nothing");
    // The same name is a different group for another tenant, and a request without a name has no group.
    let stranger = accepted(&mesh.client_of_another(), &sample, "group").await?;
    let without = accepted(&client, &chat(1), "group").await?;
    ensure!(
        stranger == 0.0 && without == 0.0,
        "{stranger} accepted from a group of another tenant, {without} without a group"
    );
    mesh.stop().await;
    Ok(())
}
