//! The writer's actor: gathers updates for a commit, gives the core its clock, and opens the store again
//! after an error or a panic.
//!
//! It lives on a thread of its own, so a slow fsync stalls nobody but those who wait for it. The core is not
//! in a `service_kit::guard`, since what rebuilds it reads a disk and may fail: then the store is closed, and
//! opened again with the next tick.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actix::{Actor, AsyncContext, Context, Handler, Message, SpawnHandle};
use refrain_protocol::document::StoreStats;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock;
use tokio::sync::oneshot;

use super::{Append, Core, Outcome};
use crate::catalog::Catalog;
use crate::config::DraftStoreConfig;
use crate::directory::{self, Manifest, Opened};
use crate::log::LogError;
use crate::metrics::{Limit, StoreMetrics};
use crate::record::DocumentKey;
use crate::shared::{Open, Shared, unavailable};

/// How far the manifest may be behind.
const MANIFEST_INTERVAL: Duration = Duration::from_secs(10);

/// What is asked of the writer.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) enum Call {
    /// Store updates, and answer with the lengths once they are durable.
    Append {
        append: Append,
        tokens: PendingTokens,
        reply: oneshot::Sender<Result<Vec<u32>, ApiError>>,
    },
    /// Mark documents as used.
    Touch(Vec<DocumentKey>),
    /// Remove documents whose text is damaged.
    Forget(Vec<DocumentKey>),
    /// Commit what waits, write the manifest, close the log.
    Close(oneshot::Sender<()>),
}

/// Tokens that count against the limit of waiting ones until this is dropped.
pub(crate) struct PendingTokens {
    count: u64,
    all: Arc<AtomicU64>,
}

impl PendingTokens {
    /// Claims room for `count` tokens among at most `max`.
    pub(crate) fn claim(all: &Arc<AtomicU64>, count: u64, max: u64) -> Option<Self> {
        let mut claimed = PendingTokens {
            count,
            all: all.clone(),
        };
        let before = all.fetch_add(count, Ordering::Relaxed);
        if before + count > max && before > 0 {
            // Alone, even an oversized claim is let through: the body limit bounds it.
            drop(std::mem::replace(
                &mut claimed,
                PendingTokens {
                    count: 0,
                    all: all.clone(),
                },
            ));
            return None;
        }
        Some(claimed)
    }
}

