//! Who is next: first come, first served within a tenant, and between tenants the one served least so far.
//!
//! The naive queue is one list in order of arrival, and one tenant with a thousand requests then makes
//! everybody else wait for all of them. This is the Virtual Token Counter instead, in its plain form: each
//! tenant has a count of tokens served ([`INPUT_WEIGHT`] for those read, [`OUTPUT_WEIGHT`] for those written),
//! and the waiting tenant with the smallest count goes first. A tenant that comes back from idling is lifted to
//! the smallest count among those that wait, so nobody saves up claims. Counts are kept per model, since a
//! token of one model says nothing about the cost of another's.
//!
//! That decides about slots that are free. Who has to give one up is decided in `turns`.
//!
//! What a chunk will write is known when it ends, and by then a burst of the same tenant has taken all slots.
//! So a grant charges the expected output of the model (a moving average), and the end corrects it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use refrain_protocol::LeaseId;
use refrain_protocol::scheduling::LeaseRequest;
use serde::Serialize;

/// What a context token that must be read costs a tenant.
const INPUT_WEIGHT: u64 = 1;
/// What an output token costs: a step each, where the whole context is read in a few.
const OUTPUT_WEIGHT: u64 = 2;
/// Expected output of a chunk before any chunk of the model has ended.
const OUTPUT_TOKENS_FIRST_GUESS: f64 = 256.0;
/// Expected time of a chunk before any chunk of the model has ended.
const SERVICE_MS_FIRST_GUESS: f64 = 1_000.0;
/// Weight of the newest chunk in the moving averages.
const AVERAGE_STEP: f64 = 0.1;
/// Tenants shown per model in a snapshot.
const TENANTS_SHOWN_MAX: usize = 100;

/// Names one waiting call. Given by the caller, growing, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Ticket(pub u64);

/// What a worker must serve: the workers of one pool are interchangeable but for load and KV.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PoolKey {
    pub(super) model: String,
    pub(super) tokenizer: String,
}

impl PoolKey {
    pub(super) fn of(request: &LeaseRequest) -> Self {
        let namespace = &request.namespace.namespace;
        PoolKey {
            model: namespace.model.clone(),
            tokenizer: namespace.tokenizer.clone(),
        }
    }
}

/// A request in the queue.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) request: LeaseRequest,
    pub(super) submitted_ms: u64,
    /// Since when no live worker can serve it.
    pub(super) stranded_since_ms: Option<u64>,
}

/// What a grant charged, to be corrected when the chunk ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Charge {
    output: u64,
}

#[derive(Debug, Default)]
struct Share {
    /// Weighted tokens served, in the pool's virtual time.
    served: u64,
    waiting: BTreeMap<Ticket, Waiting>,
    running: u32,
}

/// What is asked of a full worker's tenants, see `turns`.
pub(super) struct Claims<'a> {
    /// Slots of the pool.
    pub(super) slots: u64,
    /// Requests that came later wait on.
    pub(super) submitted_ms_max: u64,
    /// Whether the worker could take the request.
    pub(super) fits: &'a dyn Fn(&LeaseRequest) -> bool,
}

/// What a tenant holds.
#[derive(Debug, Default)]
pub(super) struct Holding {
    /// Leases that were told to give way, on any worker.
    pub(super) giving: u32,
    /// When they were granted, and which: those that it could give, the first to give last.
    pub(super) leases: Vec<(u64, LeaseId)>,
}

#[derive(Debug)]
struct Pool {
    tenants: BTreeMap<String, Share>,
    /// Waiting requests for which somebody gives way: the slot that comes of it is theirs.
    claimed: BTreeSet<Ticket>,
    /// Where virtual time stood when the queue was last empty.
    served_at_empty: u64,
    service_ms: f64,
    output_tokens: f64,
}

impl Default for Pool {
    fn default() -> Self {
        Pool {
            tenants: BTreeMap::new(),
            claimed: BTreeSet::new(),
            served_at_empty: 0,
            service_ms: SERVICE_MS_FIRST_GUESS,
            output_tokens: OUTPUT_TOKENS_FIRST_GUESS,
        }
    }
}

impl Pool {
    /// The smallest count among tenants that wait.
    fn virtual_time(&self) -> Option<u64> {
        self.tenants
            .values()
            .filter(|share| !share.waiting.is_empty())
            .map(|share| share.served)
            .min()
    }

