//! JSON-lines files, plain or compressed with gzip or zstd, read one bounded line at a time.

use std::io::{BufRead, Read};
use std::path::PathBuf;

use anyhow::{Context, bail};

pub use crate::logs::ReadProgress;
use crate::logs::{open, unreadable};

/// The longest line that is accepted, in bytes. A parsed line takes several times its size in memory.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// An open file of JSON lines.
pub struct JsonLines {
    path: PathBuf,
    lines: Box<dyn BufRead + Send>,
    number: u64,
    buffer: Vec<u8>,
}

impl JsonLines {
    /// Opens a file. Bytes read from it are added to `progress`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn open(path: PathBuf, progress: ReadProgress) -> anyhow::Result<Self> {
        let lines = open(&path, progress).with_context(|| unreadable(&path))?;
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
