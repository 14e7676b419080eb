//! Writing the file of a segment.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use refrain_protocol::{Namespace, NamespaceId};
use refrain_suffix_index::{DocumentKey as IndexKey, SegmentBuilder};

use crate::log::{LogError, refused, sync_directory};
use crate::record::{NamespaceRecord, SegmentId};
use crate::segments::entry::SegmentEntry;
use crate::segments::file::SegmentFile;
use crate::segments::paths::{directory, path};
use crate::segments::{document_records, layout};

/// Writes the file of a segment durably under its final name. `at_rename` runs between the write and the rename.
pub(crate) fn write(
    dir: &Path,
    id: SegmentId,
    namespace: NamespaceId,
    names: Option<&Namespace>,
    mut entries: Vec<SegmentEntry>,
    at_rename: &mut dyn FnMut() -> Result<(), LogError>,
) -> Result<SegmentFile, LogError> {
    entries.sort_unstable_by_key(|entry| entry.document);
    let records = document_records::pack(&entries).map_err(|damage| {
        LogError::Refused(format!(
            "the records of a segment cannot be packed: {damage}"
        ))
    })?;
    let mut builder = SegmentBuilder::new();
    let documents = entries.len();
    for entry in entries {
        let SegmentEntry {
            document,
            head,
            tokens,
            ..
        } = entry;
        builder.add(IndexKey(document.0), head.left_context, tokens);
    }
    let segment = builder.build().map_err(|error| {
        LogError::Refused(format!("the index of a segment cannot be built: {error}"))
    })?;
    let index = segment.to_bytes();
    drop(segment);
    let names = names.cloned().map(NamespaceRecord);
    let names = bincode::encode_to_vec(names, layout::config()).map_err(|error| {
        LogError::Refused(format!(
            "the names of a namespace cannot be encoded: {error}"
        ))
    })?;
    let lens = [index.len(), records.len(), names.len(), documents];
    let footer = layout::footer(id, namespace, lens, &[&records, &names]);
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
    SegmentFile::open(dir, id)
}
