//! The choice of a worker for a chunk, as a pure function of the known workers.
//!
//! The least busy worker is chosen, because a step of a large batch is slower for every request in it. The worker of
//! the last chunk still holds the KV cache, and moving costs a prefill of the whole context. So that worker wins
//! unless it is clearly busier. Waiting for it while other workers are free was rejected: the time of a prefill is
//! known, and the time until a full worker has a free slot is not.

use refrain_protocol::WorkerId;
use refrain_protocol::scheduling::{Heartbeat, LeaseRequest};

/// How much higher the load (busy share of slots) of the worker that holds the KV cache may be than the lowest load.
/// Moving a request costs a prefill of its whole context, so a small difference in load is not worth it.
const PREFERRED_LOAD_SLACK: f64 = 0.25;

/// A worker, as far as placement needs to know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    /// Its last report.
    pub(crate) heartbeat: &'a Heartbeat,
    /// Chunks that it runs or is about to run.
    pub(crate) running: u32,
    /// A chunk has just failed there. It takes no new chunks for the moment, as if it were full.
    pub(crate) suspect: bool,
    /// Time of the first heartbeat of this process of the worker.
    pub(crate) registered_ms: u64,
}

impl Candidate<'_> {
    pub(crate) fn has_slot(&self) -> bool {
        !self.suspect && self.running < self.heartbeat.max_running
    }

    /// Busy share of its slots. Call it only for candidates with a free slot: `max_running` is not 0 then.
    fn load(&self) -> f64 {
        f64::from(self.running) / f64::from(self.heartbeat.max_running)
    }

    /// Whether it could serve a request if it had a free slot. A worker that started after the request was submitted
    /// is not the process on which the request failed.
    fn suits(&self, request: &LeaseRequest, submitted_ms: u64) -> bool {
        let (worker, namespace) = (self.heartbeat, &request.namespace.namespace);
        worker.model == namespace.model
            && worker.tokenizer == namespace.tokenizer
            && !worker.draining
            && worker.max_context > request.context_tokens
            && (self.registered_ms > submitted_ms || !request.exclude.contains(&worker.worker))
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

/// Picks a worker for a request that was submitted at `submitted_ms`.
pub(crate) fn place<'a>(
    candidates: impl IntoIterator<Item = Candidate<'a>>,
    request: &LeaseRequest,
    submitted_ms: u64,
) -> Placement<'a> {
    let mut served = false;
    let mut best: Option<Candidate<'a>> = None;
    let mut preferred: Option<Candidate<'a>> = None;
    for candidate in candidates {
        if !candidate.suits(request, submitted_ms) {
            continue;
        }
        served = true;
        if !candidate.has_slot() {
            continue;
        }
        let worker = &candidate.heartbeat.worker;
        if request.prefer.as_ref() == Some(worker) {
            preferred = Some(candidate);
        }
        let better = best.is_none_or(|best| {
            let by_load = candidate.load().total_cmp(&best.load());
            by_load
                .then_with(|| worker.cmp(&best.heartbeat.worker))
                .is_lt()
        });
        if better {
            best = Some(candidate);
        }
    }
    match (best, preferred) {
        (Some(best), Some(preferred))
            if request.transferred || preferred.load() - best.load() <= PREFERRED_LOAD_SLACK =>
        {
            Placement::On(&preferred.heartbeat.worker)
        }
        (Some(best), _) => Placement::On(&best.heartbeat.worker),
        (None, _) if served => Placement::Full,
        (None, _) => Placement::NoWorker,
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::{Namespace, RequestId, SignedNamespace};

    use super::*;

    /// Checks the placement of a request that was submitted at 1000. Each worker is written `name running/max`, with
    /// optional marks: `!` draining, `?` suspect, `@n` registered at n, `#n` context n, `~` another tokenizer.
    fn check(workers: &str, request: &LeaseRequest, expected: &str) {
        let workers = workers.split(',').map(|text| {
            let words: Vec<&str> = text.split_whitespace().collect();
            let (running, max_running) = words[1].split_once('/').unwrap();
            let number = |mark: char| {
                let value = words.iter().find_map(|word| word.strip_prefix(mark));
                value.map(|value| value.parse().unwrap())
            };
            let heartbeat = Heartbeat {
                worker: WorkerId(words[0].to_owned()),
                incarnation: 1,
                url: String::new(),
                model: "m".into(),
                tokenizer: if words.contains(&"~") { "other" } else { "t" }.into(),
                max_context: number('#').unwrap_or(4096),
                max_running: max_running.parse().unwrap(),
                running: Vec::new(),
                draining: words.contains(&"!"),
                compiles_forms: false,
                eagle3: None,
                fallback: None,
                kv: None,
            };
            let registered_ms = number('@').unwrap_or(0);
            let running: u32 = running.parse().unwrap();
            (heartbeat, running, words.contains(&"?"), registered_ms)
        });
        let workers: Vec<_> = workers.collect();
        let candidates = workers
            .iter()
            .map(|(heartbeat, running, suspect, registered_ms)| Candidate {
                heartbeat,
                running: *running,
                suspect: *suspect,
                registered_ms: u64::from(*registered_ms),
            });
        let placed = match place(candidates, request, 1_000) {
            Placement::On(worker) => worker.0.clone(),
            other => format!("{other:?}"),
        };
        assert_eq!(placed, expected);
    }

    fn request() -> LeaseRequest {
        LeaseRequest {
            request: RequestId(1),
            namespace: SignedNamespace {
                namespace: Namespace {
                    tenant: "acme".into(),
                    model: "m".into(),
                    tokenizer: "t".into(),
                },
                issued_at_s: 0,
                signature: String::new(),
            },
            group: None,
            class: Default::default(),
            age_ms: 0,
            ended: None,
            expected_tokens: None,
            prefixes: Vec::new(),
            chunk_tokens: None,
            context_tokens: 100,
            generated_tokens: 0,
            max_new_tokens: 100,
            prefer: None,
            transferred: false,
            exclude: Vec::new(),
        }
    }

    #[test]
    fn least_busy_by_share_of_slots_then_by_name() {
        check("a 1/2, b 3/8, c 2/2", &request(), "b");
        check("b 1/4, a 2/8, c 1/4", &request(), "a");
        check("a 2/2, b 8/8", &request(), "Full");
    }

    #[test]
    fn only_workers_that_can_serve_it_count() {
        check("a 0/4 !, b 0/4 ~, c 0/4 #100", &request(), "NoWorker");
        check("a 0/4 ?", &request(), "Full");
        check("a 0/0", &request(), "Full");
        check("a 0/4 #101", &request(), "a");
        let mut of_another_model = request();
        of_another_model.namespace.namespace.model = "other".into();
        check("a 0/4", &of_another_model, "NoWorker");
    }

    #[test]
    fn the_holder_of_the_kv_wins_unless_clearly_busier() {
        let request = LeaseRequest {
            prefer: Some(WorkerId("b".into())),
            ..request()
        };
        check("a 0/4, b 1/4", &request, "b");
        check("a 0/4, b 2/4", &request, "a");
        check("a 3/4, b 4/4", &request, "a");
    }

    #[test]
    fn an_excluded_worker_counts_again_as_a_new_process() {
        let request = LeaseRequest {
            exclude: vec![WorkerId("a".into())],
            ..request()
        };
        check("a 0/4, b 3/4", &request, "b");
        check("a 0/4", &request, "NoWorker");
        check("a 0/4 @1001", &request, "a");
    }
}
