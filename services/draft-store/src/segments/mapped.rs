//! Memory-mapping a segment file: the only unsafe code of this crate.
//!
//! Reading the file into memory was rejected: it would take nine bytes of memory for every token, most of which
//! nobody asks for. The price is that a disk that fails under a map ends the process, where a read would return an
//! error.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use crate::log::{LogError, refused};
use crate::segments::layout::FOOTER_BYTES;

/// The part of a mapped file that is the index.
pub(super) struct IndexBytes {
    pub(super) map: Arc<Mmap>,
    pub(super) len: usize,
}

impl AsRef<[u8]> for IndexBytes {
    fn as_ref(&self) -> &[u8] {
        self.map.get(..self.len).unwrap_or_default()
    }
}

/// Maps a file. A missing or empty file counts as damage, any other failure does not.
pub(super) fn map(path: &Path) -> Result<Arc<Mmap>, LogError> {
    let corrupt = |why: &str| LogError::Corrupt(format!("{}: {why}", path.display()));
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(corrupt("missing"));
        }
        file => file.map_err(|error| refused("open", path, &error))?,
    };
    let metadata = file
        .metadata()
        .map_err(|error| refused("open", path, &error))?;
    if metadata.len() < FOOTER_BYTES as u64 {
        return Err(corrupt("too short"));
    }
    // SAFETY: nobody writes to the file while it is mapped. It got this name after its last write. It is only ever
    // deleted, which leaves the map intact. The directory lock keeps other processes of ours out.
    let map = unsafe { Mmap::map(&file) };
    Ok(Arc::new(map.map_err(|error| refused("map", path, &error))?))
}
