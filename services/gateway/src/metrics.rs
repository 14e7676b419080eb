//! The metrics of the gateway.

mod request_series;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::IntGauge;
use refrain_output_parsers::Counts;
use refrain_protocol::openai::FinishReason;
use refrain_service_kit::telemetry::{Metrics, SECONDS_BUCKETS};

use crate::request::GenerateRequest;

pub(crate) use request_series::RequestSeries;

/// Most tenants with label values of their own. The others share `other`.
const TENANT_LABELS_MAX: usize = 1000;

/// The tenant, or the model, of what belongs to none.
pub(crate) const NONE: &str = "none";

/// The tenant under which drafts are counted of all tenants whose answers hide them.
const HIDDEN: &str = "hidden";

/// Buckets of tokens per request: powers of four, as the OpenTelemetry conventions advise.
const TOKEN_BUCKETS: &[f64] = &[
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1024.0,
    4096.0,
    16384.0,
    65536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
];

/// Buckets of the time between two steps, seconds.
const GAP_BUCKETS: &[f64] = &[
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
];

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

refrain_service_kit::metric_families! {
    /// The families, with names of OpenTelemetry's GenAI conventions where these have one.
    pub(crate) struct GatewayFamilies {
        /// Tokens per request.
        pub(crate) token_usage: HistogramVec =
            "gen_ai_client_token_usage" ["tenant", "model", "token_type"] in TOKEN_BUCKETS,
        /// Seconds from the head of a request to its last token.
        pub(crate) request_seconds: HistogramVec =
            "gen_ai_server_request_duration_seconds" ["tenant", "model"] in SECONDS_BUCKETS,
        /// Seconds from the head of a request to its first token, for each choice. Rollouts may wait for long.
        pub(crate) first_token_seconds: HistogramVec =
            "gen_ai_server_time_to_first_token_seconds" ["tenant", "model", "class"] in SECONDS_BUCKETS,
        /// Seconds per token after the first one, mean over a choice.
        pub(crate) per_token_seconds: HistogramVec =
            "gen_ai_server_time_per_output_token_seconds" ["tenant", "model"] in SECONDS_BUCKETS,
        /// Interactive requests in flight. One with n choices counts as n.
        pub(crate) in_flight: IntGauge = "refrain_gateway_requests_in_flight",
        /// Rollouts in flight. One with n choices counts as n.
        pub(crate) rollouts: IntGauge = "refrain_gateway_rollouts_in_flight",
        /// Prompts by which equal ones are found, so that their outputs share drafts.
        pub(crate) implicit_groups: IntGauge = "refrain_gateway_implicit_groups",
        /// Request bodies that are arriving.
        pub(crate) bodies: IntGauge = "refrain_gateway_bodies_arriving",
        /// Requests of trainers in flight, those that are held included.
        pub(crate) trainer_in_flight: IntGauge = "refrain_gateway_trainer_requests_in_flight",
        /// Requests of trainers that are held back until there is room for them.
        pub(crate) trainer_held: IntGauge = "refrain_gateway_trainer_requests_held",
        /// Bytes of bodies of trainers that are read, and whose requests are not admitted yet.
        pub(crate) trainer_held_bytes: IntGauge = "refrain_gateway_trainer_held_bytes",
        /// Requests of trainers by route and outcome. Those that `left` have lost their client.
        pub(crate) trainer_requests: IntCounterVec =
            "refrain_gateway_trainer_requests_total" ["route", "outcome"],
        /// Requests that trainers have aborted.
        pub(crate) trainer_aborts: IntCounter = "refrain_gateway_trainer_aborts_total",
        /// Orders of trainers to workers, by the answer of each worker.
        pub(crate) trainer_orders: IntCounterVec =
            "refrain_gateway_trainer_orders_total" ["order", "outcome"],
        /// Bytes of large bodies that are being parsed and tokenized.
        pub(crate) tokenizing: IntGauge = "refrain_gateway_tokenizing_bytes",
        /// Bytes of large bodies that wait to be parsed and tokenized.
        pub(crate) tokenizing_waiting: IntGauge = "refrain_gateway_tokenizing_waiting_bytes",
        /// Forms of outputs that are being compiled.
        pub(crate) forms_compiling: IntGauge = "refrain_gateway_forms_compiling",
        /// Forms of outputs that wait to be compiled.
        pub(crate) forms_waiting: IntGauge = "refrain_gateway_forms_waiting",
        /// Forms of a model whose verdict is kept.
        pub(crate) form_verdicts: IntGaugeVec = "refrain_gateway_form_verdicts" ["model"],
        /// Responses that are stored, to be continued or read again.
        pub(crate) responses: IntGauge = "refrain_gateway_responses_stored",
        /// Bytes of these responses with their conversations.
        pub(crate) responses_bytes: IntGauge = "refrain_gateway_responses_stored_bytes",
        /// Requests refused because a limit was reached, by the limit. A limit that is no tenant's has the tenant
        /// `none`.
        pub(crate) rejections: IntCounterVec = "refrain_gateway_rejections_total" ["tenant", "limit"],
        /// Urgent requests that were carried out as ordinary ones, since their tenant had used up its urgent share.
        pub(crate) urgency_declined: IntCounter = "refrain_gateway_urgency_declined_total",
        /// Tenants in the file of tenants, or in the draft store.
        pub(crate) tenants: IntGauge = "refrain_gateway_tenants",
        /// Keys of these tenants.
        pub(crate) tenant_keys: IntGauge = "refrain_gateway_tenant_keys",
        /// The next time at which a key of a tenant ends that no later key of its name replaces, in Unix seconds.
        pub(crate) key_expiry: IntGaugeVec = "refrain_gateway_key_expiry_seconds" ["tenant"],
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
        /// Administrative acts by their outcome. A refused one has changed nothing.
        pub(crate) admin_acts: IntCounterVec =
            "refrain_gateway_admin_acts_total" ["outcome"] with ["done", "refused"],
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
        /// Choices that continued after a chunk failed.
        pub(crate) continuations: IntCounter = "refrain_gateway_continuations_total",
        /// Tool calls in outputs. A failed one could not be parsed and came as text, or broke off. A dropped one was
        /// left out, because the client wants one call at a time.
        pub(crate) tool_calls: IntCounterVec = "refrain_gateway_tool_calls_total" ["model", "outcome"],
        /// Registrations of groups in the draft store, by outcome.
        pub(crate) group_registrations: IntCounterVec =
            "refrain_gateway_group_registrations_total" ["outcome"] with ["done", "failed"],
        /// Questions to the draft store for the lengths of earlier outputs to a prompt, by what it knew.
        pub(crate) length_estimates: IntCounterVec =
            "refrain_gateway_length_estimates_total" ["outcome"] with ["known", "unknown", "failed"],
        /// Requests by their final status; 499 means that the client went away. A request of an unknown caller has
        /// the tenant `none`, and one that was refused before its model was known has the model `none`.
        pub(crate) requests: IntCounterVec = "refrain_gateway_requests_total" ["tenant", "model", "status"],
        /// Tokens of requests, also of those that fail, counted while they run: `input`, and of these
        /// `cached_input`; `output`, and of these `reasoning`; `verified_draft`, and of these `accepted_draft`.
        tokens: IntCounterVec = "refrain_gateway_tokens_total" ["tenant", "model", "kind"],
        /// Choices that ended, by the reason in their answers. An `unfinished` one failed, or its client left.
        choices: IntCounterVec = "refrain_gateway_choices_total" ["tenant", "model", "finish_reason"],
        /// Seconds between the arrivals of two steps of a choice. A step has one token or more.
        step_gap_seconds: HistogramVec =
            "refrain_gateway_step_gap_seconds" ["tenant", "model"] in GAP_BUCKETS,
        /// Seconds of a request that workers spent on reading contexts (`prefill`), and on the output after it
        /// (`decode`). Choices add up.
        pub(crate) phase_seconds: HistogramVec =
            "refrain_gateway_phase_seconds" ["model", "phase"] in SECONDS_BUCKETS,
    }
}

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
}
