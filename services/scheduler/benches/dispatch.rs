//! Measures how long the core of the scheduler takes for an event, with 256 workers and 10,000 waiting requests, and
//! with a fleet of 1,000 workers and 100,000 requests in flight.
//!
//! ```text
//! cargo bench -p refrain-scheduler --bench dispatch             # all cases
//! cargo bench -p refrain-scheduler --bench dispatch -- slots    # the case of that name
//! ```
//!
//! All workers are full all the time. Half of the requests are rollouts in groups of eight, the others are turns of
//! conversations that share prefixes; 50 tenants send both. In `slots`, slots are what is scarce. In `kv` it is room
//! in the KV caches, so that many waiting requests fit on no worker that has a free slot.
//!
//! Times are those of the thread on its core, so a busy machine adds only what it takes from the caches.

use std::collections::HashMap;

use anyhow::{Context as _, ensure};
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::scheduling::{
    Heartbeat, KvReport, LeaseFinish, LeaseOutcome, LeaseRequest, RequestClass, TenantWeight,
};
use refrain_protocol::{LeaseId, Namespace, RequestId, SignedNamespace, WorkerId};
use refrain_scheduler::core::{
    Dispatch, DispatchEffect, DispatchEvent, LeaseCallId, SchedulerConfig,
};

const SLOTS: u32 = 32;
const EVENTS: usize = 20_000;
const TENANTS: u64 = 50;
const GROUP_SIZE: u128 = 8;
const MAX_NEW_TOKENS: u32 = 32_768;
const START_MS: u64 = 1_700_000_000_000;
/// A worker reports this often.
const HEARTBEAT_MS: u64 = 1_000;
const TICK_MS: u64 = 100;

/// xorshift64*, so that all runs are the same.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }
}

/// Time that this thread has had a core. Time of other processes does not count.
fn cpu_nanos() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The load of a case.
struct Case {
    name: &'static str,
    workers: usize,
    waiting: usize,
    /// The room of each KV cache.
    kv_tokens: u64,
}

const CASES: [Case; 3] = [
    Case {
        name: "slots",
        workers: 256,
        waiting: 10_000,
        kv_tokens: 4_000_000,
    },
    Case {
        name: "kv",
        workers: 256,
        waiting: 10_000,
        kv_tokens: 250_000,
    },
    Case {
        name: "fleet",
        workers: 1_000,
        waiting: 68_000,
        kv_tokens: 4_000_000,
    },
];

/// Memory of this process in use, bytes.
fn resident_bytes() -> anyhow::Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split(' ').nth(1).context("no such field")?;
    Ok(pages.parse::<u64>()? * rustix::param::page_size() as u64)
}

/// A lease that is held.
struct Running {
    lease: LeaseId,
    worker: usize,
    request: LeaseRequest,
}

struct Mesh {
    dispatch: Dispatch,
    random: Random,
    kv_tokens: u64,
    now_us: u64,
    calls: u64,
    requests: u128,
    asked: HashMap<LeaseCallId, LeaseRequest>,
    running: Vec<Running>,
    grants: usize,
    /// Nanoseconds of events, by kind.
    nanos: HashMap<&'static str, Vec<u64>>,
}

impl Mesh {
    fn new(case: &Case) -> Self {
        let mut config = SchedulerConfig::default();
        config.queue_max = case.waiting * 2;
        config.tenant_queue_max = case.waiting * 2;
        config.rollout_queue_max = case.waiting * 2;
        config.tenant_rollout_queue_max = case.waiting * 2;
        Mesh {
            dispatch: Dispatch::new(config, START_MS, 0),
            random: Random(0x9e37_79b9_7f4a_7c15),
            kv_tokens: case.kv_tokens,
            now_us: START_MS * 1_000,
            calls: 0,
            requests: 0,
            asked: HashMap::new(),
            running: Vec::new(),
            grants: 0,
            nanos: HashMap::new(),
        }
    }

