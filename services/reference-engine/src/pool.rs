//! A pool of KV blocks beside the sessions: in memory, in a file, and at other engines.
//!
//! A *block* is the keys and values of 32 tokens, the size of a block of a KV cache. Its name is a chain of hashes
//! over all tokens up to its end, the namespace, the weights and their version. So whoever asks by that name gets
//! what it would compute itself.
//!
//! Blocks in memory are shared with the caches of sessions, so neither keeping nor taking one copies anything. A
//! thread writes them to the file. A session that opens waits, for a bounded time, while another thread loads its
//! blocks from the file or from other engines. This folder has no threads of its own, and time is a parameter.

mod block;
mod chain;
mod counts;
mod file;
mod load_table;
mod memory;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use parking_lot::Mutex;
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::{TenantId, TokenId};
use tokio::sync::mpsc;

use crate::config::KvPoolConfig;
use crate::network::{BLOCK_TOKENS, BlockFloats, KvCache, KvShape};

pub(crate) use block::{PooledBlock, decode, encode, encoded_len};
pub(crate) use chain::{BlockId, BlockKey, PooledText, WeightsIdentity, is_of_tenant};
pub(crate) use counts::{PoolCounts, PoolSizes};
pub(crate) use memory::BlockSource;

use file::BlockFile;
use load_table::{LoadTable, Verdict};
use memory::MemoryTier;

/// Maximum number of bytes of blocks that wait to be written to the file.
const WRITES_BYTES_MAX: usize = 64 << 20;

/// Maximum number of loads at once, and most that are remembered.
const LOADS_MAX: usize = 64;

/// The blocks that a session waits for.
#[derive(Debug)]
pub(crate) struct LoadJob {
    /// The blocks in order of the text. None of them was in memory.
    pub(crate) ids: Vec<BlockId>,
    /// Whether to ask other engines for what the file lacks.
    pub(crate) asks_peers: bool,
    /// The time at which nobody waits for it any longer.
    pub(crate) deadline: Instant,
}

/// The receivers of the pool's two queues, for the threads that work on them.
pub(crate) struct PoolQueues {
    pub(crate) writes: std::sync::mpsc::Receiver<PooledBlock>,
    pub(crate) loads: mpsc::Receiver<LoadJob>,
}

struct PoolSenders {
    writes: std::sync::mpsc::SyncSender<PooledBlock>,
    loads: mpsc::Sender<LoadJob>,
}

/// Blocks of KV that outlive their sessions.
pub(crate) struct KvPool {
    /// Floats of a block.
    floats: usize,
    memory: Mutex<MemoryTier>,
    file: Option<BlockFile>,
    loads: Mutex<LoadTable>,
    /// `None` after [`KvPool::end`].
    senders: Mutex<Option<PoolSenders>>,
    has_peers: bool,
    wait: Duration,
    load_blocks_max: usize,
    fetch_blocks_min: usize,
    fetch_blocks_max: usize,
    counts: PoolCounts,
}

impl std::fmt::Debug for KvPool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_tuple("KvPool")
            .field(&self.sizes())
            .finish()
    }
}

impl KvPool {
    /// Opens the pool, if the configuration has one.
    ///
    /// # Errors
    /// The memory has no room for a single block, or the file cannot be opened.
    pub(crate) fn open(
        config: &KvPoolConfig,
        shape: KvShape,
    ) -> anyhow::Result<Option<(Self, PoolQueues)>> {
        if config.memory_bytes_max == 0 {
            return Ok(None);
        }
        let floats = shape.block_len();
        let encoded = encoded_len(floats);
        let blocks_max = usize::try_from(config.memory_bytes_max / (floats as u64 * 4))?;
        anyhow::ensure!(
            blocks_max > 0,
            "engine.kv_pool.memory_bytes_max: a block of this model has {} bytes, which must fit",
            floats * 4
        );
        let open_file = |path: &std::path::PathBuf| open_file(path, config.file_bytes_max, floats);
        let file = config.file.as_ref().map(open_file).transpose()?;
        let (writes, written) = std::sync::mpsc::sync_channel((WRITES_BYTES_MAX / encoded).max(1));
        let (loads, loaded) = mpsc::channel(LOADS_MAX);
        let fetch_blocks_max = usize::try_from(config.fetch_bytes_max)? / encoded;
        let pool = KvPool {
            floats,
            memory: Mutex::new(MemoryTier::new(blocks_max)),
            file,
            loads: Mutex::new(LoadTable::new(LOADS_MAX)),
            senders: Mutex::new(Some(PoolSenders { writes, loads })),
            has_peers: !config.peers.is_empty(),
            wait: Duration::from_millis(config.wait_ms),
            fetch_blocks_min: (config.fetch_tokens_min as usize)
                .div_ceil(BLOCK_TOKENS)
                .max(1),
            // A load must not push its own first blocks out of the memory.
            load_blocks_max: blocks_max,
            fetch_blocks_max,
            counts: PoolCounts::default(),
        };
        let queues = PoolQueues {
            writes: written,
            loads: loaded,
        };
        Ok(Some((pool, queues)))
    }

