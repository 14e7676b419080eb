//! Keeps the indexes within their limits and in shape: evicts, seals, merges, rebuilds. One task per worker, which does
//! one thing at a time, so that the cores are the decode loop's.
//!
//! What takes long is done on a blocking thread, beside the lock; under it there are only the beginning, which
//! copies live texts, and the end, which compares them and swaps.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use refrain_suffix_index::IndexError;

use super::Space;
use super::drafts::Drafts;
use super::room::Size;
use super::shared::SharedDrafts;
use super::upkeep::{Job, View, plan};
use crate::metrics::MemoryMetrics;

pub(super) struct Keeper {
    pub(super) space: Arc<Space>,
}

impl Keeper {
    /// Runs until aborted.
    pub(super) async fn run(self) {
        let pause = Duration::from_millis(self.space.config.upkeep_ms);
        loop {
            let is_full = self.make_room();
            let is_done = self.work().await;
            if is_full || is_done {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Evicts; returns whether there is more to evict.
    fn make_room(&self) -> bool {
        let Space {
            config,
            groups,
            metrics,
            ..
        } = &*self.space;
        groups.expire(Instant::now());
        let mut evicted = 0;
        let memories = self.space.namespaces();
        for memory in &memories {
            // Proposals wait behind the exclusive lock, so it is taken only where something is to go.
            if memory.read().index.tokens() <= config.namespace_tokens_max {
                continue;
            }
            let gone = memory.lock().evict(config.namespace_tokens_max);
            if gone > 0 {
                memory.lacks_room.store(true, Ordering::Relaxed);
            }
            evicted += gone;
        }
        let mut sizes = Vec::new();
        let coming = self.space.room.recount(|| {
            let mut used = Size::default();
            for memory in &memories {
                let drafts = memory.read();
                sizes.push(drafts.size());
                if drafts.is_running() {
                    used += drafts.size();
                }
            }
            used
        });
        // What is being fetched has its room already.
        let limit = Size::limit(config).less(coming);
        // The one used last stays; of it the oldest documents go.
        while let Some((last, others)) = sizes.split_last() {
            let all = sizes.iter().fold(Size::default(), |sum, size| sum + *size);
            if all.is_within(limit) {
                break;
            }
            if others.is_empty() {
                let tokens_max = tokens_within(*last, limit);
                if let Some(memory) = self.space.namespaces().last() {
                    memory.lacks_room.store(true, Ordering::Relaxed);
                    evicted += memory.lock().evict(tokens_max);
                }
                break;
            }
            self.space.evict_one();
            sizes.remove(0);
        }
        metrics.index_evictions.inc_by(evicted as u64);
        evicted > 0
    }

    /// Does the most urgent job; returns whether there was one.
    async fn work(&self) -> bool {
        let config = &self.space.config;
        let now = Instant::now();
        let quiet = Duration::from_millis(config.seal_after_ms);
        let memories = self.space.namespaces();
        let mut drafts: Vec<Arc<SharedDrafts>> = Vec::new();
        let mut views = Vec::new();
        for memory in &memories {
            views.push(view(&memory.drafts, now, quiet));
            drafts.push(memory.drafts.clone());
        }
        let live = views.iter().map(|view| view.live_tokens).sum();
        self.space.live_tokens.store(live, Ordering::Relaxed);
        for group in self.space.groups.all() {
            let needs_rebuild = group.read().index.needs_rebuild();
            views.push(View {
                needs_rebuild,
                ..View::default()
            });
            drafts.push(group.drafts.clone());
        }
        let Some((at, job)) = plan(&views, config, now) else {
            return false;
        };
        let (name, metrics) = (job.name(), &self.space.metrics);
        match run(&drafts[at], job, quiet, metrics).await {
            Ok(()) => {
                metrics.job(name);
                true
            }
            Err(error) => {
                tracing::error!(%error, job = name, "index job broke off");
                false
            }
        }
    }
}

impl Job {
    fn name(&self) -> &'static str {
        match self {
            Job::Seal => "seal",
            Job::Rebuild => "rebuild",
            Job::Merge(_) => "merge",
        }
    }
}

/// How many tokens of an index are within the limit.
fn tokens_within(size: Size, limit: Size) -> u64 {
    let by_bytes =
        u128::from(size.tokens) * u128::from(limit.bytes) / u128::from(size.bytes.max(1));
    limit
        .tokens
        .min(u64::try_from(by_bytes).unwrap_or(u64::MAX))
}

fn view(shared: &SharedDrafts, now: Instant, quiet: Duration) -> View {
    let sealed_at = shared.sealed_at();
    let drafts = shared.read();
    View {
        live_tokens: drafts.index.live_tokens(),
        sealable_tokens: drafts.sealable_tokens(now, quiet),
        sealed_at,
        needs_rebuild: drafts.index.needs_rebuild(),
        segments: drafts.index.segments().len(),
        merge: drafts.index.plan_merge(),
    }
}

/// Carries out a job.
async fn run(
    shared: &Arc<SharedDrafts>,
    job: Job,
    quiet: Duration,
    metrics: &MemoryMetrics,
) -> anyhow::Result<()> {
    let held = metrics.index_lock_seconds.with_label_values(&[job.name()]);
    let retired = match &job {
        Job::Seal | Job::Rebuild => {
            let _building = shared.building.lock().await;
            let begin = |drafts: &mut Drafts| match job {
                Job::Seal => drafts.begin_seal(Instant::now(), quiet),
                _ => drafts.index.begin_rebuild(),
            };
            let rebuild = shared.timed(&held, begin);
            let rebuilt = tokio::task::spawn_blocking(move || rebuild.run()).await??;
            let retired = shared.timed(&held, |drafts| drafts.finish(rebuilt, Instant::now()))?;
            if job == Job::Seal {
                shared.set_sealed_at(Instant::now());
            }
            retired
        }
        Job::Merge(positions) => {
            let merge = shared.timed(&held, |drafts| drafts.index.begin_merge(positions));
            let merged = tokio::task::spawn_blocking(move || merge.run().map_err(IndexError::from))
                .await??;
            shared.timed(&held, |drafts| drafts.index.finish_merge(merged))?
        }
    };
    // Giving memory back takes milliseconds, too.
    tokio::task::spawn_blocking(move || drop(retired)).await?;
    Ok(())
}

#[cfg(test)]
mod tests;
