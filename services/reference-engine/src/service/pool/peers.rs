//! Asks other engines for blocks. Whatever goes wrong costs time, which is bounded, and the session reads its text.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use parking_lot::Mutex;
use refrain_service_kit::http::MeshClient;
use tokio::net::lookup_host;
use tokio::time::timeout;

use super::wire::{BlocksAnswer, BlocksRequest, PATH, decode_answer};
use crate::config::{PEERS_MAX, PeerName};
use crate::pool::{BlockId, BlockSource, KvPool};

/// How long an engine is not asked after a call of it failed.
const PAUSE: Duration = Duration::from_secs(5);

/// How long the addresses of a name are used before it is looked up again.
const LOOK_UP_INTERVAL: Duration = Duration::from_secs(10);

/// Longest time of a look-up. A session waits for it.
const LOOK_UP_TIMEOUT: Duration = Duration::from_millis(250);

/// The other engines.
pub(super) struct Peers {
    /// Those with a URL of their own.
    fixed: Vec<Arc<Peer>>,
    named: Vec<Named>,
}

/// The engines at the addresses of a name.
struct Named {
    name: PeerName,
    client: MeshClient,
    found: tokio::sync::Mutex<Found>,
}

#[derive(Default)]
struct Found {
    /// The name is looked up again at this time.
    until: Option<Instant>,
    peers: BTreeMap<SocketAddr, Arc<Peer>>,
}

struct Peer {
    client: MeshClient,
    /// It is not asked before this time.
    paused_until: Mutex<Option<Instant>>,
}

impl Peers {
    pub(super) fn new(clients: Vec<MeshClient>) -> Self {
        let mut peers = Peers {
            fixed: Vec::new(),
            named: Vec::new(),
        };
        for client in clients {
            match PeerName::parse(client.base_url()) {
                None => peers.fixed.push(Arc::new(Peer::new(client))),
                Some(name) => peers.named.push(Named {
                    name,
                    client,
                    found: tokio::sync::Mutex::default(),
                }),
            }
        }
        peers
    }

    /// The engines that can be asked now.
    async fn able(&self, now: Instant) -> Vec<Arc<Peer>> {
        let mut all = self.fixed.clone();
        for named in &self.named {
            all.extend(named.peers(now).await);
        }
        all.retain(|peer| peer.is_able(now));
        all.truncate(PEERS_MAX);
        all
    }

    /// Fetches blocks into the pool's memory, in order, until `deadline`. The engine that has most of them is asked.
    pub(super) async fn fetch(&self, pool: &KvPool, ids: &[BlockId], deadline: Instant) {
        let now = Instant::now();
        let since = pool.forgettings();
        let able = self.able(now).await;
        let best = match able.as_slice() {
            [] => return,
            [only] => only,
            several => {
                let counts = several.iter().map(|peer| peer.ask(pool, ids, 0, deadline));
                let counts = join_all(counts).await;
                let held = counts
                    .iter()
                    .map(|answer| answer.as_ref().map_or(0, |it| it.held));
                match several.iter().zip(held).max_by_key(|(_, held)| *held) {
                    Some((peer, held)) if held > 0 => peer,
                    _ => return,
                }
            }
        };
        let mut left = ids;
        while !left.is_empty() {
            let Some(answer) = best.ask(pool, left, left.len(), deadline).await else {
                return;
            };
            let count = take(pool, left, &answer, since);
            // It has no more of them, or sent something else.
            if count == 0 {
                return;
            }
            left = &left[count..];
        }
    }
}

/// Puts the blocks of an answer into the memory, as far as they are the ones that were asked for. Returns their
/// number.
fn take(pool: &KvPool, ids: &[BlockId], answer: &BlocksAnswer, since: u64) -> usize {
    let pairs = ids.iter().zip(&answer.blocks);
    let right: Vec<_> = pairs.take_while(|(id, block)| **id == block.id).collect();
    let wrong = answer.blocks.len() - right.len() + usize::from(answer.is_damaged);
    pool.counts().damaged.add(wrong as u64);
    pool.counts().fetched.add(right.len() as u64);
    for (_, block) in &right {
        pool.insert((*block).clone(), BlockSource::Peer, Some(since));
    }
    right.len()
}

impl Named {
    /// The engines at the addresses that the name had lately. A look-up that fails leaves those of the last one.
    async fn peers(&self, now: Instant) -> Vec<Arc<Peer>> {
        let mut found = self.found.lock().await;
        if found.until.is_none_or(|until| until <= now) {
            found.until = Some(now + LOOK_UP_INTERVAL);
            let PeerName { scheme, host, port } = &self.name;
            let look_up = timeout(LOOK_UP_TIMEOUT, lookup_host((host.as_str(), *port)));
            let late = |_| Err(std::io::ErrorKind::TimedOut.into());
            match look_up.await.unwrap_or_else(late) {
                Ok(addresses) => {
                    let known = std::mem::take(&mut found.peers);
                    let peer = |address: SocketAddr| {
                        let new = || Peer::new(self.client.at(&format!("{scheme}://{address}")));
                        let peer = known.get(&address).cloned();
                        (address, peer.unwrap_or_else(|| Arc::new(new())))
                    };
                    found.peers = addresses.take(PEERS_MAX).map(peer).collect();
                }
                Err(error) => {
                    tracing::warn!(host, %error, "the name of other engines is not found");
                }
            }
        }
        found.peers.values().cloned().collect()
    }
}

impl Peer {
    fn new(client: MeshClient) -> Self {
        Peer {
            client,
            paused_until: Mutex::default(),
        }
    }

    fn is_able(&self, now: Instant) -> bool {
        self.paused_until.lock().is_none_or(|until| until <= now)
    }

    /// Asks for blocks. `None`: the call failed, and the engine is left alone for a while.
    async fn ask(
        &self,
        pool: &KvPool,
        ids: &[BlockId],
        blocks_max: usize,
        deadline: Instant,
    ) -> Option<BlocksAnswer> {
        let request = BlocksRequest::new(ids.iter().map(BlockId::key), blocks_max);
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        let body = serde_json::to_vec(&request).ok()?;
        let sent = self.client.post_bytes(PATH, "application/json", body, left);
        let answer = match sent.await {
            Ok(bytes) => decode_answer(&bytes, pool.block_floats()),
            Err(error) => {
                tracing::debug!(%error, "another engine was asked for KV blocks in vain");
                None
            }
        };
        if answer.is_none() {
            pool.counts().failed_fetches.add(1);
            *self.paused_until.lock() = Some(Instant::now() + PAUSE);
        }
        answer
    }
}
