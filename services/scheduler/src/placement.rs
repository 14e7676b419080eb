//! Which worker takes a chunk: a pure function of what is known about the workers.
//!
//! The least busy one, because a step of a crowded batch is slower for everybody in it; but the worker of the
//! last chunk still holds the KV, and moving costs a prefill of the whole context, so it wins unless it is
//! clearly busier. Waiting for it while others are free was rejected: how long it stays full is unknown, how
//! long a prefill takes is not.

use refrain_protocol::WorkerId;

/// A worker as placement sees it.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Who.
    pub worker: &'a WorkerId,
    /// Public model name.
    pub model: &'a str,
    /// Tokenizer identity.
    pub tokenizer: &'a str,
    /// Longest text, tokens.
    pub max_context: u32,
    /// Chunks it runs or is about to run.
    pub running: u32,
    /// Chunks it takes at once.
    pub max_running: u32,
    /// Takes no new chunks, ever.
    pub draining: bool,
    /// Takes no new chunks for the moment, as if it were full: somebody just failed to reach it.
    pub suspect: bool,
    /// When this process of the worker first reported.
    pub registered_ms: u64,
}

impl Candidate<'_> {
    fn has_slot(&self) -> bool {
        !self.suspect && self.running < self.max_running
    }

    /// Busy share of its slots. Only asked of candidates with a slot, so `max_running` is not 0.
    fn load(&self) -> f64 {
        f64::from(self.running) / f64::from(self.max_running)
    }
}

/// What a request needs of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Need<'a> {
    /// Public model name.
    pub model: &'a str,
    /// Tokenizer identity.
    pub tokenizer: &'a str,
    /// Tokens of the context; a worker must have room for one more.
    pub context_tokens: u32,
    /// The worker that holds the KV, or that the request was handed over to.
    pub prefer: Option<&'a WorkerId>,
    /// The latter: its load beside others does not matter.
    pub handed_over: bool,
    /// Workers that just failed the request.
    pub exclude: &'a [WorkerId],
    /// When it asked. A worker that restarted since then is not the process that failed it.
    pub submitted_ms: u64,
}

impl Need<'_> {
    fn allows(&self, candidate: &Candidate<'_>) -> bool {
        candidate.model == self.model
            && candidate.tokenizer == self.tokenizer
            && !candidate.draining
            && candidate.max_context > self.context_tokens
            && (candidate.registered_ms > self.submitted_ms
                || !self.exclude.contains(candidate.worker))
    }
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement<'a> {
    /// Here, now.
    On(&'a WorkerId),
    /// There are workers for it, and all are full.
    Full,
    /// No live worker can serve it.
    Nobody,
}

/// Picks a worker.
pub fn place<'a>(
    candidates: impl IntoIterator<Item = Candidate<'a>>,
    need: &Need<'_>,
    prefer_load_slack: f64,
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
            if need.handed_over || preferred.load() - best.load() <= prefer_load_slack =>
        {
            Placement::On(preferred.worker)
        }
        (Some(best), _) => Placement::On(best.worker),
        (None, _) if served => Placement::Full,
        (None, _) => Placement::Nobody,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `name running/max` with marks: `!` draining, `?` suspect, `@n` registered at n, `#n` context n,
    /// `~` another tokenizer.
    fn check(workers: &str, need: Need<'_>, expected: &str) {
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
        let placed = match place(candidates, &need, 0.25) {
            Placement::On(worker) => worker.0.clone(),
            other => format!("{other:?}"),
        };
        assert_eq!(placed, expected);
    }

    fn need() -> Need<'static> {
        Need {
            model: "m",
            tokenizer: "t",
            context_tokens: 100,
            prefer: None,
            handed_over: false,
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
        check("a 0/4 !, b 0/4 ~, c 0/4 #100", need(), "Nobody");
        check("a 0/4 ?", need(), "Full");
        check("a 0/0", need(), "Full");
        check("a 0/4 #101", need(), "a");
        check(
            "a 0/4",
            Need {
                model: "other",
                ..need()
            },
            "Nobody",
        );
    }

    #[test]
    fn the_holder_of_the_kv_wins_unless_clearly_busier() {
        let holder = WorkerId("b".into());
        let need = Need {
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
        let need = Need {
            exclude: &exclude,
            ..need()
        };
        check("a 0/4, b 3/4", need, "b");
        check("a 0/4", need, "Nobody");
        check("a 0/4 @1001", need, "a");
    }
}
