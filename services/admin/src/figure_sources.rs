//! The state of the mesh for the console, with the metrics of all services that the gateway can reach.
//!
//! A browser reaches only this listener, so the gateway asks the others. It does that at most once a second, however
//! many operators look, and waits two seconds for each at most.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::scheduling::WorkerReport;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{MeshPart, Scheduler};
use refrain_service_kit::clock;
use serde::Serialize;
use tokio::sync::Mutex;

use super::parts::AdminParts;

/// Age up to which an answer serves others as well.
const FRESH_FOR: Duration = Duration::from_secs(1);
/// Longest wait for a service.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// Most services whose metrics are read. The answer names the others.
const PARTS_MAX: usize = 64;

/// The families that the answer has, without the buckets of histograms: what the console shows.
const FAMILIES: &[&str] = &[
    "gen_ai_server_time_to_first_token_seconds",
    "refrain_draft_store_appended_tokens_total",
    "refrain_draft_store_disk_bytes",
    "refrain_draft_store_disk_free_bytes",
    "refrain_draft_store_documents",
    "refrain_draft_store_erased_documents",
    "refrain_draft_store_evictions_total",
    "refrain_draft_store_feed_lag_messages",
    "refrain_draft_store_info",
    "refrain_draft_store_logical_bytes",
    "refrain_draft_store_pending_tokens",
    "refrain_draft_store_quarantines_held",
    "refrain_draft_store_reclaimed_bytes_total",
    "refrain_draft_store_rejections_total",
    "refrain_draft_store_segment_bytes",
    "refrain_draft_store_segments",
    "refrain_draft_store_tokens",
    "refrain_draft_store_unsealed_tokens",
    "refrain_engine_step_seconds_total",
    "refrain_gateway_rejections_total",
    "refrain_gateway_requests_in_flight",
    "refrain_gateway_requests_total",
    "refrain_gateway_tokens_total",
    "refrain_goodput_tokens_total",
    "refrain_replica_tokens",
    "refrain_scheduler_leases_running",
    "refrain_scheduler_queue_length",
    "refrain_scheduler_waiting",
    "refrain_spec_accepted_tokens_total",
    "refrain_spec_drafted_tokens_total",
    "refrain_spec_emitted_tokens_total",
    "refrain_spec_gain_error_ratio",
    "refrain_spec_gain_ratio",
    "refrain_spec_gain_steps",
    "refrain_spec_steps_total",
    "refrain_worker_parked_requests",
];

/// The newest figures, which others may want as well.
#[derive(Default)]
pub(super) struct NewestFigures(Mutex<Option<(Instant, Arc<Figures>)>>);

/// The state of the mesh.
#[derive(Serialize)]
pub(super) struct Figures {
    /// The time of the answer, Unix milliseconds.
    at_ms: u64,
    version: &'static str,
    /// Why the gateway is not ready.
    trouble: Option<String>,
    models: Vec<String>,
    workers: Vec<WorkerReport>,
    /// Why the workers are not known.
    workers_trouble: Option<String>,
    parts: Vec<Part>,
    /// Services that were not asked, since there are more than `PARTS_MAX`.
    parts_left_out: usize,
}

/// The metrics of a service.
#[derive(Serialize)]
struct Part {
    role: &'static str,
    /// Its URL, which this gateway does not have.
    url: Option<String>,
    /// Why its metrics are missing.
    trouble: Option<String>,
    /// Metrics in the text format of Prometheus.
    metrics: String,
}

/// The live workers.
///
/// # Errors
/// The scheduler does not answer in time.
pub(super) async fn workers(scheduler: &dyn Scheduler) -> Result<Vec<WorkerReport>, ApiError> {
    let workers = tokio::time::timeout(ANSWER_WAIT, scheduler.workers()).await;
    workers.unwrap_or_else(|_| {
        let message = "the scheduler does not answer in time";
        Err(ApiError::new(ErrorKind::Timeout, message))
    })
}

