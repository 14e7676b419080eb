//! The blocks in a file: slots of one size, each with a checksummed block.
//!
//! The file has no table of contents. The index is made from the heads of the slots when the file is opened. So a
//! crash or a damage costs the blocks that it hits, and no write has to be ordered or synced.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::Context as _;
use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::TenantId;

use super::block::{Damage, HEAD_BYTES, PooledBlock, decode, decode_head, encode, encoded_len};
use super::chain::{BlockKey, is_of_tenant};

/// Slots begin at multiples of this number of bytes, so that a write touches whole pages.
const PAGE_BYTES: usize = 4096;

/// A slot with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FullSlot {
    slot: u32,
    tenant: TenantId,
}

/// Which block is in which slot.
struct FileIndex {
    /// The slot of each block, in order of last use.
    slots: LruCache<BlockKey, FullSlot>,
    /// Slots without a block below `end`.
    free: Vec<u32>,
    /// Number of slots that the file has had.
    end: u32,
    slots_max: u32,
    /// Blocks that wait to be written, with their tenants.
    waiting: HashMap<BlockKey, TenantId>,
    /// The number of the next write.
    order: u64,
    /// How often the file was emptied.
    clearings: u64,
}

impl FileIndex {
    /// Takes a slot for another block. Returns whether a block lost its place.
    fn claim(&mut self) -> Option<(u32, bool)> {
        if let Some(slot) = self.free.pop() {
            return Some((slot, false));
        }
        if self.end < self.slots_max {
            self.end += 1;
            return Some((self.end - 1, false));
        }
        self.slots.pop_lru().map(|(_, full)| (full.slot, true))
    }
}

/// A file of blocks, which one process uses at a time. One thread writes, and any may read.
pub(super) struct BlockFile {
    file: File,
    floats: usize,
    slot_bytes: usize,
    /// The turn of those who write. It is taken before the index.
    turn: Mutex<()>,
    index: Mutex<FileIndex>,
}

