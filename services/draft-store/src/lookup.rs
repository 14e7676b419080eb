//! Drafts from segments as they are mapped, for workers that do not hold all of a namespace.
//!
//! What is in no segment yet is not looked up: workers hear that first of all. Each namespace that is asked for has a
//! view of its segments, beside the store's lock: a commit holds that for as long as its fsync, longer than a worker
//! waits for a draft. A view is looked at again four times a second, so what is evicted may be drafted from a moment
//! longer; what is erased is not, from the erasure's answer on.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lru::LruCache;
use refrain_protocol::lookup::{
    FoundDraft, FoundNode, LookupContext, LookupReply, LookupRequest, LookupRules,
};
use refrain_protocol::{ApiError, DocumentId, NamespaceId};
use refrain_speculation::{Expansion, Lookup, ProposeParams, Scope, Source, propose};
use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexConfig, Segment};

use crate::record::SegmentId;
use crate::shared::{Open, Shared, unavailable};

/// How old a view may be before it is compared with the store.
const VIEW_AGE_MAX: Duration = Duration::from_millis(250);
/// Namespaces with a view. One takes a few bits for each document, the segments themselves are mapped in any case.
const NAMESPACES_MAX: NonZeroUsize = NonZeroUsize::new(1_024).unwrap();
/// Longest pattern, whatever is asked for.
const PATTERN_TOKENS_MAX: u32 = 64;
/// Longest draft, whatever is asked for.
const DRAFT_TOKENS_MAX: u32 = 1_024;

/// The views of the namespaces that were asked for last.
pub(crate) struct Lookups {
    views: Mutex<Views>,
}

struct Views {
    by_namespace: LruCache<NamespaceId, View>,
    /// How often everything was forgotten: what was read before that is void.
    forgotten: u64,
}

/// A namespace's segments as one index. Cheap to clone.
#[derive(Clone)]
struct View {
    index: Arc<Index>,
    parts: Vec<Part>,
    compared: Instant,
}

/// A segment, and how many of its documents count.
type Part = (SegmentId, u64);

impl Default for Lookups {
    fn default() -> Self {
        Lookups {
            views: Mutex::new(Views {
                by_namespace: LruCache::new(NAMESPACES_MAX),
                forgotten: 0,
            }),
        }
    }
}

impl Lookups {
    fn lock(&self) -> MutexGuard<'_, Views> {
        self.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what it holds: something was erased.
    pub(crate) fn forget(&self) {
        let mut views = self.lock();
        views.by_namespace.clear();
        views.forgotten += 1;
    }

    /// Looks contexts up. Blocks on mapped pages that are not in memory, and at the first call for a namespace on the
    /// store's lock.
    pub(crate) fn run(
        &self,
        shared: &Shared,
        namespace: NamespaceId,
        request: &LookupRequest,
    ) -> Result<LookupReply, ApiError> {
        let index = self.view(shared, namespace)?;
        let params = params(request.rules);
        let contexts = request.contexts.iter();
        let drafts = contexts.map(|context| draft(&index, &params, context));
        Ok(LookupReply {
            drafts: drafts.collect(),
        })
    }

    fn view(&self, shared: &Shared, namespace: NamespaceId) -> Result<Arc<Index>, ApiError> {
        let now = Instant::now();
        let (known, forgotten) = {
            let mut views = self.lock();
            let forgotten = views.forgotten;
            let known = views.by_namespace.get_mut(&namespace).map(|known| {
                let before = known.clone();
                if now.duration_since(before.compared) >= VIEW_AGE_MAX {
                    // Whoever comes while it is compared takes it as it is.
                    known.compared = now;
                }
                before
            });
            (known, forgotten)
        };
        let seen = match &known {
            None => look(&shared.read(), namespace, None)?,
            Some(known) if now.duration_since(known.compared) < VIEW_AGE_MAX => None,
            Some(known) => match shared.try_read() {
                Some(open) => look(&open, namespace, Some(known))?,
                None => None,
            },
        };
        let Some(Seen { parts, segments }) = seen else {
            return Ok(known.map_or_else(|| Arc::new(empty()), |known| known.index));
        };
        let mut index = empty();
        for (segment, masked) in segments {
            index.mount(segment, masked);
        }
        let index = Arc::new(index);
        let mut views = self.lock();
        if views.forgotten == forgotten {
            let made = View {
                index: index.clone(),
                parts,
                compared: now,
            };
            views.by_namespace.put(namespace, made);
        }
        Ok(index)
    }
}

