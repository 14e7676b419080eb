//! Usage as far as the store has it in memory: its size, what was erased, and what each gateway has counted lately.
//! The rows themselves are in the log only.

use std::collections::{BTreeMap, HashMap};

use refrain_protocol::usage::{
    Period, PeriodTokens, Spender, SpentTokens, UsageErasure, UsageRowId,
};

/// Sizes, erasures and the newest sums of usage.
#[derive(Default)]
pub(crate) struct UsageState {
    rows: u64,
    bytes: u64,
    /// No row is older.
    earliest_hour: Option<u32>,
    newest_month: u32,
    /// By tenant, key and gateway.
    spent: HashMap<String, HashMap<String, HashMap<u128, PeriodTokens>>>,
    erasures: BTreeMap<String, u64>,
}

impl UsageState {
    /// Number of rows.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Bytes of their records.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// An hour before which there are no rows.
    pub(crate) fn earliest_hour(&self) -> Option<u32> {
        self.earliest_hour
    }

    /// Notes that there are no rows before an hour, or none at all.
    pub(crate) fn begins_at(&mut self, hour: Option<u32>) {
        self.earliest_hour = hour;
    }

    /// Counts a new row and its bytes.
    pub(crate) fn add_row(&mut self, hour: u32, bytes: u64) {
        self.rows += 1;
        self.bytes += bytes;
        let earliest = self
            .earliest_hour
            .map_or(hour, |earliest| earliest.min(hour));
        self.earliest_hour = Some(earliest);
    }

