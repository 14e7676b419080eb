//! The writer's part in making segments: what is made next, the moment at which it counts, and who waits until
//! nothing of what was removed is left in a file.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use actix::{AsyncContext, Context, Recipient};
use refrain_protocol::{ApiError, NamespaceId};
use tokio::sync::oneshot;

use super::{Writer, refuses};
use crate::config::DraftStoreConfig;
use crate::log::LogError;
use crate::record::DocumentKey;
use crate::record::SegmentId;
use crate::segments::{self, Choice, Host, Made, Plan, Policy, Product, Urgency, Work};
use crate::shared::{Open, unavailable};
use crate::writer::actor::rewriting::no_room_for_a_copy;
use crate::writer::call::Call;

/// After a segment that was not made.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// How often all namespaces are looked through for what is old, at least.
const AGE_INTERVAL_MAX: Duration = Duration::from_secs(60);
/// A document that was broken off may be gone on with for this long.
const SILENCE_MS_MIN: u64 = 3_600 * 1_000;

/// Who waits until what was removed is in no segment.
pub(crate) type Demand = oneshot::Sender<Result<(), ApiError>>;

/// What is asked of the writer about segments.
pub(crate) enum SealCall {
    /// Rewrite all segments with documents that are gone, and with `seals` seal what is at rest; begin after this
    /// call.
    Purge { demand: Demand, seals: bool },
    /// Name this one.
    Install {
        opened: u64,
        product: Box<Product>,
        reply: oneshot::Sender<Result<(), LogError>>,
    },
    /// The thread is through.
    Ended(Result<Made, LogError>),
}

/// The work under way.
struct Running {
    stop: Arc<AtomicBool>,
    from: &'static str,
    segment: SegmentId,
}

/// Rewriting what has documents that are gone, and sealing.
struct Purge {
    /// Which opening of the store it looked at; what was left in another is not known.
    opened: u64,
    left: VecDeque<SegmentId>,
    /// Seal what was at its end before this time.
    seals_before_ms: Option<u64>,
    demands: Vec<Demand>,
}

/// See the module.
#[derive(Default)]
pub(super) struct Sealing {
    running: Option<Running>,
    purge: Option<Purge>,
    /// For the next purge: the work under way may have read what they want gone.
    demands: Vec<(Demand, bool)>,
    not_before: Option<Instant>,
    /// The last segment was sealed, so that merging has its turn.
    merges_next: bool,
    /// When all namespaces were looked through for what is old; that is too much for every tick.
    aged_at: Option<Instant>,
    /// The last number given to a segment by this process; it is given to no other, whatever came of it.
    last: SegmentId,
}

impl Sealing {
    /// Has the work under way end soon: then [`SealCall::Ended`] comes.
    pub(super) fn stop(&mut self) {
        self.demands.clear();
        self.purge = None;
        if let Some(running) = &self.running {
            running.stop.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }
}

impl Policy {
    fn new(config: &DraftStoreConfig) -> Self {
        Policy {
            seal_tokens: config.seal_tokens,
            seal_documents: config.seal_documents,
            segments_max: config.segments_max,
            segment_tokens_max: config.segment_tokens_max,
        }
    }

    /// What is to be sealed next: finished and stored before `finished_ms`, or silent since `silent_ms`.
    fn choose_seal(&self, open: &Open, urgency: Urgency, rest: Rest) -> Choice {
        let catalog = &open.catalog;
        let seals = catalog
            .segments()
            .unsealed()
            .filter(|(_, unsealed)| {
                self.may_seal(unsealed.tokens, unsealed.documents.len(), urgency)
            })
            .map(|(namespace, _)| {
                let candidates = catalog.at_rest(namespace, rest.finished_ms, rest.silent_ms);
                self.seal(candidates, urgency)
            });
        first(seals)
    }

