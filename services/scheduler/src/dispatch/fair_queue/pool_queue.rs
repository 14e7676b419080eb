//! The waiting requests of one pool, by tenant and class, with the tokens that each tenant was served.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use refrain_protocol::scheduling::{RequestClass, TenantWeight};

use super::classes::{ClassRules, Turns, index};
use super::cost::{Charge, Spent};
use super::line::Line;
use super::waiting_request::{LeaseCallId, Place, WaitingRequest};
use crate::order::{Evidence, Rank};

/// Expected output of a chunk before any chunk of the pool has ended, tokens.
pub(super) const OUTPUT_TOKENS_FIRST_GUESS: f64 = 256.0;
/// Expected time of a chunk before any chunk of the pool has ended.
pub(super) const SERVICE_MS_FIRST_GUESS: f64 = 1_000.0;
/// Weight of the newest chunk in the moving averages.
const AVERAGE_STEP: f64 = 0.1;
/// Maximum number of requests of one line that are looked at for one slot. All of them have room in some KV cache.
/// Those that no free worker can take for another reason are passed over.
const LINE_LOOKED_AT_MAX: usize = 32;

/// The requests of one tenant.
#[derive(Debug, Default)]
pub(super) struct TenantQueue {
    /// The name of the tenant.
    name: Arc<str>,
    /// The weight that its newest request had.
    pub(super) weight: TenantWeight,
    /// All that it was charged, in the virtual time of the pool and in parts of a token, see `cost`.
    pub(super) served: u64,
    /// The waiting requests of each class.
    pub(super) lines: [Line; 2],
    pub(super) running: u32,
    /// Running chunks that are being preempted.
    pub(super) preempted: u32,
    /// Waiting requests that have claimed a slot.
    pub(super) claimed: u32,
}

impl TenantQueue {
    pub(super) fn waiting(&self) -> usize {
        self.lines.iter().map(Line::len).sum()
    }

    fn is_active(&self) -> bool {
        self.running > 0 || self.waiting() > 0
    }
}

/// A tenant's turn in a class: what it was charged, then the longest wait.
pub(super) type Turn = (u64, Place, Arc<str>);

#[derive(Debug)]
pub(in crate::dispatch) struct PoolQueue {
    pub(super) tenants: BTreeMap<Arc<str>, TenantQueue>,
    /// The tenants that wait in each class, in the order of their turns.
    pub(super) turns: [BTreeSet<Turn>; 2],
    /// The tenants that neither wait nor run, the least served first.
    idle: BTreeSet<(u64, Arc<str>)>,
    /// The sum of the weights of all others, in thousandths.
    active_weight: u64,
    /// Waiting requests for which a chunk is being preempted. They get the slot that becomes free.
    pub(super) claimed: BTreeSet<LeaseCallId>,
    /// Those of them that are rollouts.
    pub(super) claimed_rollouts: u64,
    /// Requests that wait in each class.
    pub(super) waiting: [usize; 2],
    /// Chunks that run in each class, and those of them that are being preempted.
    pub(super) running: [u64; 2],
    pub(super) preempted: [u64; 2],
    class_turns: Turns,
    /// The virtual time when the queue was last empty.
    served_at_empty: u64,
    /// How long a chunk holds its slot, a moving average.
    pub(super) service_ms: f64,
    /// Tokens that a chunk writes, a moving average.
    pub(super) output_tokens: f64,
    /// The gains that an order other than that of arrival is known to bring.
    pub(in crate::dispatch) evidence: Evidence,
    /// The version of the pool's workers for which stranded requests were last looked for. `None` before the first
    /// time: a pool whose last worker has gone has a version like one that never had any.
    pub(in crate::dispatch) workers_version: Option<u64>,
    /// The worker that the last request got.
    pub(in crate::dispatch) last_worker: Option<usize>,
    /// A request that waits for room in a KV cache, and the worker that takes no others until it has some.
    pub(in crate::dispatch) reserved: Option<(LeaseCallId, usize)>,
    /// Rollouts that wait for more workers to report.
    pub(in crate::dispatch) held: Option<HeldLine>,
}

