//! The choice of a worker for a chunk, as a pure function of the workers that could take it.
//!
//! The usual policy, `kv`, takes the lowest cost in milliseconds: the time to read the part of the context that a
//! worker's KV cache lacks, at its measured price, and the time that its load adds to the chunk. So a request goes
//! where its prefix lies, unless that worker is busier than the reading is worth. [`PrefixTable`] knows what lies
//! where.
//!
//! One hot prefix would still fill one worker while others are idle. So a prefix counts only while the worker's load
//! stays within a multiple of the mean (`load_imbalance_max`). Waiting for the worker that holds the prefix was
//! rejected: the time of a prefill is known, and the time until a full worker has a free slot is not.
//!
//! The turns of a session do stay with its worker, which holds what no other does: one turn at a time is no flood. In
//! exchange a new session goes by the number of sessions that live on each worker, since it will stay.
//! [`SessionHomes`] has both.
//!
//! Slots, room for KV, context lengths and exclusions are hard limits. The caller offers only workers within them.

mod prefix_table;
mod session_homes;

use refrain_protocol::WorkerId;

pub(crate) use self::prefix_table::PrefixTable;
pub(crate) use self::session_homes::SessionHomes;

use crate::config::PlacementPolicy;

/// How much higher the load of the worker that runs the request already may be than the lowest load. Moving sends the
/// context again and gives up the drafts at hand, also where reading it is cheap.
const PREFERRED_LOAD_SLACK: f64 = 0.25;
/// The part of a chunk's time by which a full worker is slower than an idle one.
const FULL_LOAD_DELAY: f64 = 0.5;
/// Requests above the mean that are no imbalance yet, beside the square root of the mean. With few requests every one
/// is a large share, and independent arrivals alone differ by the root. A narrower bound moved conversations away
/// from their prefixes although hardly anything else ran there.
const IMBALANCE_REQUESTS: f64 = 1.0;

/// SGLang's rule (sgl-model-gateway 0.3): the part of a context that has to match.
const CACHE_THRESHOLD: f64 = 0.3;
/// SGLang's rule: loads are uneven if the highest is above the lowest by more than this many requests, and
const BALANCE_REQUESTS: u32 = 64;
/// by more than this factor.
const BALANCE_FACTOR: f64 = 1.5;

/// A worker that could take the request now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    /// Its place in the worker table.
    pub(crate) index: usize,
    /// Its name.
    pub(crate) worker: &'a WorkerId,
    /// Chunks that it runs or is about to run.
    pub(crate) running: u32,
    /// Maximum number of chunks that it runs, at least 1.
    pub(crate) slots: u32,
    /// The part of its KV cache that is planned for what runs there. 0 where the capacity is unknown.
    pub(crate) kv_load: f64,
    /// Tokens of the context that it holds.
    pub(crate) held_tokens: u32,
    /// Sessions that live there.
    pub(crate) sessions: u32,
    /// Milliseconds to read a thousand tokens.
    pub(crate) prefill_ms_per_1k: f32,
}

impl Candidate<'_> {
    /// The busy part of what it has: slots or KV cache, whichever is scarcer.
    fn load(&self) -> f64 {
        let slots = f64::from(self.running) / f64::from(self.slots.max(1));
        slots.max(self.kv_load)
    }
}

/// The session of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Session {
    /// It has none that is known by a name, or the name is no conversation's.
    Unnamed,
    /// This is its first turn.
    New,
    /// Its last turn ran on this worker.
    LivesOn(usize),
}

/// The facts about the request that the choice needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<'a> {
    pub(crate) context_tokens: u32,
    /// The worker that ran its last chunk, or the one that it is transferred to.
    pub(crate) prefer: Option<&'a WorkerId>,
    pub(crate) session: Session,
    /// It was transferred to `prefer`, so it goes there however loaded that worker is.
    pub(crate) transferred: bool,
}

