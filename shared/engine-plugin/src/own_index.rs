//! The index of a request's own text, which the request drafts from like from any other.
//!
//! Indexing a prompt takes time in proportion to its length, so only a short one is indexed in the call that brings
//! it. Long ones are indexed by an actor. Meanwhile the engine's steps go on without the drafts of that
//! prompt.

use refrain_service_kit::actors::{self, Inbox};
use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexConfig};
use tokio::sync::{mpsc, oneshot};

use crate::awaited::Awaited;
use crate::backlog::{Backlog, HeldTokens};
use crate::config::PluginConfig;
use crate::metrics::{PluginMetrics, READING_TOKENS_MAX};

/// The key of the text in its index.
const OWN: DocumentKey = DocumentKey(0);

/// The index of a request's own text, which the reader makes of a long prompt. It is missing where the text
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

/// Indexes prompts: short ones at once, long ones by an actor.
pub(crate) struct PromptReader {
    index: IndexConfig,
    tokens_at_once: usize,
    /// Tokens of the prompts in the queue, and of the one that is being indexed.
    backlog: Backlog,
    waiting: mpsc::Sender<LongPrompt>,
    metrics: PluginMetrics,
}

/// The text of a long prompt, and where its index goes.
struct LongPrompt {
    text: Vec<u32>,
    reply: oneshot::Sender<Box<Index>>,
    _waiting: HeldTokens,
}

impl PromptReader {
    /// Starts the actor, on the runtime of the caller. It ends when the reader is dropped.
    pub(crate) fn start(config: &PluginConfig, metrics: PluginMetrics) -> Self {
        let index = IndexConfig {
            pattern_tokens_max: config.speculation.match_tokens_max,
            ..IndexConfig::default()
        };
        let backlog = Backlog::new(config.reading_tokens_max, metrics.reading_tokens.clone());
        // Each of them is longer than those that are indexed at once.
        let prompts_max = config.reading_tokens_max / (config.prompt_tokens_at_once + 1);
        let read = {
            let index = index.clone();
            move |prompts| read_all(prompts, index.clone())
        };
        let (waiting, actor) = actors::start_with("reader of prompts", prompts_max + 1, read);
        actor.detached();
        PromptReader {
            index,
            tokens_at_once: config.prompt_tokens_at_once,
            backlog,
            waiting,
            metrics,
        }
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
        let prompt = LongPrompt {
            text: text.to_vec(),
            reply,
            _waiting: self.backlog.hold(text.len()),
        };
        // If the actor is gone, so is the sender of the reply, and the text is not drafted from.
        let _ = self.waiting.try_send(prompt);
        OwnIndex::Pending(reading)
    }
}

async fn read_all(mut prompts: Inbox<LongPrompt>, config: IndexConfig) {
    while let Some(prompt) = prompts.recv().await {
        let config = config.clone();
        actors::blocking(move || {
            // The receiver is gone where the request has ended.
            if !prompt.reply.is_closed()
                && let Some(index) = index_of(&prompt.text, &config)
            {
                let _ = prompt.reply.send(index);
            }
        })
        .await;
    }
}

fn index_of(text: &[u32], config: &IndexConfig) -> Option<Box<Index>> {
    let mut index = Box::new(Index::new(config.clone()));
    index.open(OWN, &[]).ok()?;
    index.append(OWN, text).ok()?;
    Some(index)
}
