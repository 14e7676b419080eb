//! Sends totals that changed to every replica of the draft store, and learns there what others have counted.
//!
//! Each replica has an actor of its own, so a slow one holds up no other. A replica that is new or was away gets
//! everything that this gateway still has.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use parking_lot::Mutex;
use refrain_protocol::usage::{Period, RecordUsageRequest, UsageErasure, hour_of};
use refrain_rpc::{DraftStore, UsageReplica};
use refrain_service_kit::actors::{self, Actor};
use refrain_service_kit::backoff::jittered;
use refrain_service_kit::clock::{unix_ms, unix_s};

use super::keeper::{ChangedRows, KeeperHandle, Message};
use crate::metrics::AccountMetrics;
use crate::tenants::Budgets;

/// Time between two calls of a replica, about. Budgets of several gateways are that far behind.
const INTERVAL: Duration = Duration::from_millis(800);

/// Longest time of a call. Another one follows in any case.
const CALL_WAIT: Duration = Duration::from_secs(10);

/// Rows of one call.
const PAGE_ROWS: usize = 1_024;

/// Time between two looks for new replicas.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two looks for rows that may be forgotten.
const FORGET_INTERVAL: Duration = Duration::from_secs(60);

/// How long the last rows may take when the gateway stops.
const FINISH_WAIT: Duration = Duration::from_secs(2);

/// The actor that keeps an actor for each replica. All end when this is dropped.
pub(super) struct UsageSender {
    shared: Arc<Shared>,
    senders: Actor,
}

/// Is told that everything is erased of a tenant that is at least so old.
pub type OnErasure = Arc<dyn Fn(&str, Duration) + Send + Sync>;

/// The parts that a sender works with.
pub(super) struct SenderParts {
    pub(super) keeper: KeeperHandle,
    pub(super) store: Arc<dyn DraftStore>,
    pub(super) budgets: Arc<Budgets>,
    pub(super) on_erasure: OnErasure,
    pub(super) metrics: Arc<AccountMetrics>,
}

struct Shared {
    parts: SenderParts,
    links: Mutex<HashMap<String, Arc<Link>>>,
}

/// The state of a replica.
struct Link {
    replica: UsageReplica,
    /// The last change that it has.
    sent: AtomicU64,
    /// Rows that changed since then.
    unsent: AtomicU64,
    /// Erasures up to this time are known.
    erasures_known_ms: AtomicU64,
    /// It has answered before, so the erasures that it tells are new.
    has_answered: AtomicBool,
}

impl UsageSender {
    pub(super) fn start(parts: SenderParts) -> Self {
        let shared = Arc::new(Shared {
            parts,
            links: Mutex::default(),
        });
        let shown = shared.clone();
        let keep_senders = move || shown.clone().keep_senders();
        let senders = actors::start("usage senders", keep_senders);
        UsageSender { shared, senders }
    }

    /// Sends what is left, once more to each replica.
    pub(super) async fn finish(self) {
        self.senders.abort();
        let links: Vec<Arc<Link>> = self.shared.links.lock().values().cloned().collect();
        let last = links.iter().map(|link| self.shared.exchange(link));
        let last = tokio::time::timeout(FINISH_WAIT, futures_util::future::join_all(last)).await;
        if last.is_err() || last.is_ok_and(|all| all.iter().any(Result::is_err)) {
            tracing::warn!(
                "a draft store has not taken the last usage; it is sent when the gateway runs again"
            );
        }
    }
}

