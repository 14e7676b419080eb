//! The index of a request's own text, which the request drafts from like from any other.
//!
//! Indexing a prompt takes time in proportion to its length, so only a short one is indexed in the call that brings
//! it. Long ones are indexed on a thread of their own. Meanwhile the engine's steps go on without the drafts of that
//! prompt.

use std::io;
use std::sync::mpsc;

use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexConfig};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use crate::config::PluginConfig;
use crate::metrics::{PluginMetrics, READING_TOKENS_MAX};

/// The key of the text in its index.
const OWN: DocumentKey = DocumentKey(0);

/// The index of a request's own text.
pub(crate) enum OwnIndex {
    /// The text is too long for an index.
    Missing,
    /// The reader's thread is indexing the prompt.
    Reading(oneshot::Receiver<Index>),
    Ready(Box<Index>),
}

impl OwnIndex {
    /// Appends the tokens of `text` that the index lacks.
    pub(crate) fn catch_up(&mut self, text: &[u32]) {
        if let OwnIndex::Reading(reading) = self {
            match reading.try_recv() {
                Ok(index) => *self = OwnIndex::Ready(Box::new(index)),
                Err(TryRecvError::Closed) => *self = OwnIndex::Missing,
                Err(TryRecvError::Empty) => {}
            }
        }
        if let OwnIndex::Ready(index) = self {
            let known = index.len_of(OWN).unwrap_or(0) as usize;
            let more = text.get(known..).unwrap_or_default();
            if !more.is_empty() && index.append(OWN, more).is_err() {
                *self = OwnIndex::Missing;
            }
        }
    }

    /// The index, and the position of the end of the text in it.
    pub(crate) fn search(&self) -> Option<(&Index, Cursor)> {
        match self {
            OwnIndex::Ready(index) => Some((index, index.tip(OWN)?)),
            OwnIndex::Missing | OwnIndex::Reading(_) => None,
        }
    }
}

/// Indexes prompts: short ones at once, long ones on a thread of its own.
pub(crate) struct PromptReader {
    index: IndexConfig,
    tokens_at_once: usize,
    waiting_tokens_max: usize,
    waiting: mpsc::Sender<LongPrompt>,
    metrics: PluginMetrics,
}

struct LongPrompt {
    text: Vec<u32>,
    reply: oneshot::Sender<Index>,
}

impl PromptReader {
    /// Starts the thread, which ends when the reader is dropped.
    pub(crate) fn start(config: &PluginConfig, metrics: PluginMetrics) -> io::Result<Self> {
        let index = IndexConfig {
            pattern_tokens_max: config.pattern_tokens_max,
            ..IndexConfig::default()
        };
        let (waiting, prompts) = mpsc::channel();
        let thread = std::thread::Builder::new().name("refrain-reader".into());
        thread.spawn({
            let (index, metrics) = (index.clone(), metrics.clone());
            move || read_all(&prompts, &index, &metrics)
        })?;
        Ok(PromptReader {
            index,
            tokens_at_once: config.prompt_tokens_at_once,
            waiting_tokens_max: config.reading_tokens_max,
            waiting,
            metrics,
        })
    }

    pub(crate) fn read(&self, text: &[u32]) -> OwnIndex {
        if text.len() <= self.tokens_at_once {
            let index = index_of(text, &self.index);
            return index.map_or(OwnIndex::Missing, |index| OwnIndex::Ready(Box::new(index)));
        }
        let waiting = self.metrics.reading_tokens.get().max(0) as usize;
        if waiting + text.len() > self.waiting_tokens_max {
            self.metrics.rejected(READING_TOKENS_MAX);
            return OwnIndex::Missing;
        }
        let (reply, reading) = oneshot::channel();
        self.metrics.reading_tokens.add(text.len() as i64);
        let text = text.to_vec();
        // If the thread is gone, so is the sender of the reply, and the text is not drafted from.
        let _ = self.waiting.send(LongPrompt { text, reply });
        OwnIndex::Reading(reading)
    }
}

fn read_all(prompts: &mpsc::Receiver<LongPrompt>, config: &IndexConfig, metrics: &PluginMetrics) {
    for LongPrompt { text, reply } in prompts {
        // The receiver is gone where the request has ended.
        if !reply.is_closed()
            && let Some(index) = index_of(&text, config)
        {
            let _ = reply.send(index);
        }
        metrics.reading_tokens.sub(text.len() as i64);
    }
}

fn index_of(text: &[u32], config: &IndexConfig) -> Option<Index> {
    let mut index = Index::new(config.clone());
    index.open(OWN, &[]).ok()?;
    index.append(OWN, text).ok()?;
    Some(index)
}
