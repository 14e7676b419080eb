//! Usage of tenants, for bills and budgets: counts per hour, tenant, key and model.
//!
//! Each gateway has totals of its own, which only grow. So a total may be sent again and out of order: of two states
//! the greater one holds, and the sum over all gateways is exact.

mod calendar;
mod period_tokens;

use serde::{Deserialize, Serialize};

pub use calendar::{Period, hour_of, hours_asked, parse_hour};
pub use period_tokens::PeriodTokens;

/// The counts of some requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageCounts {
    /// Requests that made at least one token.
    pub requests: u64,
    /// Tokens of prompts, cached or not.
    pub input_tokens: u64,
    /// Those of them that an engine had in its cache.
    pub cached_input_tokens: u64,
    /// Tokens of outputs, reasoning included.
    pub output_tokens: u64,
    /// Those of them that were reasoning.
    pub reasoning_tokens: u64,
    /// Draft tokens that engines verified.
    pub verified_draft_tokens: u64,
    /// Those of them that became output.
    pub accepted_draft_tokens: u64,
}

impl UsageCounts {
    /// The names of the counts, in the order of [`UsageCounts::values`].
    pub const NAMES: [&'static str; 7] = [
        "requests",
        "input_tokens",
        "cached_input_tokens",
        "output_tokens",
        "reasoning_tokens",
        "verified_draft_tokens",
        "accepted_draft_tokens",
    ];

    /// The counts as a list.
    pub fn values(self) -> [u64; 7] {
        [
            self.requests,
            self.input_tokens,
            self.cached_input_tokens,
            self.output_tokens,
            self.reasoning_tokens,
            self.verified_draft_tokens,
            self.accepted_draft_tokens,
        ]
    }

    /// The counts of such a list.
    pub fn of_values(values: [u64; 7]) -> Self {
        let [
            requests,
            input_tokens,
            cached_input_tokens,
            output_tokens,
            reasoning_tokens,
            verified_draft_tokens,
            accepted_draft_tokens,
        ] = values;
        UsageCounts {
            requests,
            input_tokens,
            cached_input_tokens,
            output_tokens,
            reasoning_tokens,
            verified_draft_tokens,
            accepted_draft_tokens,
        }
    }

    fn zip(self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        let (left, right) = (self.values(), other.values());
        UsageCounts::of_values(std::array::from_fn(|at| combine(left[at], right[at])))
    }

    /// The sums of both.
    pub fn plus(self, other: Self) -> Self {
        self.zip(other, u64::saturating_add)
    }

    /// The excess of these over `other`, at least 0 each.
    pub fn minus(self, other: Self) -> Self {
        self.zip(other, u64::saturating_sub)
    }

    /// The greater ones of both.
    pub fn max(self, other: Self) -> Self {
        self.zip(other, u64::max)
    }

    /// Tokens that count towards budgets: those of prompts and outputs.
    pub fn tokens(self) -> u64 {
        self.input_tokens.saturating_add(self.output_tokens)
    }

    /// Whether nothing was counted.
    pub fn is_zero(self) -> bool {
        self == UsageCounts::default()
    }
}

/// Names a row of usage. Rows are in the order of these.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UsageRowId {
    /// Hours since 1970 in UTC.
    pub hour: u32,
    /// The tenant.
    pub tenant: String,
    /// The public id of the key. Empty for callers without one.
    pub key: String,
    /// The public name of the model.
    pub model: String,
    /// The gateway that counted.
    pub gateway: u128,
}

/// The state of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageTotal {
    /// When it began to count, in Unix milliseconds. After an erasure a row begins anew, and replaces the erased one.
    pub began_ms: u64,
    /// All counts since then.
    pub counts: UsageCounts,
}

impl UsageTotal {
    /// The later one of two states of a row.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        use std::cmp::Ordering;
        match self.began_ms.cmp(&other.began_ms) {
            Ordering::Less => other,
            Ordering::Greater => self,
            Ordering::Equal => UsageTotal {
                began_ms: self.began_ms,
                counts: self.counts.max(other.counts),
            },
        }
    }
}

/// A row of usage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow {
    /// Its name.
    pub id: UsageRowId,
    /// Its state.
    pub total: UsageTotal,
}

/// A tenant or one of its keys, as a budget is for one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Spender {
    /// The tenant.
    pub tenant: String,
    /// The public id of the key; `None` for all keys of the tenant together.
    pub key: Option<String>,
}

