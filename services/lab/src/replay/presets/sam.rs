//! SAM decoding (Hu et al., arXiv 2411.10666), with the settings of its section 4; both drafts are chains.

use refrain_speculation::draft::{Candidate, Scope};
use refrain_suffix_index::Token;

use super::automaton::{Automaton, TextMatch};
use super::chain::chain;

/// Draft tokens: the paper's default.
const DRAFT_TOKENS: usize = 40;
/// Separates the texts of a corpus; the paper uses the tokenizer's end of text. No recording has this token.
const END: Token = Token::MAX;

/// Conditions on matches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SamRules {
    /// A match in the corpus must be longer than one in the request's text by more than this.
    pub(super) len_bias: u32,
    /// Shorter matches draft nothing.
    pub(super) len_min: u32,
    /// Most tokens of a draft.
    pub(super) draft_tokens: usize,
}

/// A request's own automaton, and its match in the corpus.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct SamRequest {
    /// The text without its last token, so that its end is not a match.
    own: Automaton,
    last: Option<Token>,
    at_own: TextMatch,
    at_corpus: TextMatch,
}

impl SamRules {
    /// The rules beside another drafter, which drafts where SAM does not.
    pub(in super::super) const HYBRID: SamRules = SamRules {
        len_bias: 5,
        len_min: 5,
        draft_tokens: DRAFT_TOKENS,
    };
    /// The rules of SAM alone: any match drafts.
    pub(in super::super) const ALONE: SamRules = SamRules {
        len_bias: 0,
        len_min: 1,
        draft_tokens: DRAFT_TOKENS,
    };
}

/// Adds a text to a corpus.
pub(in super::super) fn add_text(corpus: &mut Automaton, text: &[Token]) {
    text.iter().for_each(|&token| corpus.push(token));
    corpus.push(END);
}

impl SamRequest {
    /// Appends to the request's text.
    pub(in super::super) fn extend(&mut self, corpus: Option<&Automaton>, tokens: &[Token]) {
        for &token in tokens {
            if let Some(last) = self.last.replace(token) {
                self.own.push(last);
            }
            self.at_own = self.own.transfer(self.at_own, token);
            if let Some(corpus) = corpus {
                self.at_corpus = corpus.transfer(self.at_corpus, token);
            }
        }
    }

    /// The draft of the longer match, from its first occurrence. In the request's text, a suffix of the match is used
    /// where too little text follows the match.
    pub(in super::super) fn draft(
        &self,
        corpus: Option<&Automaton>,
        rules: SamRules,
    ) -> Option<Candidate> {
        let (own, there) = (self.at_own.len, self.at_corpus.len);
        if let Some(corpus) = corpus
            && there > own + rules.len_bias
        {
            let text = corpus.following(self.at_corpus, rules.draft_tokens);
            let text = text.split(|token| *token == END).next()?;
            return (there - rules.len_bias >= rules.len_min)
                .then(|| chain(text, there, Scope::Tenant))?;
        }
        let text = self.own.followed_by(self.at_own, rules.draft_tokens);
        (own >= rules.len_min).then(|| chain(text, own, Scope::Request))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// End of the first occurrence of a string.
    fn first_end(text: &[Token], string: &[Token]) -> Option<usize> {
        (string.len()..=text.len()).find(|end| &text[end - string.len()..*end] == string)
    }

    /// Length of the longest suffix of the context that occurs.
    fn longest(text: &[Token], context: &[Token]) -> usize {
        let lens = (1..=context.len()).rev();
        let occurs = |len: &usize| first_end(text, &context[context.len() - len..]).is_some();
        lens.into_iter().find(occurs).unwrap_or(0)
    }

    /// The rules as the paper states them: length of the match, draft, and its scope.
    fn by_the_paper(
        corpus: &[Vec<Token>],
        context: &[Token],
        rules: SamRules,
    ) -> Option<(u32, Vec<Token>, Scope)> {
        let own_text = &context[..context.len().checked_sub(1)?];
        let own = longest(own_text, context);
        let joined: Vec<Token> = corpus
            .iter()
            .flat_map(|text| text.iter().copied().chain([END]))
            .collect();
        let there = longest(&joined, context);
        let (bias, least) = (rules.len_bias as usize, rules.len_min as usize);
        let suffix = |len: usize| &context[context.len() - len..];
        if there > own + bias {
            let end = first_end(&joined, suffix(there))?;
            let draft: Vec<Token> = joined[end..]
                .iter()
                .copied()
                .take(DRAFT_TOKENS)
                .take_while(|token| *token != END)
                .collect();
            let is_long = there - bias >= least && !draft.is_empty();
            return is_long.then_some((there as u32, draft, Scope::Tenant));
        }
        if own < least {
            return None;
        }
        let ends: Vec<usize> = (1..=own)
            .rev()
            .filter_map(|len| first_end(own_text, suffix(len)))
            .collect();
        let has_room = |end: &&usize| own_text.len() - **end >= DRAFT_TOKENS;
        let end = *ends.iter().find(has_room).or(ends.last())?;
        let draft = own_text[end..own_text.len().min(end + DRAFT_TOKENS)].to_vec();
        (!draft.is_empty()).then_some((own as u32, draft, Scope::Request))
    }

    #[test]
    fn drafts_are_those_of_the_rules_at_every_token() {
        let mut state = 3u64;
        let mut random = move |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % below
        };
        let mut seen = [[0; 3]; 2];
        for round in 0..120 {
            let words = 2 + random(6);
            // Texts of phrases, so that there are long matches, some of them in the corpus alone.
            let phrases: Vec<Vec<Token>> = (0..6)
                .map(|_| {
                    let len = 2 + random(14);
                    (0..len).map(|_| random(words) as Token).collect()
                })
                .collect();
            let mut text = |phrases: &[Vec<Token>], len: usize| -> Vec<Token> {
                let mut tokens = Vec::new();
                while tokens.len() < len {
                    match random(3) {
                        0 => tokens.push(random(words) as Token),
                        _ => tokens.extend(&phrases[random(phrases.len() as u64) as usize]),
                    }
                }
                tokens
            };
            let texts: Vec<Vec<Token>> = (0..round % 4).map(|_| text(&phrases, 40)).collect();
            let context = text(&phrases[..4], 110);
            let mut corpus = Automaton::default();
            texts.iter().for_each(|text| add_text(&mut corpus, text));
            let mut request = SamRequest::default();
            for at in 0..context.len() {
                request.extend(Some(&corpus), &context[at..=at]);
                for (kind, rules) in [SamRules::ALONE, SamRules::HYBRID].into_iter().enumerate() {
                    let found = request.draft(Some(&corpus), rules);
                    let found = found
                        .map(|found| (found.match_len, found.tree.tokens().collect(), found.scope));
                    let wanted = by_the_paper(&texts, &context[..=at], rules);
                    assert_eq!(found, wanted, "{rules:?} {texts:?} {:?}", &context[..=at]);
                    seen[kind][wanted.map_or(0, |draft| match draft.2 {
                        Scope::Request => 1,
                        Scope::Group | Scope::Tenant => 2,
                    })] += 1;
                }
            }
        }
        assert!(
            seen.as_flattened().iter().all(|count| *count > 20),
            "{seen:?}"
        );
    }
}