impl BlockFile {
    /// Opens or creates the file, for blocks of `floats` floats. Whatever else is in the file is overwritten in time.
    ///
    /// # Errors
    /// The file cannot be opened or read, another process uses it, or `bytes_max` has no room for a block.
    pub(super) fn open(path: &Path, bytes_max: u64, floats: usize) -> anyhow::Result<Self> {
        let slot_bytes = encoded_len(floats).next_multiple_of(PAGE_BYTES);
        let slots_max = u32::try_from(bytes_max / slot_bytes as u64).unwrap_or(u32::MAX);
        anyhow::ensure!(
            slots_max > 0,
            "engine.kv_pool.file_bytes_max: a block of this model takes {slot_bytes} bytes, which must fit"
        );
        let mut options = OpenOptions::new();
        // It has texts of tenants in it, as tokens.
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600);
        let file = options.open(path)?;
        file.try_lock()
            .context("another process uses it; give each engine a file of its own")?;
        let bytes = file.metadata()?.len();
        let most = u64::from(slots_max) * slot_bytes as u64;
        if bytes > most {
            file.set_len(most)?;
        }
        let slots = bytes.min(most).div_ceil(slot_bytes as u64);
        let mut index = FileIndex {
            slots: LruCache::unbounded(),
            free: Vec::new(),
            end: u32::try_from(slots)?,
            slots_max,
            waiting: HashMap::new(),
            order: 0,
            clearings: 0,
        };
        scan(&file, slot_bytes, floats, &mut index);
        tracing::info!(path = %path.display(), blocks = index.slots.len(), "the file of the KV pool is open");
        Ok(BlockFile {
            file,
            floats,
            slot_bytes,
            turn: Mutex::default(),
            index: Mutex::new(index),
        })
    }

    /// Returns the number of blocks.
    pub(super) fn len(&self) -> usize {
        self.index.lock().slots.len()
    }

    /// Returns the size of the file in bytes.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.index.lock().end) * self.slot_bytes as u64
    }

    /// Returns the number of blocks that wait to be written.
    pub(super) fn waiting(&self) -> usize {
        self.index.lock().waiting.len()
    }

    pub(super) fn has(&self, key: BlockKey) -> bool {
        self.index.lock().slots.contains(&key)
    }

    /// Marks a block as used. Returns whether the caller has to hand it in for writing, because it is neither in the
    /// file nor waits.
    pub(super) fn announce(&self, key: BlockKey, tenant: TenantId) -> bool {
        let mut index = self.index.lock();
        index.slots.get(&key).is_none() && index.waiting.insert(key, tenant).is_none()
    }

    /// Takes back an announcement.
    pub(super) fn withdraw(&self, key: BlockKey) {
        self.index.lock().waiting.remove(&key);
    }

    /// Writes a block that was announced, and returns whether another one lost its place. A block whose tenant was
    /// forgotten meanwhile is not written.
    ///
    /// # Errors
    /// The file cannot be written. Its other blocks stay.
    pub(super) fn write(&self, block: &PooledBlock) -> io::Result<bool> {
        let key = block.id.key();
        let _turn = self.turn.lock();
        let (slot, order, has_evicted, clearings) = {
            let mut index = self.index.lock();
            if index.waiting.remove(&key).is_none() {
                return Ok(false);
            }
            let Some((slot, has_evicted)) = index.claim() else {
                return Ok(false);
            };
            index.order += 1;
            (slot, index.order, has_evicted, index.clearings)
        };
        let mut bytes = Vec::new();
        encode(block, order, &mut bytes);
        // Nothing of an earlier block may be left after it.
        bytes.resize(self.slot_bytes, 0);
        let written = self.file.write_all_at(&bytes, self.place(slot));
        let mut index = self.index.lock();
        if index.clearings != clearings {
            return Ok(false);
        }
        if let Err(error) = written {
            index.free.push(slot);
            return Err(error);
        }
        let tenant = block.tenant;
        if let Some(older) = index.slots.put(key, FullSlot { slot, tenant }) {
            index.free.push(older.slot);
        }
        Ok(has_evicted)
    }

    /// Reads a block. `None`: the file does not have it.
    ///
    /// # Errors
    /// The file has something else there, which is not the block. It is dropped.
    pub(super) fn read(&self, key: BlockKey) -> Result<Option<PooledBlock>, Damage> {
        let Some(full) = self.index.lock().slots.get(&key).copied() else {
            return Ok(None);
        };
        let mut bytes = vec![0; encoded_len(self.floats)];
        let read = self.file.read_exact_at(&mut bytes, self.place(full.slot));
        let block = match read {
            Ok(()) => decode(&bytes, self.floats),
            Err(_) => Err(Damage::Short),
        };
        let damage = match block {
            Ok(block) if block.id.key() == key => return Ok(Some(block)),
            Ok(_) => Damage::Head,
            Err(damage) => damage,
        };
        let mut index = self.index.lock();
        // If the slot was given to another block, or the file was emptied, nothing is damaged.
        if index.slots.peek(&key) != Some(&full) {
            return Ok(None);
        }
        index.slots.pop(&key);
        index.free.push(full.slot);
        Err(damage)
    }

    /// Forgets all blocks, and empties the file.
    ///
    /// # Errors
    /// The file cannot be cut. Its blocks are found again after a restart.
    pub(super) fn clear(&self) -> io::Result<()> {
        let mut index = self.index.lock();
        index.slots.clear();
        index.free.clear();
        index.end = 0;
        index.clearings += 1;
        self.file.set_len(0)
    }

    /// Forgets the blocks of a tenant, and overwrites them and all slots that are not in use. Returns the number of
    /// blocks that it had in the file.
    ///
    /// # Errors
    /// A slot cannot be overwritten. Its block is found again after a restart, unless this is repeated.
    pub(super) fn forget(&self, tenant: TenantId) -> io::Result<usize> {
        let _turn = self.turn.lock();
        let (slots, free, clearings) = {
            let mut index = self.index.lock();
            index.waiting.retain(|_, of| !is_of_tenant(*of, tenant));
            let full = index.slots.iter();
            let of_tenant = full.filter(|(_, full)| is_of_tenant(full.tenant, tenant));
            let keys: Vec<BlockKey> = of_tenant.map(|(key, _)| *key).collect();
            let popped = keys.iter().filter_map(|key| index.slots.pop(key));
            let slots: Vec<u32> = popped.map(|full| full.slot).collect();
            (slots, index.free.clone(), index.clearings)
        };
        let zeros = vec![0; self.slot_bytes];
        // A slot without a block may have one of another model, or one that was damaged. None is taken meanwhile.
        let mut all = slots.iter().chain(&free);
        let wiped = all.try_for_each(|slot| self.file.write_all_at(&zeros, self.place(*slot)));
        let wiped = wiped.and_then(|()| self.file.sync_data());
        let mut index = self.index.lock();
        if index.clearings == clearings {
            index.free.extend(&slots);
        }
        wiped.map(|()| slots.len())
    }

    fn place(&self, slot: u32) -> u64 {
        u64::from(slot) * self.slot_bytes as u64
    }
}