/// The rollouts that came before this time, which get no worker until the other one.
#[derive(Clone, Copy, Debug)]
pub(in crate::dispatch) struct HeldLine {
    pub(in crate::dispatch) before_ms: u64,
    pub(in crate::dispatch) until_ms: u64,
}

impl Default for PoolQueue {
    fn default() -> Self {
        PoolQueue {
            tenants: BTreeMap::new(),
            turns: Default::default(),
            idle: BTreeSet::new(),
            active_weight: 0,
            claimed: BTreeSet::new(),
            claimed_rollouts: 0,
            waiting: [0; 2],
            running: [0; 2],
            preempted: [0; 2],
            class_turns: Turns::default(),
            served_at_empty: 0,
            service_ms: SERVICE_MS_FIRST_GUESS,
            output_tokens: OUTPUT_TOKENS_FIRST_GUESS,
            evidence: Evidence::default(),
            workers_version: None,
            last_worker: None,
            reserved: None,
            held: None,
        }
    }
}

impl PoolQueue {
    /// Requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.iter().sum()
    }

    /// The line that is held now.
    pub(in crate::dispatch) fn held_at(&self, now_ms: u64) -> Option<HeldLine> {
        self.held.filter(|held| now_ms < held.until_ms)
    }

    /// Tenants that wait or run.
    pub(super) fn active_tenants(&self) -> usize {
        self.tenants.len() - self.idle.len()
    }

    /// The slots that a tenant of this weight has a right to while others want them, at least one.
    pub(super) fn share_of(&self, weight: TenantWeight, slots: u64) -> u32 {
        let weights = self.active_weight.max(weight.thousandths());
        let share = slots.saturating_mul(weight.thousandths()) / weights;
        u32::try_from(share.max(1)).unwrap_or(u32::MAX)
    }

    /// Whether any tenant waits or runs.
    pub(super) fn is_active(&self) -> bool {
        self.active_tenants() > 0
    }

    /// Changes a tenant, and keeps the turns and the idle tenants in step.
    pub(super) fn change<R>(
        &mut self,
        tenant: &str,
        change: impl FnOnce(&mut TenantQueue) -> R,
    ) -> Option<R> {
        let queue = self.tenants.get_mut(tenant)?;
        let turn = |queue: &TenantQueue, class: usize| {
            let oldest = queue.lines[class].oldest()?;
            Some((queue.served, oldest, queue.name.clone()))
        };
        let before = [turn(queue, 0), turn(queue, 1)];
        let idle =
            |queue: &TenantQueue| (!queue.is_active()).then(|| (queue.served, queue.name.clone()));
        let active_weight = |queue: &TenantQueue| match queue.is_active() {
            true => queue.weight.thousandths(),
            false => 0,
        };
        let (idle_before, weight_before) = (idle(queue), active_weight(queue));
        let result = change(queue);
        let (idle_after, weight_after) = (idle(queue), active_weight(queue));
        self.active_weight = (self.active_weight + weight_after).saturating_sub(weight_before);
        for (class, before) in before.into_iter().enumerate() {
            let after = turn(queue, class);
            if before == after {
                continue;
            }
            if let Some(before) = before {
                self.turns[class].remove(&before);
            }
            self.turns[class].extend(after);
        }
        if idle_before != idle_after {
            if let Some(before) = idle_before {
                self.idle.remove(&before);
            }
            self.idle.extend(idle_after);
        }
        Some(result)
    }

    pub(super) fn push(&mut self, waiting: &WaitingRequest) {
        let request = &waiting.request;
        let (tenant, class) = (request.namespace.namespace.tenant_name(), request.class);
        let served_min = self.virtual_time().unwrap_or(self.served_at_empty);
        if !self.tenants.contains_key(tenant) {
            let name: Arc<str> = tenant.into();
            let queue = TenantQueue {
                name: name.clone(),
                ..TenantQueue::default()
            };
            self.tenants.insert(name.clone(), queue);
            self.idle.insert((0, name));
        }
        self.change(tenant, |queue| {
            if queue.waiting() == 0 {
                queue.served = queue.served.max(served_min);
            }
            queue.weight = request.weight;
            queue.lines[index(class)].insert(waiting.rank, waiting.place, waiting.kv_tokens);
        });
        self.waiting[index(class)] += 1;
    }

    pub(super) fn remove(&mut self, tenant: &str, class: RequestClass, rank: Rank, place: Place) {
        let was_claimed = self.claimed.remove(&place.call);
        if was_claimed && class == RequestClass::Rollout {
            self.claimed_rollouts = self.claimed_rollouts.saturating_sub(1);
        }
        let served = self.change(tenant, |queue| {
            queue.lines[index(class)].remove(rank, place);
            queue.claimed -= u32::from(was_claimed);
            queue.served
        });
        self.waiting[index(class)] = self.waiting[index(class)].saturating_sub(1);
        if let (None, Some(served)) = (self.virtual_time(), served) {
            self.served_at_empty = self.served_at_empty.max(served);
        }
    }

    /// Gives a waiting request another rank.
    pub(super) fn rerank(
        &mut self,
        tenant: &str,
        class: RequestClass,
        place: Place,
        ranks: (Rank, Rank),
        kv_tokens: u64,
    ) {
        // The turn of a tenant goes by arrival, so it stays.
        if let Some(queue) = self.tenants.get_mut(tenant) {
            queue.lines[index(class)].rerank(place, ranks, kv_tokens);
        }
    }

    /// Charges a tenant for a granted request. `read_tokens` are those that the worker is taken to lack.
    pub(super) fn charge(&mut self, waiting: &WaitingRequest, read_tokens: u32) -> Charge {
        let request = &waiting.request;
        let left = request
            .max_new_tokens
            .saturating_sub(request.generated_tokens);
        let most = waiting.chunk_tokens.unwrap_or(left).min(left);
        let output_tokens = (self.output_tokens.round() as u32).min(most);
        let charge = Charge::new(request.weight, read_tokens, output_tokens);
        let other = 1 - index(request.class);
        self.class_turns
            .note(request.class, self.waiting[other] > 0);
        self.running[index(request.class)] += 1;
        self.change(request.namespace.namespace.tenant_name(), |queue| {
            queue.served = queue.served.saturating_add(charge.expected());
            queue.running += 1;
        });
        charge
    }

    /// Notes that a chunk of the tenant has ended.
    pub(in crate::dispatch) fn chunk_ended(
        &mut self,
        tenant: &str,
        class: RequestClass,
        was_preempted: bool,
    ) {
        let index = index(class);
        self.running[index] = self.running[index].saturating_sub(1);
        self.preempted[index] = self.preempted[index].saturating_sub(u64::from(was_preempted));
        self.change(tenant, |queue| {
            queue.running = queue.running.saturating_sub(1);
            queue.preempted = queue.preempted.saturating_sub(u32::from(was_preempted));
        });
    }

    /// Corrects the charge of a chunk to its real cost.
    pub(in crate::dispatch) fn settle(&mut self, tenant: &str, charge: Charge, spent: Spent) {
        let emitted_tokens = f64::from(spent.emitted_tokens);
        self.output_tokens += AVERAGE_STEP * (emitted_tokens - self.output_tokens);
        self.change(tenant, |queue| {
            let others = queue.served.saturating_sub(charge.expected());
            queue.served = others.saturating_add(charge.real(spent));
        });
    }

    /// Notes how long a chunk held its slot.
    pub(in crate::dispatch) fn note_service(&mut self, held_ms: u64) {
        self.service_ms += AVERAGE_STEP * (held_ms as f64 - self.service_ms);
    }

    /// Forgets idle tenants beyond `tenants_max`. The least served ones go first, since their counts would be raised
    /// on their return anyway.
    pub(super) fn forget_idle_past(&mut self, tenants_max: usize) {
        while self.tenants.len() > tenants_max {
            match self.idle.pop_first() {
                Some((_, tenant)) => self.tenants.remove(&tenant),
                None => return,
            };
        }
    }

    /// The smallest count of served tokens among the tenants that wait.
    fn virtual_time(&self) -> Option<u64> {
        let first = self.turns.iter().filter_map(BTreeSet::first);
        first.map(|(served, ..)| *served).min()
    }

    /// The charge up to which a tenant's interactive requests go before the rollouts that wait. `None`: none wait.
    pub(super) fn interactive_first_max(&self, rules: ClassRules) -> Option<u64> {
        let (served, ..) = self.turns[index(RequestClass::Rollout)].first()?;
        Some(served.saturating_add(rules.interactive_lead))
    }

    /// The turns of all tenants and classes in their order.
    fn all_turns(
        &self,
        rules: ClassRules,
        slots: u64,
    ) -> impl Iterator<Item = (RequestClass, &TenantQueue)> {
        let rollouts_running = self.running[index(RequestClass::Rollout)];
        let classes = self
            .class_turns
            .order(rules.rollout_share, slots, rollouts_running);
        let first_max = match classes[0] {
            RequestClass::Interactive => self.interactive_first_max(rules),
            RequestClass::Rollout => None,
        };
        let is_first = move |turn: &&Turn| first_max.is_none_or(|most| turn.0 <= most);
        let [first, second] = classes.map(|class| &self.turns[index(class)]);
        let head = first.iter().take_while(is_first);
        // The rest of the first class takes turns with the second one.
        let rest = first.iter().skip_while(is_first);
        let tail = merged(rest, second.iter());
        let head = head.map(move |turn| (classes[0], turn));
        let tail = tail.map(move |(of_first, turn)| (classes[usize::from(!of_first)], turn));
        let all = head.chain(tail);
        all.filter_map(|(class, (_, _, tenant))| Some((class, self.tenants.get(tenant)?)))
    }

    /// The waiting calls that need at most `room_tokens`, in the order in which they should be placed. Calls that
    /// have claimed a slot come first, whatever they need. Then come the turns of tenants and classes, and of each
    /// the first few of its line.
    pub(super) fn in_order(
        &self,
        rules: ClassRules,
        slots: u64,
        room_tokens: u64,
    ) -> impl Iterator<Item = LeaseCallId> {
        let others = self
            .all_turns(rules, slots)
            .flat_map(move |(class, queue)| {
                let line = queue.lines[index(class)].in_order(room_tokens);
                line.take(LINE_LOOKED_AT_MAX)
            });
        let others = others.map(|place| place.call);
        let unclaimed = others.filter(|call| !self.claimed.contains(call));
        self.claimed.iter().copied().chain(unclaimed)
    }
}

/// Two lists of turns in one order, with whether each turn is of the first list. That one comes first where tenants
/// were charged the same, as one tenant is in both lists.
fn merged<'a>(
    first: impl Iterator<Item = &'a Turn>,
    second: impl Iterator<Item = &'a Turn>,
) -> impl Iterator<Item = (bool, &'a Turn)> {
    let (mut first, mut second) = (first.peekable(), second.peekable());
    std::iter::from_fn(move || {
        let takes_first = match (first.peek(), second.peek()) {
            (Some((one, ..)), Some((other, ..))) => one <= other,
            (one, _) => one.is_some(),
        };
        match takes_first {
            true => first.next().map(|turn| (true, turn)),
            false => second.next().map(|turn| (false, turn)),
        }
    })
}