/// A namespace's segments, with the documents of each that do not count.
struct Seen {
    parts: Vec<Part>,
    segments: Vec<(Arc<Segment>, Vec<DocumentKey>)>,
}

/// Looks at the store; `None` when it is as it was.
fn look(
    open: &Option<Open>,
    namespace: NamespaceId,
    known: Option<&View>,
) -> Result<Option<Seen>, ApiError> {
    let catalog = &open.as_ref().ok_or_else(unavailable)?.catalog;
    let of_namespace = catalog
        .segments()
        .iter()
        .filter(|(_, mounted)| mounted.sealed.namespace() == namespace);
    let parts: Vec<Part> = of_namespace
        .map(|(segment, mounted)| (segment, mounted.live_documents))
        .collect();
    if known.is_some_and(|known| known.parts == parts) {
        return Ok(None);
    }
    let (sealed, _) = catalog.sealed_and_others(namespace);
    let segments = sealed.into_iter().map(|(mounted, gone)| {
        let mut gone = gone.into_iter().peekable();
        let numbered = (0u32..).zip(mounted.sealed.ids());
        let masked = numbered
            .filter(|(number, _)| gone.next_if_eq(number).is_some())
            .map(|(_, document)| DocumentKey(document.0));
        // Of most there are none, and then no look at each document.
        let masked = if mounted.is_worn() {
            masked.collect()
        } else {
            Vec::new()
        };
        (mounted.sealed.index().clone(), masked)
    });
    Ok(Some(Seen {
        parts,
        segments: segments.collect(),
    }))
}

fn empty() -> Index {
    Index::new(IndexConfig {
        pattern_tokens_max: PATTERN_TOKENS_MAX,
        ..IndexConfig::default()
    })
}

fn params(rules: LookupRules) -> ProposeParams {
    ProposeParams {
        expansion: match rules.tree {
            true => Expansion::Tree,
            false => Expansion::Linear,
        },
        alpha: rules.alpha,
        offset: rules.offset,
        max_spec_tokens: DRAFT_TOKENS_MAX as usize,
        min_token_prob: rules.min_token_prob,
        min_match_len: rules.min_match_tokens,
        max_pattern: rules.max_pattern_tokens.min(PATTERN_TOKENS_MAX),
        ..ProposeParams::default()
    }
}

fn draft(index: &Index, params: &ProposeParams, context: &LookupContext) -> Option<FoundDraft> {
    let tokens = &context.tokens;
    let from = tokens.len().saturating_sub(PATTERN_TOKENS_MAX as usize);
    let lookup = Lookup {
        source: Source::Suffix,
        scope: Scope::Tenant,
        index,
        // Nothing is live here.
        cursor: Cursor::default(),
        context: &tokens[from..],
    };
    let room = context.draft_tokens_max.min(DRAFT_TOKENS_MAX) as usize;
    let found = propose(&[lookup], params, room)?;
    let nodes = found.tree.nodes().iter().map(|node| FoundNode {
        token: node.token,
        parent: node.parent,
        probability: node.probability,
        count: node.count,
        place: node
            .origin
            .place
            .map(|place| (DocumentId(place.document.0), place.position)),
    });
    Some(FoundDraft {
        score: found.score,
        match_len: found.match_len,
        nodes: nodes.collect(),
    })
}