/// Enters the blocks of a file by their heads, in the order in which they were written. Their content is checked when
/// it is read.
fn scan(file: &File, slot_bytes: usize, floats: usize, index: &mut FileIndex) {
    let mut found = Vec::new();
    let mut bytes = [0; HEAD_BYTES];
    for slot in 0..index.end {
        let read = file.read_exact_at(&mut bytes, u64::from(slot) * slot_bytes as u64);
        match read.map(|()| decode_head(&bytes, floats)) {
            Ok(Ok(head)) => {
                let tenant = head.tenant;
                found.push((head.order, head.id.key(), FullSlot { slot, tenant }));
            }
            _ => index.free.push(slot),
        }
    }
    found.sort_unstable_by_key(|(order, _, _)| *order);
    for (order, key, full) in found {
        index.order = order;
        if let Some(older) = index.slots.put(key, full) {
            index.free.push(older.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::network::BLOCK_TOKENS;
    use crate::pool::chain::BlockId;

    const FLOATS: usize = 64;
    const SLOT_BYTES: u64 = PAGE_BYTES as u64;

    fn block(number: u8) -> PooledBlock {
        PooledBlock {
            id: BlockId([number; 32]),
            tenant: tenant(number),
            tokens: [number.into(); BLOCK_TOKENS],
            floats: Arc::new(vec![f32::from(number); FLOATS]),
        }
    }

    /// Two tenants take turns.
    fn tenant(number: u8) -> TenantId {
        TenantId((number % 2 + 1).into())
    }

    fn announce(file: &BlockFile, number: u8) -> bool {
        file.announce(key(number), tenant(number))
    }

    fn key(number: u8) -> BlockKey {
        block(number).id.key()
    }

    /// A file with the blocks 0 to `count - 1`.
    fn filled(path: &Path, count: u8, bytes_max: u64) -> BlockFile {
        let file = BlockFile::open(path, bytes_max, FLOATS).unwrap();
        for number in 0..count {
            assert!(announce(&file, number));
            file.write(&block(number)).unwrap();
        }
        file
    }

    fn readable(file: &BlockFile, count: u8) -> Vec<u8> {
        let is_there = |number: &u8| {
            let read = file.read(key(*number)).ok().flatten();
            read.is_some_and(|read| read.floats == block(*number).floats)
        };
        (0..count).filter(is_there).collect()
    }

    #[test]
    fn blocks_outlive_the_process_and_the_oldest_make_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks.kvpool");
        let file = filled(&path, 6, 4 * SLOT_BYTES);
        assert_eq!(readable(&file, 6), [2, 3, 4, 5]);
        assert_eq!(
            (file.len(), file.bytes(), file.waiting()),
            (4, 4 * SLOT_BYTES, 0)
        );
        assert!(BlockFile::open(&path, SLOT_BYTES, FLOATS).is_err());
        drop(file);
        let file = BlockFile::open(&path, 4 * SLOT_BYTES, FLOATS).unwrap();
        assert!(!announce(&file, 2) && announce(&file, 9) && !announce(&file, 9));
        assert!(file.write(&block(9)).unwrap());
        // 2 was used since, so 3 was the oldest.
        assert_eq!(readable(&file, 10), [2, 4, 5, 9]);
        drop(file);
        let file = BlockFile::open(&path, 2 * SLOT_BYTES, FLOATS).unwrap();
        assert_eq!((file.len(), file.bytes()), (2, 2 * SLOT_BYTES));
        assert!(BlockFile::open(&folder.path().join("other"), SLOT_BYTES - 1, FLOATS).is_err());
    }

    #[test]
    fn any_damaged_byte_costs_its_own_block_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks.kvpool");
        drop(filled(&path, 3, 3 * SLOT_BYTES));
        let whole = std::fs::read(&path).unwrap();
        let block_bytes = encoded_len(FLOATS);
        for place in (0..block_bytes).map(|at| SLOT_BYTES as usize + at) {
            let mut changed = whole.clone();
            changed[place] ^= 0x10;
            std::fs::write(&path, &changed).unwrap();
            let file = BlockFile::open(&path, 3 * SLOT_BYTES, FLOATS).unwrap();
            assert_eq!(readable(&file, 3), [0, 2], "byte {place}");
            // Its slot is used again.
            assert!(announce(&file, 1));
            assert!(!file.write(&block(1)).unwrap());
            assert_eq!(readable(&file, 3), [0, 1, 2]);
        }
        for cut in (0..whole.len()).step_by(97) {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let file = BlockFile::open(&path, 3 * SLOT_BYTES, FLOATS).unwrap();
            let left = (0..3u8)
                .filter(|number| usize::from(*number) * SLOT_BYTES as usize + block_bytes <= cut);
            assert_eq!(readable(&file, 3), left.collect::<Vec<_>>(), "cut at {cut}");
        }
    }

    #[test]
    fn damage_while_the_file_is_open_is_found_when_the_block_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks.kvpool");
        let file = filled(&path, 3, 3 * SLOT_BYTES);
        let other = OpenOptions::new().write(true).open(&path).unwrap();
        other
            .write_all_at(&[7], SLOT_BYTES + HEAD_BYTES as u64)
            .unwrap();
        assert_eq!(file.read(key(1)).unwrap_err(), Damage::Floats);
        assert!(file.read(key(1)).unwrap().is_none() && !file.has(key(1)));
        other.set_len(SLOT_BYTES + 10).unwrap();
        assert_eq!(file.read(key(2)).unwrap_err(), Damage::Short);
        assert_eq!(readable(&file, 3), [0]);
    }

    #[test]
    fn an_emptied_file_has_no_blocks_and_takes_new_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks.kvpool");
        let file = filled(&path, 3, 3 * SLOT_BYTES);
        file.clear().unwrap();
        assert_eq!(
            (file.len(), file.bytes(), readable(&file, 3)),
            (0, 0, Vec::new())
        );
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        assert!(announce(&file, 1));
        file.write(&block(1)).unwrap();
        assert_eq!(readable(&file, 3), [1]);
    }

    #[test]
    fn a_forgotten_tenant_has_no_block_in_the_file_and_others_keep_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks.kvpool");
        // Slots that are free now have the bytes of an earlier file.
        std::fs::write(&path, vec![0x5a; 6 * SLOT_BYTES as usize]).unwrap();
        let file = filled(&path, 4, 8 * SLOT_BYTES);
        // One waits to be written, and another tenant's does as well.
        assert!(announce(&file, 4) && announce(&file, 5));
        assert_eq!(file.forget(tenant(0)).unwrap(), 2);
        for number in [4, 5] {
            file.write(&block(number)).unwrap();
        }
        assert_eq!((readable(&file, 6), file.waiting()), (vec![1, 3, 5], 0));
        let bytes = std::fs::read(&path).unwrap();
        let tokens = |number: u8| [u32::from(number).to_le_bytes(); BLOCK_TOKENS].concat();
        let has = |number: u8| {
            bytes
                .windows(4 * BLOCK_TOKENS)
                .any(|it| it == tokens(number))
        };
        // The slots that are empty now have zeros, which are the tokens of block 0 as well.
        assert_eq!(
            (1..6).filter(|number| has(*number)).collect::<Vec<_>>(),
            [1, 3, 5]
        );
        assert!(!bytes.windows(8).any(|it| it == [0x5a; 8]));
        drop(file);
        let file = BlockFile::open(&path, 8 * SLOT_BYTES, FLOATS).unwrap();
        assert_eq!((file.len(), readable(&file, 6)), (3, vec![1, 3, 5]));
        assert_eq!(file.forget(tenant(0)).unwrap(), 0);
        // The slots are used again.
        assert!(announce(&file, 2) && !file.write(&block(2)).unwrap());
        assert_eq!(
            (readable(&file, 6), file.bytes()),
            (vec![1, 2, 3, 5], 6 * SLOT_BYTES)
        );
    }

    #[test]
    fn a_file_of_another_model_or_of_garbage_is_used_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks.kvpool");
        drop(filled(&path, 3, 3 * SLOT_BYTES));
        let file = BlockFile::open(&path, 3 * SLOT_BYTES, FLOATS + 8).unwrap();
        assert_eq!(file.len(), 0);
        drop(file);
        std::fs::write(&path, vec![0x5a; 10_000]).unwrap();
        let file = filled(&path, 3, 3 * SLOT_BYTES);
        assert_eq!(readable(&file, 3), [0, 1, 2]);
    }
}
