//! How far drafts reach: alpha and the least likely token, set by the user or by what a draft token costs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ProposeParams;

/// A number, or `"auto"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(expecting = "a number or \"auto\"")]
pub enum Setting {
    /// Follows what was measured, such as the price of a draft token.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// This.
    #[serde(untagged)]
    Fixed(f32),
}

/// The rules of drafts, of which alpha and the least likely token may follow what a draft token costs.
///
/// A context that agreed with an earlier text for p tokens goes on to agree for d more with a probability of about
/// p / (p + d): the rule of succession. A draft token whose price is a share `x` of the worth of a token pays where
/// it is accepted with a probability of at least `x`, so up to d = (1 / x - 1) p. That is MAX_SPEC of SuffixDecoding
/// (arXiv 2411.04975, section 4) with alpha = 1 / x - 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProposeRules {
    /// The other rules. Its `alpha`, `min_token_prob` and `price` are not used.
    pub params: ProposeParams,
    /// A match of p tokens allows a draft of alpha * p tokens.
    pub alpha: Setting,
    /// Tokens that are less likely are left out.
    pub min_token_prob: Setting,
}

/// The shortest and longest reach. Beyond the longest, proposals grow and nothing is gained.
const ALPHA_MIN: f64 = 1.0;
const ALPHA_MAX: f64 = 32.0;

/// The price for a router that knows nothing yet about the steps of its engine.
const PRICE_UNKNOWN: f64 = 0.2;
/// Below this price drafts are as long as they may be.
const PRICE_MIN: f64 = 0.03;
/// Above this price nothing pays, and drafts are only there to be learnt from.
const PRICE_MAX: f64 = 0.9;

/// Requests beside which a draft token that is verified as it is found costs what it is worth: the engine computes
/// all the time.
const REQUESTS_AT_FULL_PRICE: f64 = 256.0;
/// The most that is asked of such a token. It is the share of a text that was seen once.
const WHOLE_PROB_MAX: f64 = 0.5;

/// The longest reach that SuffixDecoding recommends, and the least likely token that arctic-inference drafts.
const ALPHA_REMOTE: f64 = 4.0;
const TOKEN_PROB_REMOTE: f64 = 0.1;
/// The least likely token that is drafted in place of padding.
const TOKEN_PROB_PADDED: f64 = 0.03;

/// Longest match that may be configured, tokens. Each look-up in sealed text costs up to as many steps.
const MATCH_TOKENS_MOST: u32 = 1024;

impl ProposeRules {
    /// Checks what a configuration sets in its section `speculation`.
    pub fn check(&self, check: &mut impl FnMut(bool, &str)) {
        check(
            !matches!(self.alpha, Setting::Fixed(alpha) if !(alpha > 0.0 && alpha.is_finite())),
            "speculation.alpha: \"auto\", or a number above 0",
        );
        check(
            !matches!(self.min_token_prob, Setting::Fixed(least) if !(0.0..=1.0).contains(&least)),
            "speculation.min_token_prob: \"auto\", or a number from 0 to 1",
        );
        check(
            (1..=MATCH_TOKENS_MOST).contains(&self.params.max_pattern),
            "speculation.match_tokens_max: from 1 to 1024",
        );
    }

    /// The parameters of candidates for a router, which admits the tokens that pay: see
    /// [`propose_valued`](super::propose_valued). A draft token costs `price`, as a share of the worth of a token;
    /// `None`: that is not known. Drafts end where they no longer pay, by what is learnt, so alpha is the longest,
    /// and nothing is left out by its share.
    pub fn for_router(&self, price: Option<f64>) -> ProposeParams {
        let price = price.filter(|price| price.is_finite() && *price > 0.0);
        let price = price.unwrap_or(PRICE_UNKNOWN);
        ProposeParams {
            price: Some(price.min(PRICE_MAX) as f32),
            ..self.or(ALPHA_MAX, 0.0)
        }
    }

