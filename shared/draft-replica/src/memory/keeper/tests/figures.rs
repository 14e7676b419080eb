//! What sealing costs those who draft, and what it saves. Run by name:
//! `cargo test --release -p refrain-draft-replica figures_of_sealing -- --ignored --nocapture`.

use std::collections::VecDeque;
use std::time::Instant;

use super::*;

const TOKENS: usize = 2_000_000;
const DOCUMENT_TOKENS: usize = 500;
/// Requests that decode while the feed comes in.
const RUNNING: usize = 16;

struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// Few numbers come often, many seldom.
    fn skewed(&mut self, end: u64) -> u64 {
        let one = (self.next() % 1_000_000) as f64 / 1e6;
        ((end as f64).powf(one) as u64 - 1).min(end - 1)
    }
}

/// Outputs in which phrases come again among words that do not.
fn documents(noise: &mut Noise) -> Vec<Vec<u32>> {
    let phrases: Vec<Vec<u32>> = (0..4_000)
        .map(|_| {
            let len = 4 + noise.next() % 40;
            (0..len).map(|_| noise.skewed(50_000) as u32).collect()
        })
        .collect();
    let document = |noise: &mut Noise| {
        let mut text = Vec::with_capacity(DOCUMENT_TOKENS + 50);
        while text.len() < DOCUMENT_TOKENS {
            text.extend_from_slice(&phrases[noise.skewed(4_000) as usize]);
            let words = 1 + noise.next() % 12;
            text.extend((0..words).map(|_| noise.skewed(50_000) as u32));
        }
        text.truncate(DOCUMENT_TOKENS);
        text
    };
    (0..TOKENS / DOCUMENT_TOKENS)
        .map(|_| document(noise))
        .collect()
}

/// Steps of a decode loop over `RUNNING` requests, for the outputs `texts` from the number `from` on, until `done`:
/// seconds that each append with its draft took.
fn decode(
    memory: &NamespaceMemory,
    texts: &[Vec<u32>],
    from: usize,
    done: impl Fn() -> bool,
) -> Vec<f64> {
    let mut seconds = Vec::new();
    let mut waiting: VecDeque<u128> = (from as u128..texts.len() as u128).collect();
    let mut batch: Vec<(u128, usize)> = Vec::new();
    while !done() {
        while batch.len() < RUNNING {
            let Some(number) = waiting.pop_front() else {
                return seconds;
            };
            memory.begin(DocumentId((1 << 64) + number));
            batch.push((number, 0));
        }
        for (number, len) in &mut batch {
            let text = &texts[*number as usize];
            let document = (1 << 64) + *number;
            let more = &text[*len..text.len().min(*len + 4)];
            let started = Instant::now();
            memory.merge(&piece(document, *len as u32, more));
            *len += more.len();
            std::hint::black_box(draft(&memory.lock(), &text[..*len], Some(document)));
            seconds.push(started.elapsed().as_secs_f64());
        }
        batch.retain(|(number, len)| {
            let text = &texts[*number as usize];
            if *len < text.len() {
                return true;
            }
            let document = (1 << 64) + *number;
            memory.merge(&whole(document, text));
            memory.end(DocumentId(document));
            false
        });
        // The engine's turn.
        std::thread::sleep(Duration::from_millis(2));
    }
    seconds
}

fn quantiles(mut seconds: Vec<f64>) -> String {
    seconds.sort_by(f64::total_cmp);
    let at = |share: f64| seconds[((seconds.len() - 1) as f64 * share) as usize] * 1e3;
    format!(
        "{} steps: median {:.4} ms, p99 {:.3} ms, p99.9 {:.3} ms, longest {:.2} ms",
        seconds.len(),
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0)
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, which takes a while"]
async fn figures_of_sealing() {
    let mut noise = Noise(1);
    let texts = documents(&mut noise);
    for seals in [false, true] {
        let feed = Arc::new(Feed {
            documents: texts.clone(),
            ..Feed::default()
        });
        let bench = Bench::new(feed, |config| {
            *config = MemoryConfig::default();
            if !seals {
                config.seal_tokens = u64::MAX / 4;
                config.live_tokens_max = u64::MAX;
            }
        });
        let memory = bench.namespace(1);
        let other = documents(&mut Noise(2));
        let running = memory.clone();
        let started = Instant::now();
        let steps = tokio::task::spawn_blocking(move || {
            let is_followed = || running.lock().index.tokens() >= TOKENS as u64;
            let during_feed = decode(&running, &other, 0, is_followed);
            let feed_s = started.elapsed().as_secs_f64();
            let (from, half) = (Instant::now(), other.len() / 2);
            let is_over = || from.elapsed() > Duration::from_secs(20);
            let after = decode(&running, &other, half, is_over);
            (feed_s, during_feed, after)
        });
        let (feed_s, during_feed, after) = steps.await.unwrap();
        eventually("there is nothing more to do", || {
            let drafts = memory.lock();
            drafts.index.plan_merge().is_none() && memory.drafts.building.try_lock().is_ok()
        })
        .await;
        let sizes = memory.lock().index.sizes();
        let tokens = sizes.live_tokens + sizes.segment_tokens;
        let bytes = sizes.live_bytes + sizes.segment_bytes;
        assert!(tokens >= TOKENS as u64);
        println!("seals: {seals}; feed of {TOKENS} tokens followed in {feed_s:.1} s");
        println!(
            "  {:.1} bytes a token; {sizes:?}",
            bytes as f64 / tokens as f64
        );
        println!("  while the feed comes in, {}", quantiles(during_feed));
        println!("  afterwards, {}", quantiles(after));
        for job in ["seal", "merge", "rebuild"] {
            let jobs = bench.jobs(job);
            if jobs > 0.0 {
                let held = |what: &str| {
                    let series =
                        format!("refrain_worker_index_lock_seconds_{what}{{job=\"{job}\"}}");
                    bench.figure(&series)
                };
                let mean = held("sum") / held("count") * 1e3;
                let bounds = [0.00001, 0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1];
                let within = |bound: &&f64| {
                    let series = format!(
                        "refrain_worker_index_lock_seconds_bucket{{job=\"{job}\",le=\"{bound}\"}}"
                    );
                    bench.figure(&series) == held("count")
                };
                let most = bounds.iter().find(within).unwrap_or(&f64::INFINITY) * 1e3;
                println!(
                    "  {job}: {jobs} jobs, lock held {mean:.3} ms on average, always below {most} ms"
                );
            }
        }
    }
}
