//! A mesh that is asked to stop finishes its running requests.

use anyhow::ensure;
use e2e::{Chat, Client, Event, Program, long_task};

const TOKENS: u32 = 300;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_finished_and_stored() -> anyhow::Result<()> {
    finished_and_stored("TERM").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hang_up_drains_as_well() -> anyhow::Result<()> {
    finished_and_stored("HUP").await
}

/// Checks a stream that runs when the signal arrives: it is finished, and its output is stored.
async fn finished_and_stored(signal: &str) -> anyhow::Result<()> {
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
    program.signal(signal).await?;
    // From some time after the signal on, new requests are refused. The test uses another client, because a kept
    // connection may be served to its end.
    e2e::wait_until("new requests are refused", async || {
        let another = Client::new(&url, "refrain-dev");
        match another.chat(&Chat::new("a").max_tokens(1)).await {
            Ok(_) => None,
            // The request is refused with a reason, or the connection is refused.
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_outlasts_the_grace_period_gets_an_error() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (mut program, url) =
        Program::up(dir.path(), &[], &[("REFRAIN_DRAIN_GRACE_MS", "0")]).await?;
    let chat = Chat::new(&long_task(3))
        .max_tokens(3_000)
        .endless()
        .speculation("off");
    let mut stream = Client::new(&url, "refrain-dev").stream(&chat).await?;
    stream.read_pieces(5).await?;
    program.terminate().await?;
    let mut last = None;
    while let Some(event) = stream.next().await? {
        last = Some(event);
    }
    let Some(Event::Data(last)) = last else {
        anyhow::bail!("the stream ended with {last:?}");
    };
    ensure!(
        last["error"]["code"] == "server_is_draining",
        "the last event is {last}"
    );
    let status = program.ended().await?;
    ensure!(status.code() == Some(0), "{status}:\n{}", program.output());
    ensure!(
        program.output().contains("\"cut\":1"),
        "how many were cut is not in the log:\n{}",
        program.output()
    );
    Ok(())
}
