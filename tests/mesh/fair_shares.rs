//! Tenants that always have more to do than there are slots get tokens by their weights, however much they send.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::ensure;
use e2e::{Chat, Client, UpMesh, long_task};
use futures_util::future::try_join_all;

const SLOTS: usize = 4;
const TOKENS: u32 = 24;
/// Tokens of all tenants before the count begins. It takes a while until all requests are in the scheduler's queue.
const TOKENS_BEFORE: u64 = 3_000;
/// Tokens of all tenants after which the count ends.
const TOKENS_ALL: u64 = TOKENS_BEFORE + 6_000;
/// Requests that a tenant has in flight. Far more than slots, because a request that was answered takes its time to
/// be followed by another one on a busy machine.
const IN_FLIGHT: usize = 5 * SLOTS;

/// A request that always has as many output tokens.
fn chat(number: usize) -> Chat {
    Chat::new(&long_task(number))
        .sampled(1.0, number as u64)
        .max_tokens(TOKENS)
        .endless()
        .speculation("off")
}

/// Sends one request after the other from each of `in_flight` clients, until all tenants together have enough. Counts
/// the tokens of the tenant.
async fn keep_busy(client: &Client, in_flight: usize, all: &Arc<AtomicU64>) -> anyhow::Result<u64> {
    let of_client = |first: usize| async move {
        let (mut tokens, mut number) = (0, first);
        while all.load(Ordering::Relaxed) < TOKENS_ALL {
            let made = client.chat(&chat(number)).await?.completion_tokens();
            let before = all.fetch_add(made, Ordering::Relaxed);
            if (TOKENS_BEFORE..TOKENS_ALL).contains(&before) {
                tokens += made;
            }
            number += in_flight;
        }
        anyhow::Ok(tokens)
    };
    let tokens = try_join_all((0..in_flight).map(of_client)).await?;
    Ok(tokens.iter().sum())
}

/// The tokens of two tenants with these weights, of which the first has five times as many requests in flight.
async fn tokens_of(weights: [f64; 2]) -> anyhow::Result<[f64; 2]> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("tenants.toml");
    let [one, another] = weights;
    std::fs::write(
        &path,
        format!(
            "[[tenants]]\nname = \"one\"\nweight = {one:?}\n[[tenants]]\nname = \"another\"\nweight = {another:?}\n"
        ),
    )?;
    // The client opens connections that it then does not need at once, and the gateway would close these.
    let settings = format!(
        "[gateway]\ntenants_file = {:?}\n[gateway.http]\nhead_ms_max = 300000\n[worker]\nrunning_max = {SLOTS}\n",
        path.display().to_string()
    );
    let mesh = UpMesh::start_with(&settings).await?;
    let all = Arc::new(AtomicU64::new(0));
    let (client, other) = (mesh.client(), mesh.client_of_another());
    let (one, another) = tokio::try_join!(
        keep_busy(&client, 5 * IN_FLIGHT, &all),
        keep_busy(&other, IN_FLIGHT, &all),
    )?;
    mesh.stop().await;
    Ok([one as f64, another as f64])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_get_tokens_by_their_weights_and_not_by_what_they_send() -> anyhow::Result<()> {
    for weights in [[1.0, 1.0], [1.0, 3.0]] {
        let tokens = tokens_of(weights).await?;
        let ratio = tokens[1] / tokens[0] / (weights[1] / weights[0]);
        println!("weights {weights:?}: tokens {tokens:?}, {ratio:.3} of the ratio of the weights");
        ensure!((0.85..=1.18).contains(&ratio), "{weights:?}: {tokens:?}");
    }
    Ok(())
}