    /// What is to be merged next.
    fn choose_merge(&self, open: &Open) -> Choice {
        let by_namespace = open.catalog.segments().by_namespace();
        let mut namespaces: Vec<_> = by_namespace.into_iter().collect();
        // Where most is gone.
        namespaces.sort_by_key(|(_, segments)| {
            let masked = segments.iter().map(|(_, stats)| stats.masked_tokens);
            Reverse(masked.sum::<u64>())
        });
        let merges = namespaces
            .into_iter()
            .map(|(namespace, segments)| self.merge(namespace, &segments));
        first(merges)
    }
}

/// Bytes that a sealed document takes in its segment and, since it is removed there, in the log; and each of its tokens.
const SEALED_DOCUMENT_BYTES: u64 = 400;
const SEALED_TOKEN_BYTES: u64 = 9;

/// Bytes that a job takes at most, before anything of its sources goes.
fn product_bytes(open: &Open, namespace: NamespaceId, work: &Work) -> u64 {
    match work {
        Work::Merge(segments) => {
            let mounted = segments
                .iter()
                .filter_map(|segment| open.catalog.segments().get(*segment));
            mounted.map(|mounted| mounted.sealed.file_bytes()).sum()
        }
        Work::Seal(documents) => documents
            .iter()
            .filter_map(|document| {
                open.catalog.document(DocumentKey {
                    namespace,
                    document: *document,
                })
            })
            .map(|known| SEALED_DOCUMENT_BYTES + SEALED_TOKEN_BYTES * u64::from(known.state.len))
            .sum(),
    }
}

fn first(choices: impl Iterator<Item = Choice>) -> Choice {
    let mut choices = choices.filter(|choice| *choice != Choice::Nothing);
    choices.next().unwrap_or(Choice::Nothing)
}

/// From when on a document has come to rest.
#[derive(Clone, Copy)]
struct Rest {
    finished_ms: u64,
    silent_ms: u64,
}

impl Rest {
    /// Finished before `finished_ms`, and broken off long enough before `now_ms`.
    fn new(config: &DraftStoreConfig, finished_ms: u64, now_ms: u64) -> Self {
        let seal_after_ms = config.seal_after_s.saturating_mul(1_000);
        Rest {
            finished_ms,
            silent_ms: now_ms.saturating_sub(seal_after_ms.max(SILENCE_MS_MIN)),
        }
    }
}

fn named(choice: Choice) -> Option<(NamespaceId, Work)> {
    match choice {
        Choice::Seal(namespace, documents) => Some((namespace, Work::Seal(documents))),
        Choice::Merge(namespace, segments) => Some((namespace, Work::Merge(segments))),
        Choice::Nothing => None,
    }
}

impl Writer {
    pub(super) fn handle_seal(&mut self, call: SealCall, ctx: &mut Context<Self>) {
        match call {
            SealCall::Purge { demand, seals } => {
                self.sealing.demands.push((demand, seals));
                self.begin_next(ctx);
            }
            SealCall::Install {
                opened,
                product,
                reply,
            } => {
                let _ = reply.send(self.install(opened, *product));
            }
            SealCall::Ended(outcome) => self.end_sealing(outcome, ctx),
        }
    }

    /// Makes the next segment that is wanted or due.
    pub(super) fn seal_next(&mut self, ctx: &mut Context<Self>) {
        let is_early = |not_before| Instant::now() < not_before;
        let waits = self.sealing.not_before.is_some_and(is_early);
        let purged = self.next_purged().filter(|(namespace, work)| {
            let open = self.shared.read();
            let bytes = open
                .as_ref()
                .map_or(0, |open| product_bytes(open, *namespace, work));
            self.has_room_for(bytes)
        });
        if purged.is_none() && self.sealing.purge.is_some() {
            // A demand is no reason to fill the disk: the log could not be opened again.
            self.end_purge(Err(no_room_for_a_copy()));
        }
        let due = purged.or_else(|| match waits {
            true => None,
            false => self.next_due(),
        });
        if let Some((namespace, work)) = due {
            self.begin_sealing(namespace, work, ctx);
        }
    }

    /// The next segment that somebody wants rewritten.
    fn next_purged(&mut self) -> Option<(NamespaceId, Work)> {
        loop {
            if self.sealing.purge.is_none() && !self.sealing.demands.is_empty() {
                self.begin_purge();
            }
            let purge = self.sealing.purge.as_mut()?;
            if self.core.is_none() || purge.opened != self.opened {
                self.end_purge(Err(outdated()));
                continue;
            }
            let open = self.shared.read();
            let Some(segment) = purge.left.pop_front() else {
                if let (Some(open), Some(before_ms)) = (open.as_ref(), purge.seals_before_ms) {
                    let rest = Rest::new(&self.config, before_ms, self.shared.now_ms());
                    let policy = Policy::new(&self.config);
                    let choice = policy.choose_seal(open, Urgency::Crowded, rest);
                    if let Some(due) = named(choice) {
                        return Some(due);
                    }
                }
                drop(open);
                self.end_purge(Ok(()));
                continue;
            };
            let mounted = open
                .as_ref()
                .and_then(|open| open.catalog.segments().get(segment));
            // One that was merged by another purge is gone.
            if let Some(mounted) = mounted {
                return Some((mounted.sealed.namespace(), Work::Merge(vec![segment])));
            }
        }
    }

