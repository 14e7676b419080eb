//! Drafts from mapped segments, for workers that do not hold all of a namespace.
//!
//! Unsealed documents are not searched: workers receive those first of all. Each requested namespace has a view of
//! its segments, outside the store's lock. A commit holds that lock for a whole `fdatasync`, which is longer than a
//! worker waits for a draft. Only the first look-up of a namespace waits for the lock, to make the view.
//!
//! While there are look-ups, the view is compared with the store four times a second, and rebuilt in the background
//! while the old one answers. So evicted documents may be drafted from for a moment longer, and once after a pause.
//! Erased documents are not, from the erasure's answer on. A view keeps the files of its segments, so it is dropped
//! when one of them is removed, or when nobody asks for it.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::lookup::{
    FoundDraft, FoundNode, LookupContext, LookupReply, LookupRequest, LookupRules,
};
use refrain_protocol::{ApiError, DocumentId, NamespaceId};
use refrain_speculation::draft::{Expansion, Lookup, ProposeParams, Scope, Source, propose};
use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexConfig, MountedSegment, Segment};

use crate::record::SegmentId;
use crate::segments;
use crate::shared_store::SharedStore;

/// Age at which a view is compared with the store.
const VIEW_AGE_MAX: Duration = Duration::from_millis(250);

/// A view without look-ups is dropped after this time.
const VIEW_UNUSED_MAX: Duration = Duration::from_secs(10);

/// Most namespaces with a view. A view takes a few bits per document; the segments are mapped in any case.
const NAMESPACES_MAX: NonZeroUsize = NonZeroUsize::new(1_024).unwrap();

/// Longest pattern, whatever the caller asks for.
const PATTERN_TOKENS_MAX: u32 = 64;

/// Longest draft, whatever the caller asks for.
const DRAFT_TOKENS_MAX: u32 = 1_024;

/// The views of the namespaces that were requested most recently.
pub(crate) struct LookupViews {
    views: Mutex<ViewCache>,
}

struct ViewCache {
    by_namespace: LruCache<NamespaceId, NamespaceView>,
    /// How often all views were dropped. Data read before the last time is not used.
    forgotten: u64,
}

/// The segments of a namespace as one index.
struct NamespaceView {
    index: Arc<Index>,
    segments: Vec<ViewSegment>,
    /// When it was last known to agree with the store.
    compared: Instant,
    used: Instant,
    is_being_compared: bool,
}

/// A segment, and its removed documents.
#[derive(Clone)]
struct ViewSegment {
    id: SegmentId,
    live_documents: u64,
    segment: Arc<Segment>,
    masked: Arc<[DocumentKey]>,
}

impl Default for LookupViews {
    fn default() -> Self {
        LookupViews {
            views: Mutex::new(ViewCache {
                by_namespace: LruCache::new(NAMESPACES_MAX),
                forgotten: 0,
            }),
        }
    }
}

impl LookupViews {
    /// Drops all views, because something was erased.
    pub(crate) fn forget(&self) {
        let mut views = self.views.lock();
        views.by_namespace.clear();
        views.forgotten += 1;
    }

    /// Drops the views with a segment that is no longer mounted, and those that nobody asks for. Returns how many are
    /// left.
    pub(crate) fn retain(&self, is_mounted: impl Fn(SegmentId) -> bool, now: Instant) -> usize {
        let mut views = self.views.lock();
        let is_kept = |view: &NamespaceView| {
            now.saturating_duration_since(view.used) < VIEW_UNUSED_MAX
                && view.segments.iter().all(|segment| is_mounted(segment.id))
        };
        let gone = views.by_namespace.iter();
        let gone: Vec<NamespaceId> = gone
            .filter(|(_, view)| !is_kept(view))
            .map(|(namespace, _)| *namespace)
            .collect();
        let gone: Vec<NamespaceView> = gone
            .iter()
            .filter_map(|namespace| views.by_namespace.pop(namespace))
            .collect();
        let left = views.by_namespace.len();
        drop(views);
        // Look-ups do not wait for files to be unmapped.
        drop(gone);
        left
    }

    /// Looks up contexts. It blocks on mapped pages that are not in memory, and at the first call for a namespace on
    /// the store's lock. Also returns whether the caller is to call [`LookupViews::refresh`] now.
    pub(crate) fn look_up(
        &self,
        shared: &SharedStore,
        namespace: NamespaceId,
        request: &LookupRequest,
    ) -> Result<(LookupReply, bool), ApiError> {
        let (index, is_due) = match self.cached(namespace) {
            Some(cached) => cached,
            None => (self.build(shared, namespace)?, false),
        };
        let params = params(request.rules);
        let contexts = request.contexts.iter();
        let drafts = contexts.map(|context| draft(&index, &params, context));
        let reply = LookupReply {
            drafts: drafts.collect(),
        };
        Ok((reply, is_due))
    }

    /// The view, and whether it is due to be refreshed. Only one caller at a time is told so.
    fn cached(&self, namespace: NamespaceId) -> Option<(Arc<Index>, bool)> {
        let now = Instant::now();
        let mut views = self.views.lock();
        let view = views.by_namespace.get_mut(&namespace)?;
        view.used = now;
        let age = now.saturating_duration_since(view.compared);
        let is_due = !view.is_being_compared && age >= VIEW_AGE_MAX;
        view.is_being_compared |= is_due;
        Some((view.index.clone(), is_due))
    }