impl Drop for PendingTokens {
    fn drop(&mut self) {
        self.all.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// An append that waits for its commit.
struct Pending {
    append: Append,
    reply: oneshot::Sender<Result<Vec<u32>, ApiError>>,
    arrived: Instant,
    _tokens: PendingTokens,
}

pub(crate) struct Writer {
    shared: Arc<Shared>,
    config: DraftStoreConfig,
    metrics: StoreMetrics,
    pending_tokens: Arc<AtomicU64>,
    /// `None` while the store is closed.
    core: Option<Core>,
    pending: Vec<Pending>,
    pending_updates: usize,
    timer: Option<SpawnHandle>,
    evicted_documents: u64,
    closed: bool,
    /// What the manifest says, and since when.
    manifest_head: u64,
    manifest_written: Instant,
}

/// The store cannot be opened or written; the caller may try again.
fn refuses(error: &LogError) -> ApiError {
    ApiError::new(
        ErrorKind::Unavailable,
        "the draft store's disk refuses; try again",
    )
    .with_retry_after_ms(1_000)
    .with_detail(error)
}

impl Writer {
    /// Opens the store.
    ///
    /// # Errors
    /// The disk refuses, or another process holds the directory.
    pub(crate) fn open(
        config: DraftStoreConfig,
        shared: Arc<Shared>,
        metrics: StoreMetrics,
        pending_tokens: Arc<AtomicU64>,
    ) -> Result<Self, LogError> {
        let mut writer = Writer {
            shared,
            config,
            metrics,
            pending_tokens,
            core: None,
            pending: Vec::new(),
            pending_updates: 0,
            timer: None,
            evicted_documents: 0,
            closed: false,
            manifest_head: 0,
            manifest_written: Instant::now(),
        };
        writer.reopen()?;
        Ok(writer)
    }

    fn reopen(&mut self) -> Result<(), LogError> {
        let Opened {
            log,
            store,
            loaded,
            quarantined,
        } = directory::open(
            &self.config.data_dir,
            self.config.cache_bytes,
            clock::unix_ms(),
        )?;
        if quarantined.is_some() {
            self.metrics.quarantines.inc();
        }
        self.metrics.damaged_records.inc_by(loaded.damaged_records);
        if loaded.damaged_records > 0 {
            tracing::error!(
                records = loaded.damaged_records,
                "draft store records are damaged"
            );
        }
        let core = Core::new(
            log.clone(),
            self.config.clone(),
            store,
            loaded.repairs,
            loaded.damaged,
        );
        self.shared.set_open(Some(Open {
            catalog: loaded.catalog,
            log,
        }));
        self.core = Some(core);
        self.observe();
        Ok(())
    }

    /// Runs an action on the open store, under the lock. After an error or a panic the store is closed.
    fn run(
        &mut self,
        action: impl FnOnce(&mut Core, &mut Catalog, u64) -> Result<Outcome, LogError>,
    ) -> Result<Outcome, ApiError> {
        let outcome = {
            let mut open = self.shared.write();
            let (Some(core), Some(store)) = (self.core.as_mut(), open.as_mut()) else {
                return Err(unavailable());
            };
            // Core and catalog are thrown away after a panic: that is what makes the unwind safe.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                action(core, &mut store.catalog, clock::unix_ms())
            }));
            if !matches!(outcome, Ok(Ok(_))) {
                // Before anybody else gets the lock. Core and catalog both hold the log; sled gives its own
                // lock back with the last of them.
                self.shared.note_closed();
                *open = None;
                self.core = None;
            }
            outcome
        };
        match outcome {
            Ok(Ok(outcome)) => {
                self.publish(&outcome);
                Ok(outcome)
            }
            Ok(Err(error)) => {
                self.metrics.writer_restarts.inc();
                tracing::error!(%error, "draft store log refused, opening it again");
                Err(refuses(&error))
            }
            Err(_) => {
                self.metrics.writer_restarts.inc();
                tracing::error!("draft store writer panicked, opening the log again");
                Err(ApiError::internal("the writer panicked"))
            }
        }
    }

    fn publish(&mut self, outcome: &Outcome) {
        self.metrics.appended_tokens.inc_by(outcome.appended_tokens);
        for (_, removal) in &outcome.removed {
            self.metrics
                .evictions
                .with_label_values(&[removal.as_str()])
                .inc();
        }
        self.evicted_documents += outcome.removed.len() as u64;
        if outcome.reserved {
            self.write_manifest(false);
        }
        self.observe();
        self.shared.wake(&outcome.changed);
    }

    fn write_manifest(&mut self, closed: bool) {
        let open = self.shared.read();
        let (Some(core), Some(open)) = (&self.core, open.as_ref()) else {
            return;
        };
        let manifest = Manifest::new(core.store(), &open.catalog, closed);
        self.manifest_head = open.catalog.head();
        self.manifest_written = Instant::now();
        // Without a fresh one a rollback of sled would be noticed later or not at all; no reason to stop.
        if let Err(error) = manifest.write(&self.config.data_dir) {
            tracing::warn!(%error, "draft store manifest not written");
        }
    }

    /// Writes the manifest when it has been out of date for a while.
    fn refresh_manifest(&mut self) {
        let head = self.shared.read().as_ref().map(|open| open.catalog.head());
        if self.manifest_written.elapsed() >= MANIFEST_INTERVAL
            && head.is_some_and(|head| head != self.manifest_head)
        {
            self.write_manifest(false);
        }
    }

    /// Figures that are cheap enough for every commit.
    fn observe(&self) {
        let before = self.shared.stats();
        let Some(totals) = self
            .shared
            .read()
            .as_ref()
            .map(|open| open.catalog.totals())
        else {
            return;
        };
        self.shared.set_stats(StoreStats {
            documents: totals.documents,
            tokens: totals.tokens,
            logical_bytes: totals.bytes,
            disk_bytes: before.disk_bytes,
            namespaces: totals.namespaces,
            evicted_documents: self.evicted_documents,
        });
        self.metrics.documents.set(totals.documents as i64);
        self.metrics.tokens.set(totals.tokens as i64);
        self.metrics.logical_bytes.set(totals.bytes as i64);
        self.metrics
            .pending_tokens
            .set(self.pending_tokens.load(Ordering::Relaxed) as i64);
    }

    /// Figures that need a look at the disk.
    fn observe_disk(&self) {
        let Some((disk_bytes, blob_files)) = self
            .shared
            .read()
            .as_ref()
            .map(|open| (open.log.disk_bytes(), open.log.blob_files()))
        else {
            return;
        };
        self.shared.set_stats(StoreStats {
            disk_bytes,
            ..self.shared.stats()
        });
        self.metrics.disk_bytes.set(disk_bytes as i64);
        self.metrics.blob_files.set(blob_files as i64);
        if blob_files > 0 {
            tracing::error!(
                blob_files,
                "sled keeps values outside its log, they are not durable"
            );
        }
    }

    fn commit(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        self.pending_updates = 0;
        if pending.is_empty() {
            return;
        }
        let (appends, waiting): (Vec<Append>, Vec<_>) = pending
            .into_iter()
            .map(|pending| {
                (
                    pending.append,
                    (pending.reply, pending.arrived, pending._tokens),
                )
            })
            .unzip();
        let outcome = self.run(|core, catalog, now_ms| core.append(catalog, &appends, now_ms));
        let answers: Vec<Result<Vec<u32>, ApiError>> = match outcome {
            Ok(outcome) => outcome
                .lengths
                .into_iter()
                .map(|lengths| {
                    lengths.ok_or_else(|| {
                        self.metrics.reject(Limit::Namespaces);
                        ApiError::new(
                            ErrorKind::Overloaded,
                            "the draft store knows as many namespaces as it may (namespaces_max)",
                        )
                        .with_retry_after_ms(60_000)
                    })
                })
                .collect(),
            Err(error) => waiting.iter().map(|_| Err(error.clone())).collect(),
        };
        for ((reply, arrived, _tokens), answer) in waiting.into_iter().zip(answers) {
            self.metrics
                .append_seconds
                .observe(arrived.elapsed().as_secs_f64());
            // A caller that is gone needs no answer.
            let _ = reply.send(answer);
        }
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        if self.closed {
            return;
        }
        if self.core.is_none() {
            match self.reopen() {
                Ok(()) => tracing::info!("draft store log open again"),
                Err(error) => tracing::error!(%error, "draft store log does not open"),
            }
            return;
        }
        let more = self.run(Core::tick).is_ok_and(|outcome| outcome.more);
        self.observe_disk();
        self.refresh_manifest();
        if more {
            // What waits in the mailbox goes first.
            ctx.run_later(Duration::from_millis(1), |writer, ctx| writer.tick(ctx));
        }
    }
}

