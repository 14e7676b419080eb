//! The metrics of the gateway.

mod families;
mod request_series;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::IntGauge;
use refrain_output_parsers::Counts;
use refrain_protocol::openai::FinishReason;
use refrain_service_kit::telemetry::Metrics;

use self::families::GatewayFamilies;
use crate::request::GenerateRequest;

pub(crate) use self::request_series::RequestSeries;

/// Most tenants with label values of their own. The others share `other`.
const TENANT_LABELS_MAX: usize = 1000;

/// The tenant, or the model, of what belongs to none.
pub(crate) const NONE: &str = "none";

/// The tenant under which drafts are counted of all tenants whose answers hide them.
const HIDDEN: &str = "hidden";

/// Values of the label `limit` of refused requests.
const LIMITS: [&str; 24] = [
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
    "requests_per_minute",
    "tokens_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_day",
    "tokens_per_month",
    "requests_in_flight_max",
    "trainer_held",
];

/// Values of the label `outcome` of tool calls.
const CALL_OUTCOMES: [&str; 3] = ["parsed", "failed", "dropped"];

/// Counts one in a gauge until it is dropped.
pub(crate) struct GaugeGuard {
    gauge: IntGauge,
    number: i64,
}

impl GaugeGuard {
    /// Adds one to the gauge.
    pub(crate) fn new(gauge: &IntGauge) -> Self {
        GaugeGuard::of(gauge, 1)
    }

    /// Adds a number to the gauge.
    pub(crate) fn of(gauge: &IntGauge, number: i64) -> Self {
        gauge.add(number);
        GaugeGuard {
            gauge: gauge.clone(),
            number,
        }
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.gauge.sub(self.number);
    }
}

/// The families, and the tenants that have label values.
pub(crate) struct GatewayMetrics {
    pub(crate) families: GatewayFamilies,
    /// The series of each label value of a tenant.
    tenants: Mutex<HashMap<String, Vec<Arc<RequestSeries>>>>,
}

impl GatewayMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// A name is taken, because two gateways share a registry.
    pub(crate) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let families = GatewayFamilies::register(metrics.registry())?;
        // A rate over a counter that does not exist yet shows nothing instead of 0.
        for limit in LIMITS {
            families.rejections.with_label_values(&[NONE, limit]);
        }
        Ok(GatewayMetrics {
            families,
            tenants: Mutex::default(),
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
        let labels = [self.tenant_label(tenant), limit];
        self.families.rejections.with_label_values(&labels).inc();
    }

    /// The series that a request of a tenant for a model counts in.
    pub(crate) fn series(
        &self,
        tenant: &str,
        model: &str,
        hides_metrics: bool,
    ) -> Arc<RequestSeries> {
        let shown = self.tenant_label(tenant);
        let mut tenants = self.tenants.lock();
        let of_tenant = tenants.get(shown);
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
        let series = RequestSeries::new(&self.families, [shown, traced], model, hides_metrics);
        let series = Arc::new(series);
        let of_tenant = tenants.entry(shown.to_owned()).or_default();
        of_tenant.push(series.clone());
        series
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
        let labels = [self.tenant_label(tenant), model, status];
        self.families.requests.with_label_values(&labels).inc();
    }

    /// Counts the end of a choice. `reason` is that in its answer, if it has one.
    pub(crate) fn choice_ended(&self, request: &GenerateRequest, reason: Option<FinishReason>) {
        let reason = reason.map_or("unfinished", FinishReason::as_str);
        let labels = [
            self.tenant_label(&request.tenant),
            &request.model.id,
            reason,
        ];
        self.families.choices.with_label_values(&labels).inc();
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

    /// Observes the time to the first token of a choice.
    pub(crate) fn first_token(&self, request: &GenerateRequest, seconds: f64) {
        let labels = [
            self.tenant_label(&request.tenant),
            &request.model.id,
            request.class.as_str(),
        ];
        let family = &self.families.first_token_seconds;
        family.with_label_values(&labels).observe(seconds);
    }

    /// The refusals because of a limit, of all tenants.
    #[cfg(test)]
    pub(crate) fn rejections(&self, limit: &str) -> u64 {
        use prometheus::core::Collector as _;

        let families = self.families.rejections.collect();
        let series = families.iter().flat_map(|family| family.get_metric());
        let of_limit = series.filter(|series| {
            let mut labels = series.get_label().iter();
            labels.any(|label| label.name() == "limit" && label.value() == limit)
        });
        of_limit
            .map(|series| series.get_counter().get_value() as u64)
            .sum()
    }

    /// The label value of a tenant.
    pub(crate) fn tenant_label<'a>(&self, tenant: &'a str) -> &'a str {
        if tenant == NONE {
            return tenant;
        }
        let mut tenants = self.tenants.lock();
        if tenants.contains_key(tenant) {
            return tenant;
        }
        if tenants.len() >= TENANT_LABELS_MAX {
            return "other";
        }
        tenants.insert(tenant.to_owned(), Vec::new());
        tenant
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_bounded() {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        for tenant in 0..TENANT_LABELS_MAX {
            let tenant = tenant.to_string();
            assert_eq!(metrics.tenant_label(&tenant), tenant);
        }
        assert_eq!(metrics.tenant_label("one more"), "other");
        assert_eq!(metrics.tenant_label("7"), "7");
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
            metrics.tenant_label(&tenant.to_string());
        }
        let shared = metrics.series("one more", "m", false);
        assert!(Arc::ptr_eq(
            &shared,
            &metrics.series("and another", "m", false)
        ));
    }
}
