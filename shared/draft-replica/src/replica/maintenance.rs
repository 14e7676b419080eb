//! Maintenance of the indexes: keeping them within their limits, and sealing, merging and rebuilding them.
//!
//! One task does one job at a time, so that the cores are left to the decode loop. Long work is done on a blocking
//! thread beside the lock. Under the lock there are only the beginning of a job, which copies live texts, and its
//! end, which compares them and swaps.

mod plan;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use self::plan::{IndexView, Job, next_job};
use super::capacity::IndexSize;
use super::draft_index::DraftIndex;
use super::locked_index::LockedIndex;
use super::namespace::NamespaceReplica;
use super::registry::{Registry, SharedState};
use crate::metrics::{DOCUMENT, ReplicaMetrics};

/// The outcome of keeping namespaces within the limit.
#[derive(Debug, Default, PartialEq, Eq)]
struct Fitted {
    /// Documents that were evicted from a namespace that stays.
    evicted: usize,
    /// The order of use has changed since the sizes were taken.
    is_outdated: bool,
}

impl Registry {
    /// Maintains all indexes until it is aborted.
    pub(super) async fn maintain(self: Arc<Self>) {
        let pause = Duration::from_millis(self.shared.config.upkeep_ms);
        loop {
            let evicted = self.evict();
            let worked = self.do_next_job().await;
            if evicted || worked {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Evicts what exceeds the limits. Returns whether there may be more to evict at once.
    fn evict(&self) -> bool {
        let SharedState {
            config,
            groups,
            metrics,
            capacity,
            ..
        } = &*self.shared;
        groups.expire(Instant::now());
        groups.recount();
        let mut evicted = 0;
        let namespaces = self.namespaces();
        for namespace in &namespaces {
            // Proposals wait behind the exclusive lock, so it is taken only where documents have to go.
            if namespace.read().index.tokens() <= config.namespace_tokens_max {
                continue;
            }
            let documents = namespace.write().evict(config.namespace_tokens_max);
            if documents > 0 {
                namespace.lacks_capacity.store(true, Ordering::Relaxed);
            }
            evicted += documents;
        }
        let mut sizes = Vec::new();
        let reserved = capacity.recount(|| {
            let mut in_use = IndexSize::default();
            for namespace in &namespaces {
                let index = namespace.read();
                sizes.push((namespace.clone(), index.size()));
                if index.is_in_use() {
                    in_use += index.size();
                }
            }
            in_use
        });
        // Segments that are being fetched have their capacity already.
        let limit = IndexSize::limit(config).saturating_sub(reserved);
        let fitted = self.fit(sizes, limit);
        evicted += fitted.evicted;
        let evictions = metrics.evictions.with_label_values(&[DOCUMENT]);
        evictions.inc_by(evicted as u64);
        evicted > 0 || fitted.is_outdated
    }

    /// Evicts namespaces until the rest is within the limit, the least recently used first. The most recently used
    /// one stays, and loses its oldest documents. `sizes` are in the order of use.
    ///
    /// Requests go on meanwhile. Where one has used the namespace that would be next, the sizes have to be taken
    /// anew.
    fn fit(&self, sizes: Vec<(Arc<NamespaceReplica>, IndexSize)>, limit: IndexSize) -> Fitted {
        let mut fitted = Fitted::default();
        let sum = |sum, (_, size): &(_, IndexSize)| sum + *size;
        let mut left = &sizes[..];
        while !left.iter().fold(IndexSize::default(), sum).is_within(limit) {
            match left {
                [] => break,
                [(last, size)] => {
                    last.lacks_capacity.store(true, Ordering::Relaxed);
                    fitted.evicted += last.write().evict(size.tokens_within(limit));
                    break;
                }
                [(first, _), others @ ..] => {
                    if !self.evict_if_least_used(first.id) {
                        fitted.is_outdated = true;
                        break;
                    }
                    left = others;
                }
            }
        }
        fitted
    }

    /// Does the most urgent job. Returns whether there was one.
    async fn do_next_job(&self) -> bool {
        let config = &self.shared.config;
        let now = Instant::now();
        let quiet = Duration::from_millis(config.seal_after_ms);
        let mut indexes: Vec<Arc<LockedIndex>> = Vec::new();
        let mut views = Vec::new();
        for namespace in self.namespaces() {
            views.push(view(&namespace.index, now, quiet));
            indexes.push(namespace.index.clone());
        }
        let live = views.iter().map(|view| view.live_tokens).sum();
        self.shared.live_tokens.store(live, Ordering::Relaxed);
        for group in self.shared.groups.all() {
            let needs_rebuild = group.read().index.needs_rebuild();
            views.push(IndexView {
                needs_rebuild,
                ..IndexView::default()
            });
            indexes.push(group.index.clone());
        }
        let Some((at, job)) = next_job(&views, config, now) else {
            return false;
        };
        let (name, metrics) = (job.name(), &self.shared.metrics);
        match run(&indexes[at], job, quiet, metrics).await {
            Ok(()) => {
                metrics.jobs.with_label_values(&[name]).inc();
                true
            }
            Err(error) => {
                tracing::error!(%error, job = name, "a job on an index failed; its documents stay as they were");
                false
            }
        }
    }
}

/// The properties of an index that the choice of the next job depends on.
fn view(index: &LockedIndex, now: Instant, quiet: Duration) -> IndexView {
    let sealed_at = *index.sealed_at.lock();
    let index = index.drafts.read();
    IndexView {
        live_tokens: index.index.live_tokens(),
        sealable_tokens: index.sealable_tokens(now, quiet),
        sealed_at,
        needs_rebuild: index.index.needs_rebuild(),
        segments: index.index.segments().len(),
        merge: index.index.plan_merge(),
    }
}

/// Carries out a job.
async fn run(
    index: &Arc<LockedIndex>,
    job: Job,
    quiet: Duration,
    metrics: &ReplicaMetrics,
) -> anyhow::Result<()> {
    let lock_seconds = metrics.lock_seconds.with_label_values(&[job.name()]);
    let retired = match &job {
        Job::Seal | Job::Rebuild => {
            let _building = index.building.lock().await;
            let begin = |index: &mut DraftIndex| match job {
                Job::Seal => index.begin_seal(Instant::now(), quiet),
                _ => index.index.begin_rebuild(),
            };
            let rebuild = index.write_timed(&lock_seconds, begin);
            let rebuilt = tokio::task::spawn_blocking(move || rebuild.run()).await??;
            let finish = |index: &mut DraftIndex| index.finish_rebuild(rebuilt, Instant::now());
            let retired = index.write_timed(&lock_seconds, finish)?;
            index.revive();
            if job == Job::Seal {
                *index.sealed_at.lock() = Some(Instant::now());
            }
            retired
        }
        Job::Merge(positions) => {
            let begin = |index: &mut DraftIndex| index.index.begin_merge(positions);
            let merge = index.write_timed(&lock_seconds, begin);
            let merged = tokio::task::spawn_blocking(move || merge.run()).await??;
            index.write_timed(&lock_seconds, |index| index.index.finish_merge(merged))?
        }
    };
    // Freeing the memory takes milliseconds, too.
    tokio::task::spawn_blocking(move || drop(retired)).await?;
    Ok(())
}

#[cfg(test)]
mod tests;
