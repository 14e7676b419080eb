//! The sizes of steps that are measured together, and the curve over them.

/// Sizes up to `.0` tokens are measured together in buckets of `.1`, each closed above: edges of tiles are multiples
/// of powers of two.
pub(super) const WIDTHS: [(u32, u32); 4] = [(64, 1), (256, 4), (1024, 16), (4096, 64)];
/// Tokens beyond which every number has a bucket of its own.
const WIDE: u32 = WIDTHS[WIDTHS.len() - 1].0;

/// Number of buckets with a width.
pub(super) fn buckets() -> usize {
    bucket_of(WIDE).0 + 1
}

/// Tokens of a step beyond those of the last bucket with a width.
pub(super) fn beyond(tokens: u32) -> u32 {
    tokens.saturating_sub(WIDE)
}

/// The bucket of a number of tokens, and the last number in it. Beyond the widths every number has one of its own.
pub(super) fn bucket_of(tokens: u32) -> (usize, u32) {
    let (mut first, mut from) = (0, 0);
    for (to, width) in WIDTHS {
        if tokens <= to {
            let widths = (tokens.max(1) - from).div_ceil(width);
            return (first + widths as usize - 1, from + widths * width);
        }
        first += ((to - from) / width) as usize;
        from = to;
    }
    (first + (tokens - from) as usize - 1, tokens)
}

/// Tokens in the middle of a bucket.
pub(super) fn middle(at: usize) -> f64 {
    let (mut first, mut from) = (0, 0);
    for (to, width) in WIDTHS {
        let count = ((to - from) / width) as usize;
        if at < first + count {
            let last = from + width * (at - first + 1) as u32;
            return f64::from(last) - f64::from(width - 1) / 2.0;
        }
        first += count;
        from = to;
    }
    f64::from(from)
}

/// The nearest values that never fall, by weighted squares: neighbours that fall are merged into their mean.
pub(super) fn never_falling(values: &mut [f64], weights: &[f64]) {
    // (mean, weight, how many)
    let mut merged: Vec<(f64, f64, usize)> = Vec::with_capacity(values.len());
    for (value, weight) in values.iter().zip(weights) {
        let mut last = (*value, *weight, 1);
        while let Some(before) = merged.pop_if(|before| before.0 > last.0) {
            let weight = before.1 + last.1;
            last = (
                (before.0 * before.1 + last.0 * last.1) / weight,
                weight,
                before.2 + last.2,
            );
        }
        merged.push(last);
    }
    let mut rest = values;
    for (mean, _, count) in merged {
        let (run, after) = rest.split_at_mut(count);
        run.fill(mean);
        rest = after;
    }
}
