//! Files of a log: folders, compressed files and standard input, read as streams.

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use flate2::read::MultiGzDecoder;

use super::summary::LogSummary;

/// Folders are entered so deep, and so many files are read.
const FOLDERS_DEPTH_MAX: usize = 32;
const FILES_MAX: usize = 1_000_000;

/// Compressed and binary forms that are not read, with the remedy.
const UNREAD: [(&[u8], &str); 7] = [
    (b"PK\x03\x04", "a zip file: unpack it"),
    (b"BZh", "compressed with bzip2: unpack it"),
    (b"\xfd7zXZ", "compressed with xz: unpack it"),
    (b"PAR1", "a Parquet file: write it as JSON lines"),
    (
        b"SQLite format 3",
        "a database: export its calls as JSON lines",
    ),
    (b"\xff\xfe", "UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "UTF-16: save it as UTF-8"),
];

/// Progress of reading one or several files, in bytes on disk. Clones share a counter.
#[derive(Clone, Default)]
pub struct ReadProgress {
    read_bytes: Arc<AtomicU64>,
    size_bytes: u64,
}

impl ReadProgress {
    /// Progress of reading `size_bytes` in total.
    pub fn new(size_bytes: u64) -> Self {
        ReadProgress {
            size_bytes,
            ..ReadProgress::default()
        }
    }

    /// The share that is read, 0 to 1.
    pub fn share(&self) -> f64 {
        let share = self.read_bytes.load(Ordering::Relaxed) as f64 / self.size_bytes.max(1) as f64;
        share.min(1.0)
    }
}

/// Files in the order in which they are read.
pub(super) struct Files {
    pub(super) paths: Vec<PathBuf>,
    pub(super) size_bytes: u64,
    /// Whether a path was found in a folder, by its place. Such a file may be anything.
    pub(super) in_folder: Vec<bool>,
}

impl Files {
    /// Checks that all paths exist, so that a wrong name is reported before hours of work. `-` is standard input.
    pub(super) fn find(paths: &[PathBuf], summary: &mut LogSummary) -> anyhow::Result<Files> {
        let mut files = Files {
            paths: Vec::new(),
            size_bytes: 0,
            in_folder: Vec::new(),
        };
        for path in paths {
            if is_stdin(path) {
                files.push(path.clone(), 0, false);
                continue;
            }
            let metadata = std::fs::metadata(path).with_context(|| unreadable(path))?;
            if metadata.is_dir() {
                files.enter(path, 0, summary)?;
            } else {
                files.push(path.clone(), metadata.len(), false);
            }
        }
        Ok(files)
    }

    fn push(&mut self, path: PathBuf, size_bytes: u64, in_folder: bool) {
        self.paths.push(path);
        self.size_bytes += size_bytes;
        self.in_folder.push(in_folder);
    }

    /// Takes the files of a folder, in the order of their names.
    fn enter(
        &mut self,
        folder: &Path,
        depth: usize,
        summary: &mut LogSummary,
    ) -> anyhow::Result<()> {
        let entries = std::fs::read_dir(folder).with_context(|| unreadable(folder))?;
        let mut entries: Vec<_> = entries
            .collect::<Result<_, _>>()
            .with_context(|| unreadable(folder))?;
        entries.sort_by_key(|entry| entry.file_name());
        for entry in entries {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            // aider's histories are hidden files.
            let is_hidden = name.starts_with('.') && !name.starts_with(".aider.");
            let kind = entry.file_type().with_context(|| unreadable(folder))?;
            let path = entry.path();
            if is_hidden {
                summary.leave_out("a hidden file or folder", || path.display().to_string());
            } else if kind.is_dir() && depth < FOLDERS_DEPTH_MAX {
                self.enter(&path, depth + 1, summary)?;
            } else if kind.is_file() && self.paths.len() < FILES_MAX {
                let size_bytes = entry.metadata().map_or(0, |metadata| metadata.len());
                self.push(path, size_bytes, true);
            } else {
                summary.leave_out("neither a file nor a folder, or too many of them", || {
                    path.display().to_string()
                });
            }
        }
        Ok(())
    }
}

pub(crate) fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == "-"
}

pub(crate) fn unreadable(path: &Path) -> String {
    format!("{}: the trace cannot be read", path.display())
}

/// Why a file that begins so is not read.
pub(super) fn unread(head: &[u8]) -> Option<&'static str> {
    let known = UNREAD.iter().find(|(magic, _)| head.starts_with(magic));
    known
        .map(|(_, reason)| *reason)
        .or_else(|| head.contains(&0).then_some("a binary file"))
}

/// Opens a file, and decompresses it if it is compressed. Bytes read from it are added to `progress`.
pub(crate) fn open(
    path: &Path,
    progress: ReadProgress,
) -> std::io::Result<Box<dyn BufRead + Send>> {
    let file: Box<dyn Read + Send> = match is_stdin(path) {
        true => Box::new(std::io::stdin()),
        false => Box::new(File::open(path)?),
    };
    let (head, rest) = headed(CountedFile { file, progress }, 4)?;
    let whole = Cursor::new(head.clone()).chain(rest);
    Ok(match &head[..] {
        [0x28, 0xb5, 0x2f, 0xfd] => {
            Box::new(BufReader::new(zstd::stream::read::Decoder::new(whole)?))
        }
        [0x1f, 0x8b, ..] => Box::new(BufReader::new(MultiGzDecoder::new(whole))),
        _ => Box::new(BufReader::new(whole)),
    })
}

/// The first bytes of a stream, and the rest.
pub(super) fn headed<R: Read>(mut stream: R, bytes: u64) -> std::io::Result<(Vec<u8>, R)> {
    let mut head = Vec::new();
    (&mut stream).take(bytes).read_to_end(&mut head)?;
    Ok((head, stream))
}

/// A file that counts the bytes that are read from it.
struct CountedFile {
    file: Box<dyn Read + Send>,
    progress: ReadProgress,
}

impl Read for CountedFile {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let bytes = self.file.read(into)?;
        self.progress
            .read_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}
