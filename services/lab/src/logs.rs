//! Logs of any tool, read as recorded calls.
//!
//! A log is one or several files, folders, or `-` for standard input, plain or compressed with gzip or zstd.
//! `pieces` and `texts` cut a file into records, and `record` finds the calls in a record by the shapes of requests
//! and responses (`shapes`), so that a tool that nobody thought of is read as well. `names` finds sessions, tenants
//! and times, `turns` writes messages as a prompt, and `encoder` turns text into tokens by a
//! `tokenizer`.
//!
//! Files are read on a thread of their own, beside the one that turns text into tokens. Records that cannot be used
//! are left out and counted: [`LogSummary`] tells why. Nothing here says a text of the log.

mod call;
mod call_reader;
mod encoder;
mod file;
mod forms;
mod halves;
mod members;
mod names;
mod pieces;
mod python;
mod record;
mod remote_tokenizer;
mod shapes;
mod source;
mod spans;
mod streams;
mod summary;
#[cfg(test)]
mod tests;
mod texts;
mod thread;
mod tokenizer;
mod turns;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use anyhow::bail;

use encoder::Encoder;
use record::RecordReader;
use source::Files;

pub(crate) use call::{LoggedCall, RecordedCall};
pub use call_reader::{CallReader, TokenCall};
pub use source::ReadProgress;
pub(crate) use source::{is_stdin, open, unreadable};
pub use summary::{FormCount, LeftOut, LogSummary};
pub(crate) use tokenizer::LogTokenizer;
pub use tokenizer::TokenizerOptions;

/// Calls that are read ahead.
const AHEAD_MAX: usize = 64;

enum Message {
    Call(Box<LoggedCall>),
    End(Box<LogSummary>),
    Failed(anyhow::Error),
}

/// The calls of a log, in the order of its files and records.
pub(crate) struct Logs {
    calls: Receiver<Message>,
    encoder: Encoder,
    progress: ReadProgress,
    summary: LogSummary,
    is_ended: bool,
}

impl Logs {
    /// Begins to read. All paths are checked first, so that a wrong name is reported before hours of work.
    ///
    /// # Errors
    /// A path that cannot be read.
    pub(crate) fn open(paths: &[PathBuf], tokenizer: LogTokenizer) -> anyhow::Result<Self> {
        let mut records = RecordReader::default();
        let files = Files::find(paths, &mut records.summary)?;
        let progress = ReadProgress::new(files.size_bytes);
        let (sender, calls) = sync_channel(AHEAD_MAX);
        let is_ended = paths.is_empty();
        if !is_ended {
            let progress = progress.clone();
            let reading = move || {
                let end = match read_all(&files, &progress, records, &sender) {
                    Ok(summary) => Message::End(Box::new(summary)),
                    Err(error) => Message::Failed(error),
                };
                // Whoever waits no longer needs no end.
                let _ = sender.send(end);
            };
            std::thread::Builder::new()
                .name("log".to_owned())
                .spawn(reading)?;
        }
        Ok(Logs {
            calls,
            encoder: Encoder::new(tokenizer),
            progress,
            summary: LogSummary::default(),
            is_ended,
        })
    }

    /// Bytes of files that were read. Standard input has none.
    pub(crate) fn progress(&self) -> ReadProgress {
        self.progress.clone()
    }

    /// The summary of what was read. It is complete after the last call.
    pub(crate) fn summary(&self) -> LogSummary {
        LogSummary {
            has_approximate_tokens: self.encoder.is_approximate(),
            ..self.summary.clone()
        }
    }

    /// Whether a text was turned into tokens.
    pub(crate) fn has_texts(&self) -> bool {
        self.encoder.has_encoded()
    }

    /// The next call as the log has it, or `None` at the end. [`encoded`](Self::encoded) turns it into tokens, and
    /// [`counted`](Self::counted) says how long its output is, which takes no time.
    ///
    /// # Errors
    /// A file that cannot be read to its end, and a log without any call.
    pub(crate) fn next_logged(&mut self) -> anyhow::Result<Option<LoggedCall>> {
        if self.is_ended {
            return Ok(None);
        }
        match self.calls.recv() {
            Ok(Message::Call(call)) => Ok(Some(*call)),
            Ok(Message::End(summary)) => {
                self.is_ended = true;
                self.summary = LogSummary {
                    output_tokens_estimated: self.summary.output_tokens_estimated,
                    ..*summary
                };
                if self.summary.calls == 0 {
                    return Err(self.summary.nothing_usable());
                }
                Ok(None)
            }
            Ok(Message::Failed(error)) => {
                self.is_ended = true;
                Err(error)
            }
            Err(_) => bail!("the log was not read to its end"),
        }
    }

    /// The call with its text turned into tokens.
    ///
    /// # Errors
    /// A text without a tokenizer, or one that it cannot encode.
    pub(crate) fn encoded(&mut self, call: LoggedCall) -> anyhow::Result<RecordedCall> {
        self.encoder.recorded(call)
    }

    /// How many tokens the output has. Those of a text are estimated from those of the texts so far.
    pub(crate) fn counted(&mut self, call: &LoggedCall) -> u64 {
        let (tokens, is_estimated) = self.encoder.output_tokens(call);
        if is_estimated {
            self.summary.output_tokens_estimated += tokens;
        }
        tokens
    }
}

impl Iterator for Logs {
    type Item = anyhow::Result<RecordedCall>;

    fn next(&mut self) -> Option<Self::Item> {
        let call = self.next_logged().transpose()?;
        Some(call.and_then(|call| self.encoded(call)))
    }
}

fn read_all(
    files: &Files,
    progress: &ReadProgress,
    mut records: RecordReader,
    calls: &SyncSender<Message>,
) -> anyhow::Result<LogSummary> {
    let mut is_wanted = true;
    let mut send = |records: &mut RecordReader| {
        while is_wanted && let Some(call) = records.next_ready() {
            is_wanted = calls.send(Message::Call(Box::new(call))).is_ok();
        }
        is_wanted
    };
    for (path, in_folder) in files.paths.iter().zip(&files.in_folder) {
        file::read(path, *in_folder, progress.clone(), &mut records, &mut send)?;
        if !send(&mut records) {
            return Ok(records.summary);
        }
    }
    records.end();
    send(&mut records);
    Ok(records.summary)
}