    /// Ends the queues. The jobs in them are still done.
    pub(crate) fn end(&self) {
        *self.senders.lock() = None;
    }

    pub(crate) fn counts(&self) -> &PoolCounts {
        &self.counts
    }

    /// Returns the number of floats of a block.
    pub(crate) fn block_floats(&self) -> usize {
        self.floats
    }

    /// Returns how much the pool holds.
    pub(crate) fn sizes(&self) -> PoolSizes {
        let block_bytes = self.floats as u64 * 4;
        let memory_blocks = self.memory.lock().len() as u64;
        let file = self.file.as_ref();
        PoolSizes {
            memory_blocks,
            memory_bytes: memory_blocks * block_bytes,
            file_blocks: file.map_or(0, BlockFile::len) as u64,
            file_bytes: file.map_or(0, BlockFile::bytes),
            writes_waiting: file.map_or(0, BlockFile::waiting) as u64,
        }
    }

    /// Keeps the full blocks of a text from place `from` on. Those that are here already count as used.
    ///
    /// The deepest blocks are the first to make room, because a block without those before it is of no use.
    pub(crate) fn keep(
        &self,
        tenant: TenantId,
        ids: &[BlockId],
        text: &[TokenId],
        kv: &KvCache,
        from: usize,
    ) {
        let full = kv.full_blocks().min(ids.len());
        for place in (from..full).rev() {
            let (id, tokens) = (ids[place], &text[place * BLOCK_TOKENS..]);
            let Some(tokens) = tokens.first_chunk::<BLOCK_TOKENS>() else {
                continue;
            };
            let block = || PooledBlock {
                id,
                tenant,
                tokens: *tokens,
                floats: kv.block_floats(place),
            };
            let is_known = self.memory.lock().touch(&id);
            if !is_known {
                self.insert(block(), BlockSource::Memory, None);
                self.counts.stored.add(1);
            }
            self.write_behind(id.key(), tenant, block);
        }
    }

    /// Puts a block into the memory, where it may push others out. A block that was read elsewhere is dropped if a
    /// tenant was forgotten after `read_since`, a value of [`KvPool::forgettings`], because it may be one of those.
    pub(crate) fn insert(&self, block: PooledBlock, source: BlockSource, read_since: Option<u64>) {
        let mut memory = self.memory.lock();
        if read_since.is_some_and(|since| since != memory.forgettings()) {
            return;
        }
        let evicted = memory.insert(block, source);
        self.counts.evicted_from_memory.add(evicted.into());
    }

    /// How often a tenant was forgotten so far.
    pub(crate) fn forgettings(&self) -> u64 {
        self.memory.lock().forgettings()
    }

    /// Remembers the hash by which schedulers know the text up to a block's end.
    pub(crate) fn name_prefix(&self, hash: PrefixHash, last: BlockKey) {
        self.memory.lock().name_prefix(hash, last);
    }

    /// Returns the named prefixes whose last block is in memory.
    pub(crate) fn prefixes(&self) -> Vec<PrefixHash> {
        self.memory.lock().prefixes()
    }

    /// Queues a block for the file, unless that has it already.
    fn write_behind(&self, key: BlockKey, tenant: TenantId, block: impl FnOnce() -> PooledBlock) {
        let Some(file) = &self.file else {
            return;
        };
        if !file.announce(key, tenant) {
            return;
        }
        let senders = self.senders.lock();
        let senders = senders.as_ref();
        if senders.is_none_or(|senders| senders.writes.try_send(block()).is_err()) {
            file.withdraw(key);
            self.counts.refused_writes.add(1);
        }
    }

    /// Writes a block to the file. The writer's thread calls this.
    pub(crate) fn write(&self, block: &PooledBlock) {
        let Some(file) = &self.file else {
            return;
        };
        match file.write(block) {
            Ok(evicted) => {
                self.counts.evicted_from_file.add(evicted.into());
            }
            Err(error) => {
                if self.counts.failed_writes.add(1) == 0 {
                    tracing::warn!(%error, "a KV block cannot be written to the file of the pool");
                }
            }
        }
    }

    /// Returns how many blocks of a text the memory has without a gap, from place `from` on.
    pub(crate) fn reach(&self, ids: &[BlockId], text: &[TokenId], from: usize) -> usize {
        let memory = self.memory.lock();
        let blocks = ids.iter().zip(text.chunks_exact(BLOCK_TOKENS)).skip(from);
        blocks
            .take_while(|(id, tokens)| memory.peek(id, tokens).is_some())
            .count()
    }

