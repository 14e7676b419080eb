//! How predictable outputs are: their empirical entropy (SuffixDecoding, arXiv 2411.04975, A.2.3).

use refrain_suffix_index::Token;

use crate::logs::RecordedCall;

/// Longest pattern, tokens: that of the published suffix trees.
const PATTERN_TOKENS_MAX: usize = 64;

/// How to read it, with the workloads of the paper and those of docs/benchmarks.md in mind.
pub(crate) const ENTROPY_BANDS: &str = "Entropy below about 1 bit is text that says the same again and again; up to \
    about 2.5 it keeps to a form, as code and tool calls do; above that it hardly repeats.";

/// Outputs from which the entropy is computed, evenly spread over the calls. More of them change little.
const OUTPUTS_MAX: usize = 100;

/// The entropy of the outputs of these calls, as of [`empirical_entropy_bits`].
pub(crate) fn entropy_of_calls(calls: &[RecordedCall]) -> Option<f64> {
    let apart = calls.len().div_ceil(OUTPUTS_MAX).max(1);
    let outputs = calls.iter().step_by(apart).map(|call| &call.output[..]);
    empirical_entropy_bits(&outputs.collect::<Vec<_>>())
}

/// Mean entropy of the next token in bits, over all nodes of the outputs' suffix tree that occur more than once. Each
/// pattern is weighted by how often it is continued, also where that is certain.
///
/// The paper does not name its logarithm, so its figures may be in other units.
/// `None` if there is no token.
fn empirical_entropy_bits(outputs: &[&[Token]]) -> Option<f64> {
    let mut suffixes: Vec<&[Token]> = outputs
        .iter()
        .flat_map(|output| (0..output.len()).map(|at| &output[at..]))
        .collect();
    suffixes.sort_unstable_by(|a, b| capped(a).cmp(capped(b)));
    let (mut bits, mut weight) = (0.0, 0.0);
    // Suffixes with a common prefix are adjacent: (first, one past the last, length of the prefix).
    let mut patterns = vec![(0, suffixes.len(), 0)];
    let mut counts = Vec::new();
    while let Some((mut from, to, len)) = patterns.pop() {
        // Suffixes that end with the pattern come first, and have no continuation.
        from += suffixes[from..to].partition_point(|suffix| suffix.len() == len);
        counts.clear();
        let mut first = from;
        while first < to {
            let token = suffixes[first][len];
            let same = suffixes[first..to].partition_point(|suffix| suffix[len] == token);
            counts.push(same);
            if same > 1 && len + 1 < PATTERN_TOKENS_MAX {
                patterns.push((first, first + same, len + 1));
            }
            first += same;
        }
        let total = (to - from) as f64;
        bits += counts
            .iter()
            .map(|&count| surprise_bits(count, total))
            .sum::<f64>();
        weight += total;
    }
    (weight > 0.0).then(|| bits / weight)
}

/// Bits of all occurrences of one token together.
fn surprise_bits(count: usize, total: f64) -> f64 {
    let count = count as f64;
    count * (total / count).log2()
}

fn capped(suffix: &[Token]) -> &[Token] {
    &suffix[..suffix.len().min(PATTERN_TOKENS_MAX)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certain_text_has_no_entropy_and_open_text_has_its_bits() {
        let entropy = |outputs: &[&[Token]]| empirical_entropy_bits(outputs);
        assert_eq!(entropy(&[]), None);
        assert_eq!(entropy(&[&[], &[]]), None);
        assert_eq!(entropy(&[&[7; 10]]), Some(0.0));
        // Two tokens in turns: only the empty pattern has two continuations, which is one bit for 6 tokens.
        // Patterns of one to four tokens that occur more than once are continued 3 + 2, 2 + 2, 2 + 1 and 1 times.
        let found = entropy(&[&[1, 2, 1, 2, 1, 2]]).expect("there are tokens");
        assert!((found - 6.0 / 19.0).abs() < 1e-12, "{found}");
        // The empty pattern has 4 tokens; token 1 continues with 2 or 3, which is one bit and 2 tokens.
        let found = entropy(&[&[1, 2], &[1, 3]]).expect("there are tokens");
        let root = (2.0 * 1.0 + 1.0 * 2.0 + 1.0 * 2.0) / 4.0;
        assert!(
            (found - (4.0 * root + 2.0 * 1.0) / 6.0).abs() < 1e-12,
            "{found}"
        );
    }

    #[test]
    fn text_that_repeats_has_less_entropy() {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ((state >> 33) % below) as Token
        };
        let phrases: Vec<Vec<Token>> = (0..5)
            .map(|_| (0..12).map(|_| random(1000)).collect())
            .collect();
        let repeated: Vec<Vec<Token>> = (0..50)
            .map(|_| {
                (0..5)
                    .flat_map(|_| phrases[random(5) as usize].clone())
                    .collect()
            })
            .collect();
        let fresh: Vec<Vec<Token>> = (0..50)
            .map(|_| (0..60).map(|_| random(60)).collect())
            .collect();
        let of = |outputs: &[Vec<Token>]| {
            let outputs: Vec<&[Token]> = outputs.iter().map(Vec::as_slice).collect();
            empirical_entropy_bits(&outputs).expect("there are tokens")
        };
        assert!(
            of(&repeated) < 0.8 * of(&fresh),
            "{} {}",
            of(&repeated),
            of(&fresh)
        );
    }
}
