//! Writing the file of a segment, and deleting files.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use refrain_protocol::document::DocumentHead;
use refrain_protocol::{DocumentId, Namespace, NamespaceId, TokenId};
use refrain_suffix_index::{DocumentKey as IndexKey, SegmentBuilder};

use super::file;
use super::{Sealed, directory, path, records};
use crate::log::sled::sync_directory;
use crate::log::{LogError, refused};
use crate::record::{NamespaceRecord, SegmentId, StateRecord};

/// A document on its way into a segment.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) document: DocumentId,
    pub(crate) state: StateRecord,
    pub(crate) head: DocumentHead,
    pub(crate) tokens: Vec<TokenId>,
}

/// Writes the file of a segment under its final name, durably. `at_rename` is called between the two halves of
/// that.
pub(super) fn write(
    dir: &Path,
    id: SegmentId,
    namespace: NamespaceId,
    names: Option<&Namespace>,
    mut entries: Vec<Entry>,
    at_rename: &mut dyn FnMut() -> Result<(), LogError>,
) -> Result<Sealed, LogError> {
    entries.sort_unstable_by_key(|entry| entry.document);
    let records = records::pack(&entries)
        .map_err(|damage| LogError::Refused(format!("records cannot be written: {damage}")))?;
    let mut builder = SegmentBuilder::new();
    let documents = entries.len();
    for entry in entries {
        let Entry {
            document,
            head,
            tokens,
            ..
        } = entry;
        builder.add(IndexKey(document.0), head.left_context, tokens);
    }
    let segment = builder
        .build()
        .map_err(|error| LogError::Refused(format!("no segment can be made: {error}")))?;
    let index = segment.to_bytes();
    drop(segment);
    let names = names.map(NamespaceRecord::from);
    let names = bincode::encode_to_vec(names, file::config())
        .map_err(|error| LogError::Refused(format!("names do not encode: {error}")))?;
    let lens = [index.len(), records.len(), names.len(), documents];
    let footer = file::footer(id, namespace, lens, &[&records, &names]);
    let (target, directory) = (path(dir, id), directory(dir));
    let temporary = target.with_extension("new");
    let failed = |error: std::io::Error| refused("write", &target, &error);
    if !directory.exists() {
        std::fs::create_dir_all(&directory).map_err(failed)?;
        sync_directory(dir).map_err(failed)?;
    }
    let mut file = File::create(&temporary).map_err(failed)?;
    for part in [&index, &records, &names, &footer] {
        file.write_all(part).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    at_rename()?;
    std::fs::rename(&temporary, &target).map_err(failed)?;
    sync_directory(&directory).map_err(failed)?;
    Sealed::open(dir, id)
}

/// Deletes files, durably.
pub(super) fn delete(dir: &Path, paths: &[PathBuf]) -> Result<(), LogError> {
    for path in paths {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(refused("delete", path, &error));
            }
            _ => {}
        }
    }
    if paths.is_empty() {
        return Ok(());
    }
    let directory = directory(dir);
    sync_directory(&directory).map_err(|error| refused("sync", &directory, &error))
}
