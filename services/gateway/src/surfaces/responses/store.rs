//! The responses that clients may continue or read again: a table in memory, with limits on count, bytes and age.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;

use super::history::{History, HistoryItem};
use super::item_ids::place_of;
use crate::metrics::GatewayMetrics;

/// The limits of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreLimits {
    /// Bytes of all responses with their conversations. A tenant may have half. 0: nothing is stored.
    pub(crate) bytes_max: usize,
    /// Responses of one tenant.
    pub(crate) tenant_responses_max: usize,
    /// Time after which a response is forgotten.
    pub(crate) age_max: Duration,
}

/// A response with its conversation.
#[derive(Debug)]
pub(super) struct StoredResponse {
    /// The response as JSON.
    pub(super) body: Bytes,
    /// The conversation up to its end.
    pub(super) history: History,
    /// The ids of its output items, which are the last ones of the conversation.
    pub(super) items: Vec<String>,
}

/// The responses of all tenants.
pub struct ResponseStore {
    limits: StoreLimits,
    table: Mutex<Table>,
    metrics: Arc<GatewayMetrics>,
}

#[derive(Default)]
struct Table {
    bytes: usize,
    last_number: u64,
    by_tenant: HashMap<String, TenantResponses>,
}

#[derive(Default)]
struct TenantResponses {
    bytes: usize,
    /// In the order in which they were stored.
    responses: BTreeMap<u64, Entry>,
    numbers: HashMap<String, u64>,
    /// The response and the place in its conversation of each output item.
    items: HashMap<String, (u64, usize)>,
}

struct Entry {
    id: String,
    at: Instant,
    bytes: usize,
    response: Arc<StoredResponse>,
}

impl ResponseStore {
    /// Creates an empty table.
    pub(crate) fn new(limits: StoreLimits, metrics: Arc<GatewayMetrics>) -> Self {
        ResponseStore {
            limits,
            table: Mutex::default(),
            metrics,
        }
    }

    /// Whether anything is stored at all.
    pub(super) fn is_on(&self) -> bool {
        self.limits.bytes_max > 0
    }

    /// Stores a response. The oldest ones are forgotten for it. One that is larger than a tenant's share is not
    /// stored.
    pub(super) fn insert(&self, tenant: &str, id: &str, response: StoredResponse, now: Instant) {
        let bytes = response.bytes() + id.len() + tenant.len();
        if bytes > self.limits.bytes_max / 2 {
            return;
        }
        let mut table = self.table.lock();
        table.forget_older_than(self.limits.age_max, now);
        table.insert(tenant, id, response, bytes, now);
        table.enforce(tenant, &self.limits);
        self.show(&table);
    }

    /// A response of a tenant.
    pub(super) fn get(&self, tenant: &str, id: &str, now: Instant) -> Option<Arc<StoredResponse>> {
        let table = self.table.lock();
        let of_tenant = table.by_tenant.get(tenant)?;
        let entry = of_tenant.responses.get(of_tenant.numbers.get(id)?)?;
        let is_fresh = now.saturating_duration_since(entry.at) < self.limits.age_max;
        is_fresh.then(|| entry.response.clone())
    }

    /// The body of a response of a tenant.
    pub(crate) fn body(&self, tenant: &str, id: &str, now: Instant) -> Option<Bytes> {
        self.get(tenant, id, now)
            .map(|response| response.body.clone())
    }

    /// An item of a tenant's responses: of an output, or of an input as a list of it names the item.
    pub(super) fn item(&self, tenant: &str, id: &str) -> Option<Arc<HistoryItem>> {
        let table = self.table.lock();
        let of_tenant = table.by_tenant.get(tenant)?;
        let (number, place) = match of_tenant.items.get(id) {
            Some((number, place)) => (number, *place),
            None => {
                let (response, place) = place_of(id)?;
                (of_tenant.numbers.get(&response)?, place)
            }
        };
        let entry = of_tenant.responses.get(number)?;
        entry.response.history.get(place).cloned()
    }

