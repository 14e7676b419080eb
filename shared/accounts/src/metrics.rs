//! The metrics of accounts, and the label values of tenants.

use std::collections::{BTreeMap, HashSet};

use parking_lot::Mutex;
use prometheus::{IntCounter, IntCounterVec};
use refrain_protocol::usage::UsageCounts;
use refrain_service_kit::telemetry::Metrics;

/// Most tenants with label values of their own. The others share `other`.
pub const TENANT_LABELS_MAX: usize = 1000;

/// The tenant, or the model, of what belongs to none.
pub const NONE: &str = "none";

/// Values of the label `limit` of requests that are refused here.
const LIMITS: [&str; 7] = [
    "requests_per_minute",
    "tokens_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_day",
    "tokens_per_month",
    "requests_in_flight_max",
];

refrain_service_kit::metric_families! {
    /// The families.
    pub(crate) struct AccountFamilies {
        /// Requests refused because a limit was reached, by the limit. A limit that is no tenant's has the tenant
        /// `none`.
        rejections: IntCounterVec = "refrain_gateway_rejections_total" ["tenant", "limit"],
        /// Urgent requests that were carried out as ordinary ones, since their tenant had used up its urgent share.
        pub(crate) urgency_declined: IntCounter = "refrain_gateway_urgency_declined_total",
        /// Tenants in the file of tenants, or in the draft store.
        pub(crate) tenants: IntGauge = "refrain_gateway_tenants",
        /// Keys of these tenants.
        pub(crate) tenant_keys: IntGauge = "refrain_gateway_tenant_keys",
        /// The next time at which a key of a tenant ends that no later key of its name replaces, in Unix seconds.
        key_expiry: IntGaugeVec = "refrain_gateway_key_expiry_seconds" ["tenant"],
        /// Times that the tenants were taken over, or failed to be. Alert on failures.
        pub(crate) tenants_read: IntCounterVec =
            "refrain_gateway_tenants_read_total" ["outcome"] with ["read", "failed"],
        /// Public keys of the issuer of tokens.
        pub(crate) jwks_keys: IntGauge = "refrain_gateway_jwks_keys",
        /// Times that these keys were read, or failed to be.
        pub(crate) jwks_read: IntCounterVec =
            "refrain_gateway_jwks_read_total" ["outcome"] with ["read", "failed"],
        /// Valid tokens that are remembered.
        pub(crate) tokens_remembered: IntGauge = "refrain_gateway_tokens_remembered",
        /// Rows of usage: one per hour, tenant, key and model.
        pub(crate) usage_rows: IntGauge = "refrain_gateway_usage_rows",
        /// Bytes of the usage journal.
        pub(crate) usage_journal_bytes: IntGauge = "refrain_gateway_usage_journal_bytes",
        /// Rows of usage that the draft store that is furthest behind does not have.
        pub(crate) usage_unsent_rows: IntGauge = "refrain_gateway_usage_unsent_rows",
        /// Calls that sent usage to a draft store.
        pub(crate) usage_sends: IntCounterVec =
            "refrain_gateway_usage_sends_total" ["outcome"] with ["done", "failed"],
        /// Times that the usage journal could not be written. Alert unless 0.
        pub(crate) usage_write_failures: IntCounter = "refrain_gateway_usage_write_failures_total",
        /// Rows of usage that were given up before a draft store had them. Alert unless 0.
        pub(crate) usage_lost: IntCounter = "refrain_gateway_usage_lost_rows_total",
        /// Tokens of requests, also of those that fail, counted while they run: `input`, and of these
        /// `cached_input`; `output`, and of these `reasoning`; `verified_draft`, and of these `accepted_draft`.
        tokens: IntCounterVec = "refrain_gateway_tokens_total" ["tenant", "model", "kind"],
    }
}

/// The families, and the tenants that have label values.
pub struct AccountMetrics {
    pub(crate) families: AccountFamilies,
    labelled: Mutex<HashSet<String>>,
}

/// Counters of the tokens of requests, in the order of the kinds of [`UsageCounts`].
pub struct TokenSeries([IntCounter; 6]);

impl TokenSeries {
    /// Adds tokens, while a request runs.
    pub(crate) fn add(&self, counts: UsageCounts) {
        let [_requests, tokens @ ..] = counts.values();
        for (counter, tokens) in self.0.iter().zip(tokens) {
            counter.inc_by(tokens);
        }
    }
}

impl AccountMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// A name is taken, because two gateways share a registry.
    pub fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let metrics = AccountMetrics {
            families: AccountFamilies::register(metrics.registry())?,
            labelled: Mutex::default(),
        };
        metrics.show_limits(&LIMITS);
        Ok(metrics)
    }

    /// Lets the series of limits exist. A rate over a counter that does not exist yet shows nothing instead of 0.
    pub fn show_limits(&self, limits: &[&str]) {
        for limit in limits {
            self.rejections().with_label_values(&[NONE, *limit]);
        }
    }

    /// Counts a request of a tenant that was refused because a limit was reached.
    pub fn rejected(&self, tenant: &str, limit: &str) {
        let labels = [self.tenant_label(tenant), limit];
        self.rejections().with_label_values(&labels).inc();
    }

    /// Requests that were refused because a limit was reached, by the labels of tenant and limit.
    pub fn rejections(&self) -> &IntCounterVec {
        &self.families.rejections
    }

    /// The label value of a tenant.
    pub fn tenant_label<'a>(&self, tenant: &'a str) -> &'a str {
        if tenant == NONE {
            return tenant;
        }
        let mut labelled = self.labelled.lock();
        if labelled.contains(tenant) {
            return tenant;
        }
        if labelled.len() >= TENANT_LABELS_MAX {
            return "other";
        }
        labelled.insert(tenant.to_owned());
        tenant
    }

    /// The counters of tokens with the tenant label `shown`. Those that tell what was known before are of the tenant
    /// `traced`.
    pub fn tokens(&self, [shown, traced]: [&str; 2], model: &str) -> TokenSeries {
        let kinds = [
            (shown, "input"),
            (traced, "cached_input"),
            (shown, "output"),
            (shown, "reasoning"),
            (traced, "verified_draft"),
            (traced, "accepted_draft"),
        ];
        let family = &self.families.tokens;
        TokenSeries(kinds.map(|(tenant, kind)| family.with_label_values(&[tenant, model, kind])))
    }

    /// Sets the next ends of keys, by tenant. Tenants without a label of their own show the first of all theirs.
    pub(crate) fn set_key_ends<'a>(&self, ends: impl Iterator<Item = (&'a str, i64)>) {
        let mut first = BTreeMap::new();
        for (tenant, end) in ends {
            let shown = first.entry(self.tenant_label(tenant)).or_insert(end);
            *shown = end.min(*shown);
        }
        let gauges = &self.families.key_expiry;
        gauges.reset();
        for (tenant, end) in first {
            gauges.with_label_values(&[tenant]).set(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_bounded() {
        let metrics = AccountMetrics::new(&Metrics::new().unwrap()).unwrap();
        for tenant in 0..TENANT_LABELS_MAX {
            let tenant = tenant.to_string();
            assert_eq!(metrics.tenant_label(&tenant), tenant);
        }
        assert_eq!(metrics.tenant_label("one more"), "other");
        assert_eq!(metrics.tenant_label("7"), "7");
    }
}
