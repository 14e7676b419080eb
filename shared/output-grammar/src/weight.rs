//! The cost of merging the parts of a schema that hold together, and the merges that would change its meaning.
//!
//! A value must be valid by all parts of an `allOf`, by the keywords beside it, and by what a `$ref` names. Merged,
//! the alternatives of one part are multiplied by those of the others, and each gets a copy of the rest.

use std::collections::HashMap;

use serde_json::Value;

/// Maximum number of alternatives of merged parts, where more than one part has some.
const ALTERNATIVES_MAX: usize = 1_000;

/// Maximum number of bytes of the copies that alternatives get.
const COPIED_BYTES_MAX: usize = 16 << 20;

/// Largest `multipleOf`, and product of several that hold together. The automaton has a state for each remainder. A
/// fraction counts by its digits, without the point.
const MULTIPLE_MAX: f64 = 10_000.0;

/// Maximum number of digits of a `multipleOf` after the point. The automaton computes in 32 bits.
const FRACTION_DIGITS_MAX: u32 = 8;

/// Parts that hold together.
#[derive(Clone, Copy)]
struct Weight {
    alternatives: usize,
    /// Number of parts with more than one alternative.
    choices: usize,
    bytes: usize,
    /// Number of values of `multipleOf`, and of those that are fractions, and the product of all by their digits.
    multiples: usize,
    fractions: usize,
    product: f64,
}

impl Weight {
    const NONE: Weight = Weight {
        alternatives: 1,
        choices: 0,
        bytes: 0,
        multiples: 0,
        fractions: 0,
        product: 1.0,
    };

    fn and(self, other: Weight) -> Weight {
        Weight {
            alternatives: self.alternatives.saturating_mul(other.alternatives),
            choices: self.choices.saturating_add(other.choices),
            bytes: self.bytes.saturating_add(other.bytes),
            multiples: self.multiples.saturating_add(other.multiples),
            fractions: self.fractions.saturating_add(other.fractions),
            product: self.product * other.product,
        }
    }
}

/// Weighs the schemas of one root.
pub(crate) struct Scale<'a> {
    root: &'a Value,
    referred: HashMap<&'a str, Weight>,
}

impl<'a> Scale<'a> {
    pub(crate) fn new(root: &'a Value) -> Self {
        Scale {
            root,
            referred: HashMap::new(),
        }
    }

    /// Why a schema cannot be merged, if it cannot.
    pub(crate) fn fault(&mut self, schema: &'a Value) -> Option<&'static str> {
        let weight = self.weigh(schema);
        let copied = weight.alternatives.saturating_mul(weight.bytes);
        match weight {
            Weight {
                choices: 2..,
                alternatives,
                ..
            } if alternatives > ALTERNATIVES_MAX => {
                Some("its parts that hold together multiply to more than 1000 alternatives")
            }
            Weight { choices: 1.., .. } if copied > COPIED_BYTES_MAX => {
                Some("what holds beside its alternatives is too long for their number")
            }
            Weight {
                multiples: 2..,
                fractions: 1..,
                ..
            } => Some("several values of multipleOf that hold together must be integers"),
            Weight { product, .. } if product > MULTIPLE_MAX => Some(
                "multipleOf must be at most 10000, and so must the product of several that hold together",
            ),
            _ => None,
        }
    }

    fn weigh(&mut self, schema: &'a Value) -> Weight {
        let Some(fields) = schema.as_object() else {
            return Weight::NONE;
        };
        let mut weight = Weight::NONE;
        for (name, value) in fields {
            let part = match (name.as_str(), value) {
                ("anyOf" | "oneOf", Value::Array(branches)) => self.choice(branches),
                ("allOf", Value::Array(parts)) => {
                    let parts = parts.iter().map(|part| self.weigh(part));
                    parts.fold(Weight::NONE, Weight::and)
                }
                ("$ref", Value::String(uri)) => self.referred(uri),
                ("$defs" | "definitions", _) => Weight::NONE,
                ("multipleOf", Value::Number(number)) => {
                    let number = number.as_f64().unwrap_or(f64::INFINITY);
                    Weight {
                        multiples: 1,
                        fractions: usize::from(number.fract() != 0.0),
                        product: digits(number),
                        ..Weight::NONE
                    }
                }
                _ => Weight {
                    bytes: name.len() + value.to_string().len(),
                    ..Weight::NONE
                },
            };
            weight = weight.and(part);
        }
        weight
    }

    /// One of some branches. They are written down anyway, so only what holds beside them is copied.
    fn choice(&mut self, branches: &'a [Value]) -> Weight {
        let mut choice = Weight {
            alternatives: 0,
            ..Weight::NONE
        };
        for branch in branches {
            let branch = self.weigh(branch);
            choice.alternatives = choice.alternatives.saturating_add(branch.alternatives);
            choice.choices = choice.choices.max(branch.choices);
            choice.multiples = choice.multiples.max(branch.multiples);
            choice.fractions = choice.fractions.max(branch.fractions);
            choice.product = choice.product.max(branch.product);
        }
        choice.choices = choice.choices.max(usize::from(choice.alternatives > 1));
        choice.alternatives = choice.alternatives.max(1);
        choice
    }

    fn referred(&mut self, uri: &'a str) -> Weight {
        if let Some(weight) = self.referred.get(uri) {
            return *weight;
        }
        // A part that refers to itself is refused by the library, or has no alternatives by that.
        self.referred.insert(uri, Weight::NONE);
        let target = uri.strip_prefix('#').and_then(|at| self.root.pointer(at));
        let weight = target.map_or(Weight::NONE, |target| self.weigh(target));
        self.referred.insert(uri, weight);
        weight
    }
}

/// The digits of a number as an integer, as the library finds them.
fn digits(mut number: f64) -> f64 {
    let mut after_point = 0;
    while number.fract() != 0.0 {
        number *= 10.0;
        after_point += 1;
        if after_point > FRACTION_DIGITS_MAX {
            return f64::INFINITY;
        }
    }
    number
}
