//! Drafts from segments as they are mapped, for workers that do not hold all of a namespace.
//!
//! What is in no segment yet is not looked up: workers hear that first of all. Each namespace that is asked for has a
//! view of its segments, beside the store's lock: a commit holds that for as long as its fsync, longer than a worker
//! waits for a draft. Only the first look-up of a namespace waits for that lock, to make the view. While there are
//! look-ups, the view is compared with the store four times a second and made anew beside them, the old one
//! answering meanwhile; so what is evicted may be drafted from a moment longer, and once after a pause. What is
//! erased is not, from the erasure's answer on. A view holds on to its segments' files: it goes when one of them does,
//! or when nobody asks.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lru::LruCache;
use refrain_protocol::lookup::{
    FoundDraft, FoundNode, LookupContext, LookupReply, LookupRequest, LookupRules,
};
use refrain_protocol::{ApiError, DocumentId, NamespaceId};
use refrain_speculation::{Expansion, Lookup, ProposeParams, Scope, Source, propose};
use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexConfig, MountedSegment, Segment};

use crate::record::SegmentId;
use crate::segments;
use crate::shared::{Open, Shared, unavailable};

/// How old a view may be before it is compared with the store.
const VIEW_AGE_MAX: Duration = Duration::from_millis(250);
/// How long a view is kept that nobody asks.
const VIEW_UNUSED_MAX: Duration = Duration::from_secs(10);
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

/// A namespace's segments as one index.
struct View {
    index: Arc<Index>,
    parts: Vec<Part>,
    /// When it was last known to be as the store is, or nearly so.
    compared: Instant,
    used: Instant,
    is_being_compared: bool,
}

/// A segment, and which of its documents count.
#[derive(Clone)]
struct Part {
    id: SegmentId,
    live_documents: u64,
    segment: Arc<Segment>,
    masked: Arc<[DocumentKey]>,
}

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

    /// Lets go of the views with a segment that is not mounted any more, and of those that nobody asks. Returns how
    /// many are left.
    pub(crate) fn keep(&self, is_mounted: impl Fn(SegmentId) -> bool, now: Instant) -> usize {
        let mut views = self.lock();
        let is_kept = |view: &View| {
            now.saturating_duration_since(view.used) < VIEW_UNUSED_MAX
                && view.parts.iter().all(|part| is_mounted(part.id))
        };
        let gone = views.by_namespace.iter();
        let gone: Vec<NamespaceId> = gone
            .filter(|(_, view)| !is_kept(view))
            .map(|(namespace, _)| *namespace)
            .collect();
        let gone: Vec<View> = gone
            .iter()
            .filter_map(|namespace| views.by_namespace.pop(namespace))
            .collect();
        let left = views.by_namespace.len();
        drop(views);
        // Whoever looks up does not wait for files to be unmapped.
        drop(gone);
        left
    }

    /// Looks contexts up. Blocks on mapped pages that are not in memory, and at the first call for a namespace on the
    /// store's lock. With the answer it tells whether somebody is to call [`Lookups::compare`] now.
    pub(crate) fn run(
        &self,
        shared: &Shared,
        namespace: NamespaceId,
        request: &LookupRequest,
    ) -> Result<(LookupReply, bool), ApiError> {
        let (index, is_due) = match self.known(namespace) {
            Some(known) => known,
            None => (self.make(shared, namespace)?, false),
        };
        let params = params(request.rules);
        let contexts = request.contexts.iter();
        let drafts = contexts.map(|context| draft(&index, &params, context));
        let reply = LookupReply {
            drafts: drafts.collect(),
        };
        Ok((reply, is_due))
    }

    /// The view as it is, and whether it is to be compared: that is said to one caller at a time.
    fn known(&self, namespace: NamespaceId) -> Option<(Arc<Index>, bool)> {
        let now = Instant::now();
        let mut views = self.lock();
        let view = views.by_namespace.get_mut(&namespace)?;
        view.used = now;
        let age = now.saturating_duration_since(view.compared);
        let is_due = !view.is_being_compared && age >= VIEW_AGE_MAX;
        view.is_being_compared |= is_due;
        Some((view.index.clone(), is_due))
    }

    fn make(&self, shared: &Shared, namespace: NamespaceId) -> Result<Arc<Index>, ApiError> {
        let forgotten = self.lock().forgotten;
        let compared = Instant::now();
        let parts = look(shared, namespace, &[])?.unwrap_or_default();
        let index = index(&parts);
        let mut views = self.lock();
        if views.forgotten == forgotten {
            let made = View {
                index: index.clone(),
                parts,
                compared,
                used: Instant::now(),
                is_being_compared: false,
            };
            views.by_namespace.put(namespace, made);
        }
        Ok(index)
    }

    /// Brings a view up to date. Blocks on the store's lock; for who [`Lookups::run`] has told to.
    pub(crate) fn compare(&self, shared: &Shared, namespace: NamespaceId) {
        let _comparing = Comparing {
            lookups: self,
            namespace,
        };
        let compared = Instant::now();
        let (before, forgotten) = {
            let views = self.lock();
            let Some(view) = views.by_namespace.peek(&namespace) else {
                return;
            };
            (view.parts.clone(), views.forgotten)
        };
        let seen = look(shared, namespace, &before);
        let made = seen.map(|parts| parts.map(|parts| (index(&parts), parts)));
        let mut views = self.lock();
        if views.forgotten != forgotten {
            return;
        }
        match made {
            // The next look-up tells that the store is closed.
            Err(_) => drop(views.by_namespace.pop(&namespace)),
            Ok(made) => {
                // One that went meanwhile stays away.
                let Some(view) = views.by_namespace.peek_mut(&namespace) else {
                    return;
                };
                view.compared = compared;
                if let Some((index, parts)) = made {
                    view.index = index;
                    view.parts = parts;
                }
            }
        }
    }
}

