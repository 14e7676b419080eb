//! A request's own text, as one that is drafted from.
//!
//! Reading a prompt takes as long as that is, so only a short one is read in the call that brings it. For long ones there is a
//! thread: the engine's steps go on meanwhile, without the drafts of that one prompt.

use std::io;
use std::sync::mpsc;

use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexConfig};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use crate::config::InEngineConfig;
use crate::metrics::{InEngineMetrics, READING_TOKENS_MAX};

/// The text in its index.
const OWN: DocumentKey = DocumentKey(0);

/// The index of a request's own text.
pub(crate) enum Own {
    /// There is none: the text is too long for one.
    Missing,
    Reading(oneshot::Receiver<Index>),
    Here(Box<Index>),
}

impl Own {
    /// Takes in what the text has more by now.
    pub(crate) fn catch_up(&mut self, text: &[u32]) {
        if let Own::Reading(reading) = self {
            match reading.try_recv() {
                Ok(index) => *self = Own::Here(Box::new(index)),
                Err(TryRecvError::Closed) => *self = Own::Missing,
                Err(TryRecvError::Empty) => {}
            }
        }
        if let Own::Here(index) = self {
            let known = index.len_of(OWN).unwrap_or(0) as usize;
            let more = text.get(known..).unwrap_or_default();
            if !more.is_empty() && index.append(OWN, more).is_err() {
                *self = Own::Missing;
            }
        }
    }

    /// What is searched, and the place of the text's end in it.
    pub(crate) fn search(&self) -> Option<(&Index, Cursor)> {
        match self {
            Own::Here(index) => Some((index, index.tip(OWN)?)),
            Own::Missing | Own::Reading(_) => None,
        }
    }
}

/// Reads prompts: short ones at once, long ones on a thread of its own.
pub(crate) struct Reader {
    index: IndexConfig,
    tokens_at_once: usize,
    waiting_max: usize,
    waiting: mpsc::Sender<Prompt>,
    metrics: InEngineMetrics,
}

struct Prompt {
    text: Vec<u32>,
    read: oneshot::Sender<Index>,
}

impl Reader {
    /// Starts the thread. It ends with the reader.
    pub(crate) fn start(config: &InEngineConfig, metrics: InEngineMetrics) -> io::Result<Self> {
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
        Ok(Reader {
            index,
            tokens_at_once: config.prompt_tokens_at_once,
            waiting_max: config.reading_tokens_max,
            waiting,
            metrics,
        })
    }

    pub(crate) fn read(&self, text: &[u32]) -> Own {
        if text.len() <= self.tokens_at_once {
            return read(text, &self.index)
                .map_or(Own::Missing, |index| Own::Here(Box::new(index)));
        }
        let waiting = self.metrics.reading_tokens.get().max(0) as usize;
        if waiting + text.len() > self.waiting_max {
            self.metrics.rejected(READING_TOKENS_MAX);
            return Own::Missing;
        }
        let (read, reading) = oneshot::channel();
        self.metrics.reading_tokens.add(text.len() as i64);
        let text = text.to_vec();
        // Without the thread the other end is gone, and the text is not drafted from.
        let _ = self.waiting.send(Prompt { text, read });
        Own::Reading(reading)
    }
}

fn read_all(prompts: &mpsc::Receiver<Prompt>, index: &IndexConfig, metrics: &InEngineMetrics) {
    for Prompt { text, read: reply } in prompts {
        // Nobody waits for it where its request has ended.
        if !reply.is_closed()
            && let Some(index) = read(&text, index)
        {
            let _ = reply.send(index);
        }
        metrics.reading_tokens.sub(text.len() as i64);
    }
}

fn read(text: &[u32], config: &IndexConfig) -> Option<Index> {
    let mut index = Index::new(config.clone());
    index.open(OWN, &[]).ok()?;
    index.append(OWN, text).ok()?;
    Some(index)
}
