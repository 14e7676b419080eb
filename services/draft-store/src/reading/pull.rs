//! Reading the news of several namespaces and groups for one pull.

use std::collections::HashSet;

use refrain_protocol::document::{FeedCursor, FeedDelta};
use refrain_protocol::pull::{PullReply, Scope, ScopeDelta, ScopeNews, ScopePull};
use refrain_protocol::{ApiError, DocumentId, NamespaceId};

use crate::catalog::{GroupKey, GroupReader};
use crate::reading::answer_budget::AnswerBudget;
use crate::reading::feed::{FeedRead, FeedSource, read};
use crate::record::DocumentKey;
use crate::shared_store::SharedStore;

/// A pull in progress: what its scopes have read so far. It ends with the first read that finds news.
pub(crate) struct Pull {
    scopes: Vec<ReadScope>,
    tokens_max: usize,
    bytes_max: usize,
    is_full: bool,
}

struct ReadScope {
    /// `None` for a scope that is refused.
    source: Option<Source>,
    own: HashSet<DocumentId>,
    asked: FeedCursor,
    /// Up to here there is nothing for the reader.
    cursor: FeedCursor,
    /// It was not read since its namespace changed.
    is_due: bool,
    news: Option<ScopeNews>,
}

enum Source {
    Namespace(NamespaceId),
    Group(GroupKey),
}

impl Source {
    fn namespace(&self) -> NamespaceId {
        match self {
            Source::Namespace(namespace) | Source::Group((namespace, _)) => *namespace,
        }
    }
}

impl Pull {
    /// A pull of scopes, each with its namespace or the reason why that is refused.
    pub(crate) fn new(
        scopes: impl IntoIterator<Item = (Result<NamespaceId, ApiError>, ScopePull)>,
        tokens_max: usize,
        bytes_max: usize,
    ) -> Self {
        let scopes = scopes.into_iter().map(|(namespace, asked)| {
            let (source, news) = match (namespace, asked.scope) {
                (Ok(namespace), Scope::Namespace) => (Some(Source::Namespace(namespace)), None),
                (Ok(namespace), Scope::Group(name)) => {
                    (Some(Source::Group((namespace, name))), None)
                }
                (Err(error), _) => (None, Some(refused(error))),
            };
            ReadScope {
                is_due: source.is_some(),
                source,
                own: asked.own.into_iter().collect(),
                asked: asked.after,
                cursor: asked.after,
                news,
            }
        });
        Pull {
            scopes: scopes.collect(),
            tokens_max,
            bytes_max,
            is_full: false,
        }
    }

    /// The namespaces whose changes may be news.
    pub(crate) fn namespaces(&self) -> HashSet<NamespaceId> {
        let sources = self.scopes.iter().filter_map(|of| of.source.as_ref());
        sources.map(Source::namespace).collect()
    }

    /// Notes that these namespaces have changed, so that their scopes are read again.
    pub(crate) fn note_changed(&mut self, changed: &HashSet<NamespaceId>) {
        for scope in &mut self.scopes {
            let source = scope.source.as_ref();
            scope.is_due |= source.is_some_and(|source| changed.contains(&source.namespace()));
        }
    }

    /// Whether there is an answer that its reader waits for.
    pub(crate) fn has_news(&self) -> bool {
        self.is_full || self.scopes.iter().any(|scope| scope.news.is_some())
    }

    /// Reads the scopes that are due, the first ones first, while the answer has room. Returns the documents that
    /// were found damaged. A scope that cannot be read is refused.
    ///
    /// Blocks on the disk and on the writer, so call it from blocking threads only.
    ///
    /// # Errors
    /// The store is closed.
    pub(crate) fn read(&mut self, shared: &SharedStore) -> Result<HashSet<DocumentKey>, ApiError> {
        let mut budget = AnswerBudget::new(self.tokens_max, self.bytes_max);
        let mut damaged = HashSet::new();
        for scope in self.scopes.iter_mut().filter(|scope| scope.is_due) {
            if budget.is_spent() {
                self.is_full = true;
                break;
            }
            match scope.read(shared, &mut budget) {
                Ok(found) => damaged.extend(found),
                Err(error) if shared.is_open() => scope.news = Some(refused(error)),
                Err(error) => return Err(error),
            }
            scope.is_due = false;
            self.is_full |= scope.is_cut_off();
        }
        Ok(damaged)
    }

    /// The answer, and the tokens of groups in it. A scope without news is in it if its reader goes on elsewhere than
    /// before. A full answer leaves that out, so that its last scope is the last one that was read.
    pub(crate) fn into_reply(self) -> (PullReply, u64) {
        let mut group_tokens = 0;
        let mut deltas = Vec::new();
        for (at, scope) in (0..).zip(self.scopes) {
            let has_moved = scope.cursor != scope.asked && !self.is_full;
            let moved = || ScopeNews::Changes {
                delta: FeedDelta {
                    cursor: scope.cursor,
                    caught_up: true,
                    ..FeedDelta::default()
                },
                age_ms: None,
            };
            let Some(news) = scope.news.or_else(|| has_moved.then(moved)) else {
                continue;
            };
            if let (Some(Source::Group(_)), ScopeNews::Changes { delta, .. }) =
                (&scope.source, &news)
            {
                group_tokens += u64::from(delta.tokens());
            }
            deltas.push(ScopeDelta { scope: at, news });
        }
        let is_full = self.is_full;
        (PullReply { deltas, is_full }, group_tokens)
    }
}

impl ReadScope {
    fn read(
        &mut self,
        shared: &SharedStore,
        budget: &mut AnswerBudget,
    ) -> Result<HashSet<DocumentKey>, ApiError> {
        let mut emitted_ms: Option<u64> = None;
        let FeedRead { delta, damaged } = match &self.source {
            None => return Ok(HashSet::new()),
            Some(Source::Namespace(namespace)) => {
                let source = FeedSource::Namespace(*namespace, &self.own);
                read(shared, source, self.cursor, budget, |_, _| {})?
            }
            Some(Source::Group(group)) => {
                let now_ms = shared.now_ms();
                if !shared.read()?.catalog.groups.is_live(group, now_ms) {
                    self.news = Some(ScopeNews::Unregistered);
                    return Ok(HashSet::new());
                }
                let own = &self.own;
                let source = FeedSource::Group(&GroupReader { group, own });
                read(shared, source, self.cursor, budget, |catalog, sequence| {
                    let newest_ms = catalog.groups.emitted_ms(group, sequence);
                    emitted_ms = [emitted_ms, newest_ms].into_iter().flatten().min();
                })?
            }
        };
        self.cursor = delta.cursor;
        if delta.reset || !delta.events.is_empty() || !delta.caught_up {
            let age_ms = emitted_ms.map(|emitted_ms| shared.now_ms().saturating_sub(emitted_ms));
            self.news = Some(ScopeNews::Changes {
                delta,
                age_ms: age_ms.map(|age_ms| u32::try_from(age_ms).unwrap_or(u32::MAX)),
            });
        }
        Ok(damaged)
    }

    /// Whether its changes did not all fit.
    fn is_cut_off(&self) -> bool {
        matches!(&self.news, Some(ScopeNews::Changes { delta, .. }) if !delta.caught_up)
    }
}

fn refused(error: ApiError) -> ScopeNews {
    ScopeNews::Refused {
        kind: error.kind,
        message: error.message,
    }
}
