//! The index of a request's own text, which the request drafts from like from any other.
//!
//! Indexing a prompt takes time in proportion to its length, so only a short one is indexed in the call that brings
//! it. Long ones are indexed on a thread of their own. Meanwhile the engine's steps go on without the drafts of that
//! prompt.

use std::io;
use std::sync::mpsc;

use refrain_service_kit::tasks::lasting_work;
use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexConfig};
use tokio::sync::oneshot;

use crate::awaited::Awaited;
use crate::backlog::Backlog;
use crate::config::PluginConfig;
use crate::metrics::{PluginMetrics, READING_TOKENS_MAX};

/// The key of the text in its index.
const OWN: DocumentKey = DocumentKey(0);

/// The index of a request's own text, which the reader's thread makes of a long prompt. It is missing where the text
/// is too long for an index.
pub(crate) type OwnIndex = Awaited<Box<Index>>;

impl OwnIndex {
    /// Appends the tokens of `text` that the index lacks.
    pub(crate) fn catch_up(&mut self, text: &[u32]) {
        let Some(index) = self.poll() else {
            return;
        };
        let known = index.len_of(OWN).unwrap_or(0) as usize;
        let more = text.get(known..).unwrap_or_default();
        if !more.is_empty() && index.append(OWN, more).is_err() {
            *self = OwnIndex::Missing;
        }
    }

    /// The index, and the position of the end of the text in it.
    pub(crate) fn search(&self) -> Option<(&Index, Cursor)> {
        match self {
            OwnIndex::Ready(index) => Some((index, index.tip(OWN)?)),
            OwnIndex::Missing | OwnIndex::Pending(_) => None,
        }
    }
}

/// Indexes prompts: short ones at once, long ones on a thread of its own.
pub(crate) struct PromptReader {
    index: IndexConfig,
    tokens_at_once: usize,
    /// Tokens of the prompts in the queue, and of the one that is being indexed.
    backlog: Backlog,
    waiting: mpsc::Sender<LongPrompt>,
    metrics: PluginMetrics,
}

/// The text of a long prompt, and where its index goes.
type LongPrompt = (Vec<u32>, oneshot::Sender<Box<Index>>);

impl PromptReader {
    /// Starts the thread, which ends when the reader is dropped.
    pub(crate) fn start(config: &PluginConfig, metrics: PluginMetrics) -> io::Result<Self> {
        let index = IndexConfig {
            pattern_tokens_max: config.speculation.match_tokens_max,
            ..IndexConfig::default()
        };
        let backlog = Backlog::new(config.reading_tokens_max, metrics.reading_tokens.clone());
        let (waiting, prompts) = mpsc::channel();
        let thread = std::thread::Builder::new().name("refrain-reader".into());
        thread.spawn({
            let (index, backlog) = (index.clone(), backlog.clone());
            lasting_work("reader of prompts", move || {
                read_all(&prompts, &index, &backlog);
            })
        })?;
        Ok(PromptReader {
            index,
            tokens_at_once: config.prompt_tokens_at_once,
            backlog,
            waiting,
            metrics,
        })
    }

    pub(crate) fn read(&self, text: &[u32]) -> OwnIndex {
        if text.len() <= self.tokens_at_once {
            let index = index_of(text, &self.index);
            return index.map_or(OwnIndex::Missing, OwnIndex::Ready);
        }
        if !self.backlog.has_room(text.len()) {
            self.metrics.rejected(READING_TOKENS_MAX);
            return OwnIndex::Missing;
        }
        let (reply, reading) = oneshot::channel();
        self.backlog.add(text.len());
        // If the thread is gone, so is the sender of the reply, and the text is not drafted from.
        let _ = self.waiting.send((text.to_vec(), reply));
        OwnIndex::Pending(reading)
    }
}

fn read_all(prompts: &mpsc::Receiver<LongPrompt>, config: &IndexConfig, backlog: &Backlog) {
    for (text, reply) in prompts {
        // The receiver is gone where the request has ended.
        if !reply.is_closed()
            && let Some(index) = index_of(&text, config)
        {
            let _ = reply.send(index);
        }
        backlog.take_off(text.len());
    }
}

fn index_of(text: &[u32], config: &IndexConfig) -> Option<Box<Index>> {
    let mut index = Box::new(Index::new(config.clone()));
    index.open(OWN, &[]).ok()?;
    index.append(OWN, text).ok()?;
    Some(index)
}