impl Actor for Writer {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.config.mailbox_max);
        self.observe_disk();
        ctx.run_interval(Duration::from_millis(self.config.tick_ms), |writer, ctx| {
            writer.tick(ctx)
        });
    }
}

impl Handler<Call> for Writer {
    type Result = ();

    fn handle(&mut self, call: Call, ctx: &mut Self::Context) {
        match call {
            Call::Append { reply, .. } if self.core.is_none() => {
                let _ = reply.send(Err(unavailable()));
            }
            Call::Append {
                append,
                tokens,
                reply,
            } => {
                self.pending_updates += append.updates.len();
                self.pending.push(Pending {
                    append,
                    reply,
                    arrived: Instant::now(),
                    _tokens: tokens,
                });
                if self.pending_updates >= self.config.commit_updates {
                    if let Some(timer) = self.timer.take() {
                        ctx.cancel_future(timer);
                    }
                    self.commit();
                } else if self.timer.is_none() {
                    let wait = Duration::from_millis(self.config.commit_interval_ms);
                    self.timer = Some(ctx.run_later(wait, |writer, _| {
                        writer.timer = None;
                        writer.commit();
                    }));
                }
            }
            Call::Touch(keys) => {
                // Advisory: while the store is closed there is nothing to touch.
                let _ = self.run(|core, catalog, now_ms| {
                    core.touch(catalog, &keys, now_ms);
                    Ok(Outcome::default())
                });
            }
            Call::Forget(keys) => {
                self.metrics.damaged_records.inc_by(keys.len() as u64);
                tracing::error!(documents = keys.len(), "documents are damaged and removed");
                let _ = self.run(|core, catalog, now_ms| core.forget(catalog, &keys, now_ms));
            }
            Call::Close(reply) => {
                self.commit();
                // Writes the times of use.
                let _ = self.run(Core::tick);
                self.write_manifest(true);
                self.closed = true;
                self.shared.set_open(None);
                self.core = None;
                let _ = reply.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::document::{DocumentHead, DocumentUpdate};
    use refrain_protocol::{DocumentId, Namespace};
    use refrain_service_kit::telemetry::Metrics;

    use super::*;

    fn append(document: u128) -> Append {
        let names = Namespace {
            tenant: "a".into(),
            model: "m".into(),
            tokenizer: "t".into(),
        };
        let update = DocumentUpdate {
            document: DocumentId(document),
            epoch: 1,
            prev_len: 0,
            tokens: vec![1, 2, 3],
            head: DocumentHead::default(),
            finish: None,
        };
        Append {
            namespace: names.id(),
            names,
            updates: vec![update],
        }
    }

    #[test]
    fn after_a_panic_nobody_sees_what_was_not_durable() {
        let dir = tempfile::tempdir().unwrap();
        let config = DraftStoreConfig {
            data_dir: dir.path().join("data"),
            ..DraftStoreConfig::default()
        };
        let shared = Arc::new(Shared::default());
        let metrics = StoreMetrics::new(&Metrics::new().unwrap()).unwrap();
        let pending = Arc::new(AtomicU64::new(0));
        let mut writer = Writer::open(config, shared.clone(), metrics, pending).unwrap();
        let kept = [append(1)];
        writer
            .run(|core, catalog, now_ms| core.append(catalog, &kept, now_ms))
            .unwrap();
        let error = writer
            .run(|_, catalog, _| {
                let sequence = catalog.advance();
                let key = DocumentKey {
                    namespace: kept[0].namespace,
                    document: DocumentId(9),
                };
                catalog.bury(key, sequence);
                std::panic::resume_unwind(Box::new("boom"))
            })
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Internal);
        assert!(!shared.is_open() && shared.read().is_none());
        assert!(writer.run(Core::tick).is_err());
        writer.reopen().unwrap();
        let read = shared
            .read_feed(kept[0].namespace, Default::default(), 100)
            .unwrap();
        assert_eq!(read.reply.events.len(), 1);
        assert_eq!(
            (
                shared.stats().documents,
                writer.metrics.writer_restarts.get()
            ),
            (1, 1)
        );
        let more = [append(2)];
        writer
            .run(|core, catalog, now_ms| core.append(catalog, &more, now_ms))
            .unwrap();
        assert_eq!(shared.stats().documents, 2);
    }
}
