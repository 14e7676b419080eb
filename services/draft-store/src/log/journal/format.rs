//! The journal's file: its name, its records, and their bytes.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::log::{Batch, LogError, refused};

/// The file's name in the directory of a log.
pub(super) const FILE: &str = "journal";

/// A journal that is being made. It takes the name of the one that counts once it is whole.
pub(super) const FILE_NEW: &str = "journal.new";

pub(super) const MAGIC: [u8; 3] = *b"RfJ";

pub(super) const VERSION: u8 = 1;

pub(super) const HEADER_BYTES: usize = 24;

pub(super) const FLAG_REMOVE: u8 = 1;

pub(super) const FLAG_FIRST: u8 = 2;

pub(super) const FLAG_LAST: u8 = 4;

/// Longest key and value that a record may claim; far above what is ever written.
pub(super) const KEY_BYTES_MAX: usize = 4 << 10;

pub(super) const VALUE_BYTES_MAX: usize = 1 << 20;

/// Key of the record that names a journal, the first one in it. No other key begins with this byte.
pub(super) const NAME_KEY: [u8; 1] = [0];

/// How far a journal was applied to the index beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JournalPosition {
    /// The journal's name: a random number.
    pub(crate) journal: u64,
    /// Bytes up to the end of the last batch that was applied.
    pub(crate) end: u64,
}

impl JournalPosition {
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.journal.to_le_bytes());
        bytes[8..].copy_from_slice(&self.end.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (journal, end) = bytes.split_at_checked(8)?;
        Some(JournalPosition {
            journal: u64::from_le_bytes(journal.try_into().ok()?),
            end: u64::from_le_bytes(end.try_into().ok()?),
        })
    }
}

/// Where the journal of a log lies.
pub(crate) fn path_in(log: &Path) -> PathBuf {
    log.join(FILE)
}

/// Whether a log has a journal. A disk that does not say so is no answer.
pub(crate) fn is_in(log: &Path) -> Result<bool, LogError> {
    let path = path_in(log);
    path.try_exists()
        .map_err(|error| refused("look for", &path, &error))
}

/// Removes a journal that was begun and not installed.
pub(crate) fn remove_unfinished(log: &Path) {
    let _ = std::fs::remove_file(log.join(FILE_NEW));
}

pub(super) fn checksum(offset: u64, header: &[u8], key: &[u8], value: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&offset.to_le_bytes());
    hash.update(header);
    hash.update(key);
    hash.update(value);
    hash.digest()
}

/// A batch as it stands at `offset`.
pub(super) fn encode(batch: &Batch, offset: u64, buffer: &mut Vec<u8>) {
    let records = batch.len();
    let bytes = batch.bytes() + (records * HEADER_BYTES) as u64;
    for (number, (key, value)) in batch.writes().enumerate() {
        let start = buffer.len();
        let mut flags = 0;
        if value.is_none() {
            flags |= FLAG_REMOVE;
        }
        if number == 0 {
            flags |= FLAG_FIRST;
        }
        if number + 1 == records {
            flags |= FLAG_LAST;
        }
        let value = value.map_or(&[][..], Vec::as_slice);
        buffer.extend_from_slice(&MAGIC);
        buffer.extend_from_slice(&[VERSION, flags, 0]);
        buffer.extend_from_slice(&(key.len() as u16).to_le_bytes());
        buffer.extend_from_slice(&(value.len() as u32).to_le_bytes());
        let batch_bytes = if number == 0 { bytes as u32 } else { 0 };
        buffer.extend_from_slice(&batch_bytes.to_le_bytes());
        let sum = checksum(offset + start as u64, &buffer[start..], key, value);
        buffer.extend_from_slice(&sum.to_le_bytes());
        buffer.extend_from_slice(key);
        buffer.extend_from_slice(value);
    }
}
