//! Hostile HTTP against a running gateway: broken bodies, heads and connections. Nothing of it panics, gets an error
//! that blames the mesh, or keeps memory.

mod mutation;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::ensure;
use e2e::{Chat, Client, Program, number_of, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use mutation::{Attack, attack};

/// The number of attacks, unless this variable says otherwise.
const ATTACKS_VARIABLE: &str = "REFRAIN_TEST_ATTACKS";
const ATTACKS: usize = 1_500;
/// Attacks at once.
const AT_ONCE: usize = 16;
/// A round before memory is measured, so that caches and pools have their sizes.
const WARM_UP: usize = 500;
/// Small caches have their sizes after the round that warms up. They grow for a long time at their usual limits.
const SMALL_CACHES: [(&str, &str); 3] = [
    ("REFRAIN_ENGINE__FORM_CACHE_BYTES_MAX", "1000000"),
    ("REFRAIN_ENGINE__KV_TOKENS_MAX", "2048"),
    ("REFRAIN_ENGINE__MAX_SESSIONS", "16"),
];
/// How long an attacker reads an answer. Then it leaves, which an honest server has to bear as well.
const READ_MAX: Duration = Duration::from_secs(3);
/// Most bytes that an attacker reads of an answer.
const READ_BYTES_MAX: usize = 1 << 20;
/// Growth of the process that is not a leak: a debug build's allocator returns pages late.
const GROWTH_BYTES_MAX: f64 = 64.0 * 1024.0 * 1024.0;

/// Sends an attack, and returns the status of the first answer, if there is one.
async fn carry_out(addr: SocketAddr, attack: &Attack) -> Option<u16> {
    let mut stream = TcpStream::connect(addr).await.ok()?;
    for part in &attack.parts {
        // The gateway may have closed the connection already.
        if stream.write_all(part).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    if attack.leaves {
        return None;
    }
    let mut answer = Vec::new();
    let read = async {
        let mut buffer = [0; 4_096];
        while answer.len() < READ_BYTES_MAX {
            match stream.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(bytes) => answer.extend_from_slice(&buffer[..bytes]),
            }
        }
    };
    let _ = tokio::time::timeout(READ_MAX, read).await;
    let head = std::str::from_utf8(answer.get(..12)?).ok()?;
    head.strip_prefix("HTTP/1.1 ")?.parse().ok()
}

/// Carries attacks out, and returns how many got an answer of each hundred.
async fn rounds(addr: SocketAddr, seeds: std::ops::Range<u64>) -> anyhow::Result<[usize; 6]> {
    let mut running = tokio::task::JoinSet::new();
    let mut statuses = [0; 6];
    for seed in seeds.clone() {
        if running.len() >= AT_ONCE {
            count(&mut statuses, running.join_next().await)?;
        }
        running.spawn(async move {
            let attack = attack(seed);
            (seed, carry_out(addr, &attack).await)
        });
    }
    while let Some(ended) = running.join_next().await {
        count(&mut statuses, Some(ended))?;
    }
    Ok(statuses)
}

fn count(
    statuses: &mut [usize; 6],
    ended: Option<Result<(u64, Option<u16>), tokio::task::JoinError>>,
) -> anyhow::Result<()> {
    let Some(ended) = ended else { return Ok(()) };
    let (seed, status) = ended?;
    if let Some(status) = status {
        // 501 names a transfer encoding that nobody knows, and 505 a version of HTTP: both blame the caller.
        ensure!(
            status < 500 || matches!(status, 501 | 505),
            "attack {seed} got {status}: {}",
            String::from_utf8_lossy(&attack(seed).parts.concat())
        );
        statuses[usize::from(status / 100).min(5)] += 1;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_requests_get_errors_and_do_no_harm() -> anyhow::Result<()> {
    let attacks = number_of(ATTACKS_VARIABLE, ATTACKS)?;
    let dir = tempfile::tempdir()?;
    let (mut program, url) = Program::up(dir.path(), &[], &SMALL_CACHES).await?;
    let addr: SocketAddr = url.trim_start_matches("http://").parse()?;
    let client = Client::new(&url, "refrain-dev");
    let chat = Chat::new("What is the weather in Oslo?").max_tokens(8);
    let expected = client.chat(&chat).await?.text;
    rounds(addr, 0..WARM_UP as u64).await?;
    let before = client.scrape().await?.resident_bytes()?;
    let first = WARM_UP as u64;
    let statuses = rounds(addr, first..first + attacks as u64).await?;
    // Many attacks are refused, and some change nothing that matters.
    ensure!(
        statuses[4] > attacks / 4 && statuses[2] > 0,
        "answers by hundreds: {statuses:?}"
    );
    wait_until("no attack is in flight", async || {
        let scrape = client.scrape().await.ok()?;
        (scrape.sum("refrain_gateway_requests_in_flight", &[]) == 0.0).then_some(())
    })
    .await;
    let grown = client.scrape().await?.resident_bytes()? - before;
    println!("answers by hundreds: {statuses:?}; {grown} bytes more in memory");
    ensure!(
        grown < GROWTH_BYTES_MAX,
        "{attacks} attacks left {grown} bytes more in memory"
    );
    ensure!(client.chat(&chat).await?.text == expected);
    ensure!(program.status().is_none(), "the program has ended");
    let output = program.output();
    ensure!(!output.contains("panicked"), "{output}");
    Ok(())
}
