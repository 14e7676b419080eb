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
/// Below this price nothing more is drafted.
const PRICE_MIN: f64 = 0.002;
/// Above this price nothing pays, and drafts are only there to be learnt from.
const PRICE_MAX: f64 = 0.9;

/// Requests beside which a draft token costs half a token, where steps are not timed. The price that the router
/// measures on the modelled H100 with an 8B model is within a fifth of this rule from 16 to 128 requests.
const REQUESTS_AT_HALF_PRICE: f64 = 256.0;

/// Longest match that may be configured, tokens. Each look-up in sealed text costs up to as many steps.
const MATCH_TOKENS_MOST: u32 = 1024;

impl ProposeRules {
    /// Checks what a configuration sets in its section `speculation`.
    pub fn check(&self, check: &mut impl FnMut(bool, &str)) {
        check(
            self.alpha.is_alpha(),
            "speculation.alpha: \"auto\", or a number above 0",
        );
        check(
            self.min_token_prob.is_token_prob(),
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
            ..self.or(ALPHA_MAX)
        }
    }

    /// The parameters of drafts of which all tokens are verified that are worth their price
    /// ([`Candidate::paying`](super::Candidate::paying)), in steps of so many requests. `price` is the cost of a
    /// draft token, as a share of the worth of a token; where it was not measured, it follows the number of requests.
    ///
    /// They have no price where both settings are fixed: then a draft is that of Algorithm 1, and verified as it is.
    pub fn whole(&self, requests: usize, price: Option<f64>) -> ProposeParams {
        let requests = requests.max(1) as f64;
        self.whole_at(price.unwrap_or(requests / (requests + REQUESTS_AT_HALF_PRICE)))
    }

    /// The parameters of such drafts where an engine verifies them in place of padding, so that they cost nothing.
    pub fn padded(&self) -> ProposeParams {
        self.whole_at(PRICE_MIN)
    }

    fn whole_at(&self, price: f64) -> ProposeParams {
        // A price that is no number counts as the least.
        let price = price.clamp(PRICE_MIN, PRICE_MAX).max(PRICE_MIN);
        let alpha = (1.0 / price - 1.0).clamp(ALPHA_MIN, ALPHA_MAX);
        let is_fixed = self.alpha != Setting::Auto && self.min_token_prob != Setting::Auto;
        ProposeParams {
            price: (!is_fixed).then_some(price as f32),
            ..self.or(alpha)
        }
    }

    /// The same rules, with these settings where they are given.
    pub fn with(&self, alpha: Option<f32>, min_token_prob: Option<f32>) -> ProposeRules {
        let or = |fixed: Option<f32>, setting| fixed.map_or(setting, Setting::Fixed);
        ProposeRules {
            alpha: or(alpha, self.alpha),
            min_token_prob: or(min_token_prob, self.min_token_prob),
            params: self.params.clone(),
        }
    }

    /// The settings, with this alpha where none is set.
    fn or(&self, alpha: f64) -> ProposeParams {
        ProposeParams {
            alpha: self.alpha.or(alpha),
            min_token_prob: self.min_token_prob.or(0.0),
            price: None,
            ..self.params.clone()
        }
    }
}

impl Setting {
    /// Whether it may be an alpha: a number has to be above 0.
    pub fn is_alpha(self) -> bool {
        !matches!(self, Setting::Fixed(alpha) if !(alpha > 0.0 && alpha.is_finite()))
    }

    /// Whether it may be a least probability: a number has to be from 0 to 1.
    pub fn is_token_prob(self) -> bool {
        !matches!(self, Setting::Fixed(least) if !(0.0..=1.0).contains(&least))
    }

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
        let of = |requests| rules.whole(requests, None);
        // A token costs half a token beside 256 requests.
        assert_eq!(of(256).price, Some(0.5));
        assert_eq!(of(0), of(1));
        assert_eq!(reach(of(1)), (32.0, 0.0));
        assert_eq!([of(16), of(64)].map(reach), [(16.0, 0.0), (4.0, 0.0)]);
        assert_eq!((of(100_000).price, of(100_000).alpha), (Some(0.9), 1.0));
        let at = |price| rules.whole(16, Some(price));
        assert_eq!((at(0.2).price, reach(at(0.2))), (Some(0.2), (4.0, 0.0)));
        assert_eq!(at(7.0).price, Some(0.9));
        for least in [0.0, -1.0, f64::NAN] {
            assert_eq!((at(least).price, at(least).alpha), (Some(0.002), 32.0));
        }
        assert_eq!(rules.padded(), at(0.0));
    }

    #[test]
    fn drafts_are_those_of_algorithm_1_where_both_settings_are_fixed() {
        let rules = ProposeRules::default();
        let all = |rules: &ProposeRules| {
            [
                rules.whole(16, None),
                rules.whole(1, Some(0.1)),
                rules.padded(),
            ]
        };
        let alpha = rules.with(Some(2.0), None);
        assert!(all(&alpha).iter().all(|of| of.price.is_some()));
        assert!(all(&alpha).iter().all(|of| reach(of.clone()) == (2.0, 0.0)));
        let both = alpha.with(None, Some(0.3));
        assert!(all(&both).iter().all(|of| of.price.is_none()));
        // A router still chooses by what is learnt.
        assert!(both.for_router(None).price.is_some());
        // The later setting counts.
        assert_eq!(both.with(Some(1.0), None).alpha, Setting::Fixed(1.0));
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
            rules.whole(1, None),
            rules.whole(512, Some(0.1)),
            rules.padded(),
        ];
        for params in all {
            assert_eq!(reach(params), (2.0, 0.25));
        }
    }
}