    fn begin_purge(&mut self) {
        let demands = std::mem::take(&mut self.sealing.demands);
        let seals = demands.iter().any(|(_, seals)| *seals);
        let demands: Vec<Demand> = demands.into_iter().map(|(demand, _)| demand).collect();
        let (left, cleared) = {
            let open = self.shared.read();
            let Some(open) = open.as_ref() else {
                for demand in demands {
                    let _ = demand.send(Err(unavailable()));
                }
                return;
            };
            let segments = open.catalog.segments();
            let worn = segments.iter().filter(|(_, mounted)| mounted.is_worn());
            let left = worn.map(|(segment, _)| segment).collect();
            // A file that could not be deleted at its time is to be gone now.
            let cleared = segments::clear_orphans(&self.config.data_dir, |segment| {
                segments.get(segment).is_some()
            });
            (left, cleared)
        };
        self.sealing.purge = Some(Purge {
            opened: self.opened,
            left,
            // What was stored in this very millisecond, too.
            seals_before_ms: seals.then(|| self.shared.now_ms() + 1),
            demands,
        });
        if let Err(error) = cleared {
            self.end_purge(Err(error));
        }
    }

    fn end_purge(&mut self, outcome: Result<(), LogError>) {
        if let Some(purge) = self.sealing.purge.take() {
            for demand in purge.demands {
                let _ = demand.send(outcome.clone().map_err(|error| refuses(&error)));
            }
        }
    }

    fn next_due(&mut self) -> Option<(NamespaceId, Work)> {
        let now_ms = self.shared.now_ms();
        let seal_after_ms = self.config.seal_after_s.saturating_mul(1_000);
        let seal_age = Duration::from_secs(self.config.seal_age_s);
        let mut rest = Rest::new(&self.config, now_ms.saturating_sub(seal_after_ms), now_ms);
        let looks_at_age = self
            .sealing
            .aged_at
            .is_none_or(|at| at.elapsed() >= seal_age.min(AGE_INTERVAL_MAX));
        let shared = self.shared.clone();
        let open = shared.read();
        let open = open.as_ref()?;
        let urgency = if open.catalog.segments().unsealed_tokens() > self.config.unsealed_tokens_max
        {
            // Finished ones seldom go on, and those that do come back from their segment.
            rest.finished_ms = now_ms;
            Urgency::Crowded
        } else if looks_at_age {
            let age_ms = seal_age.as_millis() as u64;
            let before_ms = now_ms.saturating_sub(age_ms);
            Urgency::Aged { before_ms }
        } else {
            Urgency::Usual
        };
        let policy = Policy::new(&self.config);
        // By turns: a store that always has something to seal would never give room back, nor would one that always
        // has something to merge.
        let merge = policy.choose_merge(open);
        let has_room = |(namespace, work): &(NamespaceId, Work)| {
            self.has_room_for(product_bytes(open, *namespace, work))
        };
        let merge = named(merge).filter(has_room);
        if merge.is_some() && (self.sealing.merges_next) {
            return merge;
        }
        let seal = named(policy.choose_seal(open, urgency, rest));
        let seal = seal.filter(has_room);
        if seal.is_none() && looks_at_age {
            self.sealing.aged_at = Some(Instant::now());
        }
        seal.or(merge)
    }