    /// The parameters of drafts that are verified as they are found, in steps of so many requests. The price of a
    /// token is a fit to the best rules on modelled engines (docs/vllm.md), where the time of steps is not known.
    pub fn whole(&self, requests: usize) -> ProposeParams {
        let price = requests.max(1) as f64 / REQUESTS_AT_FULL_PRICE;
        self.whole_at(price.sqrt())
    }

    /// The parameters of drafts that are verified as they are found, where a draft token costs `price`, as a share of
    /// the worth of a token. Nobody chooses among their tokens, so each has to be worth its price.
    pub fn whole_at(&self, price: f64) -> ProposeParams {
        // A price that is no number counts as the least.
        let price = price.clamp(PRICE_MIN, 1.0).max(PRICE_MIN);
        let alpha = (1.0 / price - 1.0).clamp(ALPHA_MIN, ALPHA_MAX);
        self.or(alpha, price.min(WHOLE_PROB_MAX))
    }

    /// The parameters of drafts that an engine verifies in place of padding, so that they cost nothing.
    pub fn padded(&self) -> ProposeParams {
        self.or(ALPHA_MAX, TOKEN_PROB_PADDED)
    }

    /// The parameters of look-ups in a store, which do not know the step that their drafts are for.
    pub fn remote(&self) -> ProposeParams {
        self.or(ALPHA_REMOTE, TOKEN_PROB_REMOTE)
    }

    fn or(&self, alpha: f64, token_prob: f64) -> ProposeParams {
        ProposeParams {
            alpha: self.alpha.or(alpha),
            min_token_prob: self.min_token_prob.or(token_prob),
            price: None,
            ..self.params.clone()
        }
    }
}

impl Setting {
    fn or(self, auto: f64) -> f32 {
        match self {
            Setting::Auto => auto as f32,
            Setting::Fixed(value) => value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reach(params: ProposeParams) -> (f32, f32) {
        let rounded = |value: f32| (value * 1_000.0).round() / 1_000.0;
        (rounded(params.alpha), rounded(params.min_token_prob))
    }

    #[test]
    fn a_router_gets_long_drafts_and_their_price() {
        let rules = ProposeRules::default();
        let price = |price| rules.for_router(price).price;
        assert_eq!(reach(rules.for_router(Some(0.1))), (32.0, 0.0));
        assert_eq!((price(None), price(Some(0.1))), (Some(0.2), Some(0.1)));
        assert_eq!(price(Some(7.0)), Some(0.9));
        for unknown in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(price(Some(unknown)), price(None));
        }
    }

    #[test]
    fn whole_drafts_are_shorter_beside_more_requests() {
        let rules = ProposeRules::default();
        let of = |requests| reach(rules.whole(requests));
        assert_eq!(
            [of(0), of(1), of(16)],
            [(15.0, 0.063), (15.0, 0.063), (3.0, 0.25)]
        );
        assert_eq!([of(64), of(100_000)], [(1.0, 0.5), (1.0, 0.5)]);
        let at = |price| reach(rules.whole_at(price));
        assert_eq!([at(0.25), at(0.2)], [(3.0, 0.25), (4.0, 0.2)]);
        assert_eq!([at(0.8), at(7.0)], [(1.0, 0.5), (1.0, 0.5)]);
        for least in [0.0, -1.0, f64::NAN] {
            assert_eq!(at(least), (32.0, 0.03));
        }
        assert_eq!(reach(rules.padded()), (32.0, 0.03));
        assert_eq!(reach(rules.remote()), (4.0, 0.1));
    }

    #[test]
    fn what_is_set_stays() {
        let rules = ProposeRules {
            alpha: Setting::Fixed(2.0),
            min_token_prob: Setting::Fixed(0.25),
            ..ProposeRules::default()
        };
        let all = [
            rules.for_router(Some(0.01)),
            rules.for_router(None),
            rules.whole(1),
            rules.whole(512),
            rules.padded(),
            rules.remote(),
        ];
        for params in all {
            assert_eq!(reach(params), (2.0, 0.25));
        }
    }
}
