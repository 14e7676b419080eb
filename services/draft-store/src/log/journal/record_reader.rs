//! Reads single records of a journal, and examines the bytes between them.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::log::journal::format::{
    FLAG_FIRST, FLAG_LAST, FLAG_REMOVE, HEADER_BYTES, KEY_BYTES_MAX, MAGIC, VALUE_BYTES_MAX,
    VERSION, checksum,
};
use crate::log::journal::{LogError, refused};

/// Bytes read at once.
const WINDOW_BYTES: usize = 256 << 10;

/// Unit of the disk: it writes a sector completely or not at all.
const SECTOR_BYTES: u64 = 512;

/// Unit in which the operating system reads.
const PAGE_BYTES: usize = 4_096;

/// Most unreadable pages that are treated as damage. With more of them, the disk itself has failed.
const UNREADABLE_PAGES_MAX: u32 = 256;

/// Replaces a byte that could not be read.
const UNREADABLE: u8 = 0xee;

/// This many zeros in a row never reached the disk, since values that could have them are compressed.
const ZEROS_UNWRITTEN: usize = 256;

/// The same at the end of a write.
const ZEROS_UNWRITTEN_AT_END: usize = 8;

pub(super) struct JournalRecord {
    /// Length of the whole record, header included.
    pub(super) bytes: u64,
    pub(super) is_first: bool,
    pub(super) is_last: bool,
    /// Bytes of the whole batch, in the first record of a batch.
    pub(super) batch_bytes: u64,
    pub(super) key: Vec<u8>,
    /// `None`: the key is removed.
    pub(super) value: Option<Vec<u8>>,
}

/// A candidate for a header; only the checksum decides.
pub(super) struct RecordHeader {
    pub(super) flags: u8,
    pub(super) key_bytes: usize,
    pub(super) value_bytes: usize,
    pub(super) batch_bytes: u64,
}

impl RecordHeader {
    /// Whether the length of the batch agrees with the length of its only record.
    pub(super) fn is_consistent(&self) -> bool {
        let record = (HEADER_BYTES + self.key_bytes + self.value_bytes) as u64;
        let is_alone = self.flags & FLAG_FIRST != 0 && self.flags & FLAG_LAST != 0;
        self.batch_bytes >= record && (!is_alone || self.batch_bytes == record)
    }
}

/// A part of the file in memory, and the file behind it.
pub(super) struct RecordReader {
    path: PathBuf,
    file: File,
    /// Number of pages that the disk could not read.
    unreadable: u32,
    pub(super) len: u64,
    start: u64,
    bytes: Vec<u8>,
}

impl RecordReader {
    pub(super) fn open(path: &Path) -> Result<Self, LogError> {
        let failed = |error: std::io::Error| refused("read", path, &error);
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        Ok(RecordReader {
            path: path.to_owned(),
            file,
            unreadable: 0,
            len,
            start: 0,
            bytes: Vec::new(),
        })
    }

    /// `count` bytes from `at` on, if the file has them.
    fn get(&mut self, at: u64, count: usize) -> Result<Option<&[u8]>, LogError> {
        if at.saturating_add(count as u64) > self.len {
            return Ok(None);
        }
        let is_in = at >= self.start && at + count as u64 <= self.start + self.bytes.len() as u64;
        if !is_in {
            let wanted = (self.len - at).min(count.max(WINDOW_BYTES) as u64) as usize;
            self.bytes.resize(wanted, 0);
            self.start = at;
            if self.file.read_exact_at(&mut self.bytes, at).is_err() {
                let outcome = self.read_pages(at);
                outcome.map_err(|error| refused("read", &self.path, &error))?;
            }
        }
        let from = (at - self.start) as usize;
        Ok(self.bytes.get(from..from + count))
    }

    /// Reads the window again, page by page. An unreadable page counts as damaged.
    fn read_pages(&mut self, at: u64) -> std::io::Result<()> {
        let mut done = 0;
        while done < self.bytes.len() {
            let end = self.bytes.len().min(done + PAGE_BYTES);
            let page = &mut self.bytes[done..end];
            if let Err(error) = self.file.read_exact_at(page, at + done as u64) {
                self.unreadable += 1;
                if self.unreadable > UNREADABLE_PAGES_MAX {
                    // With this many errors the disk itself has failed.
                    self.bytes.clear();
                    return Err(error);
                }
                page.fill(UNREADABLE);
            }
            done = end;
        }
        Ok(())
    }

