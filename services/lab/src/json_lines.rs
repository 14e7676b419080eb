//! JSON-lines files, plain or compressed with zstd, read one bounded line at a time.

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, bail};

/// The longest line that is accepted, in bytes. A parsed line takes several times its size in memory.
const LINE_BYTES_MAX: u64 = 64 << 20;

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

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
        self.read_bytes.load(Ordering::Relaxed) as f64 / self.size_bytes.max(1) as f64
    }
}

/// An open file of JSON lines.
pub struct JsonLines {
    path: PathBuf,
    lines: Box<dyn BufRead>,
    number: u64,
    buffer: Vec<u8>,
}

impl JsonLines {
    /// Opens a file. Bytes read from it are added to `progress`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn open(path: PathBuf, progress: ReadProgress) -> anyhow::Result<Self> {
        let lines = decompressed(&path, progress).with_context(|| unreadable(&path))?;
        Ok(JsonLines {
            path,
            lines,
            number: 0,
            buffer: Vec::new(),
        })
    }

    /// Reads the next line, which [`line`](Self::line) then returns. Returns false at the end of the file.
    ///
    /// # Errors
    /// If the file cannot be read, or the line is longer than 64 MiB.
    pub fn advance(&mut self) -> anyhow::Result<bool> {
        self.number += 1;
        self.buffer.clear();
        (&mut self.lines)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut self.buffer)
            .with_context(|| self.position())?;
        if self.buffer.len() as u64 == LINE_BYTES_MAX && self.buffer.last() != Some(&b'\n') {
            bail!(
                "{}: the line has more than {LINE_BYTES_MAX} bytes",
                self.position()
            );
        }
        Ok(!self.buffer.is_empty())
    }

    /// The current line, without white space at its end.
    pub fn line(&self) -> &[u8] {
        self.buffer.trim_ascii_end()
    }

    /// File and line number, for error messages.
    pub fn position(&self) -> String {
        format!("{}, line {}", self.path.display(), self.number)
    }
}

/// An error of parsing one line. serde_json counts lines within its input, which is a single line here, so only the
/// column is kept.
pub fn line_error(error: serde_json::Error) -> anyhow::Error {
    let text = error.to_string();
    let reason = text
        .rsplit_once(" at line ")
        .map_or(text.as_str(), |(reason, _)| reason);
    anyhow::anyhow!("{reason} (column {})", error.column())
}

pub(crate) fn unreadable(path: &Path) -> String {
    format!("{}: the trace cannot be read", path.display())
}

fn decompressed(path: &Path, progress: ReadProgress) -> std::io::Result<Box<dyn BufRead>> {
    let mut file = CountedFile {
        file: File::open(path)?,
        progress,
    };
    let mut head = Vec::new();
    (&mut file)
        .take(ZSTD_MAGIC.len() as u64)
        .read_to_end(&mut head)?;
    let is_zstd = head == ZSTD_MAGIC;
    let whole = Cursor::new(head).chain(file);
    Ok(if is_zstd {
        Box::new(BufReader::new(zstd::stream::read::Decoder::new(whole)?))
    } else {
        Box::new(BufReader::new(whole))
    })
}

/// A file that counts the bytes that are read from it.
struct CountedFile {
    file: File,
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
