//! A mesh that is asked to stop finishes what it began.

use anyhow::ensure;
use e2e::{Chat, Client, Program, long_task};

const TOKENS: u32 = 300;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_finished_and_kept() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (mut program, url) = Program::up(dir.path(), &[], &[]).await?;
    let client = Client::new(&url, "refrain-dev");
    let chat = Chat::new(&long_task(3))
        .sampled(1.2, 5)
        .max_tokens(TOKENS)
        .endless()
        .speculation("off");
    let undisturbed = client.chat(&chat).await?.text;
    let stored = client
        .scrape()
        .await?
        .sum("refrain_draft_store_tokens", &[]);

    let mut stream = client.stream(&chat).await?;
    let mut text = stream.read_pieces(5).await?;
    program.terminate().await?;
    // The signal arrives some time; from then on nothing new is taken. Another client, since a connection
    // that is kept may be served to its end.
    e2e::wait_until("new requests are refused", async || {
        let another = Client::new(&url, "refrain-dev");
        match another.chat(&Chat::new("a").max_tokens(1)).await {
            Ok(_) => None,
            // Refused with a reason, or not connected at all.
            Err(error) => {
                let error = error.to_string();
                let has_status = error.starts_with(|first: char| first.is_ascii_digit());
                (error.starts_with("503") || !has_status).then_some(())
            }
        }
    })
    .await;
    text += &stream.read_to_done().await?;
    ensure!(
        text == undisturbed,
        "the drained output differs:\n{text}\ninstead of\n{undisturbed}"
    );
    let status = program.ended().await?;
    ensure!(status.code() == Some(0), "{status}:\n{}", program.output());

    let (_program, url) = Program::up(dir.path(), &[], &[]).await?;
    let kept = Client::new(&url, "refrain-dev")
        .scrape()
        .await?
        .sum("refrain_draft_store_tokens", &[]);
    let least = f64::from(TOKENS) * 2.0;
    ensure!(
        kept >= least && kept >= stored,
        "{kept} tokens kept of at least {least}"
    );
    Ok(())
}