/// A view that is being compared; when this is dropped, it may be once more.
struct Comparing<'a> {
    lookups: &'a Lookups,
    namespace: NamespaceId,
}

impl Drop for Comparing<'_> {
    fn drop(&mut self) {
        if let Some(view) = self.lookups.lock().by_namespace.peek_mut(&self.namespace) {
            view.is_being_compared = false;
        }
    }
}

/// Looks at the store; `None` when it is as it was. The lock is held for one segment at a time, so that a commit need not
/// wait for all of them; what moves in between is in two segments or in none until the next look.
fn look(
    shared: &Shared,
    namespace: NamespaceId,
    known: &[Part],
) -> Result<Option<Vec<Part>>, ApiError> {
    let read = |open: &Option<Open>| -> Result<Vec<(SegmentId, u64)>, ApiError> {
        let segments = open.as_ref().ok_or_else(unavailable)?.catalog.segments();
        let of_namespace = segments
            .iter()
            .filter(|(_, mounted)| mounted.sealed.namespace() == namespace);
        Ok(of_namespace
            .map(|(segment, mounted)| (segment, mounted.live_documents))
            .collect())
    };
    let listed = read(&shared.read())?;
    let is_same =
        |part: &Part, listed: &(SegmentId, u64)| (part.id, part.live_documents) == *listed;
    if known.len() == listed.len() && known.iter().zip(&listed).all(|(a, b)| is_same(a, b)) {
        return Ok(None);
    }
    let mut parts = Vec::with_capacity(listed.len());
    for one in listed {
        if let Some(part) = known.iter().find(|part| is_same(part, &one)) {
            parts.push(part.clone());
            continue;
        }
        let open = shared.read();
        let Open { catalog, .. } = open.as_ref().ok_or_else(unavailable)?;
        if let Some(mounted) = catalog.segments().get(one.0) {
            parts.push(part(mounted, mounted.gone()));
        }
    }
    Ok(Some(parts))
}

fn part(mounted: &segments::Mounted, gone: Vec<u32>) -> Part {
    let mut gone = gone.into_iter().peekable();
    let mut masked = Vec::with_capacity(gone.len());
    // Of most there are none, and then no look at each document.
    if gone.peek().is_some() {
        let numbered = (0u32..).zip(mounted.sealed.ids());
        let is_gone = numbered.filter(|(number, _)| gone.next_if_eq(number).is_some());
        masked.extend(is_gone.map(|(_, document)| DocumentKey(document.0)));
    }
    Part {
        id: mounted.sealed.id(),
        live_documents: mounted.live_documents,
        segment: mounted.sealed.index().clone(),
        masked: masked.into(),
    }
}

/// A document that counts is in one segment: nothing is to be compared between them.
fn index(parts: &[Part]) -> Arc<Index> {
    let mounted = parts
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
