//! The journal's file: its name, the layout of its records, and their encoding.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::log::{Batch, LogError, refused};

/// The file's name in the directory of a log.
pub(super) const FILE: &str = "journal";

/// Name of a journal in the making. It is renamed to [`FILE`] once it is complete.
pub(super) const FILE_NEW: &str = "journal.new";

pub(super) const MAGIC: [u8; 3] = *b"RfJ";

pub(super) const VERSION: u8 = 1;

pub(super) const HEADER_BYTES: usize = 24;

pub(super) const FLAG_REMOVE: u8 = 1;

pub(super) const FLAG_FIRST: u8 = 2;

pub(super) const FLAG_LAST: u8 = 4;

/// Longest key and value that a record may claim, far above anything that is written.
pub(super) const KEY_BYTES_MAX: usize = 4 << 10;

pub(super) const VALUE_BYTES_MAX: usize = 1 << 20;

/// Key of the first record of a journal, which holds the journal's name. No other key begins with this byte.
pub(super) const NAME_KEY: [u8; 1] = [0];

/// A position in a journal, up to which the index beside it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JournalPosition {
    /// The journal's name: a random number.
    pub(crate) journal: u64,
    /// Bytes up to the end of the last applied batch.
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

/// Path of the journal in the directory of a log.
pub(crate) fn path_in(log: &Path) -> PathBuf {
    log.join(FILE)
}

/// Whether a log has a journal. An error of the disk is not taken for an answer.
pub(crate) fn is_in(log: &Path) -> Result<bool, LogError> {
    let path = path_in(log);
    path.try_exists()
        .map_err(|error| refused("search for", &path, &error))
}

/// Whether a journal was begun and not installed.
pub(crate) fn is_begun(log: &Path) -> Result<bool, LogError> {
    let path = log.join(FILE_NEW);
    path.try_exists()
        .map_err(|error| refused("search for", &path, &error))
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

/// Encodes a batch that will stand at `offset`.
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
