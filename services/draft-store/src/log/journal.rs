//! The journal: an append-only file. Every batch is written and synced here before it is acknowledged.
//!
//! The journal is the truth, and sled beside it is a catalogue that can be thrown away and built again. The reason is
//! that sled's own file cannot be read in part. One damaged page, or one file of its directory that a full disk left
//! empty, makes all of it unreadable. Scanning sled's file for our envelopes was rejected: it would cost no writes,
//! but it would need a copy of sled's page format, and one page holds many records.
//!
//! ```text
//! journal := record*                       batches one after the other; the first names the journal
//! record  := magic (3) version (1) flags (1) zero (1) key bytes (2) value bytes (4) batch bytes (4)
//!            checksum (8) key value        little-endian
//! ```
//!
//! The checksum covers the record's offset, so bytes from another position are never taken for a record. Every record
//! has one, so damage costs only the records that it touches: the scan continues at the next sound record.
//!
//! The first record of a batch holds the length of the batch. This distinguishes a write that was cut off, which was
//! never acknowledged and is dropped whole, from a complete batch that is damaged.
//!
//! `format.rs` has the layout, `scan.rs` reads a journal past damage, and `record_reader.rs` reads single records for
//! it.

mod format;
mod record_reader;
mod scan;
#[cfg(test)]
mod tests;

pub(crate) use format::{JournalPosition, is_begun, is_in, path_in, remove_unfinished};
pub(crate) use scan::{ScanReport, ScannedBatch, scan};

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::log::journal::format::{
    FILE, FILE_NEW, KEY_BYTES_MAX, NAME_KEY, VALUE_BYTES_MAX, encode,
};
use crate::log::{Batch, LogError, refused};

/// An open journal. Only one thread appends.
pub(crate) struct Journal {
    path: PathBuf,
    file: Arc<File>,
    inode: (u64, u64),
    name: u64,
    end: u64,
    synced_end: u64,
    /// An append or a sync failed. The content of the file is unknown until it is scanned again.
    broken: bool,
    buffer: Vec<u8>,
}

impl Journal {
    /// Creates an empty journal under a temporary name; see [`Journal::install`].
    pub(crate) fn create(log: &Path, name: u64) -> Result<Self, LogError> {
        let path = log.join(FILE_NEW);
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .map_err(|error| refused("create", &path, &error))?;
        let mut journal = Journal::over(path, file, name, 0)?;
        let mut naming = Batch::default();
        naming.put(NAME_KEY.to_vec(), name.to_le_bytes().to_vec());
        journal.append(&naming)?;
        Ok(journal)
    }

    /// Makes the journal durable, and gives it its final name.
    pub(crate) fn install(&mut self) -> Result<(), LogError> {
        self.sync()?;
        let path = self.path.with_file_name(FILE);
        std::fs::rename(&self.path, &path)
            .map_err(|error| refused("rename", &self.path, &error))?;
        self.path = path;
        if let Some(log) = self.path.parent() {
            crate::log::sync_directory(log).map_err(|error| refused("sync", log, &error))?;
        }
        Ok(())
    }

    /// Opens a journal that was scanned. Bytes after its last complete batch are cut off.
    pub(crate) fn open(log: &Path, name: u64, end: u64) -> Result<Self, LogError> {
        let path = path_in(log);
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| refused("open", &path, &error))?;
        let failed = |error: std::io::Error| refused("cut", &path, &error);
        if file.metadata().map_err(failed)?.len() > end {
            file.set_len(end).map_err(failed)?;
        }
        // The bytes that were read may have been only in the system's memory.
        file.sync_all().map_err(failed)?;
        Journal::over(path, file, name, end)
    }

    fn over(path: PathBuf, file: File, name: u64, end: u64) -> Result<Self, LogError> {
        let metadata = file
            .metadata()
            .map_err(|error| refused("examine", &path, &error))?;
        Ok(Journal {
            path,
            file: Arc::new(file),
            inode: (metadata.dev(), metadata.ino()),
            name,
            end,
            synced_end: end,
            broken: false,
            buffer: Vec::new(),
        })
    }

    /// The end of the last batch.
    pub(crate) fn position(&self) -> JournalPosition {
        JournalPosition {
            journal: self.name,
            end: self.end,
        }
    }

    /// The end of what is durable. After a failed sync nothing beyond it counts.
    pub(crate) fn synced_position(&self) -> JournalPosition {
        JournalPosition {
            journal: self.name,
            end: self.synced_end,
        }
    }

    /// Appends a batch. It is durable after [`Journal::sync`]. A failed write is cut off again.
    pub(crate) fn append(&mut self, batch: &Batch) -> Result<JournalPosition, LogError> {
        self.check()?;
        let is_long = |(key, value): (&Vec<u8>, Option<&Vec<u8>>)| {
            key.len() > KEY_BYTES_MAX || value.is_some_and(|value| value.len() > VALUE_BYTES_MAX)
        };
        if batch.writes().any(is_long) {
            // A scan would not accept it as a record.
            return Err(LogError::Refused(
                "a key or a value is longer than the journal accepts; this is a bug".into(),
            ));
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        encode(batch, self.end, &mut buffer);
        let written = self.file.write_all_at(&buffer, self.end);
        let bytes = buffer.len() as u64;
        self.buffer = buffer;
        self.buffer.clear();
        self.buffer.shrink_to(1 << 20);
        if let Err(error) = written {
            // If this fails too, the scan at the next start drops the same bytes.
            self.broken = self.file.set_len(self.end).is_err();
            return Err(refused("write", &self.path, &error));
        }
        self.end += bytes;
        Ok(self.position())
    }

    /// Makes the appended batches durable.
    pub(crate) fn sync(&mut self) -> Result<(), LogError> {
        let (file, end) = self.begin_sync()?;
        let outcome = file.sync_data();
        self.end_sync(end, outcome)
    }

    /// The file to sync, and the position that the sync will make durable. For callers that do not want to hold the
    /// journal meanwhile.
    pub(crate) fn begin_sync(&self) -> Result<(Arc<File>, u64), LogError> {
        self.check()?;
        Ok((self.file.clone(), self.end))
    }

    /// Records the result of a sync.
    pub(crate) fn end_sync(
        &mut self,
        end: u64,
        outcome: std::io::Result<()>,
    ) -> Result<(), LogError> {
        self.check()?;
        if let Err(error) = outcome {
            // The system may have dropped what it could not write, and still show it. Nothing of it was acknowledged,
            // so nothing of it is kept.
            self.broken = true;
            let _ = self.file.set_len(self.synced_end);
            return Err(refused("sync", &self.path, &error));
        }
        // If somebody removed or replaced the file, nothing may be acknowledged.
        let is_there = std::fs::metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.inode);
        if !is_there {
            self.broken = true;
            return Err(LogError::Refused(format!(
                "{} was removed or replaced while the store ran; put it back, or start the store again",
                self.path.display()
            )));
        }
        self.synced_end = self.synced_end.max(end);
        Ok(())
    }

    fn check(&self) -> Result<(), LogError> {
        match self.broken {
            false => Ok(()),
            true => Err(LogError::Refused(format!(
                "{} cannot be written after a failed write until it is opened again",
                self.path.display()
            ))),
        }
    }
}
