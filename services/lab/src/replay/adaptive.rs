//! How many draft tokens vLLM verifies under adaptive verification, and which. Its host chooses the number before the
//! drafts of the step exist, by those of the step before; its device then takes the best of the present drafts.

/// The number of draft tokens that brings most tokens per second. `paths` are, for each request, the probabilities
/// that its first draft token is accepted, that its first two are, and so on. `seconds` tells how long a step takes
/// with so many draft tokens.
pub(crate) fn budget(paths: &[impl AsRef<[f32]>], seconds: impl Fn(usize) -> f64) -> usize {
    let mut expected = paths.len() as f64;
    let mut best = (expected / seconds(0), 0);
    for (number, path) in (1..).zip(ranked(paths)) {
        expected += f64::from(path.0);
        let rate = expected / seconds(number);
        if rate > best.0 {
            best = (rate, number);
        }
    }
    best.1
}

/// The places of each request when `budget` draft tokens are verified. Where the drafts have fewer, the rest of the
/// budget is verified for nothing, behind the first draft.
pub(crate) fn admit(paths: &[impl AsRef<[f32]>], budget: usize) -> Vec<usize> {
    let mut places = vec![0; paths.len()];
    for (_, request) in ranked(paths).into_iter().take(budget) {
        places[request] += 1;
    }
    let admitted: usize = places.iter().sum();
    if let Some(first) = places.first_mut() {
        *first += budget - admitted;
    }
    places
}

/// All draft tokens by their probability, the highest first, with the numbers of their requests.
fn ranked(paths: &[impl AsRef<[f32]>]) -> Vec<(f32, usize)> {
    let each = paths.iter().enumerate();
    let mut all: Vec<(f32, usize)> = each
        .flat_map(|(request, path)| path.as_ref().iter().map(move |path| (*path, request)))
        .collect();
    all.sort_by(|left, right| right.0.total_cmp(&left.0));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATHS: [&[f32]; 3] = [&[0.9, 0.8, 0.1], &[0.5], &[]];

    #[test]
    fn the_budget_ends_where_a_token_costs_more_than_it_brings() {
        let seconds = |price: f64| move |tokens: usize| 3.0 + price * tokens as f64;
        assert_eq!(budget(&PATHS, seconds(0.0)), 4);
        // Three requests bring a token a second: a draft token must bring what it costs.
        assert_eq!(budget(&PATHS, seconds(0.4)), 3);
        assert_eq!(budget(&PATHS, seconds(0.85)), 1);
        assert_eq!(budget(&PATHS, seconds(1.0)), 0);
        assert_eq!(budget(&PATHS[..0], seconds(1.0)), 0);
    }

    #[test]
    fn the_most_likely_tokens_are_admitted_from_the_front_of_each_draft() {
        assert_eq!(admit(&PATHS, 0), [0, 0, 0]);
        assert_eq!(admit(&PATHS, 2), [2, 0, 0]);
        assert_eq!(admit(&PATHS, 3), [2, 1, 0]);
        assert_eq!(admit(&PATHS, 9), [8, 1, 0]);
        assert_eq!(admit(&PATHS[..0], 9), [0; 0]);
    }
}