/// The facts about all workers of the pool that the choice needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolLoad {
    /// Chunks that run on workers that take new ones, full or not.
    pub(crate) running: u64,
    /// Sessions that live on them. It counts for a new session alone.
    pub(crate) sessions: u64,
    /// Slots of these workers.
    pub(crate) slots: u64,
    /// Fewest and most chunks on one of them.
    pub(crate) running_range: (u32, u32),
    /// How long a chunk holds its slot.
    pub(crate) service_ms: f64,
    /// The worker that the last request got.
    pub(crate) last: Option<usize>,
}

/// The chosen worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) index: usize,
    /// Tokens of the context that it is taken to hold. It has to read the others.
    pub(crate) held_tokens: u32,
}

/// Picks one of the candidates. `None`: there is none.
pub(crate) fn choose<'a>(
    policy: PlacementPolicy,
    load_imbalance_max: f64,
    demand: &Demand<'_>,
    pool: &PoolLoad,
    candidates: impl Iterator<Item = Candidate<'a>> + Clone,
) -> Option<Choice> {
    let prefers = |candidate: &Candidate<'_>| demand.prefer == Some(candidate.worker);
    // The worker of the last chunk holds all of the context. A worker that the request is transferred to may not.
    let holds = |candidate: &Candidate<'_>| {
        let held_tokens = match prefers(candidate) && !demand.transferred {
            true => demand.context_tokens,
            false => candidate.held_tokens.min(demand.context_tokens),
        };
        Choice {
            index: candidate.index,
            held_tokens,
        }
    };
    if demand.transferred
        && let Some(preferred) = candidates.clone().find(prefers)
    {
        return Some(holds(&preferred));
    }
    let cost = |candidate: &Candidate<'_>| -> f64 {
        let slack = match prefers(candidate) {
            true => PREFERRED_LOAD_SLACK,
            false => 0.0,
        };
        match policy {
            PlacementPolicy::Kv => {
                let load_ms = pool.service_ms * FULL_LOAD_DELAY * (candidate.load() - slack);
                let counts = match demand.session {
                    _ if prefers(candidate) => true,
                    Session::LivesOn(home) if home == candidate.index => true,
                    Session::New if !has_even_sessions(candidate, pool, load_imbalance_max) => {
                        false
                    }
                    _ => is_balanced(candidate, pool, load_imbalance_max),
                };
                let held_tokens = if counts {
                    holds(candidate).held_tokens
                } else {
                    0
                };
                let missing = demand.context_tokens.saturating_sub(held_tokens);
                load_ms + f64::from(missing) / 1_000.0 * f64::from(candidate.prefill_ms_per_1k)
            }
            PlacementPolicy::LeastLoaded => candidate.load() - slack,
            PlacementPolicy::RoundRobin => {
                let after = pool.last.is_none_or(|last| candidate.index > last);
                candidate.index as f64 + if after { 0.0 } else { 1e9 }
            }
            PlacementPolicy::CacheAware => {
                let load = f64::from(candidate.running);
                let held = f64::from(holds(candidate).held_tokens);
                let matches = held > CACHE_THRESHOLD * f64::from(demand.context_tokens.max(1));
                match !is_uneven(pool) && matches {
                    true => -held,
                    false => load,
                }
            }
        }
    };
    let best = candidates.min_by(|a, b| {
        let by_cost = cost(a).total_cmp(&cost(b));
        by_cost
            .then_with(|| prefers(b).cmp(&prefers(a)))
            .then_with(|| a.worker.cmp(b.worker))
    });
    best.map(|best| holds(&best))
}

/// A worker's part of all requests or sessions and one more, by its part of all slots.
fn mean_of(all: u64, candidate: &Candidate<'_>, pool: &PoolLoad) -> f64 {
    let part = f64::from(candidate.slots) / pool.slots.max(1) as f64;
    (all + 1) as f64 * part
}

