//! Clients of two gateways. Each knows what it has to be answered, and that a request to a gateway that lives on is
//! answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use e2e::{Chat, Client};
use fastrand::Rng;
use tokio::task::JoinSet;

use crate::mesh::{Lives, Mesh};
use crate::network::GATEWAYS;

/// Clients at work.
const CLIENTS: usize = 4;

/// Different requests. Each is made again and again, so workers have drafts.
const CHATS: usize = 6;

const TOKENS: u32 = 60;

/// The longest pause of a client between two requests, in milliseconds.
const PAUSE_MS: u64 = 300;

/// The requests with their answers, as they are without drafts and without faults.
#[derive(Clone)]
pub(crate) struct Chats(Arc<Vec<(Chat, String)>>);

/// The counts of all clients.
#[derive(Clone, Default)]
pub(crate) struct Tally {
    answered: Arc<AtomicU64>,
    cut_off: Arc<AtomicU64>,
}

impl Tally {
    /// Requests that were answered rightly so far.
    pub(crate) fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Requests whose gateway was killed before it had answered them.
    pub(crate) fn cut_off(&self) -> u64 {
        self.cut_off.load(Ordering::Relaxed)
    }
}

impl Chats {
    /// Asks for everything once without drafts. Nothing may be broken meanwhile.
    pub(crate) async fn ask(client: &Client) -> anyhow::Result<Chats> {
        let mut chats = Vec::new();
        for number in 0..CHATS {
            let chat = Chat::random(number).max_tokens(TOKENS);
            let answer = client.chat(&chat.clone().speculation("off")).await?;
            chats.push((chat, answer.text));
        }
        Ok(Chats(Arc::new(chats)))
    }

    /// Asks for everything once with drafts. Returns the accepted draft tokens of the tenant's documents.
    pub(crate) async fn ask_with_drafts(&self, client: &Client) -> anyhow::Result<u64> {
        let mut accepted = 0;
        for (chat, expected) in self.0.iter() {
            let answer = client.chat(&chat.clone().speculation("suffix")).await?;
            ensure!(answer.text == *expected, "drafts have changed an answer");
            accepted += answer.accepted();
        }
        Ok(accepted)
    }

    /// Number of requests.
    pub(crate) fn count(&self) -> u64 {
        self.0.len() as u64
    }

    /// Number of output tokens of all answers.
    pub(crate) fn tokens(&self) -> u64 {
        u64::from(TOKENS) * self.0.len() as u64
    }
}

/// The clients of a round.
pub(crate) struct Clients {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<anyhow::Result<()>>,
}

impl Clients {
    pub(crate) fn start(mesh: &Mesh, chats: &Chats, tally: &Tally, seed: u64) -> Clients {
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for number in 0..CLIENTS {
            let mut caller = Caller {
                gateways: mesh.clients().to_vec(),
                lives: mesh.lives.clone(),
                chats: chats.clone(),
                tally: tally.clone(),
                first: number % GATEWAYS,
                rng: Rng::with_seed(seed.wrapping_mul(37).wrapping_add(number as u64)),
            };
            let stop = stop.clone();
            tasks.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    caller.ask().await?;
                    let pause = caller.rng.u64(..PAUSE_MS);
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                }
                Ok(())
            });
        }
        Clients { stop, tasks }
    }

    /// Stops the clients once they have their answers.
    ///
    /// # Errors
    /// An answer was wrong, or a request was lost by a gateway that lived on.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended??;
        }
        Ok(())
    }

    /// # Errors
    /// As of [`Self::stop`], for the clients that have given up so far.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        while let Some(ended) = self.tasks.try_join_next() {
            ended??;
        }
        Ok(())
    }
}

/// One client. It prefers one of the gateways.
struct Caller {
    gateways: Vec<Client>,
    lives: Lives,
    chats: Chats,
    tally: Tally,
    first: usize,
    rng: Rng,
}

impl Caller {
    /// Makes a request, at another gateway if the first one goes.
    async fn ask(&mut self) -> anyhow::Result<()> {
        let (chat, expected) = &self.chats.0[self.rng.usize(..self.chats.0.len())];
        let is_streamed = self.rng.bool();
        for attempt in self.first.. {
            let gateway = attempt % GATEWAYS;
            let Some(life) = self.lives.of(gateway) else {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            };
            let client = &self.gateways[gateway];
            let answered = match is_streamed {
                true => stream(client, chat).await,
                false => client.chat(chat).await.map(|answer| answer.text),
            };
            match answered {
                Ok(text) => {
                    ensure!(
                        text == *expected,
                        "gateway {gateway} answered {chat:?} with\n{text}\ninstead of\n{expected}"
                    );
                    self.tally.answered.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) => {
                    // A kill is noted before it happens, so no request that it cuts off is taken for a lost one.
                    if self.lives.of(gateway) == Some(life) {
                        return Err(error).with_context(|| {
                            format!("gateway {gateway} lived on and lost the request {chat:?}")
                        });
                    }
                    self.tally.cut_off.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

async fn stream(client: &Client, chat: &Chat) -> anyhow::Result<String> {
    client.stream(chat).await?.read_to_done().await
}