/// Rows from a gateway, and its questions about other gateways.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordUsageRequest {
    /// The gateway that asks.
    pub gateway: u128,
    /// Rows that have changed. Repeats are harmless.
    pub rows: Vec<UsageRow>,
    /// Erasures up to this time are known to the gateway, by the clock of the store in Unix milliseconds.
    pub erasures_known_ms: u64,
    /// Those whose tokens at other gateways are asked for.
    pub spenders: Vec<Spender>,
    /// The day that is meant, as the number of a [`Period::Day`].
    pub day: u32,
    /// The month that is meant, as the number of a [`Period::Month`].
    pub month: u32,
}

/// The answer to [`RecordUsageRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordUsageReply {
    /// Erasures since those that are known, in order of time.
    pub erasures: Vec<UsageErasure>,
    /// For each spender, what each other gateway has counted.
    pub spent: Vec<Vec<SpentTokens>>,
}

/// The usage of a tenant was erased: all that had begun to count until then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageErasure {
    /// The tenant.
    pub tenant: String,
    /// The time, in Unix milliseconds.
    pub at_ms: u64,
}

/// Tokens that a gateway has counted for a spender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpentTokens {
    /// The gateway.
    pub gateway: u128,
    /// Tokens of the day that was asked for.
    pub day_tokens: u64,
    /// Tokens of the month that was asked for.
    pub month_tokens: u64,
}

/// Asks for rows of usage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRowsRequest {
    /// The first hour, in hours since 1970.
    pub from_hour: u32,
    /// The hour after the last one.
    pub until_hour: u32,
    /// Rows of this tenant only.
    pub tenant: Option<String>,
    /// Rows of this key only.
    pub key: Option<String>,
    /// Rows of this model only.
    pub model: Option<String>,
    /// Where the page before ended.
    pub after: Option<UsageRowId>,
    /// Most rows of the answer.
    pub rows_max: u32,
}

/// A page of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRowsReply {
    /// The rows, in order. There may be none although others follow.
    pub rows: Vec<UsageRow>,
    /// Where the next page begins: after this row. `None` at the end.
    pub next: Option<UsageRowId>,
}

/// Erases the usage of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EraseUsageRequest {
    /// The tenant.
    pub tenant: String,
}

/// The answer to [`EraseUsageRequest`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EraseUsageReply {
    /// The time of the erasure, in Unix milliseconds.
    pub erased_at_ms: u64,
    /// Rows that were erased.
    pub rows: u64,
    /// Gateways that have erased theirs, and have forgotten the responses that they stored for the tenant.
    #[serde(default)]
    pub gateways: u64,
    /// Gateways that were heard of lately and have not done so yet. They do when they call the next time.
    #[serde(default)]
    pub gateways_pending: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(began_ms: u64, requests: u64, output_tokens: u64) -> UsageTotal {
        UsageTotal {
            began_ms,
            counts: UsageCounts {
                requests,
                output_tokens,
                ..UsageCounts::default()
            },
        }
    }

    #[test]
    fn the_order_and_the_number_of_messages_do_not_change_a_row() {
        let states = [
            total(5, 1, 10),
            total(5, 2, 30),
            total(9, 1, 4),
            total(9, 1, 7),
        ];
        let all = |order: [usize; 6]| {
            let picked = order.into_iter().map(|at| states[at]);
            picked.fold(UsageTotal::default(), UsageTotal::merge)
        };
        for order in [[0, 1, 2, 3, 3, 0], [3, 2, 1, 0, 0, 1], [2, 0, 3, 1, 2, 2]] {
            assert_eq!(all(order), total(9, 1, 7));
        }
        assert_eq!(total(5, 1, 30).merge(total(5, 2, 10)), total(5, 2, 30));
    }

    #[test]
    fn names_and_values_are_in_the_order_of_the_fields() {
        let counts = UsageCounts::of_values([1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(counts.values(), [1, 2, 3, 4, 5, 6, 7]);
        let json = serde_json::to_value(counts).unwrap();
        for (name, value) in UsageCounts::NAMES.iter().zip(counts.values()) {
            assert_eq!(json[name], value);
        }
        assert_eq!(counts.tokens(), 6);
        assert_eq!(counts.plus(counts).minus(counts), counts);
    }
}