    pub(super) fn header(&mut self, at: u64) -> Result<Option<RecordHeader>, LogError> {
        Ok(self.get(at, HEADER_BYTES)?.and_then(|bytes| {
            let number = |range: Range<usize>| {
                bytes[range]
                    .iter()
                    .rev()
                    .fold(0u64, |number, byte| number << 8 | u64::from(*byte))
            };
            let header = RecordHeader {
                flags: bytes[4],
                key_bytes: number(6..8) as usize,
                value_bytes: number(8..12) as usize,
                batch_bytes: number(12..16),
            };
            let is_sane = bytes[..3] == MAGIC
                && bytes[3] == VERSION
                && header.key_bytes <= KEY_BYTES_MAX
                && header.value_bytes <= VALUE_BYTES_MAX;
            is_sane.then_some(header)
        }))
    }

    /// The record at `at`, if a sound one begins there.
    pub(super) fn record(&mut self, at: u64) -> Result<Option<JournalRecord>, LogError> {
        let Some(RecordHeader {
            flags,
            key_bytes,
            value_bytes,
            batch_bytes,
        }) = self.header(at)?
        else {
            return Ok(None);
        };
        let bytes = HEADER_BYTES + key_bytes + value_bytes;
        let Some(all) = self.get(at, bytes)? else {
            return Ok(None);
        };
        let (header, content) = all.split_at(HEADER_BYTES);
        let (key, value) = content.split_at(key_bytes);
        let (head, sum) = header.split_at(HEADER_BYTES - 8);
        if sum != checksum(at, head, key, value).to_le_bytes() {
            return Ok(None);
        }
        Ok(Some(JournalRecord {
            bytes: bytes as u64,
            is_first: flags & FLAG_FIRST != 0,
            is_last: flags & FLAG_LAST != 0,
            batch_bytes,
            key: key.to_vec(),
            value: (flags & FLAG_REMOVE == 0).then(|| value.to_vec()),
        }))
    }

    /// The start of the next sound record.
    pub(super) fn next_record(&mut self, from: u64) -> Result<Option<u64>, LogError> {
        let mut at = from;
        while at + HEADER_BYTES as u64 <= self.len {
            let count = (self.len - at).min(4_096) as usize;
            let candidates: Vec<u64> = match self.get(at, count)? {
                Some(bytes) => bytes
                    .windows(MAGIC.len())
                    .enumerate()
                    .filter(|(_, bytes)| *bytes == MAGIC)
                    .map(|(offset, _)| at + offset as u64)
                    .collect(),
                None => return Ok(None),
            };
            for candidate in candidates {
                if self.record(candidate)?.is_some() {
                    return Ok(Some(candidate));
                }
            }
            // A magic number may cross the boundary between two reads.
            at += (count - (MAGIC.len() - 1)).max(1) as u64;
        }
        Ok(None)
    }

    /// Whether bytes are missing that a completed write would have filled.
    pub(super) fn has_unwritten(&mut self, range: Range<u64>) -> Result<bool, LogError> {
        let (mut at, mut zeros) = (range.start, 0);
        while at < range.end {
            let count = (range.end - at).min(4_096) as usize;
            let Some(bytes) = self.get(at, count)? else {
                return Ok(true);
            };
            for byte in bytes {
                zeros = if *byte == 0 { zeros + 1 } else { 0 };
                if zeros >= ZEROS_UNWRITTEN {
                    return Ok(true);
                }
            }
            at += count as u64;
        }
        Ok(zeros >= ZEROS_UNWRITTEN_AT_END)
    }

    /// Whether part of a write never reached the disk: some sector is all zeros, as far as it lies in the range.
    pub(super) fn has_hole(&mut self, range: Range<u64>) -> Result<bool, LogError> {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min((at / SECTOR_BYTES + 1) * SECTOR_BYTES);
            let count = (end - at) as usize;
            let part = self.get(at, count)?.unwrap_or_default();
            if count >= ZEROS_UNWRITTEN_AT_END && part.iter().all(|byte| *byte == 0) {
                return Ok(true);
            }
            at = end;
        }
        Ok(false)
    }

    /// Refuses a journal of another version. None of its records looks sound for that reason alone.
    pub(super) fn check_version(&mut self) -> Result<(), LogError> {
        match self.get(0, MAGIC.len() + 1)? {
            Some(&[ref magic @ .., version]) if *magic == MAGIC && version != VERSION => {
                Err(LogError::Refused(format!(
                    "{} is of version {version}, and this program reads version {VERSION}; nothing was changed. \
                     Start the program that wrote it",
                    self.path.display()
                )))
            }
            _ => Ok(()),
        }
    }
}
