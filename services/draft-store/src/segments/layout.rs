//! The layout of a segment file: its footer, its format version and the lengths of its parts.

use std::path::Path;

use refrain_protocol::NamespaceId;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::log::LogError;
use crate::record::SegmentId;

const MAGIC: [u8; 4] = *b"RFSD";

/// The version of files that are written.
const VERSION: u32 = 3;

/// A format version that this program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileVersion {
    /// Without the hashes of prompts.
    V2,
    /// With them.
    V3,
}

impl FileVersion {
    fn of(footer: &[u8]) -> Option<Self> {
        match version_of(footer) {
            2 => Some(FileVersion::V2),
            VERSION => Some(FileVersion::V3),
            _ => None,
        }
    }
}

pub(super) const FOOTER_BYTES: usize = 72;

/// Largest encoding of a namespace's names.
const NAMES_BYTES_MAX: usize = 4_096;

pub(super) fn config() -> impl bincode::config::Config {
    bincode::config::legacy().with_limit::<NAMES_BYTES_MAX>()
}

/// The footer of a file. `lens` are the lengths of index, records and names, and the number of documents. `parts` are
/// the bytes after the index.
pub(super) fn footer(
    id: SegmentId,
    namespace: NamespaceId,
    lens: [usize; 4],
    parts: &[&[u8]],
) -> Vec<u8> {
    let mut footer = Vec::with_capacity(FOOTER_BYTES);
    footer.extend(MAGIC);
    footer.extend(VERSION.to_le_bytes());
    footer.extend(id.to_le_bytes());
    footer.extend(namespace.0.to_le_bytes());
    for len in lens {
        footer.extend((len as u64).to_le_bytes());
    }
    let mut checksum = Xxh3::new();
    for part in parts.iter().copied().chain([&footer[..]]) {
        checksum.update(part);
    }
    footer.extend(checksum.digest().to_le_bytes());
    footer
}

fn u64_at(footer: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&footer[at..at + 8]);
    u64::from_le_bytes(word)
}

fn version_of(footer: &[u8]) -> u32 {
    u64_at(footer, 4) as u32
}

/// Refuses bytes that are a complete file of another version. Damaged bytes pass; `SegmentFile::open` detects them.
pub(super) fn check_version(bytes: &[u8], path: &Path) -> Result<(), LogError> {
    let Some(footer) = bytes.last_chunk::<FOOTER_BYTES>() else {
        return Ok(());
    };
    let version = version_of(footer);
    if footer[..4] != MAGIC || FileVersion::of(footer).is_some() {
        return Ok(());
    }
    let index = usize::try_from(u64_at(footer, 32)).unwrap_or(usize::MAX);
    let checked = bytes.get(index..bytes.len() - 8);
    if checked.is_none_or(|checked| xxh3_64(checked) != u64_at(footer, 64)) {
        return Ok(());
    }
    Err(LogError::Refused(format!(
        "{} is a segment of format version {version}, and this program reads 2 and {VERSION}: nothing was changed; run \
         the binary that wrote it and `refrain store export`, then import into an empty directory with this one",
        path.display()
    )))
}

/// Lengths of the parts of a file, in bytes, its number of documents, and its checksum.
#[derive(Clone, Copy)]
pub(super) struct FileLayout {
    pub(super) version: FileVersion,
    pub(super) index: usize,
    pub(super) records: usize,
    pub(super) names: usize,
    pub(super) documents: usize,
    pub(super) checksum: u64,
}

impl FileLayout {
    pub(super) fn names_at(&self) -> usize {
        self.index + self.records
    }

    /// Reads the footer with the numbers of segment and namespace, and checks everything after the index.
    pub(super) fn check(bytes: &[u8]) -> Result<(FileLayout, SegmentId, NamespaceId), String> {
        let at = bytes.len().checked_sub(FOOTER_BYTES).ok_or("too short")?;
        let footer = &bytes[at..];
        if footer[..4] != MAGIC {
            return Err("it is not a segment file".into());
        }
        let version = FileVersion::of(footer).ok_or("the format version is damaged")?;
        let len_at = |at: usize| usize::try_from(u64_at(footer, at)).map_err(|_| "lengths");
        let parts = FileLayout {
            version,
            index: len_at(32)?,
            records: len_at(40)?,
            names: len_at(48)?,
            documents: len_at(56)?,
            checksum: u64_at(footer, 64),
        };
        let sum = [parts.records, parts.names]
            .into_iter()
            .try_fold(parts.index, |sum, len| sum.checked_add(len));
        if sum != Some(at) {
            return Err("the lengths differ from those in the footer".into());
        }
        if xxh3_64(&bytes[parts.index..bytes.len() - 8]) != parts.checksum {
            return Err("the checksum of the records differs".into());
        }
        let namespace = u128::from(u64_at(footer, 16)) | u128::from(u64_at(footer, 24)) << 64;
        Ok((parts, u64_at(footer, 8), NamespaceId(namespace)))
    }
}