    fn apply(&mut self, kind: &'static str, event: DispatchEvent) -> anyhow::Result<()> {
        let now_ms = self.now_us / 1_000;
        let began = cpu_nanos();
        let effects = self.dispatch.apply(event, now_ms);
        let nanos = cpu_nanos() - began;
        self.nanos.entry(kind).or_default().push(nanos);
        for effect in effects {
            match effect {
                DispatchEffect::Grant { call, lease, .. } => {
                    let request = self.asked.remove(&call).context("an unknown call")?;
                    self.grants += 1;
                    self.running.push(Running {
                        lease: lease.lease,
                        worker: lease.worker.0[1..].parse()?,
                        request,
                    });
                }
                DispatchEffect::Reject { call, error, .. } => {
                    anyhow::ensure!(error.code.as_deref() == Some("queue_wait"), "{error}");
                    self.asked.remove(&call);
                }
                DispatchEffect::HeartbeatAnswer(answer) => drop(answer?),
                _ => {}
            }
        }
        Ok(())
    }

    /// A new request: a rollout of the newest group, or a turn of a conversation.
    fn request(&mut self) -> LeaseRequest {
        self.requests += 1;
        let is_rollout = self.requests.is_multiple_of(2);
        let group = self.requests / 2 / GROUP_SIZE;
        let tenant = self.random.below(TENANTS);
        let (context_tokens, prefixes) = if is_rollout {
            (600, (0..9).map(|nth| group as u64 * 1_000 + nth).collect())
        } else {
            // A conversation of 4,000 to 32,000 tokens; the first 2,000 are the tenant's system prompt.
            let conversation = self.random.below(20_000);
            let marks = 64 + self.random.below(56);
            let own = (32..marks).map(|mark| conversation * 1_000 + mark);
            let shared = (0..32).map(|mark| (1 << 40) + tenant * 1_000 + mark);
            let tokens = 4_096 + (marks as u32 - 64) * 512;
            (tokens, shared.chain(own).collect::<Vec<u64>>())
        };
        LeaseRequest {
            request: RequestId(self.requests),
            namespace: SignedNamespace::unsigned(Namespace {
                tenant: format!("tenant-{tenant}"),
                model: "model".into(),
                tokenizer: "tokenizer".into(),
            }),
            session: None,
            group: is_rollout.then(|| format!("group-{group}")),
            class: match is_rollout {
                true => RequestClass::Rollout,
                false => RequestClass::Interactive,
            },
            weight: TenantWeight::default(),
            age_ms: 0,
            epoch_seen: 0,
            ended: None,
            expected_tokens: None,
            prefixes: prefixes.into_iter().map(PrefixHash).collect(),
            chunk_tokens: None,
            context_tokens,
            generated_tokens: 0,
            max_new_tokens: MAX_NEW_TOKENS,
            prefer: None,
            transferred: false,
            exclude: Vec::new(),
        }
    }

    fn ask(&mut self, kind: &'static str, request: LeaseRequest) -> anyhow::Result<()> {
        self.calls += 1;
        let call = LeaseCallId(self.calls);
        let kept = LeaseRequest {
            ended: None,
            ..request.clone()
        };
        self.asked.insert(call, kept);
        self.apply(kind, DispatchEvent::Submit { call, request })
    }

    /// One chunk ends. Its request goes on, or is finished.
    fn end_chunk(&mut self) -> anyhow::Result<()> {
        let nth = self.random.below(self.running.len() as u64) as usize;
        let ended = self.running.swap_remove(nth);
        let mut request = ended.request;
        let emitted_tokens = 200 + self.random.below(1_848) as u32;
        let goes_on = request.class == RequestClass::Rollout && self.random.below(8) > 0;
        let finish = LeaseFinish {
            lease: ended.lease,
            outcome: match goes_on {
                true => LeaseOutcome::Continues,
                false => LeaseOutcome::Finished,
            },
            emitted_tokens,
            worker_ended_ms_ago: Some(0),
            cached_tokens: Some(request.context_tokens / 2),
            rejected_tokens: 0,
            accepted_tokens: 0,
        };
        if goes_on && request.generated_tokens + emitted_tokens < MAX_NEW_TOKENS {
            request.generated_tokens += emitted_tokens;
            request.context_tokens += emitted_tokens;
            request.age_ms += 1_000;
            request.prefer = Some(WorkerId(format!("w{}", ended.worker)));
            request.ended = Some(finish);
            return self.ask("end and ask", request);
        }
        self.apply("finish", DispatchEvent::Finish(finish))
    }