impl NewestFigures {
    /// The newest figures, or those of the last second. Others who ask meanwhile wait for the same answer.
    pub(super) async fn figures(&self, parts: &AdminParts) -> Arc<Figures> {
        let mut last = self.0.lock().await;
        if let Some((made, figures)) = &*last
            && made.elapsed() < FRESH_FOR
        {
            return figures.clone();
        }
        let figures = Arc::new(Figures::read(parts).await);
        *last = Some((Instant::now(), figures.clone()));
        figures
    }
}

impl Figures {
    async fn read(of: &AdminParts) -> Self {
        let (workers, workers_trouble) = match workers(&*of.scheduler).await {
            Ok(workers) => (workers, None),
            Err(error) => (Vec::new(), Some(error.message)),
        };
        let own = String::from_utf8_lossy(&of.metrics.render()).into_owned();
        let mut parts = vec![Part {
            role: "gateway",
            url: None,
            trouble: None,
            metrics: shown(&own),
        }];
        let mut parts_left_out = 0;
        if let Some(pages) = &of.mesh.metrics {
            let of_workers = workers.iter().map(|worker| MeshPart {
                role: "worker",
                url: worker.url.clone(),
            });
            let others: Vec<_> = pages.parts().iter().cloned().chain(of_workers).collect();
            parts_left_out = others.len().saturating_sub(PARTS_MAX);
            let reads = others.into_iter().take(PARTS_MAX).map(|part| async move {
                let page = pages.read(&part.url, ANSWER_WAIT).await;
                let (metrics, trouble) = match page {
                    Ok(page) => (shown(&page), None),
                    Err(error) => (String::new(), Some(error.message)),
                };
                Part {
                    role: part.role,
                    url: Some(part.url),
                    trouble,
                    metrics,
                }
            });
            parts.extend(futures_util::future::join_all(reads).await);
        }
        Figures {
            at_ms: clock::unix_ms(),
            version: env!("CARGO_PKG_VERSION"),
            trouble: (of.readiness)().err(),
            models: of.models.clone(),
            workers,
            workers_trouble,
            parts,
            parts_left_out,
        }
    }
}

/// The lines of a page of metrics that the console needs.
fn shown(page: &str) -> String {
    let mut text = String::new();
    for line in page.lines() {
        let end = line.find(['{', ' ']).unwrap_or(line.len());
        let name = &line[..end];
        let family = name.strip_suffix("_sum");
        let family = family.or_else(|| name.strip_suffix("_count"));
        let is_shown = |name: &str| FAMILIES.binary_search(&name).is_ok();
        if is_shown(name) || family.is_some_and(is_shown) {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console;

    #[test]
    fn only_the_lines_that_the_console_needs_are_sent() {
        let page = "# HELP refrain_goodput_tokens_total Emitted tokens.\n\
                    refrain_goodput_tokens_total{model=\"m\"} 81\n\
                    gen_ai_server_time_to_first_token_seconds_bucket{le=\"1\"} 0\n\
                    gen_ai_server_time_to_first_token_seconds_sum{model=\"m\"} 12\n\
                    gen_ai_server_time_to_first_token_seconds_count{model=\"m\"} 1\n\
                    refrain_draft_store_tokens 5\n\
                    process_cpu_seconds_total 1\n";
        let lines: Vec<&str> = page.lines().collect();
        let text = shown(page);
        let kept: Vec<&str> = text.lines().collect();
        assert_eq!(kept, [lines[1], lines[3], lines[4], lines[5]]);
    }

    /// The names of metrics in a module of the page.
    fn names(module: &str) -> impl Iterator<Item = &str> {
        let words = module.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
        words.filter(|word| word.starts_with("refrain_") || word.starts_with("gen_ai_"))
    }

    #[test]
    fn the_answer_has_what_the_page_asks_for_and_nothing_else() {
        assert!(FAMILIES.is_sorted(), "the search needs an order");
        let modules: Vec<&str> = console::modules().collect();
        let asked: Vec<&str> = modules.iter().flat_map(|module| names(module)).collect();
        assert!(!asked.is_empty());
        for name in &asked {
            let line = format!("{name} 1");
            assert_eq!(shown(&line).trim(), line, "the answer lacks {name}");
        }
        for family in FAMILIES {
            let is_asked = |name: &&str| name.starts_with(family);
            assert!(
                asked.iter().any(is_asked),
                "the page does not show {family}"
            );
        }
    }
}
