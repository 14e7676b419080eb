//! Writes calls to a file, on a thread of its own, so that no answer waits for a disk.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::hash::BuildHasher;
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use anyhow::Context;
use parking_lot::Mutex;
use refrain_lab::logs::{CallReader, TokenCall};
use serde_json::Value;

use super::exchange::Exchange;

/// Calls that wait for the writer. Later ones are left out.
const WAITING_CALLS_MAX: usize = 256;
const WAITING_BYTES_MAX: usize = 256 << 20;

/// Callers that get a number of their own; all others share the last one.
const CALLERS_MAX: usize = 10_000;

/// The reason for which embeddings, lists of models and the like are not written.
const NO_OUTPUT: &str = "a call without an output of a model";

/// When there is enough.
#[derive(Clone, Copy, Debug)]
pub(super) struct Enough {
    pub(super) output_tokens: u64,
    pub(super) calls: u64,
    pub(super) bytes: u64,
}

/// The calls that were written, and those that were not.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    pub(super) calls: u64,
    /// Tokens of their outputs, about.
    pub(super) output_tokens: u64,
    pub(super) bytes: u64,
    /// Calls that are not in the file, by reason.
    pub(super) left_out: BTreeMap<&'static str, u64>,
    /// Whether there is enough. Further calls only pass through.
    pub(super) is_enough: bool,
    /// The error that ended the writing.
    pub(super) error: Option<String>,
}

/// The way to the file. Clones share it.
#[derive(Clone)]
pub(super) struct RecordWriter {
    /// `None` once it is closed.
    queue: Arc<Mutex<Option<SyncSender<Exchange>>>>,
    waiting_bytes: Arc<AtomicUsize>,
    written: Arc<Mutex<Written>>,
}

impl RecordWriter {
    /// Starts the thread. It ends once there is enough, or the writer is closed.
    ///
    /// # Errors
    /// There is no thread.
    pub(super) fn start(
        file: File,
        is_private: bool,
        enough: Enough,
        told: impl FnOnce(&Written) + Send + 'static,
    ) -> anyhow::Result<(Self, JoinHandle<()>)> {
        let (queue, exchanges) = sync_channel(WAITING_CALLS_MAX);
        let writer = RecordWriter {
            queue: Arc::new(Mutex::new(Some(queue))),
            waiting_bytes: Arc::default(),
            written: Arc::default(),
        };
        let (waiting_bytes, written) = (writer.waiting_bytes.clone(), writer.written.clone());
        let thread = std::thread::Builder::new().name("recorder".into());
        let thread = thread.spawn(move || {
            let mut lines = Lines {
                file: BufWriter::new(file),
                callers: HashMap::new(),
                reader: CallReader::new(RandomState::new().hash_one(0)),
                is_private,
                enough,
            };
            let result = lines.write_all(&exchanges, &waiting_bytes, &written);
            let mut written = written.lock();
            written.error = result.err().map(|error| format!("{error:#}"));
            told(&written);
        });
        Ok((writer, thread.context("there is no thread for the file")?))
    }

    /// Hands a call over. It never waits: a call for which there is no room is left out.
    pub(super) fn write(&self, exchange: Exchange) {
        let written = self.written.lock();
        if written.is_enough || written.error.is_some() {
            return;
        }
        drop(written);
        let bytes = exchange.bytes();
        let waiting = self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let sent = |queue: &SyncSender<Exchange>| queue.try_send(exchange).is_ok();
        let is_taken = waiting <= WAITING_BYTES_MAX && self.queue.lock().as_ref().is_some_and(sent);
        if !is_taken {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.leave_out("the disk was too slow");
        }
    }

    pub(super) fn leave_out(&self, reason: &'static str) {
        *self.written.lock().left_out.entry(reason).or_default() += 1;
    }

    /// Takes no further call. The thread ends when those that wait are written.
    pub(super) fn close(&self) {
        self.queue.lock().take();
    }
}

/// The lines of the file.
struct Lines {
    file: BufWriter<File>,
    /// Numbers of callers, by the hash of their key.
    callers: HashMap<u64, usize>,
    reader: CallReader,
    /// Whether calls are written without their texts.
    is_private: bool,
    enough: Enough,
}

impl Lines {
    /// Writes calls until there are enough, or no more come.
    fn write_all(
        &mut self,
        exchanges: &Receiver<Exchange>,
        waiting_bytes: &AtomicUsize,
        written: &Mutex<Written>,
    ) -> anyhow::Result<()> {
        while let Ok(exchange) = exchanges.recv() {
            let bytes = exchange.bytes();
            let record = exchange.record(self.caller(exchange.caller));
            waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            let record = match record {
                Ok(record) => record,
                Err(reason) => {
                    *written.lock().left_out.entry(reason).or_default() += 1;
                    continue;
                }
            };
            let (tokens, bytes) = self.write(record)?;
            let mut written = written.lock();
            if bytes == 0 {
                *written.left_out.entry(NO_OUTPUT).or_default() += 1;
                continue;
            }
            written.calls += 1;
            written.output_tokens += tokens;
            written.bytes += bytes;
            if written.calls >= self.enough.calls
                || written.output_tokens >= self.enough.output_tokens
                || written.bytes >= self.enough.bytes
            {
                written.is_enough = true;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Writes a call, and returns its output tokens and the bytes that it takes. Both are 0 if it has no output.
    fn write(&mut self, record: Value) -> anyhow::Result<(u64, u64)> {
        let mut text = Vec::new();
        let tokens = match self.is_private {
            true => {
                let calls = self.reader.read(record)?;
                for call in &calls {
                    serde_json::to_writer(&mut text, call)?;
                    text.push(b'\n');
                }
                calls.iter().map(TokenCall::output_tokens).sum()
            }
            false => {
                serde_json::to_writer(&mut text, &record)?;
                text.push(b'\n');
                match self.reader.count(record) {
                    Some(tokens) => tokens,
                    None => return Ok((0, 0)),
                }
            }
        };
        self.write_lines(&text)
            .context("the file cannot be written")?;
        Ok((tokens, text.len() as u64))
    }

    /// Writes lines. Whoever reads the file meanwhile sees whole calls.
    fn write_lines(&mut self, text: &[u8]) -> std::io::Result<()> {
        self.file.write_all(text)?;
        self.file.flush()
    }

    /// The name of a caller. Keys are in no file, and neither are their hashes.
    fn caller(&mut self, hash: Option<u64>) -> Option<String> {
        let next = self.callers.len() + 1;
        let number = match self.callers.len() < CALLERS_MAX {
            true => *self.callers.entry(hash?).or_insert(next),
            false => self.callers.get(&hash?).copied().unwrap_or(CALLERS_MAX),
        };
        Some(format!("key-{number}"))
    }
}
