//! The output is the engine's own, whatever the drafts, the batches and the chunks.

use anyhow::ensure;
use e2e::{Answer, Chat, UpMesh, varied_prompts};

const PROMPTS: usize = 54;
const TOKENS_MAX: u32 = 32;

/// Each prompt greedily and sampled. Every fourth output always reaches its limit.
fn chats() -> Vec<Chat> {
    let prompts = varied_prompts(PROMPTS).into_iter().enumerate();
    prompts
        .flat_map(|(number, prompt)| {
            let chat = Chat::new(&prompt).max_tokens(TOKENS_MAX);
            let chat = if number % 4 == 0 {
                chat.endless()
            } else {
                chat
            };
            [chat.clone(), chat.sampled(0.8, number as u64)]
        })
        .collect()
}

fn ensure_same(expected: &[Answer], answers: &[Answer], how: &str) -> anyhow::Result<()> {
    for (number, (expected, answer)) in expected.iter().zip(answers).enumerate() {
        ensure!(
            expected.text == answer.text,
            "request {number} differs {how}"
        );
        ensure!(
            expected.finish_reason == answer.finish_reason,
            "request {number} ends otherwise {how}"
        );
        let (before, now) = (expected.completion_tokens(), answer.completion_tokens());
        ensure!(
            before == now,
            "request {number} has {now} tokens instead of {before} {how}"
        );
    }
    ensure!(expected.len() == answers.len(), "answers are missing {how}");
    Ok(())
}

fn accepted(answers: &[Answer]) -> u64 {
    answers.iter().map(Answer::accepted).sum()
}

fn accepted_from(answers: &[Answer], source: &str) -> u64 {
    answers
        .iter()
        .map(|answer| answer.accepted_from(source))
        .sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_depends_on_neither_drafts_nor_batches_nor_chunks() -> anyhow::Result<()> {
    let chats = chats();
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let plain = client.chat_all(&chats, "off", 1).await?;
    ensure!(
        accepted(&plain) == 0,
        "drafts were used where they were turned off"
    );
    ensure!(
        plain.iter().any(|answer| answer.finish_reason == "length"),
        "no output reached its limit"
    );
    // The first pass drafts from the outputs of the plain one, so most steps accept many tokens.
    for (mode, at_once) in [
        ("suffix", 1),
        ("eagle3", 1),
        ("auto", 1),
        ("off", 8),
        ("suffix", 8),
        ("eagle3", 8),
        ("auto", 8),
    ] {
        let how = format!("with drafts {mode}, {at_once} at once");
        let answers = client.chat_all(&chats, mode, at_once).await?;
        ensure_same(&plain, &answers, &how)?;
        ensure!(
            (accepted(&answers) > 0) == (mode != "off"),
            "{} accepted {how}",
            accepted(&answers)
        );
        for source in ["suffix", "eagle3"] {
            ensure!(
                mode == "auto" || (accepted_from(&answers, source) > 0) == (mode == source),
                "{} accepted from {source} {how}",
                accepted_from(&answers, source)
            );
        }
    }
    mesh.stop().await;

    // Another mesh remembers nothing, takes a new lease every 16 tokens, and makes wide drafts of the head, of which
    // most branches are rejected.
    let data = tempfile::tempdir()?;
    let settings = "[worker.speculation.drafter]\ndepth = 5\ntop_k = 3\ntokens_max = 12";
    let mesh = UpMesh::start_tuned(data.path(), settings, |file| {
        file.gateway.tuning.chunk_tokens = 16;
        file.worker.speculation.drafter.path_prob_min = 0.01;
    })
    .await?;
    for mode in ["suffix", "eagle3", "auto"] {
        let answers = mesh.client().chat_all(&chats, mode, 4).await?;
        ensure_same(&plain, &answers, &format!("in chunks, with drafts {mode}"))?;
        ensure!(
            accepted(&answers) > 0,
            "no draft was accepted in chunks, with drafts {mode}"
        );
    }
    let leases = mesh.client().scrape().await?.sum(
        "refrain_scheduler_leases_total",
        &[("outcome", "continues")],
    );
    ensure!(leases > 0.0, "no request was cut into chunks");
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_has_the_text_of_a_whole_answer() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    for (number, prompt) in varied_prompts(12).iter().enumerate() {
        let chat = Chat::new(prompt).sampled(0.8, number as u64).endless();
        let whole = client.chat(&chat).await?;
        let streamed = client.stream(&chat).await?.read_to_done().await?;
        ensure!(
            whole.text == streamed,
            "request {number} differs when it is streamed"
        );
    }
    mesh.stop().await;
    Ok(())
}
