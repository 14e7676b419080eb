//! The counters of a request's tokens, by tenant and model.

use prometheus::{IntCounter, IntCounterVec};
use refrain_protocol::usage::UsageCounts;

/// The counters that the tokens of a request are added to. They are looked up once for a request.
pub(crate) struct TokenCounters([IntCounter; 6]);

impl TokenCounters {
    /// The counters of a tenant and a model. Those that tell what was known before are of the tenant `traced`.
    pub(super) fn new(family: &IntCounterVec, shown: &str, traced: &str, model: &str) -> Self {
        let of = |tenant, kind| family.with_label_values(&[tenant, model, kind]);
        TokenCounters([
            of(shown, "input"),
            of(traced, "cached_input"),
            of(shown, "output"),
            of(shown, "reasoning"),
            of(traced, "verified_draft"),
            of(traced, "accepted_draft"),
        ])
    }

    /// Adds tokens.
    pub(crate) fn add(&self, counts: UsageCounts) {
        let [_requests, tokens @ ..] = counts.values();
        for (counter, tokens) in self.0.iter().zip(tokens) {
            counter.inc_by(tokens);
        }
    }
}
