//! The waiting requests of one pool, by tenant, with the tokens that each tenant was served.

use std::collections::{BTreeMap, BTreeSet};

use super::waiting_request::{LeaseCallId, WaitingRequest};

/// Cost of a context token that a worker has to read.
const INPUT_WEIGHT: u64 = 1;
/// Cost of an output token. Each one takes a step, while a few steps read a whole context.
const OUTPUT_WEIGHT: u64 = 2;
/// Expected output of a chunk before any chunk of the pool has ended, tokens.
const OUTPUT_TOKENS_FIRST_GUESS: f64 = 256.0;
/// Expected time of a chunk before any chunk of the pool has ended.
pub(super) const SERVICE_MS_FIRST_GUESS: f64 = 1_000.0;
/// Weight of the newest chunk in the moving averages.
const AVERAGE_STEP: f64 = 0.1;

/// The charge of a grant for its expected output, to be corrected when the chunk ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Charge {
    output: u64,
}

/// The waiting requests of one tenant.
#[derive(Debug, Default)]
pub(super) struct TenantQueue {
    /// Weighted tokens served, in the virtual time of the pool.
    pub(super) served: u64,
    pub(super) waiting: BTreeMap<LeaseCallId, WaitingRequest>,
    pub(super) running: u32,
}

impl TenantQueue {
    pub(super) fn is_active(&self) -> bool {
        self.running > 0 || !self.waiting.is_empty()
    }
}

#[derive(Debug)]
pub(in crate::dispatch) struct PoolQueue {
    pub(super) tenants: BTreeMap<String, TenantQueue>,
    /// Waiting requests for which a chunk is being preempted. They get the slot that becomes free.
    pub(super) claimed: BTreeSet<LeaseCallId>,
    /// The virtual time when the queue was last empty.
    served_at_empty: u64,
    /// How long a chunk holds its slot, a moving average.
    pub(super) service_ms: f64,
    /// Tokens that a chunk writes, a moving average.
    pub(super) output_tokens: f64,
}

impl Default for PoolQueue {
    fn default() -> Self {
        PoolQueue {
            tenants: BTreeMap::new(),
            claimed: BTreeSet::new(),
            served_at_empty: 0,
            service_ms: SERVICE_MS_FIRST_GUESS,
            output_tokens: OUTPUT_TOKENS_FIRST_GUESS,
        }
    }
}

impl PoolQueue {
    /// Requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.tenants
            .values()
            .map(|tenant| tenant.waiting.len())
            .sum()
    }

    /// Whether any tenant waits or runs.
    pub(super) fn is_active(&self) -> bool {
        self.tenants.values().any(TenantQueue::is_active)
    }

    pub(super) fn push(&mut self, call: LeaseCallId, tenant: &str, waiting: WaitingRequest) {
        let served_min = self.virtual_time().unwrap_or(self.served_at_empty);
        let queue = self.tenants.entry(tenant.to_owned()).or_default();
        if queue.waiting.is_empty() {
            queue.served = queue.served.max(served_min);
        }
        queue.waiting.insert(call, waiting);
    }

    pub(super) fn remove(&mut self, call: LeaseCallId, tenant: &str) -> Option<WaitingRequest> {
        let queue = self.tenants.get_mut(tenant)?;
        let waiting = queue.waiting.remove(&call)?;
        self.claimed.remove(&call);
        let served = queue.served;
        if self.virtual_time().is_none() {
            self.served_at_empty = self.served_at_empty.max(served);
        }
        Some(waiting)
    }

    /// Charges a tenant for a granted request. `reads_context` says that the worker has no KV cache of it.
    pub(super) fn charge(
        &mut self,
        tenant: &str,
        waiting: &WaitingRequest,
        reads_context: bool,
    ) -> Option<Charge> {
        let request = &waiting.request;
        let left = request
            .max_new_tokens
            .saturating_sub(request.generated_tokens);
        let output = (self.output_tokens.round() as u64).min(u64::from(left)) * OUTPUT_WEIGHT;
        let input = if reads_context {
            u64::from(request.context_tokens) * INPUT_WEIGHT
        } else {
            0
        };
        let queue = self.tenants.get_mut(tenant)?;
        queue.served = queue.served.saturating_add(input + output);
        queue.running += 1;
        Some(Charge { output })
    }

    /// Notes that a chunk of the tenant has ended.
    pub(in crate::dispatch) fn chunk_ended(&mut self, tenant: &str) {
        if let Some(queue) = self.tenants.get_mut(tenant) {
            queue.running = queue.running.saturating_sub(1);
        }
    }

    /// Corrects the charge of a chunk to its real output.
    pub(in crate::dispatch) fn settle(
        &mut self,
        tenant: &str,
        charge: Charge,
        emitted_tokens: u32,
    ) {
        self.output_tokens += AVERAGE_STEP * (f64::from(emitted_tokens) - self.output_tokens);
        if let Some(queue) = self.tenants.get_mut(tenant) {
            let spent = u64::from(emitted_tokens) * OUTPUT_WEIGHT;
            queue.served = queue
                .served
                .saturating_sub(charge.output)
                .saturating_add(spent);
        }
    }

    /// Notes how long a chunk held its slot.
    pub(in crate::dispatch) fn note_service(&mut self, held_ms: u64) {
        self.service_ms += AVERAGE_STEP * (held_ms as f64 - self.service_ms);
    }

    /// Forgets idle tenants beyond `tenants_max`. The least served ones go first, since their counts would be raised
    /// on their return anyway.
    pub(super) fn forget_idle_past(&mut self, tenants_max: usize) {
        while self.tenants.len() > tenants_max {
            let idle = self
                .tenants
                .iter()
                .filter(|(_, queue)| !queue.is_active())
                .min_by_key(|(_, queue)| queue.served)
                .map(|(tenant, _)| tenant.clone());
            match idle {
                Some(tenant) => self.tenants.remove(&tenant),
                None => return,
            };
        }
    }

    /// The smallest count of served tokens among the tenants that wait.
    fn virtual_time(&self) -> Option<u64> {
        self.tenants
            .values()
            .filter(|queue| !queue.waiting.is_empty())
            .map(|queue| queue.served)
            .min()
    }
}
