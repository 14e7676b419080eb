//! The choice of a worker for a chunk, as a pure function of the known workers.
//!
//! The least busy worker is chosen, because a step of a large batch is slower for every request in it. The worker of
//! the last chunk still holds the KV cache, and moving costs a prefill of the whole context. So that worker wins
//! unless it is clearly busier. Waiting for it while other workers are free was rejected: the time of a prefill is
//! known, and the time until a full worker has a free slot is not.

use refrain_protocol::WorkerId;

/// How much higher the load (busy share of slots) of the worker that holds the KV cache may be than the lowest load.
/// Moving a request costs a prefill of its whole context, so a small difference in load is not worth it.
const PREFERRED_LOAD_SLACK: f64 = 0.25;

/// A worker, as far as placement needs to know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) worker: &'a WorkerId,
    /// Public model name.
    pub(crate) model: &'a str,
    /// Tokenizer identity.
    pub(crate) tokenizer: &'a str,
    /// Longest context, tokens.
    pub(crate) max_context: u32,
    /// Chunks that it runs or is about to run.
    pub(crate) running: u32,
    /// Most chunks at once.
    pub(crate) max_running: u32,
    /// It takes no new chunks, and stops soon.
    pub(crate) draining: bool,
    /// A chunk has just failed there. It takes no new chunks for the moment, as if it were full.
    pub(crate) suspect: bool,
    /// Time of the first heartbeat of this process of the worker.
    pub(crate) registered_ms: u64,
}

impl Candidate<'_> {
    fn has_slot(&self) -> bool {
        !self.suspect && self.running < self.max_running
    }

    /// Busy share of its slots. Call it only for candidates with a free slot: `max_running` is not 0 then.
    fn load(&self) -> f64 {
        f64::from(self.running) / f64::from(self.max_running)
    }
}

/// The requirements of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requirements<'a> {
    /// Public model name.
    pub(crate) model: &'a str,
    /// Tokenizer identity.
    pub(crate) tokenizer: &'a str,
    /// Tokens of the context. A worker must have room for one more.
    pub(crate) context_tokens: u32,
    /// The worker that holds the KV cache, or to which the request was handed over.
    pub(crate) prefer: Option<&'a WorkerId>,
    /// The request was handed over to `prefer`, so the load of that worker does not matter.
    pub(crate) transferred: bool,
    /// Workers on which the request has just failed.
    pub(crate) exclude: &'a [WorkerId],
    /// Time of the request. A worker that started later is not the process on which the request failed.
    pub(crate) submitted_ms: u64,
}

impl Requirements<'_> {
    fn allows(&self, candidate: &Candidate<'_>) -> bool {
        candidate.model == self.model
            && candidate.tokenizer == self.tokenizer
            && !candidate.draining
            && candidate.max_context > self.context_tokens
            && (candidate.registered_ms > self.submitted_ms
                || !self.exclude.contains(candidate.worker))
    }
}

/// The result of [`place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement<'a> {
    /// The request can run on this worker now.
    On(&'a WorkerId),
    /// Some workers can serve it, but all of them are full.
    Full,
    /// No live worker can serve it.
    NoWorker,
}

/// Picks a worker for a request.
pub(crate) fn place<'a>(
    candidates: impl IntoIterator<Item = Candidate<'a>>,
    need: &Requirements<'_>,
) -> Placement<'a> {
    let mut served = false;
    let mut best: Option<Candidate<'a>> = None;
    let mut preferred: Option<Candidate<'a>> = None;
    for candidate in candidates {
        if !need.allows(&candidate) {
            continue;
        }
        served = true;
        if !candidate.has_slot() {
            continue;
        }
        if need.prefer == Some(candidate.worker) {
            preferred = Some(candidate);
        }
        let better = best.is_none_or(|best| {
            candidate
                .load()
                .total_cmp(&best.load())
                .then_with(|| candidate.worker.cmp(best.worker))
                .is_lt()
        });
        if better {
            best = Some(candidate);
        }
    }
    match (best, preferred) {
        (Some(best), Some(preferred))
            if need.transferred || preferred.load() - best.load() <= PREFERRED_LOAD_SLACK =>
        {
            Placement::On(preferred.worker)
        }
        (Some(best), _) => Placement::On(best.worker),
        (None, _) if served => Placement::Full,
        (None, _) => Placement::NoWorker,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a placement. Each worker is written `name running/max`, with optional marks: `!` draining, `?` suspect,
    /// `@n` registered at n, `#n` context n, `~` another tokenizer.
    fn check(workers: &str, need: Requirements<'_>, expected: &str) {
        let workers: Vec<(WorkerId, Vec<&str>)> = workers
            .split(',')
            .map(|text| {
                let mut words = text.split_whitespace();
                (WorkerId(words.next().unwrap().to_owned()), words.collect())
            })
            .collect();
        let candidates = workers.iter().map(|(worker, words)| {
            let (running, max_running) = words[0].split_once('/').unwrap();
            let number = |mark: char| {
                words
                    .iter()
                    .find_map(|word| word.strip_prefix(mark))
                    .map(|value| value.parse().unwrap())
            };
            Candidate {
                worker,
                model: "m",
                tokenizer: if words.contains(&"~") { "other" } else { "t" },
                max_context: number('#').unwrap_or(4096),
                running: running.parse().unwrap(),
                max_running: max_running.parse().unwrap(),
                draining: words.contains(&"!"),
                suspect: words.contains(&"?"),
                registered_ms: number('@').unwrap_or(0).into(),
            }
        });
        let placed = match place(candidates, &need) {
            Placement::On(worker) => worker.0.clone(),
            other => format!("{other:?}"),
        };
        assert_eq!(placed, expected);
    }

    fn need() -> Requirements<'static> {
        Requirements {
            model: "m",
            tokenizer: "t",
            context_tokens: 100,
            prefer: None,
            transferred: false,
            exclude: &[],
            submitted_ms: 1_000,
        }
    }

    #[test]
    fn least_busy_by_share_of_slots_then_by_name() {
        check("a 1/2, b 3/8, c 2/2", need(), "b");
        check("b 1/4, a 2/8, c 1/4", need(), "a");
        check("a 2/2, b 8/8", need(), "Full");
    }

    #[test]
    fn only_workers_that_can_serve_it_count() {
        check("a 0/4 !, b 0/4 ~, c 0/4 #100", need(), "NoWorker");
        check("a 0/4 ?", need(), "Full");
        check("a 0/0", need(), "Full");
        check("a 0/4 #101", need(), "a");
        check(
            "a 0/4",
            Requirements {
                model: "other",
                ..need()
            },
            "NoWorker",
        );
    }

    #[test]
    fn the_holder_of_the_kv_wins_unless_clearly_busier() {
        let holder = WorkerId("b".into());
        let need = Requirements {
            prefer: Some(&holder),
            ..need()
        };
        check("a 0/4, b 1/4", need, "b");
        check("a 0/4, b 2/4", need, "a");
        check("a 3/4, b 4/4", need, "a");
    }

    #[test]
    fn an_excluded_worker_counts_again_as_a_new_process() {
        let exclude = [WorkerId("a".into())];
        let need = Requirements {
            exclude: &exclude,
            ..need()
        };
        check("a 0/4, b 3/4", need, "b");
        check("a 0/4", need, "NoWorker");
        check("a 0/4 @1001", need, "a");
    }
}
