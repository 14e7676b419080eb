//! Facts about an output that the answers of both interfaces have besides its tokens.

use refrain_gateway::{ChoiceFigures, GenerateRequest};
use refrain_protocol::openai::WeightSpan;
use serde::Serialize;

use super::version::version_name;

/// The versions of the weights that an output has, and counts of its drafts.
#[derive(Serialize)]
pub(super) struct OutputFacts<'a> {
    weight_version: String,
    weight_versions: &'a [WeightSpan],
    spec_verify_ct: u64,
    spec_draft_token_num: u64,
    spec_accept_token_num: u64,
}

impl<'a> OutputFacts<'a> {
    /// Says what is known of an output with these spans. `first_version` is that of an output without a token.
    pub(super) fn new(
        first_version: u64,
        spans: &'a [WeightSpan],
        shown: ChoiceFigures,
    ) -> OutputFacts<'a> {
        let version = spans.last().map_or(first_version, |last| last.version);
        OutputFacts {
            weight_version: version_name(version),
            weight_versions: spans,
            spec_verify_ct: shown.steps,
            spec_draft_token_num: shown.drafted,
            spec_accept_token_num: shown.accepted,
        }
    }
}

/// The figures of a choice, or none where the tenant hides them.
pub(super) fn shown_figures(request: &GenerateRequest, figures: ChoiceFigures) -> ChoiceFigures {
    match request.hides_metrics() {
        true => ChoiceFigures::default(),
        false => figures,
    }
}