    /// Counts a row that is gone.
    pub(crate) fn remove_row(&mut self, bytes: u64) {
        self.rows = self.rows.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Adds tokens that a row has more than before.
    pub(crate) fn spend(&mut self, row: &UsageRowId, tokens: u64) {
        let month = Period::Month.number(row.hour);
        if month > self.newest_month {
            self.newest_month = month;
            self.forget_spent_before(month.saturating_sub(1));
        }
        if month.saturating_add(1) < self.newest_month {
            return;
        }
        let of_tenant = self.spent.entry(row.tenant.clone()).or_default();
        let of_key = of_tenant.entry(row.key.clone()).or_default();
        let spent = of_key.entry(row.gateway).or_default();
        spent.add(row.hour, tokens);
    }

    fn forget_spent_before(&mut self, month: u32) {
        self.spent.retain(|_, of_tenant| {
            of_tenant.retain(|_, of_key| {
                of_key.retain(|_, spent| spent.month() >= month);
                !of_key.is_empty()
            });
            !of_tenant.is_empty()
        });
    }

    /// The tokens that gateways have counted for a spender in a day and a month, other than `asking`.
    pub(crate) fn spent(
        &self,
        spender: &Spender,
        (day, month): (u32, u32),
        asking: u128,
    ) -> Vec<SpentTokens> {
        let mut sums: BTreeMap<u128, SpentTokens> = BTreeMap::new();
        let of_tenant = self.spent.get(&spender.tenant).into_iter().flatten();
        let wanted =
            of_tenant.filter(|(key, _)| spender.key.as_ref().is_none_or(|one| one == *key));
        for (gateway, spent) in wanted.flat_map(|(_, of_key)| of_key) {
            if *gateway == asking {
                continue;
            }
            let sum = sums.entry(*gateway).or_insert(SpentTokens {
                gateway: *gateway,
                ..SpentTokens::default()
            });
            sum.day_tokens = sum.day_tokens.saturating_add(spent.of_day(day));
            sum.month_tokens = sum.month_tokens.saturating_add(spent.of_month(month));
        }
        sums.into_values().collect()
    }

    /// Number of erasures that are remembered.
    pub(crate) fn erasures(&self) -> usize {
        self.erasures.len()
    }

    /// When the usage of a tenant was last erased.
    pub(crate) fn erased_at(&self, tenant: &str) -> Option<u64> {
        self.erasures.get(tenant).copied()
    }

    /// Notes an erasure. Counts from before it do not count any more.
    pub(crate) fn erase(&mut self, tenant: String, at_ms: u64) {
        self.spent.remove(&tenant);
        self.erasures.insert(tenant, at_ms);
    }

    /// Erasures after a time, in order of time.
    pub(crate) fn erasures_after(&self, after_ms: u64) -> Vec<UsageErasure> {
        let later = self.erasures.iter().filter(|(_, at_ms)| **at_ms > after_ms);
        let mut later: Vec<UsageErasure> = later
            .map(|(tenant, at_ms)| UsageErasure {
                tenant: tenant.clone(),
                at_ms: *at_ms,
            })
            .collect();
        later.sort_by_key(|erasure| erasure.at_ms);
        later
    }

    /// Forgets the erasures before a time. Returns their tenants.
    pub(crate) fn forget_erasures(&mut self, before_ms: u64) -> Vec<String> {
        let old = self
            .erasures
            .iter()
            .filter(|(_, at_ms)| **at_ms < before_ms);
        let old: Vec<String> = old.map(|(tenant, _)| tenant.clone()).collect();
        for tenant in &old {
            self.erasures.remove(tenant);
        }
        old
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::usage::parse_hour;

    use super::*;

    fn row(time: &str, tenant: &str, key: &str, gateway: u128) -> UsageRowId {
        UsageRowId {
            hour: parse_hour(time).unwrap(),
            tenant: tenant.into(),
            key: key.into(),
            model: "m".into(),
            gateway,
        }
    }

    fn periods(time: &str) -> (u32, u32) {
        let hour = parse_hour(time).unwrap();
        (Period::Day.number(hour), Period::Month.number(hour))
    }

    fn spender(key: Option<&str>) -> Spender {
        Spender {
            tenant: "acme".into(),
            key: key.map(str::to_owned),
        }
    }

    #[test]
    fn a_gateway_learns_what_others_have_counted_today_and_this_month() {
        let mut usage = UsageState::default();
        usage.spend(&row("2027-01-30T23:00:00Z", "acme", "k", 1), 1_000);
        usage.spend(&row("2027-01-31T01:00:00Z", "acme", "k", 1), 10);
        usage.spend(&row("2027-01-31T02:00:00Z", "acme", "l", 1), 5);
        usage.spend(&row("2027-01-31T02:00:00Z", "acme", "k", 2), 3);
        usage.spend(&row("2027-01-31T02:00:00Z", "bolt", "k", 1), 99);
        let today = periods("2027-01-31");
        let of = |day_tokens, month_tokens, gateway| SpentTokens {
            gateway,
            day_tokens,
            month_tokens,
        };
        let all = usage.spent(&spender(None), today, 3);
        assert_eq!(all, [of(15, 1_015, 1), of(3, 3, 2)]);
        assert_eq!(
            usage.spent(&spender(Some("k")), today, 2),
            [of(10, 1_010, 1)]
        );
        assert_eq!(usage.spent(&spender(Some("x")), today, 2), []);
        // A new month begins with nothing, and what is older is forgotten in the end.
        usage.spend(&row("2027-02-01", "acme", "k", 1), 7);
        let next = usage.spent(&spender(None), periods("2027-02-01"), 2);
        assert_eq!(next, [of(7, 7, 1)]);
        usage.spend(&row("2027-03-01", "bolt", "k", 1), 7);
        assert!(!usage.spent["acme"].contains_key("l"));
        usage.spend(&row("2027-04-01", "bolt", "k", 1), 7);
        assert!(!usage.spent.contains_key("acme"));
    }

    #[test]
    fn what_was_counted_before_an_erasure_is_not_told_any_more() {
        let mut usage = UsageState::default();
        usage.spend(&row("2027-01-31", "acme", "k", 1), 10);
        usage.erase("acme".into(), 50);
        usage.erase("bolt".into(), 40);
        assert_eq!(usage.spent(&spender(None), periods("2027-01-31"), 2), []);
        let tenants = |after| {
            let later = usage.erasures_after(after).into_iter();
            later.map(|erasure| erasure.tenant).collect::<Vec<_>>()
        };
        assert_eq!(tenants(0), ["bolt", "acme"]);
        assert_eq!(tenants(40), ["acme"]);
        assert_eq!(usage.forget_erasures(50), ["bolt"]);
        assert_eq!(usage.erased_at("bolt"), None);
        assert_eq!(usage.erased_at("acme"), Some(50));
    }
}