    /// Takes `count` blocks of a text from place `from` on. Fewer are returned if the memory has lost one.
    pub(crate) fn take(
        &self,
        ids: &[BlockId],
        text: &[TokenId],
        from: usize,
        count: usize,
    ) -> Vec<BlockFloats> {
        let mut memory = self.memory.lock();
        let blocks = ids.iter().zip(text.chunks_exact(BLOCK_TOKENS));
        let mut taken = Vec::with_capacity(count);
        for (id, tokens) in blocks.skip(from).take(count) {
            let Some((floats, source)) = memory.peek(id, tokens) else {
                break;
            };
            taken.push(floats);
            self.counts.hits_of(source).add(1);
        }
        for id in ids[..from + taken.len()].iter().rev() {
            memory.touch(id);
        }
        taken
    }

    /// Whether a session waits for a load of blocks that are not in memory, in order of its text. Starts the load if
    /// the file has the first of them, or if other engines may have them.
    pub(crate) fn awaits_load(&self, missing: &[BlockId], now: Instant) -> bool {
        let missing = &missing[..missing.len().min(self.load_blocks_max)];
        let (Some(first), Some(last)) = (missing.first(), missing.last()) else {
            return false;
        };
        let in_file = self.file.as_ref();
        let in_file = in_file.is_some_and(|file| file.has(first.key()));
        let asks_peers = self.has_peers && self.fetched_of(missing.len()) > 0;
        if !in_file && !asks_peers {
            return false;
        }
        let mut loads = self.loads.lock();
        match loads.ask(last.key(), now, self.wait) {
            Verdict::Wait => true,
            Verdict::GoOn => false,
            Verdict::Refused => {
                self.counts.refused_loads.add(1);
                false
            }
            Verdict::Start => {
                let job = LoadJob {
                    ids: missing.to_vec(),
                    asks_peers,
                    deadline: now + self.wait,
                };
                let senders = self.senders.lock();
                let senders = senders.as_ref();
                let is_sent = senders.is_some_and(|senders| senders.loads.try_send(job).is_ok());
                if !is_sent {
                    loads.end(last.key());
                    self.counts.refused_loads.add(1);
                }
                is_sent
            }
        }
    }

    /// Loads blocks from the file into the memory, up to the first that it lacks. Returns how many are in memory.
    pub(crate) fn load_from_file(&self, ids: &[BlockId]) -> usize {
        let since = self.forgettings();
        let load = |id: &BlockId| {
            if self.memory.lock().holds(id) {
                return true;
            }
            let block = self.read_file(id.key());
            let block = block.filter(|block| block.id == *id);
            block
                .map(|block| self.insert(block, BlockSource::File, Some(since)))
                .is_some()
        };
        ids.iter().take_while(|id| load(id)).count()
    }

    fn read_file(&self, key: BlockKey) -> Option<PooledBlock> {
        let read = self.file.as_ref()?.read(key);
        read.unwrap_or_else(|damage| {
            self.counts.damaged.add(1);
            tracing::warn!(%damage, "a block in the file of the KV pool is damaged and was dropped");
            None
        })
    }

    /// Forgets all blocks. Those that are being written or loaded may still come.
    pub(crate) fn clear(&self) {
        self.memory.lock().clear();
        if let Some(Err(error)) = self.file.as_ref().map(BlockFile::clear) {
            tracing::warn!(%error, "the file of the KV pool cannot be emptied");
        }
    }

    /// Forgets the blocks of a tenant, also those that are being loaded or wait to be written, and overwrites them in
    /// the file. Returns how many the memory and the file had.
    ///
    /// # Errors
    /// The file cannot be written. Blocks may be left in it, until this is repeated.
    pub(crate) fn forget(&self, tenant: TenantId) -> std::io::Result<(usize, usize)> {
        let in_memory = self.memory.lock().forget(tenant);
        let in_file = match &self.file {
            Some(file) => file.forget(tenant)?,
            None => 0,
        };
        Ok((in_memory, in_file))
    }

    /// Ends the wait for a load.
    pub(crate) fn load_ended(&self, job: &LoadJob) {
        if let Some(last) = job.ids.last() {
            self.loads.lock().end(last.key());
        }
    }

    /// Returns how many of so many missing blocks other engines are asked for.
    pub(crate) fn fetched_of(&self, missing: usize) -> usize {
        match missing < self.fetch_blocks_min {
            true => 0,
            false => missing.min(self.fetch_blocks_max),
        }
    }

    /// Returns how many of these blocks the pool has without a gap.
    pub(crate) fn held(&self, keys: &[BlockKey]) -> usize {
        let is_held = |key: &BlockKey| {
            self.memory.lock().get(*key).is_some()
                || self.file.as_ref().is_some_and(|file| file.has(*key))
        };
        keys.iter().take_while(|key| is_held(key)).count()
    }

    /// Returns a block for another engine, from memory or from the file.
    pub(crate) fn block(&self, key: BlockKey) -> Option<PooledBlock> {
        let held = self.memory.lock().get(key);
        held.or_else(|| self.read_file(key))
    }
}

fn open_file(path: &Path, bytes_max: u64, floats: usize) -> anyhow::Result<BlockFile> {
    BlockFile::open(path, bytes_max, floats)
        .with_context(|| format!("engine.kv_pool.file: {} cannot be used", path.display()))
}
