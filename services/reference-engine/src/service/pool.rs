//! The threads and calls around the pool of KV blocks: one thread writes to the file, one loads, and other engines
//! ask.

mod metrics;
mod peers;
mod serve;
mod wire;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread::JoinHandle;

use futures_util::FutureExt as _;
use refrain_service_kit::actors::start_thread;
use refrain_service_kit::http::MeshClient;

use crate::pool::{KvPool, LoadJob, PoolQueues};

pub(super) use metrics::PoolMetrics;
pub(super) use serve::BlockServer;
pub(super) use wire::{BlocksRequest, encode_answer};

use peers::Peers;

/// The threads of a pool.
pub(super) struct PoolThreads {
    pool: Arc<KvPool>,
    threads: Vec<JoinHandle<()>>,
}

impl PoolThreads {
    /// Starts the threads. `peers` are clients of the other engines.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn start(
        pool: &Arc<KvPool>,
        queues: PoolQueues,
        peers: Vec<MeshClient>,
    ) -> anyhow::Result<Self> {
        let PoolQueues { writes, loads } = queues;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let writer = {
            let pool = pool.clone();
            start_thread("engine-kv-file", move || {
                writes.iter().for_each(|block| pool.write(&block));
            })?
        };
        let loader = {
            let pool = pool.clone();
            let peers = Arc::new(Peers::new(peers));
            let mut loads = loads;
            start_thread("engine-kv-load", move || {
                runtime.block_on(load_all(&pool, &peers, &mut loads));
            })?
        };
        Ok(PoolThreads {
            pool: pool.clone(),
            threads: vec![writer, loader],
        })
    }

    /// Writes what waits, and ends the threads.
    pub(super) fn end(&mut self) {
        self.pool.end();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Carries out loads side by side until the queue ends.
async fn load_all(
    pool: &Arc<KvPool>,
    peers: &Arc<Peers>,
    jobs: &mut tokio::sync::mpsc::Receiver<LoadJob>,
) {
    while let Some(job) = jobs.recv().await {
        let (pool, peers) = (pool.clone(), peers.clone());
        // Its number is limited by the table of loads. Those that still run at the end are dropped.
        tokio::spawn(async move {
            // Whoever waits for the blocks is told that there are no more, also after a panic.
            let loaded = AssertUnwindSafe(load(&pool, &peers, &job)).catch_unwind();
            if loaded.await.is_err() {
                tracing::error!("a load of blocks panicked");
            }
            pool.load_ended(&job);
        });
    }
}

/// Loads blocks from the file, and those that it lacks from other engines.
async fn load(pool: &KvPool, peers: &Peers, job: &LoadJob) {
    let in_memory = pool.load_from_file(&job.ids);
    let missing = &job.ids[in_memory..];
    let missing = &missing[..pool.fetched_of(missing.len())];
    if job.asks_peers && !missing.is_empty() {
        peers.fetch(pool, missing, job.deadline).await;
    }
}