    fn heartbeat(&mut self, kind: &'static str, worker: usize) -> anyhow::Result<()> {
        let of_worker = self
            .running
            .iter()
            .filter(|running| running.worker == worker);
        let running: Vec<LeaseId> = of_worker.map(|running| running.lease).collect();
        let held = (0..running.len() as u64).map(|nth| PrefixHash(self.now_us + nth));
        let heartbeat = Heartbeat {
            worker: WorkerId(format!("w{worker}")),
            incarnation: 1,
            url: format!("http://10.0.0.{worker}:8000"),
            model: "model".into(),
            tokenizer: "tokenizer".into(),
            max_context: 131_072,
            max_running: SLOTS,
            draining: false,
            trouble: None,
            leaves: false,
            compiles_forms: false,
            eagle3: None,
            fallback: None,
            state: None,
            kv: Some(KvReport {
                capacity_tokens: self.kv_tokens,
                held: Some(held.collect()),
                ..KvReport::default()
            }),
            running,
            epoch_seen: 0,
        };
        self.apply(kind, DispatchEvent::Heartbeat(heartbeat))
    }

    fn fill(&mut self, waiting: usize) -> anyhow::Result<()> {
        while self.dispatch.queue_length() < waiting {
            let request = self.request();
            self.ask("new", request)?;
        }
        Ok(())
    }
}

fn measure(case: &Case) -> anyhow::Result<()> {
    let before = resident_bytes()?;
    let mut mesh = Mesh::new(case);
    for worker in 0..case.workers {
        mesh.heartbeat("start", worker)?;
    }
    mesh.fill(case.waiting)?;
    mesh.nanos.clear();
    let (mut next_beat, mut next_tick_us) = (0, mesh.now_us);
    let grants_before = mesh.grants;
    for nth in 0..EVENTS {
        // Ten thousand chunks end in a second.
        mesh.now_us += 100;
        mesh.end_chunk()?;
        mesh.fill(case.waiting)?;
        if (nth as u64).is_multiple_of(HEARTBEAT_MS * 10 / case.workers as u64) {
            mesh.heartbeat("heartbeat", next_beat)?;
            next_beat = (next_beat + 1) % case.workers;
        }
        if mesh.now_us >= next_tick_us {
            mesh.apply("tick", DispatchEvent::Tick)?;
            next_tick_us = mesh.now_us + TICK_MS * 1_000;
        }
    }
    let grants = mesh.grants - grants_before;
    ensure!(
        grants * 10 > EVENTS * 9,
        "only {grants} chunks were granted"
    );
    println!(
        "{}: {} chunks run, {} requests wait, {grants} grants, {} MB",
        case.name,
        mesh.running.len(),
        mesh.dispatch.queue_length(),
        resident_bytes()?.saturating_sub(before) / 1_000_000,
    );
    let mut all = Vec::new();
    let mut kinds: Vec<_> = std::mem::take(&mut mesh.nanos).into_iter().collect();
    kinds.sort_by_key(|(kind, _)| *kind);
    for (kind, nanos) in kinds {
        all.extend(&nanos);
        report(kind, nanos);
    }
    report("all", all);
    Ok(())
}

fn report(kind: &str, mut nanos: Vec<u64>) {
    nanos.sort_unstable();
    let at = |share: f64| nanos[((nanos.len() - 1) as f64 * share) as usize] as f64 / 1_000.0;
    let mean = nanos.iter().sum::<u64>() as f64 / nanos.len() as f64 / 1_000.0;
    println!(
        "  {kind:<12} {:>7} events: mean {mean:>6.1} us, p50 {:>6.1}, p99 {:>6.1}, p99.9 {:>7.1}, most {:>8.1}",
        nanos.len(),
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
    );
}

fn main() -> anyhow::Result<()> {
    let wanted = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    for case in &CASES {
        let is_wanted = |wanted: &String| case.name.contains(wanted.as_str());
        if wanted.as_ref().is_none_or(is_wanted) {
            measure(case)?;
        }
    }
    Ok(())
}
