//! The file of usage: a header, and records that are only appended until the file is rewritten.
//!
//! A record is its length, a checksum, and its bytes. Written records survive the end of the process at any moment;
//! [`Journal::sync`] makes it survive a loss of power, too. A record that is torn ends what is read, and is cut off.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use refrain_rpc::{append_record, read_records};
use refrain_service_kit::random;
use xxhash_rust::xxh3::xxh3_64;

use super::book::Record;

const MAGIC: [u8; 8] = *b"RfUsage1";

/// Bytes of the magic, the gateway's id and their checksum.
const HEADER_BYTES: usize = 8 + 16 + 8;

/// A file of fewer bytes is not rewritten.
const REWRITE_BYTES_MIN: u64 = 4 << 20;

/// A file is rewritten when it has this many times the bytes that it had when it was new.
const REWRITE_FACTOR: u64 = 3;

const FILE: &str = "journal";
const FILE_NEW: &str = "journal.new";
const LOCK: &str = "lock";

/// A directory as it was found.
#[derive(Debug)]
pub(super) struct FoundJournal {
    /// The id of the gateway.
    pub(super) gateway: u128,
    pub(super) records: Vec<Record>,
    dir: PathBuf,
    lock: File,
}

/// The open file.
pub(super) struct Journal {
    dir: PathBuf,
    gateway: u128,
    /// `None` after a write that failed: something is missing, and nothing may follow the gap until the file is
    /// rewritten.
    file: Option<File>,
    /// Bytes up to the end of the last complete record.
    bytes: u64,
    /// Bytes when it was rewritten last.
    fresh_bytes: u64,
    /// Records that are not written yet.
    buffer: Vec<u8>,
    is_synced: bool,
    _lock: File,
}

impl FoundJournal {
    /// Reads the file in `dir`. A file that is not one of usage is set aside.
    ///
    /// # Errors
    /// Another process uses the directory, or the disk refuses.
    pub(super) fn read(dir: &Path, now_ms: u64) -> anyhow::Result<Self> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(dir)?;
        let lock = File::create(dir.join(LOCK))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("another gateway uses this directory"),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        let path = dir.join(FILE);
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            read => Some(read?),
        };
        let (gateway, records) = match bytes.as_deref().map(read_file) {
            Some(Some((gateway, records, torn))) => {
                if torn > 0 {
                    tracing::warn!(
                        bytes = torn,
                        "the end of the usage journal was torn, and is cut off"
                    );
                }
                (gateway, records)
            }
            unreadable => {
                if unreadable.is_some() {
                    let aside = dir.join(format!("journal.damaged-{now_ms}"));
                    std::fs::rename(&path, &aside)?;
                    tracing::error!(
                        moved_to = %aside.display(),
                        "the usage journal is damaged at its beginning; the gateway begins a new one"
                    );
                }
                (random::u128().context("no random numbers")?, Vec::new())
            }
        };
        Ok(FoundJournal {
            gateway,
            records,
            dir: dir.to_owned(),
            lock,
        })
    }

    /// The journal that goes on here. Its file is the one that was found until [`Journal::rewrite`] replaces it.
    pub(super) fn journal(self) -> Journal {
        Journal {
            dir: self.dir,
            gateway: self.gateway,
            file: None,
            bytes: 0,
            fresh_bytes: 0,
            buffer: Vec::new(),
            is_synced: true,
            _lock: self.lock,
        }
    }
}

impl Journal {
    /// Adds a record. It is in the file after the next [`Journal::write`].
    pub(super) fn append(&mut self, record: &Record) {
        if append_record(record, &mut self.buffer).is_err() {
            self.file = None;
        }
    }

    /// Writes all records that were added.
    ///
    /// # Errors
    /// The disk refuses. The file then has to be rewritten, which [`Journal::is_rewrite_due`] says.
    pub(super) fn write(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let written = self.file.as_mut().map(|file| file.write_all(&self.buffer));
        let written = written.unwrap_or(Ok(()));
        match &written {
            Ok(()) if self.file.is_some() => {
                self.bytes += self.buffer.len() as u64;
                self.is_synced = false;
            }
            _ => self.file = None,
        }
        self.buffer.clear();
        written
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// The disk refuses, or something could not be written.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        let Some(file) = &self.file else {
            return Err(io::Error::other("the usage journal lacks records"));
        };
        if !self.is_synced {
            file.sync_data()?;
            self.is_synced = true;
        }
        Ok(())
    }

    /// Whether the file is large enough to be rewritten, or lacks something.
    pub(super) fn is_rewrite_due(&self) -> bool {
        let most = REWRITE_BYTES_MIN.max(self.fresh_bytes.saturating_mul(REWRITE_FACTOR));
        self.file.is_none() || self.bytes > most
    }

    /// Replaces the file by one with these records.
    ///
    /// # Errors
    /// The disk refuses. The earlier file is still there.
    pub(super) fn rewrite(&mut self, records: impl Iterator<Item = Record>) -> io::Result<()> {
        let (file, bytes) = write_new(&self.dir, self.gateway, records)?;
        self.file = Some(file);
        (self.bytes, self.fresh_bytes) = (bytes, bytes);
        self.buffer.clear();
        self.is_synced = true;
        Ok(())
    }

    /// Lets each write fail until the file is written anew.
    #[cfg(test)]
    pub(super) fn refuse_writes(&mut self) -> io::Result<()> {
        self.file = Some(File::open(self.dir.join(FILE))?);
        Ok(())
    }

    /// Bytes of the file.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Writes a file beside the present one, and puts it in its place.
fn write_new(
    dir: &Path,
    gateway: u128,
    records: impl Iterator<Item = Record>,
) -> io::Result<(File, u64)> {
    let new = dir.join(FILE_NEW);
    let mut options = OpenOptions::new();
    // There may be a leftover.
    options.create(true).write(true).truncate(true).mode(0o600);
    let mut writer = io::BufWriter::new(options.open(&new)?);
    let mut bytes = HEADER_BYTES as u64;
    writer.write_all(&header(gateway))?;
    let mut buffer = Vec::new();
    for record in records {
        buffer.clear();
        append_record(&record, &mut buffer).map_err(io::Error::other)?;
        bytes += buffer.len() as u64;
        writer.write_all(&buffer)?;
    }
    let file = writer
        .into_inner()
        .map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    std::fs::rename(&new, dir.join(FILE))?;
    File::open(dir)?.sync_all()?;
    Ok((file, bytes))
}

fn header(gateway: u128) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend(gateway.to_le_bytes());
    header.extend(xxh3_64(&header).to_le_bytes());
    header
}

/// The gateway, the records and the number of bytes after the last whole one. `None` if the header is damaged.
fn read_file(bytes: &[u8]) -> Option<(u128, Vec<Record>, usize)> {
    let (head, rest) = bytes.split_at_checked(HEADER_BYTES)?;
    let id = head.get(MAGIC.len()..)?.first_chunk()?;
    let gateway = u128::from_le_bytes(*id);
    if head != header(gateway) {
        return None;
    }
    let (records, torn) = read_records(rest);
    Some((gateway, records, torn))
}

#[cfg(test)]
mod tests;
