//! How drafts are made inside an engine: by the configuration, by the engine, and by how much runs.

use refrain_protocol::ApiError;
use refrain_protocol::chunk::DraftRules;
use refrain_speculation::draft::{Expansion, ProposeParams, ProposeRules, Setting};
use serde::Deserialize;

/// How drafts are made inside an engine. The keys are those of a worker's section `speculation`.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct SpeculationConfig {
    /// How long drafts are: a match of p tokens allows alpha * p draft tokens. With `auto`, drafts end where they no
    /// longer pay, by what is learnt and by the number of requests that run. It is 32 up to 8 requests, 16 for 16,
    /// and 4 for 64. Where the engine verifies as many tokens in any case, as SGLang does, it is 32.
    pub alpha: Setting,
    /// Draft tokens with a smaller share of the continuations that were seen are left out. With `auto`, those are
    /// left out that do not pay, by what is learnt. Where both this and `alpha` are set, drafts are as SuffixDecoding
    /// makes them, and nothing learnt is used.
    pub min_token_prob: Setting,
    /// Most draft tokens of one request in one step, beside the engine's own limit. 0: there are no drafts.
    pub max_spec_tokens: usize,
    /// Longest match that is looked for, tokens. A longer one counts as one of this length.
    pub match_tokens_max: u32,
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        let params = ProposeParams::default();
        SpeculationConfig {
            alpha: Setting::Auto,
            min_token_prob: Setting::Auto,
            max_spec_tokens: params.max_spec_tokens,
            match_tokens_max: params.max_pattern,
        }
    }
}

impl SpeculationConfig {
    pub(crate) fn rules(&self) -> ProposeRules {
        ProposeRules {
            params: ProposeParams {
                // Engines verify the drafts of plugins as chains.
                expansion: Expansion::Linear,
                max_spec_tokens: self.max_spec_tokens,
                max_pattern: self.match_tokens_max,
                ..ProposeParams::default()
            },
            alpha: self.alpha,
            min_token_prob: self.min_token_prob,
        }
    }
}

/// The rules that an engine sets for the drafts of a step. The configuration decides where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineRules {
    /// A match of p tokens allows alpha * p + `offset` draft tokens.
    pub alpha: Option<f32>,
    /// See `alpha`.
    pub offset: f32,
    /// Draft tokens that are less likely are left out.
    pub min_token_prob: Option<f32>,
    /// Most tokens of a match and its draft together.
    pub match_plus_draft_max: Option<u32>,
    /// Whether the engine verifies as many tokens in a step as it has room for, whatever is drafted.
    pub is_padded: bool,
}

impl EngineRules {
    /// The parameters of a request in a step in which so many run. Alpha and the least likely token of the request's
    /// own rules, which are those of its tenant, come before what the engine sets. All limits hold as well.
    pub(crate) fn params(
        &self,
        configured: &ProposeRules,
        of_request: &DraftRules,
        requests: usize,
    ) -> ProposeParams {
        let of_engine = configured.with(self.alpha, self.min_token_prob);
        let mut rules = of_engine.with(of_request.alpha, of_request.min_token_prob);
        rules.params.offset = self.offset;
        rules.params.match_plus_draft_cap = self.match_plus_draft_max;
        match self.is_padded {
            true => rules.padded(),
            false => rules.whole(requests, None),
        }
    }
}

/// Checks the rules that a request brings.
///
/// # Errors
/// `InvalidRequest` that names the rule.
pub(crate) fn check_of_request(rules: &DraftRules) -> Result<(), ApiError> {
    let DraftRules {
        alpha,
        min_token_prob,
        ..
    } = *rules;
    if !alpha.is_none_or(|alpha| Setting::Fixed(alpha).is_alpha()) {
        return Err(ApiError::invalid(
            "alpha",
            "alpha: must be a number above 0",
        ));
    }
    if !min_token_prob.is_none_or(|least| Setting::Fixed(least).is_token_prob()) {
        return Err(ApiError::invalid(
            "min_token_prob",
            "min_token_prob: must be a number from 0 to 1",
        ));
    }
    Ok(())
}

/// Most draft tokens of a request with these rules, of whatever source.
pub(crate) fn tokens_max_of_request(rules: &DraftRules) -> usize {
    rules.max_spec_tokens.map_or(usize::MAX, |max| max as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_a_request_have_ranges() {
        let rules = |alpha, min_token_prob| DraftRules {
            alpha,
            min_token_prob,
            max_spec_tokens: None,
        };
        for right in [
            rules(None, None),
            rules(Some(0.01), Some(0.0)),
            rules(Some(4.0), Some(1.0)),
        ] {
            assert_eq!(check_of_request(&right), Ok(()), "{right:?}");
        }
        for (wrong, field) in [
            (rules(Some(0.0), None), "alpha"),
            (rules(Some(f32::NAN), None), "alpha"),
            (rules(Some(f32::INFINITY), None), "alpha"),
            (rules(None, Some(-0.1)), "min_token_prob"),
            (rules(None, Some(1.1)), "min_token_prob"),
            (rules(None, Some(f32::NAN)), "min_token_prob"),
        ] {
            let error = check_of_request(&wrong).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{error:?}");
        }
    }

    fn reach(of: EngineRules, configured: &SpeculationConfig, requests: usize) -> (f32, f32) {
        let params = of.params(&configured.rules(), &DraftRules::default(), requests);
        let rounded = |value: f32| (value * 1_000.0).round() / 1_000.0;
        (rounded(params.alpha), rounded(params.min_token_prob))
    }

    #[test]
    fn drafts_get_dearer_as_more_requests_run() {
        let configured = SpeculationConfig::default().rules();
        let auto = |requests| {
            let params =
                EngineRules::default().params(&configured, &DraftRules::default(), requests);
            (params.alpha, params.price)
        };
        assert_eq!(auto(0), auto(1));
        assert_eq!(auto(1), (32.0, Some(1.0 / 257.0)));
        assert_eq!(auto(64), (4.0, Some(0.2)));
        assert_eq!(auto(usize::MAX), (1.0, Some(0.9)));
    }

    #[test]
    fn padding_is_filled_as_far_as_possible() {
        let padded = EngineRules {
            is_padded: true,
            ..EngineRules::default()
        };
        let configured = SpeculationConfig::default();
        for requests in [1, 256] {
            assert_eq!(reach(padded, &configured, requests), (32.0, 0.0));
            let params = padded.params(&configured.rules(), &DraftRules::default(), requests);
            assert_eq!(params.price, Some(0.002));
        }
    }

    #[test]
    fn the_engine_comes_before_the_configuration_and_both_before_auto() {
        let configured = SpeculationConfig {
            alpha: Setting::Fixed(3.0),
            min_token_prob: Setting::Fixed(0.25),
            max_spec_tokens: 7,
            match_tokens_max: 20,
        };
        let engine = EngineRules {
            alpha: Some(2.0),
            offset: 1.0,
            match_plus_draft_max: Some(30),
            ..EngineRules::default()
        };
        for requests in [1, 64] {
            assert_eq!(
                reach(EngineRules::default(), &configured, requests),
                (3.0, 0.25)
            );
            assert_eq!(reach(engine, &configured, requests), (2.0, 0.25));
        }
        let params = engine.params(&configured.rules(), &DraftRules::default(), 1);
        assert_eq!(
            (params.offset, params.match_plus_draft_cap),
            (1.0, Some(30))
        );
        assert_eq!((params.max_spec_tokens, params.max_pattern), (7, 20));
        assert_eq!(params.expansion, Expansion::Linear);
    }
}