impl Shared {
    /// Starts an actor for each replica that is new, and ends those of replicas that are gone.
    async fn keep_senders(self: Arc<Self>) {
        let mut senders: HashMap<String, Actor> = HashMap::new();
        let mut forgot = Instant::now();
        loop {
            let replicas = self.parts.store.usage_replicas();
            let is_known = |name: &String| replicas.iter().any(|replica| replica.name == *name);
            senders.retain(|name, _| is_known(name));
            self.links.lock().retain(|name, _| is_known(name));
            for replica in replicas {
                let name = replica.name.clone();
                senders.entry(name.clone()).or_insert_with(|| {
                    let new = || {
                        Arc::new(Link {
                            replica,
                            sent: AtomicU64::new(0),
                            unsent: AtomicU64::new(0),
                            erasures_known_ms: AtomicU64::new(0),
                            has_answered: AtomicBool::new(false),
                        })
                    };
                    let link = self.links.lock().entry(name).or_insert_with(new).clone();
                    let shared = self.clone();
                    let follow = move || shared.clone().follow(link.clone());
                    actors::start("usage sender", follow)
                });
            }
            self.observe();
            if forgot.elapsed() >= FORGET_INTERVAL {
                forgot = Instant::now();
                self.forget().await;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    fn observe(&self) {
        let links = self.links.lock();
        let unsent = links
            .values()
            .map(|link| link.unsent.load(Ordering::Relaxed));
        let unsent = unsent.max().unwrap_or(0);
        self.parts
            .metrics
            .families
            .usage_unsent_rows
            .set(unsent.cast_signed());
    }

    /// Tells the keeper what every replica has. Without a replica it is nothing.
    async fn forget(&self) {
        let sent = {
            let links = self.links.lock();
            let sent = links.values().map(|link| link.sent.load(Ordering::Relaxed));
            sent.min().unwrap_or(0)
        };
        let _ = self.parts.keeper.messages.send(Message::Sent(sent)).await;
    }

    /// Exchanges usage with a replica, again and again.
    async fn follow(self: Arc<Self>, link: Arc<Link>) {
        let mut is_well = true;
        let mut wanted = self.parts.budgets.wanted();
        loop {
            wanted.mark_unchanged();
            let outcome = self.exchange(&link).await;
            if outcome.is_ok() != is_well {
                is_well = outcome.is_ok();
                let store = &link.replica.name;
                match outcome {
                    Ok(()) => tracing::info!(store, "the draft store takes usage again"),
                    Err(error) => tracing::warn!(
                        store,
                        error = format!("{error:#}"),
                        "a draft store does not take usage; this gateway keeps it and sends it later"
                    ),
                }
            }
            let pause = tokio::time::sleep(jittered(INTERVAL));
            match is_well {
                true => _ = futures_util::future::select(pin!(pause), pin!(wanted.changed())).await,
                // Requests that wait must not make this gateway call a store without a pause that is away.
                false => pause.await,
            }
        }
    }

    /// Sends all rows that changed, page by page.
    async fn exchange(&self, link: &Link) -> anyhow::Result<()> {
        loop {
            let after = link.sent.load(Ordering::Relaxed);
            let changed = self.parts.keeper.ask(|reply| Message::Changed {
                after,
                rows_max: PAGE_ROWS,
                reply,
            });
            let changed = changed.await.context("the usage journal is closed")?;
            let count = (changed.rows.len() + changed.more) as u64;
            link.unsent.store(count, Ordering::Relaxed);
            let more = changed.more;
            let outcome = self.send(link, changed).await;
            let outcome_name = if outcome.is_ok() { "done" } else { "failed" };
            let sends = &self.parts.metrics.families.usage_sends;
            sends.with_label_values(&[outcome_name]).inc();
            outcome?;
            link.unsent.store(more as u64, Ordering::Relaxed);
            if more == 0 {
                return Ok(());
            }
        }
    }

    async fn send(&self, link: &Link, changed: ChangedRows) -> anyhow::Result<()> {
        let hour = hour_of(unix_s());
        let (day, month) = (Period::Day.number(hour), Period::Month.number(hour));
        let spenders = self.parts.budgets.spenders();
        let request = RecordUsageRequest {
            gateway: self.parts.keeper.gateway,
            rows: changed.rows,
            erasures_known_ms: link.erasures_known_ms.load(Ordering::Relaxed),
            spenders: spenders.clone(),
            day,
            month,
        };
        let call = link.replica.store.record_usage(request);
        let reply = tokio::time::timeout(CALL_WAIT, call).await;
        let reply = reply.map_err(|_| anyhow!("no answer in time"))??;
        self.parts
            .budgets
            .learn(&spenders, &reply.spent, (day, month));
        if let Some(last) = reply.erasures.last() {
            let (known_ms, now_ms) = (last.at_ms, unix_ms());
            let is_new = link.has_answered.load(Ordering::Relaxed);
            for UsageErasure { tenant, at_ms } in &reply.erasures {
                // The clocks may differ, so only old erasures are judged by time.
                let age_ms = if is_new {
                    0
                } else {
                    now_ms.saturating_sub(*at_ms)
                };
                (self.parts.on_erasure)(tenant, Duration::from_millis(age_ms));
            }
            let erased = self.parts.keeper.ask(|reply_to| Message::Erase {
                erasures: reply.erasures,
                reply: reply_to,
            });
            erased
                .await
                .context("the usage journal could not be rewritten for an erasure")?;
            link.erasures_known_ms.store(known_ms, Ordering::Relaxed);
        }
        link.has_answered.store(true, Ordering::Relaxed);
        link.sent.store(changed.last_change, Ordering::Relaxed);
        Ok(())
    }
}
