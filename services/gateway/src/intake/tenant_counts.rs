//! Amounts in total and by tenant, such as requests in flight or bytes that wait.

use std::collections::HashMap;

/// Amounts of all tenants together and of each. A tenant without any has no entry.
#[derive(Default)]
pub(super) struct TenantCounts {
    pub(super) total: usize,
    pub(super) by_tenant: HashMap<String, usize>,
}

impl TenantCounts {
    pub(super) fn of(&self, tenant: &str) -> usize {
        self.by_tenant.get(tenant).copied().unwrap_or(0)
    }

    pub(super) fn add(&mut self, tenant: &str, amount: usize) {
        self.total += amount;
        *self.by_tenant.entry(tenant.to_owned()).or_default() += amount;
    }

    pub(super) fn remove(&mut self, tenant: &str, amount: usize) {
        self.total -= amount;
        if let Some(of_tenant) = self.by_tenant.get_mut(tenant) {
            *of_tenant -= amount;
            if *of_tenant == 0 {
                self.by_tenant.remove(tenant);
            }
        }
    }
}