    fn build(&self, shared: &SharedStore, namespace: NamespaceId) -> Result<Arc<Index>, ApiError> {
        let forgotten = self.views.lock().forgotten;
        let compared = Instant::now();
        let segments = read_segments(shared, namespace, &[])?.unwrap_or_default();
        let index = index(&segments);
        let mut views = self.views.lock();
        if views.forgotten == forgotten {
            let made = NamespaceView {
                index: index.clone(),
                segments,
                compared,
                used: Instant::now(),
                is_being_compared: false,
            };
            views.by_namespace.put(namespace, made);
        }
        Ok(index)
    }

    /// Brings a view up to date. It blocks on the store's lock. To be called when [`LookupViews::look_up`] says so.
    pub(crate) fn refresh(&self, shared: &SharedStore, namespace: NamespaceId) {
        let _comparing = RefreshGuard {
            lookups: self,
            namespace,
        };
        let compared = Instant::now();
        let (before, forgotten) = {
            let views = self.views.lock();
            let Some(view) = views.by_namespace.peek(&namespace) else {
                return;
            };
            (view.segments.clone(), views.forgotten)
        };
        let seen = read_segments(shared, namespace, &before);
        let made = seen.map(|segments| segments.map(|segments| (index(&segments), segments)));
        let mut views = self.views.lock();
        if views.forgotten != forgotten {
            return;
        }
        match made {
            // The next look-up reports that the store is closed.
            Err(_) => drop(views.by_namespace.pop(&namespace)),
            Ok(made) => {
                // A view that was dropped meanwhile stays dropped.
                let Some(view) = views.by_namespace.peek_mut(&namespace) else {
                    return;
                };
                view.compared = compared;
                if let Some((index, segments)) = made {
                    view.index = index;
                    view.segments = segments;
                }
            }
        }
    }
}

/// A view that is being refreshed. Dropping this allows the next refresh.
struct RefreshGuard<'a> {
    lookups: &'a LookupViews,
    namespace: NamespaceId,
}

impl Drop for RefreshGuard<'_> {
    fn drop(&mut self) {
        if let Some(view) = self
            .lookups
            .views
            .lock()
            .by_namespace
            .peek_mut(&self.namespace)
        {
            view.is_being_compared = false;
        }
    }
}

/// The segments of a namespace now, or `None` if they are unchanged. The lock is held for one segment at a time, so
/// that a commit need not wait for all of them. A document that moves in between is in two segments or in none until
/// the next refresh.
fn read_segments(
    shared: &SharedStore,
    namespace: NamespaceId,
    cached: &[ViewSegment],
) -> Result<Option<Vec<ViewSegment>>, ApiError> {
    let listed: Vec<(SegmentId, u64)> = {
        let open = shared.read()?;
        let segments = open.catalog.segments().iter();
        segments
            .filter(|(_, mounted)| mounted.file.namespace == namespace)
            .map(|(segment, mounted)| (segment, mounted.live_documents))
            .collect()
    };
    let is_same = |segment: &ViewSegment, listed: &(SegmentId, u64)| {
        (segment.id, segment.live_documents) == *listed
    };
    if cached.len() == listed.len() && cached.iter().zip(&listed).all(|(a, b)| is_same(a, b)) {
        return Ok(None);
    }
    let mut segments = Vec::with_capacity(listed.len());
    for one in listed {
        if let Some(segment) = cached.iter().find(|segment| is_same(segment, &one)) {
            segments.push(segment.clone());
            continue;
        }
        let open = shared.read()?;
        if let Some(mounted) = open.catalog.segments().get(one.0) {
            segments.push(view_segment(mounted, mounted.gone()));
        }
    }
    Ok(Some(segments))
}

fn view_segment(mounted: &segments::ActiveSegment, gone: Vec<u32>) -> ViewSegment {
    let mut gone = gone.into_iter().peekable();
    let mut masked = Vec::with_capacity(gone.len());
    // Most segments have no removed documents, and need no look at each document.
    if gone.peek().is_some() {
        let numbered = (0u32..).zip(mounted.file.ids());
        let is_gone = numbered.filter(|(number, _)| gone.next_if_eq(number).is_some());
        masked.extend(is_gone.map(|(_, document)| DocumentKey(document.0)));
    }
    ViewSegment {
        id: mounted.file.id,
        live_documents: mounted.live_documents,
        segment: mounted.file.index().clone(),
        masked: masked.into(),
    }
}

/// A live document is in one segment only, so the segments need not be compared with each other.
fn index(segments: &[ViewSegment]) -> Arc<Index> {
    let mounted = segments
        .iter()
        .map(|part| MountedSegment::without(part.segment.clone(), part.masked.iter().copied()));
    let mut index = Index::new(IndexConfig {
        pattern_tokens_max: PATTERN_TOKENS_MAX,
        ..IndexConfig::default()
    });
    index.mount_all(mounted.collect());
    Arc::new(index)
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
        // The store's index has no live part.
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
