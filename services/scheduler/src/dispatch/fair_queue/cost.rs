//! The cost of a chunk in the Virtual Token Counter, and what a tenant is charged for it.
//!
//! The unit is a token of a prompt that an engine reads. A tenant is charged its cost divided by its weight.

use refrain_protocol::scheduling::TenantWeight;

/// Cost of a context token that the worker read. Tokens that its KV cache held are free: nothing was computed.
const READ_COST: u64 = 1;
/// Cost of an output token. Each one takes a step, while a few steps read a whole context. The VTC paper has the
/// same. An output token that was drafted costs as much as another one: the step that drafts save is a gain for
/// everybody.
const OUTPUT_COST: u64 = 2;
/// Cost of a draft token that the engine verified and rejected. It took one position of a forward pass, as a token of
/// a prompt does, and left nothing. Otherwise a tenant that predicts nonsense would have that work for free.
const REJECTED_COST: u64 = 1;
/// Cost of a chunk by itself. A slot is empty until the next grant reaches it, which takes some steps. Without it,
/// calls that read and write nothing would cost nothing, however many slots they pass through.
const CHUNK_COST: u64 = 8;
/// Counts are in this part of a token, so that the share of a heavy tenant is exact.
pub(super) const PARTS_PER_TOKEN: u64 = 1_000;

/// The charge of a grant for its expected cost, to be corrected when the chunk ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::dispatch) struct Charge {
    /// The weight of the tenant at the grant, so that a later one does not change what this chunk costs.
    weight: TenantWeight,
    read_tokens: u32,
    output_tokens: u32,
}

/// The real use of a chunk.
#[derive(Clone, Copy, Debug)]
pub(in crate::dispatch) struct Spent {
    pub(in crate::dispatch) emitted_tokens: u32,
    /// Context tokens that the worker read. `None`: unknown, so the estimate stays.
    pub(in crate::dispatch) read_tokens: Option<u32>,
    /// Draft tokens that were verified and rejected.
    pub(in crate::dispatch) rejected_tokens: u32,
}

/// The charge of a tenant of this weight for so many tokens, in parts of a token.
fn parts(weight: TenantWeight, read: u32, output: u32, rejected: u32) -> u64 {
    let cost = CHUNK_COST
        + u64::from(read) * READ_COST
        + u64::from(output) * OUTPUT_COST
        + u64::from(rejected) * REJECTED_COST;
    cost * PARTS_PER_TOKEN * TenantWeight::THOUSANDTHS / weight.thousandths()
}

impl Charge {
    pub(super) fn new(weight: TenantWeight, read_tokens: u32, output_tokens: u32) -> Self {
        Charge {
            weight,
            read_tokens,
            output_tokens,
        }
    }

    /// The charge at the grant. No drafts are expected to fail.
    pub(super) fn expected(&self) -> u64 {
        parts(self.weight, self.read_tokens, self.output_tokens, 0)
    }

    /// The charge for the cost that the chunk turned out to have.
    pub(super) fn real(&self, spent: Spent) -> u64 {
        let read_tokens = spent.read_tokens.unwrap_or(self.read_tokens);
        parts(
            self.weight,
            read_tokens,
            spent.emitted_tokens,
            spent.rejected_tokens,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(weight: f64) -> Charge {
        Charge::new(TenantWeight::try_from(weight).unwrap(), 100, 50)
    }

    #[test]
    fn a_charge_is_the_cost_divided_by_the_weight() {
        assert_eq!(charge(1.0).expected(), 208 * PARTS_PER_TOKEN);
        assert_eq!(charge(4.0).expected(), 52 * PARTS_PER_TOKEN);
        assert_eq!(charge(0.01).expected(), 20_800 * PARTS_PER_TOKEN);
        assert_eq!(charge(100.0).expected(), 2_080);
    }

    #[test]
    fn reading_what_was_held_is_free_and_rejected_drafts_are_not() {
        let real = |read_tokens, emitted_tokens, rejected_tokens| {
            let spent = Spent {
                emitted_tokens,
                read_tokens,
                rejected_tokens,
            };
            charge(1.0).real(spent) / PARTS_PER_TOKEN
        };
        assert_eq!(real(Some(100), 50, 0), 208);
        assert_eq!(real(Some(0), 50, 0), 108);
        assert_eq!(real(Some(0), 50, 30), 138);
        // A chunk that broke off before it told what it read is taken to have read what was expected.
        assert_eq!(real(None, 0, 0), 108);
        assert_eq!(real(Some(0), 0, 0), CHUNK_COST, "nothing is quite free");
        assert!(real(Some(u32::MAX), u32::MAX, u32::MAX) > u64::from(u32::MAX));
    }
}