    /// Forgets the idle tenant that loses least by it: a small count is lifted on return anyway.
    fn forget_idle_past(&mut self, tenants_max: usize) {
        while self.tenants.len() > tenants_max {
            let idle = self
                .tenants
                .iter()
                .filter(|(_, share)| share.waiting.is_empty() && share.running == 0)
                .min_by_key(|(_, share)| share.served)
                .map(|(tenant, _)| tenant.clone());
            match idle {
                Some(tenant) => self.tenants.remove(&tenant),
                None => return,
            };
        }
    }
}

/// All waiting requests, by pool and tenant.
#[derive(Debug)]
pub(super) struct FairQueue {
    pools: BTreeMap<PoolKey, Pool>,
    /// Where each ticket waits.
    places: HashMap<Ticket, (PoolKey, String)>,
    /// Waiting requests by tenant, all pools together.
    waiting_by_tenant: HashMap<String, usize>,
    tenants_tracked_max: usize,
}

impl FairQueue {
    pub(super) fn new(tenants_tracked_max: usize) -> Self {
        FairQueue {
            pools: BTreeMap::new(),
            places: HashMap::new(),
            waiting_by_tenant: HashMap::new(),
            tenants_tracked_max,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn contains(&self, ticket: Ticket) -> bool {
        self.places.contains_key(&ticket)
    }

    pub(super) fn waiting_of_tenant(&self, tenant: &str) -> usize {
        self.waiting_by_tenant.get(tenant).copied().unwrap_or(0)
    }

    pub(super) fn waiting_in_pool(&self, key: &PoolKey) -> usize {
        self.pools.get(key).map_or(0, |pool| {
            pool.tenants.values().map(|share| share.waiting.len()).sum()
        })
    }

    /// Pools in which somebody waits.
    pub(super) fn pools_waiting(&self) -> Vec<PoolKey> {
        let waits = |pool: &Pool| pool.tenants.values().any(|share| !share.waiting.is_empty());
        self.pools
            .iter()
            .filter(|(_, pool)| waits(pool))
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// All tickets, oldest first.
    pub(super) fn tickets(&self) -> Vec<Ticket> {
        let mut tickets: Vec<Ticket> = self.places.keys().copied().collect();
        tickets.sort_unstable();
        tickets
    }

    pub(super) fn push(&mut self, ticket: Ticket, request: LeaseRequest, now_ms: u64) {
        let key = PoolKey::of(&request);
        let tenant = request.namespace.namespace.tenant.clone();
        let pool = self.pools.entry(key.clone()).or_default();
        let floor = pool.virtual_time().unwrap_or(pool.served_at_empty);
        let share = pool.tenants.entry(tenant.clone()).or_default();
        if share.waiting.is_empty() {
            share.served = share.served.max(floor);
        }
        share.waiting.insert(
            ticket,
            Waiting {
                request,
                submitted_ms: now_ms,
                stranded_since_ms: None,
            },
        );
        pool.forget_idle_past(self.tenants_tracked_max);
        *self.waiting_by_tenant.entry(tenant.clone()).or_default() += 1;
        self.places.insert(ticket, (key, tenant));
    }

    pub(super) fn get(&self, ticket: Ticket) -> Option<&Waiting> {
        let (key, tenant) = self.places.get(&ticket)?;
        self.pools
            .get(key)?
            .tenants
            .get(tenant)?
            .waiting
            .get(&ticket)
    }

    pub(super) fn get_mut(&mut self, ticket: Ticket) -> Option<&mut Waiting> {
        let (key, tenant) = self.places.get(&ticket)?;
        self.pools
            .get_mut(key)?
            .tenants
            .get_mut(tenant)?
            .waiting
            .get_mut(&ticket)
    }

    /// Takes a request out, without a grant.
    pub(super) fn remove(&mut self, ticket: Ticket) -> Option<Waiting> {
        let (key, tenant) = self.places.remove(&ticket)?;
        if let Some(count) = self.waiting_by_tenant.get_mut(&tenant) {
            *count -= 1;
            if *count == 0 {
                self.waiting_by_tenant.remove(&tenant);
            }
        }
        let pool = self.pools.get_mut(&key)?;
        let share = pool.tenants.get_mut(&tenant)?;
        let waiting = share.waiting.remove(&ticket)?;
        pool.claimed.remove(&ticket);
        let served = share.served;
        if pool.virtual_time().is_none() {
            pool.served_at_empty = pool.served_at_empty.max(served);
        }
        Some(waiting)
    }

    /// Takes a request out for a grant and charges its tenant. `reads_context`: the worker has no KV of it.
    pub(super) fn take(
        &mut self,
        ticket: Ticket,
        reads_context: bool,
    ) -> Option<(Waiting, Charge)> {
        let waiting = self.remove(ticket)?;
        let key = PoolKey::of(&waiting.request);
        let pool = self.pools.get_mut(&key)?;
        let left = waiting
            .request
            .max_new_tokens
            .saturating_sub(waiting.request.generated_tokens);
        let output = (pool.output_tokens.round() as u64).min(u64::from(left)) * OUTPUT_WEIGHT;
        let input = if reads_context {
            u64::from(waiting.request.context_tokens) * INPUT_WEIGHT
        } else {
            0
        };
        let share = pool
            .tenants
            .get_mut(&waiting.request.namespace.namespace.tenant)?;
        share.served = share.served.saturating_add(input + output);
        share.running += 1;
        Some((waiting, Charge { output }))
    }

    /// The tenant's chunk runs no longer.
    pub(super) fn ended(&mut self, key: &PoolKey, tenant: &str) {
        if let Some(share) = self
            .pools
            .get_mut(key)
            .and_then(|pool| pool.tenants.get_mut(tenant))
        {
            share.running = share.running.saturating_sub(1);
        }
    }

    /// Corrects the charge of a chunk by what it wrote in truth.
    pub(super) fn settle(
        &mut self,
        key: &PoolKey,
        tenant: &str,
        charge: Charge,
        emitted_tokens: u32,
    ) {
        let Some(pool) = self.pools.get_mut(key) else {
            return;
        };
        pool.output_tokens += AVERAGE_STEP * (f64::from(emitted_tokens) - pool.output_tokens);
        if let Some(share) = pool.tenants.get_mut(tenant) {
            let spent = u64::from(emitted_tokens) * OUTPUT_WEIGHT;
            share.served = share
                .served
                .saturating_sub(charge.output)
                .saturating_add(spent);
        }
    }

    /// Notes how long a chunk held its slot.
    pub(super) fn note_service(&mut self, key: &PoolKey, held_ms: u64) {
        if let Some(pool) = self.pools.get_mut(key) {
            pool.service_ms += AVERAGE_STEP * (held_ms as f64 - pool.service_ms);
        }
    }

    /// How long a chunk of the pool holds its slot, from recent ones.
    pub(super) fn service_ms(&self, key: &PoolKey) -> f64 {
        self.pools
            .get(key)
            .map_or(SERVICE_MS_FIRST_GUESS, |pool| pool.service_ms)
    }

    /// The waiting tickets of a pool in the order in which they should be tried: those for which somebody gives way,
    /// then tenants by tokens served (ties: the longest wait), each tenant's in order of arrival.
    pub(super) fn in_order(&self, key: &PoolKey) -> impl Iterator<Item = (Ticket, &Waiting)> {
        let pool = self.pools.get(key).into_iter();
        let claimed = pool.clone().flat_map(|pool| &pool.claimed);
        let claimed = claimed.filter_map(|ticket| Some((*ticket, self.get(*ticket)?)));
        let mut shares: Vec<&Share> = pool
            .clone()
            .flat_map(|pool| pool.tenants.values())
            .filter(|share| !share.waiting.is_empty())
            .collect();
        shares.sort_by_key(|share| (share.served, share.waiting.keys().next().copied()));
        let others = shares.into_iter().flat_map(|share| {
            share
                .waiting
                .iter()
                .map(|(ticket, waiting)| (*ticket, waiting))
        });
        let is_claimed =
            move |ticket: &Ticket| pool.clone().any(|pool| pool.claimed.contains(ticket));
        claimed.chain(others.filter(move |(ticket, _)| !is_claimed(ticket)))
    }

    /// Finds slots for requests of tenants that have fewer than their share: the leases that are to end, of tenants
    /// that have more than theirs. Each is for one request, which is tried first from now on.
    pub(super) fn claim_slots(
        &mut self,
        key: &PoolKey,
        claims: Claims<'_>,
        mut holdings: BTreeMap<String, Holding>,
    ) -> Vec<LeaseId> {
        let Some(pool) = self.pools.get_mut(key) else {
            return Vec::new();
        };
        let is_active = |share: &Share| share.running > 0 || !share.waiting.is_empty();
        let active = pool
            .tenants
            .values()
            .filter(|share| is_active(share))
            .count();
        let fair = claims.slots / active.max(1) as u64;
        let fair = u32::try_from(fair.max(1)).unwrap_or(u32::MAX);
        let mut claimants: Vec<(u64, Vec<Ticket>)> = Vec::new();
        for share in pool.tenants.values() {
            let waiting = share.waiting.iter();
            let claimed = waiting
                .clone()
                .filter(|(ticket, _)| pool.claimed.contains(ticket));
            let has = share.running + u32::try_from(claimed.count()).unwrap_or(u32::MAX);
            let tickets = waiting
                .filter(|(ticket, waiting)| {
                    !pool.claimed.contains(ticket)
                        && waiting.submitted_ms <= claims.submitted_ms_max
                        && (claims.fits)(&waiting.request)
                })
                .map(|(ticket, _)| *ticket);
            let tickets: Vec<Ticket> = tickets.take(fair.saturating_sub(has) as usize).collect();
            if !tickets.is_empty() {
                claimants.push((share.served, tickets));
            }
        }
        claimants.sort_by_key(|(served, tickets)| (*served, tickets[0]));
        let mut give_way = Vec::new();
        for (_, tickets) in claimants {
            for ticket in tickets {
                let most_over = holdings
                    .iter_mut()
                    .filter(|(_, holding)| !holding.leases.is_empty())
                    .filter_map(|(tenant, holding)| {
                        let share = pool.tenants.get(tenant)?;
                        let keeps = share.running.saturating_sub(holding.giving);
                        (keeps > fair).then_some((keeps, holding))
                    })
                    .max_by_key(|(keeps, _)| *keeps);
                let Some((_, holding)) = most_over else {
                    break;
                };
                if let Some((_, lease)) = holding.leases.pop() {
                    holding.giving += 1;
                    pool.claimed.insert(ticket);
                    give_way.push(lease);
                }
            }
        }
        give_way
    }

    /// Forgets the pools that nobody uses: nothing waits or runs, and `served` says no worker is left.
    pub(super) fn forget_pools(&mut self, served: impl Fn(&PoolKey) -> bool) {
        self.pools.retain(|key, pool| {
            served(key)
                || pool
                    .tenants
                    .values()
                    .any(|share| share.running > 0 || !share.waiting.is_empty())
        });
    }

    pub(super) fn observe(&self) -> Vec<PoolState> {
        let pools = self.pools.iter().map(|(key, pool)| {
            let mut tenants: Vec<TenantState> = pool
                .tenants
                .iter()
                .map(|(tenant, share)| TenantState {
                    tenant: tenant.clone(),
                    waiting: share.waiting.len(),
                    running: share.running,
                    served: share.served,
                })
                .collect();
            let tenants_tracked = tenants.len();
            tenants.sort_by_key(|tenant| Reverse((tenant.waiting, tenant.running)));
            tenants.truncate(TENANTS_SHOWN_MAX);
            PoolState {
                model: key.model.clone(),
                tokenizer: key.tokenizer.clone(),
                waiting: self.waiting_in_pool(key),
                service_ms: pool.service_ms.round() as u64,
                output_tokens: pool.output_tokens.round() as u64,
                tenants_tracked,
                tenants,
            }
        });
        pools.collect()
    }
}

/// A model's queue in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolState {
    /// Public model name.
    pub model: String,
    /// Tokenizer identity.
    pub tokenizer: String,
    /// Requests that wait.
    pub waiting: usize,
    /// How long a chunk holds its slot, recently.
    pub service_ms: u64,
    /// How much a chunk writes, recently.
    pub output_tokens: u64,
    /// Tenants whose share is remembered.
    pub tenants_tracked: usize,
    /// The busiest of them.
    pub tenants: Vec<TenantState>,
}

/// A tenant's share of a model in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TenantState {
    /// Who.
    pub tenant: String,
    /// Requests that wait.
    pub waiting: usize,
    /// Leases that run.
    pub running: u32,
    /// Weighted tokens served.
    pub served: u64,
}
