//! Prompt lookup decoding (Saxena 2023), after the function that its author published, with its defaults.

use refrain_speculation::draft::{Candidate, Scope};
use refrain_suffix_index::Token;

use super::chain::chain;

/// Longest n-gram, tokens.
const NGRAM_TOKENS_MAX: usize = 3;
/// Tokens of a draft, as published.
pub(in super::super) const PLD_DRAFT_TOKENS: usize = 10;

/// Drafts what followed the earliest occurrence of the context's last n tokens, for the largest n that has one.
///
/// As published, an occurrence counts only if a whole draft follows it, and if it ends more than n tokens before the
/// context. The search begins at the start of the context, as in the published function.
pub(in super::super) fn look_up(context: &[Token], draft_tokens: usize) -> Option<Candidate> {
    let longest = NGRAM_TOKENS_MAX.min(context.len().saturating_sub(1));
    (1..=longest).rev().find_map(|len| {
        let ngram = &context[context.len() - len..];
        // Room for a draft that is longer than the n-gram implies the distance.
        let distance = draft_tokens.max(len + 1);
        let ends = len..=context.len().checked_sub(distance)?;
        let end = ends
            .into_iter()
            .find(|end| &context[end - len..*end] == ngram)?;
        chain(
            &context[end..end + draft_tokens],
            len as u32,
            Scope::Request,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published function, line by line.
    fn published(input: &[Token]) -> Vec<Token> {
        for size in (1..=3).rev() {
            let Some(from) = input.len().checked_sub(size) else {
                continue;
            };
            for at in 0..=from {
                let (start, end) = (at + size, at + size + 10);
                if input[at..start] == input[from..] && end <= input.len() && start < from {
                    return input[start..end].to_vec();
                }
            }
        }
        Vec::new()
    }

    #[test]
    fn drafts_are_those_of_the_published_function() {
        let mut state = 1u64;
        let mut random = move |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % below
        };
        let mut by_len = [0; 4];
        for _ in 0..4000 {
            let words = 2 + random(40);
            let len = random(60) as usize;
            let context: Vec<Token> = (0..len).map(|_| random(words) as Token).collect();
            let found = look_up(&context, PLD_DRAFT_TOKENS);
            let tokens: Vec<Token> = found.iter().flat_map(|draft| draft.tree.tokens()).collect();
            assert_eq!(tokens, published(&context), "{context:?}");
            by_len[found.map_or(0, |draft| draft.match_len as usize)] += 1;
        }
        assert!(by_len.iter().all(|count| *count > 100), "{by_len:?}");
    }
}
