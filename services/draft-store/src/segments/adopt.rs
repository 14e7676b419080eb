//! A segment file of another replica, on its way into use here.
//!
//! The index stays as it is: it is nearly all of the file, and sorting it is the work that the other replica has
//! done. The records are written anew, since the sequences in them are those of the other store. Followers of this
//! one would miss documents, or take one for another. The number of the segment is another one, too.

use std::fs::OpenOptions;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use refrain_protocol::NamespaceId;

use crate::log::{LogError, refused, sync_directory};
use crate::record::{NamespaceRecord, SegmentId};
use crate::segments::entry::SegmentEntry;
use crate::segments::file::SegmentFile;
use crate::segments::paths::{delete_files, directory, list, path};
use crate::segments::{document_records, layout};

/// The extension of a file that is still received, or not in use yet.
const EXTENSION: &str = "received";

/// A segment that came as a file from another replica.
pub(crate) struct ReceivedSegment {
    /// The file under its temporary name.
    pub(crate) file: SegmentFile,
    /// The generation of the other replica.
    pub(crate) origin: u64,
    /// The last message up to which the other replica had applied everything when it listed the segment, and had
    /// carried out all erasures.
    pub(crate) seen: u64,
    /// Numbers of the documents that it does not hand over.
    pub(crate) gone: Vec<u32>,
    /// When each document was last used, by its number, in Unix seconds.
    pub(crate) used_s: Vec<u32>,
}

/// Creates an empty file for a segment of another replica, which is known by its checksum. One that is there is
/// emptied.
pub(crate) fn create_received(
    dir: &Path,
    checksum: u64,
) -> Result<(std::fs::File, PathBuf), LogError> {
    let folder = directory(dir);
    let path = folder.join(format!("{checksum:016x}.{EXTENSION}"));
    let failed = |error: std::io::Error| refused("write", &path, &error);
    if !folder.exists() {
        std::fs::create_dir_all(&folder).map_err(failed)?;
        sync_directory(dir).map_err(failed)?;
    }
    let file = std::fs::File::create(&path).map_err(failed)?;
    Ok((file, path))
}

/// Deletes what an interrupted join has left.
pub(crate) fn clear_received(dir: &Path) -> Result<(), LogError> {
    let others = list(dir)?.1;
    let received = others.into_iter();
    let received = received.filter(|path| path.extension().is_some_and(|found| found == EXTENSION));
    delete_files(dir, &received.collect::<Vec<_>>())
}

/// Opens a received file, and checks all of it.
///
/// # Errors
/// [`LogError::Corrupt`] if it is not the segment that was asked for, or is damaged.
pub(crate) fn open_received(
    path: &Path,
    namespace: NamespaceId,
    checksum: u64,
) -> Result<SegmentFile, LogError> {
    let file = SegmentFile::open_any(path)?;
    if file.namespace != namespace || file.manifest().checksum != checksum {
        let why = format!(
            "{}: it is not the segment that was asked for",
            path.display()
        );
        return Err(LogError::Corrupt(why));
    }
    Ok(file)
}

/// Deletes a received file that is of no use.
pub(crate) fn discard_received(dir: &Path, received: SegmentFile) -> Result<(), LogError> {
    let path = received.path().to_owned();
    drop(received);
    delete_files(dir, &[path])
}

/// Whether a received file is still there. An erasure deletes it, since it may have what was erased.
pub(crate) fn is_there(received: &SegmentFile) -> bool {
    received.path().exists()
}

/// Gives a received file the number `id`, and new records: `entries` are its documents in order, without their text.
pub(crate) fn adopt(
    dir: &Path,
    id: SegmentId,
    received: SegmentFile,
    entries: &[SegmentEntry],
) -> Result<SegmentFile, LogError> {
    let records = document_records::pack(entries).map_err(|damage| {
        LogError::Refused(format!(
            "the records of a segment cannot be packed: {damage}"
        ))
    })?;
    let names = received.names.clone().map(NamespaceRecord);
    let names = bincode::encode_to_vec(names, layout::config()).map_err(|error| {
        LogError::Refused(format!(
            "the names of a namespace cannot be encoded: {error}"
        ))
    })?;
    let (index, namespace) = (received.index_bytes(), received.namespace);
    let temporary = received.path().to_owned();
    // Nobody may write to a file that is mapped.
    drop(received);
    let lens = [index, records.len(), names.len(), entries.len()];
    let footer = layout::footer(id, namespace, lens, &[&records, &names]);
    let target = path(dir, id);
    let failed = |error: std::io::Error| refused("write", &target, &error);
    let mut file = OpenOptions::new()
        .write(true)
        .open(&temporary)
        .map_err(failed)?;
    file.set_len(index as u64).map_err(failed)?;
    file.seek(SeekFrom::End(0)).map_err(failed)?;
    for part in [&records, &names, &footer] {
        file.write_all(part).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    std::fs::rename(&temporary, &target).map_err(failed)?;
    sync_directory(&directory(dir)).map_err(failed)?;
    SegmentFile::open(dir, id)
}
