//! The writer's part in making segments: what is made next, the moment at which it counts, and who waits until
//! nothing of what was removed is left in a file.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use actix::{AsyncContext, Context, Recipient};
use refrain_protocol::{ApiError, NamespaceId};
use refrain_service_kit::clock;
use tokio::sync::oneshot;

use super::{Writer, refuses};
use crate::config::DraftStoreConfig;
use crate::log::LogError;
use crate::record::SegmentId;
use crate::segments::{self, Choice, Host, Made, Plan, Policy, Product, Urgency, Work};
use crate::shared::{Open, unavailable};
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
        let merges = by_namespace
            .into_iter()
            .map(|(namespace, segments)| self.merge(namespace, &segments));
        first(merges)
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
                self.go_on_sealing(ctx);
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

    /// Makes a segment when one is due.
    pub(super) fn seal_if_due(&mut self, ctx: &mut Context<Self>) {
        let is_early = |not_before| Instant::now() < not_before;
        if !self.sealing.not_before.is_some_and(is_early) {
            self.go_on_sealing(ctx);
        }
    }

    /// Begins what is next, unless something is under way.
    fn go_on_sealing(&mut self, ctx: &mut Context<Self>) {
        if self.sealing.is_running() || self.closing.is_some() {
            return;
        }
        if let Some((namespace, work)) = self.next_purged().or_else(|| self.next_due()) {
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
            let open = self.shared.read();
            let Some(segment) = purge.left.pop_front() else {
                if let (Some(open), Some(before_ms)) = (open.as_ref(), purge.seals_before_ms) {
                    let rest = Rest::new(&self.config, before_ms, clock::unix_ms());
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
            left,
            seals_before_ms: seals.then(clock::unix_ms),
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
        let now_ms = clock::unix_ms();
        let seal_after_ms = self.config.seal_after_s.saturating_mul(1_000);
        let seal_age = Duration::from_secs(self.config.seal_age_s);
        let rest = Rest::new(&self.config, now_ms.saturating_sub(seal_after_ms), now_ms);
        let aged_at = &mut self.sealing.aged_at;
        let looks_at_age = aged_at.is_none_or(|at| at.elapsed() >= seal_age.min(AGE_INTERVAL_MAX));
        let shared = self.shared.clone();
        let open = shared.read();
        let open = open.as_ref()?;
        let urgency = if open.catalog.segments().unsealed_tokens() > self.config.unsealed_tokens_max
        {
            Urgency::Crowded
        } else if looks_at_age {
            let age_ms = seal_age.as_millis() as u64;
            let before_ms = now_ms.saturating_sub(age_ms);
            Urgency::Aged { before_ms }
        } else {
            Urgency::Usual
        };
        let policy = Policy::new(&self.config);
        let seal = named(policy.choose_seal(open, urgency, rest));
        if seal.is_none() && looks_at_age {
            *aged_at = Some(Instant::now());
        }
        seal.or_else(|| named(policy.choose_merge(open)))
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
        } else if self.sealing.purge.is_some() || !self.sealing.demands.is_empty() {
            self.go_on_sealing(ctx);
        } else {
            self.seal_if_due(ctx);
        }
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
