//! The versions of the weights that sampled an output.

use refrain_protocol::openai::WeightSpan;

use crate::relay::OutputToken;

/// Adds the tokens that come next to the spans of an output.
pub fn add_weight_spans(spans: &mut Vec<WeightSpan>, tokens: &[OutputToken]) {
    for token in tokens {
        match spans.last_mut() {
            Some(last) if last.version == token.weight_version => last.end += 1,
            last => {
                let start = last.map_or(0, |last| last.end);
                spans.push(WeightSpan {
                    start,
                    end: start + 1,
                    version: token.weight_version,
                });
            }
        }
    }
}

/// The spans of a whole output.
pub(super) fn weight_spans(tokens: &[OutputToken]) -> Vec<WeightSpan> {
    let mut spans = Vec::new();
    add_weight_spans(&mut spans, tokens);
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_the_output_without_gaps() {
        let tokens: Vec<OutputToken> = [0, 0, 3, 3, 3, 0]
            .into_iter()
            .map(|weight_version| OutputToken {
                id: 1,
                logprob: None,
                weight_version,
            })
            .collect();
        let spans = weight_spans(&tokens);
        let numbers: Vec<_> = spans
            .iter()
            .map(|span| (span.start, span.end, span.version))
            .collect();
        assert_eq!(numbers, [(0, 2, 0), (2, 5, 3), (5, 6, 0)]);
        let mut in_two = weight_spans(&tokens[..3]);
        add_weight_spans(&mut in_two, &tokens[3..]);
        assert_eq!(in_two, spans);
        assert!(weight_spans(&[]).is_empty());
    }
}
