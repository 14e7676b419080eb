//! The series that a request counts in, by its tenant and model.

use std::sync::Arc;

use prometheus::Histogram;
use refrain_accounts::TokenSeries;
use refrain_protocol::openai::{Timings, Usage};

use super::families::GatewayFamilies;

/// The series of the requests of a tenant for a model. They are looked up once for a request, since each lookup takes
/// as long as several observations.
pub(crate) struct RequestSeries {
    pub(super) model: String,
    pub(super) hides_metrics: bool,
    /// Tokens, which are counted while requests run.
    pub(crate) tokens: Arc<TokenSeries>,
    /// Seconds from the head of the request to its last token.
    pub(crate) seconds: Histogram,
    /// Seconds per token after the first one.
    pub(crate) per_token_seconds: Histogram,
    /// Seconds between two steps. Their number tells how many tokens a step brought.
    pub(crate) step_gap_seconds: Histogram,
    phase_seconds: [Histogram; 2],
    token_usage: [Histogram; 2],
}

impl RequestSeries {
    /// The series with the tenant label `shown`. Those that tell what was known before are of the tenant `traced`.
    pub(super) fn new(
        families: &GatewayFamilies,
        tokens: TokenSeries,
        [shown, traced]: [&str; 2],
        model: &str,
        hides_metrics: bool,
    ) -> Self {
        let phase = |phase| families.phase_seconds.with_label_values(&[model, phase]);
        let usage = |kind| {
            let labels = [shown, model, kind];
            families.token_usage.with_label_values(&labels)
        };
        let of_both = [shown, model];
        let step_gaps = &families.step_gap_seconds;
        RequestSeries {
            model: model.to_owned(),
            hides_metrics,
            tokens: Arc::new(tokens),
            seconds: families.request_seconds.with_label_values(&of_both),
            per_token_seconds: families.per_token_seconds.with_label_values(&of_both),
            step_gap_seconds: step_gaps.with_label_values(&[traced, model]),
            phase_seconds: ["prefill", "decode"].map(phase),
            token_usage: ["input", "output"].map(usage),
        }
    }

    /// Observes the tokens of a request that has ended.
    pub(crate) fn observe_usage(&self, usage: &Usage) {
        let tokens = [usage.prompt_tokens, usage.completion_tokens];
        for (histogram, tokens) in self.token_usage.iter().zip(tokens) {
            histogram.observe(tokens as f64);
        }
    }

    /// Observes the seconds that workers spent on a request.
    pub(crate) fn observe_phases(&self, timings: &Timings) {
        let seconds = [timings.prefill_s, timings.decode_s];
        for (histogram, seconds) in self.phase_seconds.iter().zip(seconds) {
            histogram.observe(seconds);
        }
    }
}