    /// Forgets a response. Returns whether there was one.
    pub(crate) fn remove(&self, tenant: &str, id: &str) -> bool {
        let mut table = self.table.lock();
        let of_tenant = table.by_tenant.get(tenant);
        let number = of_tenant.and_then(|of_tenant| of_tenant.numbers.get(id).copied());
        if let Some(number) = number {
            table.remove(tenant, number);
        }
        self.show(&table);
        number.is_some()
    }

    /// Forgets the responses of a tenant that are at least so old.
    pub(crate) fn forget_tenant(&self, tenant: &str, age_min: Duration, now: Instant) {
        let mut table = self.table.lock();
        table.forget_older(tenant, age_min, now);
        self.show(&table);
    }

    fn show(&self, table: &Table) {
        let families = &self.metrics.families;
        let count: usize = table
            .by_tenant
            .values()
            .map(|of_tenant| of_tenant.responses.len())
            .sum();
        families.responses.set(count as i64);
        families.responses_bytes.set(table.bytes as i64);
    }
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        let history: usize = self.history.iter().map(|item| item.bytes()).sum();
        let items: usize = self.items.iter().map(String::len).sum();
        self.body.len() + history + items
    }
}

impl Table {
    fn insert(
        &mut self,
        tenant: &str,
        id: &str,
        response: StoredResponse,
        bytes: usize,
        now: Instant,
    ) {
        self.last_number += 1;
        let number = self.last_number;
        let of_tenant = self.by_tenant.entry(tenant.to_owned()).or_default();
        let first = response.history.len().saturating_sub(response.items.len());
        for (place, item) in response.items.iter().enumerate() {
            of_tenant
                .items
                .insert(item.clone(), (number, first + place));
        }
        of_tenant.numbers.insert(id.to_owned(), number);
        of_tenant.bytes += bytes;
        self.bytes += bytes;
        of_tenant.responses.insert(
            number,
            Entry {
                id: id.to_owned(),
                at: now,
                bytes,
                response: Arc::new(response),
            },
        );
    }

    /// Forgets the oldest responses until all limits hold, those of `tenant` and those of all.
    fn enforce(&mut self, tenant: &str, limits: &StoreLimits) {
        while let Some(of_tenant) = self.by_tenant.get(tenant) {
            let is_past = of_tenant.responses.len() > limits.tenant_responses_max
                || of_tenant.bytes > limits.bytes_max / 2;
            if !(is_past && self.remove_oldest(tenant)) {
                break;
            }
        }
        while self.bytes > limits.bytes_max {
            let largest = self.by_tenant.iter().max_by_key(|(_, of)| of.bytes);
            let Some(largest) = largest.map(|(tenant, _)| tenant.clone()) else {
                break;
            };
            if !self.remove_oldest(&largest) {
                break;
            }
        }
    }

    fn forget_older_than(&mut self, age_max: Duration, now: Instant) {
        let tenants: Vec<String> = self.by_tenant.keys().cloned().collect();
        for tenant in tenants {
            self.forget_older(&tenant, age_max, now);
        }
    }

    fn forget_older(&mut self, tenant: &str, age_max: Duration, now: Instant) {
        while let Some(entry) = self
            .by_tenant
            .get(tenant)
            .and_then(|of_tenant| of_tenant.responses.values().next())
            && now.saturating_duration_since(entry.at) >= age_max
        {
            self.remove_oldest(tenant);
        }
    }

    fn remove_oldest(&mut self, tenant: &str) -> bool {
        let of_tenant = self.by_tenant.get(tenant);
        let oldest = of_tenant.and_then(|of_tenant| of_tenant.responses.keys().next().copied());
        if let Some(oldest) = oldest {
            self.remove(tenant, oldest);
        }
        oldest.is_some()
    }

    fn remove(&mut self, tenant: &str, number: u64) {
        let Some(of_tenant) = self.by_tenant.get_mut(tenant) else {
            return;
        };
        if let Some(entry) = of_tenant.responses.remove(&number) {
            of_tenant.numbers.remove(&entry.id);
            for item in &entry.response.items {
                of_tenant.items.remove(item);
            }
            of_tenant.bytes -= entry.bytes;
            self.bytes -= entry.bytes;
        }
        if of_tenant.responses.is_empty() {
            self.by_tenant.remove(tenant);
        }
    }
}

#[cfg(test)]
mod tests;