    fn begin_sealing(&mut self, namespace: NamespaceId, work: Work, ctx: &mut Context<Self>) {
        let (names, highest) = {
            let open = self.shared.read();
            let Some(open) = open.as_ref() else { return };
            let highest = open.catalog.segments().iter().map(|(id, _)| id).max();
            (open.catalog.names(namespace).cloned(), highest)
        };
        let id = self.sealing.last.max(highest.unwrap_or(0)) + 1;
        self.sealing.last = id;
        let from = match &work {
            Work::Seal(_) => "log",
            Work::Merge(_) => "segments",
        };
        self.sealing.merges_next = matches!(work, Work::Seal(_));
        let stop = Arc::new(AtomicBool::new(false));
        let plan = Plan {
            dir: self.config.data_dir.clone(),
            id,
            namespace,
            names,
            work,
            stop: stop.clone(),
        };
        self.sealing.running = Some(Running {
            stop,
            from,
            segment: id,
        });
        let (shared, writer, opened) =
            (self.shared.clone(), ctx.address().recipient(), self.opened);
        let spawned = std::thread::Builder::new()
            .name("draft-store-seal".to_owned())
            .spawn(move || {
                let host = WriterHost { writer, opened };
                // Whatever happens, the writer hears of the end.
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    segments::run(&plan, &shared, &host, &|_| Ok(()))
                }))
                .unwrap_or_else(|_| Err(LogError::Refused("the sealing panicked".into())));
                host.writer.do_send(Call::Seal(SealCall::Ended(outcome)));
            });
        if let Err(error) = spawned {
            self.end_sealing(Err(LogError::Refused(error.to_string())), ctx);
        }
    }

    fn install(&mut self, opened: u64, product: Product) -> Result<(), LogError> {
        if opened != self.opened || self.closing.is_some() || self.core.is_none() {
            return Err(outdated());
        }
        self.run(|core, catalog, now_ms| core.install(catalog, product, now_ms))
            .map_err(|error| LogError::Refused(error.to_string()))?;
        // Before the files of what was merged are deleted, so that their room comes back.
        self.drop_views();
        Ok(())
    }

    fn end_sealing(&mut self, outcome: Result<Made, LogError>, ctx: &mut Context<Self>) {
        let Some(running) = self.sealing.running.take() else {
            return;
        };
        let told = if outcome.is_ok() { "done" } else { "failed" };
        let made = self
            .metrics
            .segments_made
            .with_label_values(&[running.from, told]);
        made.inc();
        match outcome {
            Ok(made) => tracing::info!(
                from = running.from,
                documents = made.documents,
                tokens = made.tokens,
                bytes = made.bytes,
                "draft store segment made"
            ),
            Err(error) => {
                tracing::warn!(from = running.from, %error, "draft store segment not made");
                self.sealing.not_before = Some(Instant::now() + RETRY_AFTER);
                self.clear_failed(running.segment);
                self.end_purge(Err(error));
            }
        }
        self.observe();
        self.observe_disk();
        if self.closing.is_some() {
            self.close_if_quiet();
            return;
        }
        self.begin_next(ctx);
    }

    /// Deletes what is left of a segment that was not made. One that counts all the same stays: its name became
    /// durable before something failed.
    fn clear_failed(&self, segment: SegmentId) {
        let open = self.shared.read();
        // Of a closed store nobody knows what counts; the next start does.
        let Some(open) = open.as_ref() else { return };
        let segments = open.catalog.segments();
        if segments.get(segment).is_none()
            && let Err(error) = segments::clear(&self.config.data_dir, segment)
        {
            tracing::warn!(%error, "draft store orphan not deleted");
        }
    }
}

fn outdated() -> LogError {
    LogError::Refused("the store was closed or opened again".into())
}

/// The writer, for the thread that makes segments.
struct WriterHost {
    writer: Recipient<Call>,
    opened: u64,
}

impl Host for WriterHost {
    fn install(&self, product: Product) -> Result<(), LogError> {
        let (reply, answer) = oneshot::channel();
        // One call for each segment: the mailbox takes it even when it is full.
        self.writer.do_send(Call::Seal(SealCall::Install {
            opened: self.opened,
            product: Box::new(product),
            reply,
        }));
        answer.blocking_recv().unwrap_or_else(|_| Err(outdated()))
    }
}

#[cfg(test)]
impl Writer {
    /// Begins a purge with a segment to go; answers with who waits for it.
    pub(super) fn purge_in_progress(&mut self) -> oneshot::Receiver<Result<(), ApiError>> {
        let (demand, waits) = oneshot::channel();
        self.sealing.demands.push((demand, false));
        self.begin_purge();
        let purge = self.sealing.purge.as_mut();
        purge.expect("began").left.push_back(7);
        waits
    }

    pub(super) fn go_on_purging(&mut self) {
        assert!(self.next_purged().is_none());
    }
}
