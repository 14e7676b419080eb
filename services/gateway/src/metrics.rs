//! The metrics of the gateway.

mod families;
mod request_series;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use refrain_accounts::{AccountMetrics, NONE};
use refrain_output_parsers::Counts;
use refrain_protocol::openai::FinishReason;
use refrain_protocol::scheduling::RequestClass;
use refrain_service_kit::telemetry::Metrics;

use self::families::GatewayFamilies;
pub(crate) use self::request_series::RequestSeries;

/// The tenant under which drafts are counted of all tenants whose answers hide them.
const HIDDEN: &str = "hidden";

/// Values of the label `limit` of refused requests.
const LIMITS: [&str; 16] = [
    "requests",
    "tenant_requests",
    "rollouts",
    "tenant_rollouts",
    "bodies",
    "tenant_bodies",
    "bodies_bytes",
    "body_bytes",
    "body_time",
    "context",
    "retries",
    "tokenizing",
    "forms",
    "form_bytes",
    "scheduler_wait",
    "group_registrations",
];

/// Values of the label `outcome` of tool calls.
const CALL_OUTCOMES: [&str; 3] = ["parsed", "failed", "dropped"];

/// The families of the gateway, with those of its accounts, and the series of tenants.
pub(crate) struct GatewayMetrics {
    pub(crate) families: GatewayFamilies,
    pub(crate) accounts: Arc<AccountMetrics>,
    /// The series of each label value of a tenant.
    series: Mutex<HashMap<String, Vec<Arc<RequestSeries>>>>,
}

impl GatewayMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// A name is taken, because two gateways share a registry.
    pub(crate) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let accounts = AccountMetrics::new(metrics)?;
        accounts.show_limits(&LIMITS);
        Ok(GatewayMetrics {
            families: GatewayFamilies::register(metrics.registry())?,
            accounts: Arc::new(accounts),
            series: Mutex::default(),
        })
    }

    /// Lets the series of a model exist from the start, so that their first count is a rise.
    pub(crate) fn serves(&self, model: &str) {
        self.called(model, Counts::default());
        let requests = &self.families.requests;
        requests.with_label_values(&[NONE, model, "200"]);
        self.families.form_verdicts.with_label_values(&[model]);
    }

    /// Counts a request of a tenant that was refused because a limit was reached.
    pub(crate) fn rejected(&self, tenant: &str, limit: &str) {
        self.accounts.rejected(tenant, limit);
    }

    /// The series that a request of a tenant for a model counts in.
    pub(crate) fn series(
        &self,
        tenant: &str,
        model: &str,
        hides_metrics: bool,
    ) -> Arc<RequestSeries> {
        let shown = self.accounts.tenant_label(tenant);
        let mut series = self.series.lock();
        let of_tenant = series.get(shown);
        let known = of_tenant
            .into_iter()
            .flatten()
            .find(|series| series.model == model && series.hides_metrics == hides_metrics);
        if let Some(known) = known {
            return known.clone();
        }
        let traced = match hides_metrics {
            true => HIDDEN,
            false => shown,
        };
        let (labels, families) = ([shown, traced], &self.families);
        let tokens = self.accounts.tokens(labels, model);
        let new = RequestSeries::new(families, tokens, labels, model, hides_metrics);
        let new = Arc::new(new);
        let of_tenant = series.entry(shown.to_owned()).or_default();
        of_tenant.push(new.clone());
        new
    }

    /// Counts the tool calls of an output.
    pub(crate) fn called(&self, model: &str, calls: Counts) {
        let numbers = [calls.calls, calls.failures, calls.dropped];
        for (outcome, number) in CALL_OUTCOMES.iter().zip(numbers) {
            let family = &self.families.tool_calls;
            let counter = family.with_label_values(&[model, outcome]);
            counter.inc_by(u64::from(number));
        }
    }

    /// Counts a request by its final status.
    pub(crate) fn ended(&self, tenant: &str, model: &str, status: &str) {
        let labels = [self.accounts.tenant_label(tenant), model, status];
        self.families.requests.with_label_values(&labels).inc();
    }

    /// Counts the end of a choice. `reason` is that in its answer, if it has one.
    pub(crate) fn choice_ended(&self, tenant: &str, model: &str, reason: Option<FinishReason>) {
        let reason = reason.map_or("unfinished", FinishReason::as_str);
        let labels = [self.accounts.tenant_label(tenant), model, reason];
        self.families.choices.with_label_values(&labels).inc();
    }

    /// Observes the time to the first token of a choice.
    pub(crate) fn first_token(&self, tenant: &str, model: &str, class: RequestClass, seconds: f64) {
        let labels = [self.accounts.tenant_label(tenant), model, class.as_str()];
        let family = &self.families.first_token_seconds;
        family.with_label_values(&labels).observe(seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_accounts::TENANT_LABELS_MAX;

    impl GatewayMetrics {
        /// The refusals because of a limit, of all tenants.
        pub(crate) fn rejections(&self, limit: &str) -> u64 {
            use prometheus::core::Collector as _;

            let families = self.accounts.rejections().collect();
            let series = families.iter().flat_map(|family| family.get_metric());
            let of_limit = series.filter(|series| {
                let mut labels = series.get_label().iter();
                labels.any(|label| label.name() == "limit" && label.value() == limit)
            });
            of_limit
                .map(|series| series.get_counter().get_value() as u64)
                .sum()
        }
    }

    #[test]
    fn requests_of_a_tenant_for_a_model_count_in_the_same_series() {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        let first = metrics.series("a", "m", false);
        assert!(Arc::ptr_eq(&first, &metrics.series("a", "m", false)));
        for (tenant, model, hides_metrics) in
            [("b", "m", false), ("a", "n", false), ("a", "m", true)]
        {
            let other = metrics.series(tenant, model, hides_metrics);
            assert!(!Arc::ptr_eq(&first, &other));
        }
        let gaps = |tenant| {
            metrics
                .families
                .step_gap_seconds
                .with_label_values(&[tenant, "m"])
        };
        metrics.series("b", "m", true).step_gap_seconds.observe(1.0);
        assert_eq!(gaps(HIDDEN).get_sample_count(), 1);
        assert_eq!(gaps("b").get_sample_count(), 0);
        for tenant in 2..TENANT_LABELS_MAX {
            metrics.accounts.tenant_label(&tenant.to_string());
        }
        let shared = metrics.series("one more", "m", false);
        assert!(Arc::ptr_eq(
            &shared,
            &metrics.series("and another", "m", false)
        ));
    }
}