/// Whether one session more could live there for a prefix's sake. They stay, so chance does not even them out.
fn has_even_sessions(candidate: &Candidate<'_>, pool: &PoolLoad, load_imbalance_max: f64) -> bool {
    let mean = mean_of(pool.sessions, candidate, pool);
    f64::from(candidate.sessions) + 1.0 <= (mean * load_imbalance_max).max(mean + 1.0)
}

/// Whether the worker could take one request more for a prefix's sake.
fn is_balanced(candidate: &Candidate<'_>, pool: &PoolLoad, load_imbalance_max: f64) -> bool {
    let mean = mean_of(pool.running, candidate, pool);
    let after = f64::from(candidate.running) + 1.0;
    after <= (mean * load_imbalance_max).max(mean + mean.sqrt() + IMBALANCE_REQUESTS)
}

/// SGLang's test of uneven loads.
fn is_uneven(pool: &PoolLoad) -> bool {
    let (fewest, most) = pool.running_range;
    most - fewest > BALANCE_REQUESTS && f64::from(most) > BALANCE_FACTOR * f64::from(fewest)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Case {
        policy: PlacementPolicy,
        context_tokens: u32,
        prefer: Option<&'static str>,
        transferred: bool,
        service_ms: f64,
        last: Option<usize>,
        session: Session,
    }

    const CASE: Case = Case {
        session: Session::Unnamed,
        policy: PlacementPolicy::Kv,
        context_tokens: 100,
        prefer: None,
        transferred: false,
        service_ms: 1_000.0,
        last: None,
    };

    impl Case {
        /// Checks which worker is chosen, and what it is taken to hold. Each worker is written `name running/slots`,
        /// with optional marks: `#n` holds n tokens, `@n` has n sessions, `%n` has planned n per cent of its KV
        /// cache, `$n` reads a thousand tokens in n milliseconds.
        fn check(&self, workers: &str, expected: &str) {
            let named: Vec<(WorkerId, Vec<&str>)> = workers
                .split(',')
                .map(|text| text.split_whitespace().collect::<Vec<_>>())
                .map(|words| (WorkerId(words[0].to_owned()), words[1..].to_vec()))
                .collect();
            let candidates: Vec<Candidate<'_>> = (0..)
                .zip(&named)
                .map(|(index, (worker, words))| {
                    let (running, slots) = words[0].split_once('/').unwrap();
                    let number = |mark: char| {
                        let value = words.iter().find_map(|word| word.strip_prefix(mark));
                        value.map(|value| value.parse::<u32>().unwrap())
                    };
                    Candidate {
                        index,
                        worker,
                        running: running.parse().unwrap(),
                        slots: slots.parse().unwrap(),
                        kv_load: f64::from(number('%').unwrap_or(0)) / 100.0,
                        held_tokens: number('#').unwrap_or(0),
                        sessions: number('@').unwrap_or(0),
                        prefill_ms_per_1k: number('$').unwrap_or(100) as f32,
                    }
                })
                .collect();
            let prefer = self.prefer.map(|worker| WorkerId(worker.to_owned()));
            let running = candidates.iter().map(|candidate| candidate.running);
            let sessions = candidates.iter().map(|one| u64::from(one.sessions));
            let pool = PoolLoad {
                sessions: sessions.sum(),
                running: running.clone().map(u64::from).sum(),
                slots: candidates.iter().map(|one| u64::from(one.slots)).sum(),
                running_range: (running.clone().min().unwrap(), running.max().unwrap()),
                service_ms: self.service_ms,
                last: self.last,
            };
            let demand = Demand {
                session: self.session,
                context_tokens: self.context_tokens,
                prefer: prefer.as_ref(),
                transferred: self.transferred,
            };
            let choice = choose(self.policy, 1.3, &demand, &pool, candidates.iter().copied());
            let choice = choice.unwrap();
            let chosen = format!("{} {}", named[choice.index].0, choice.held_tokens);
            assert_eq!(chosen, expected, "{workers}");
        }
    }

    #[test]
    fn without_prefixes_the_least_busy_by_share_of_slots_or_kv_wins() {
        for policy in [PlacementPolicy::Kv, PlacementPolicy::LeastLoaded] {
            let case = Case { policy, ..CASE };
            case.check("a 1/2, b 3/8", "b 0");
            case.check("b 1/4, a 2/8, c 1/4", "a 0");
            case.check("a 1/8 %90, b 4/8 %10", "b 0");
        }
    }

    #[test]
    fn the_worker_of_the_last_chunk_wins_unless_clearly_busier() {
        let prefer = Some("b");
        for policy in [PlacementPolicy::Kv, PlacementPolicy::LeastLoaded] {
            let case = Case {
                policy,
                prefer,
                ..CASE
            };
            case.check("a 0/4, b 1/4", "b 100");
            case.check("a 0/4, b 2/4", "a 0");
            let case = Case {
                transferred: true,
                ..case
            };
            case.check("a 0/4, b 3/4 #64", "b 64");
        }
        // Reading a long context takes longer than a busier worker does.
        let case = Case {
            prefer,
            context_tokens: 8_000,
            ..CASE
        };
        case.check("a 0/4, b 3/4", "b 8000");
    }

    #[test]
    fn the_price_of_what_is_missing_is_weighed_against_load() {
        let case = Case {
            context_tokens: 4_000,
            ..CASE
        };
        case.check("a 2/8, b 3/8 #2048", "b 2048");
        case.check("a 2/8, b 3/8 #64", "a 0");
        case.check("a 2/8 $20, b 3/8 #2048 $20", "a 0");
        case.check("a 2/8 $1000, b 2/8 $10", "b 0");
    }

    #[test]
    fn a_hot_prefix_cannot_drown_one_worker() {
        let case = Case {
            context_tokens: 8_192,
            ..CASE
        };
        case.check("a 10/64, b 12/64 #8192, c 10/64", "b 8192");
        case.check("a 10/64, b 16/64 #8192, c 10/64", "a 0");
    }

    #[test]
    fn a_session_stays_and_a_new_one_goes_where_few_live() {
        let case = |session| Case {
            session,
            context_tokens: 8_192,
            ..CASE
        };
        let busy = "a 10/64, b 16/64 #8192, c 10/64";
        case(Session::LivesOn(1)).check(busy, "b 8192");
        case(Session::LivesOn(0)).check(busy, "a 0");
        // It lost its text there, and another worker holds more.
        case(Session::LivesOn(0)).check("a 2/64, b 2/64 #4096", "b 4096");
        case(Session::New).check("a 0/64 @1, b 1/64 #8192 @1", "b 8192");
        case(Session::New).check("a 0/64 @1, b 1/64 #8192 @4", "a 0");
        case(Session::Unnamed).check("a 0/64 @1, b 1/64 #8192 @4", "b 8192");
    }

    #[test]
    fn round_robin_takes_the_next_one() {
        let case = |last| Case {
            policy: PlacementPolicy::RoundRobin,
            last,
            ..CASE
        };
        case(None).check("a 3/4, b 0/4, c 0/4", "a 0");
        case(Some(0)).check("a 0/4, b 3/4, c 0/4", "b 0");
        case(Some(2)).check("a 0/4, b 3/4, c 0/4", "a 0");
    }

    #[test]
    fn the_cache_aware_rule_follows_long_matches_while_loads_are_even() {
        let case = Case {
            policy: PlacementPolicy::CacheAware,
            context_tokens: 1_000,
            ..CASE
        };
        case.check("a 0/256, b 60/256 #512, c 70/256 #320", "a 0");
        case.check("a 10/256, b 60/256 #512, c 70/256 #320", "b 512");
        case.check("a 10/256, b 60/256 #256", "a 0");
        case.check("a 0/256, b 65/256 #512", "a 0");
    }
}
