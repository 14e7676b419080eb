//! Drafts that were not verified: they are followed along the stream, to learn how much of them came true.

use refrain_speculation::draft::Candidate;

/// Number of drafts that are followed at once: one per power of two of the match length. The first draft of its kind
/// is followed to its end, so that far tokens are judged as often as near ones.
const KINDS: usize = 8;

/// The drafts of one chunk that are still followed.
#[derive(Default)]
pub(super) struct FollowedDrafts {
    open: [Option<FollowedDraft>; KINDS],
}

struct FollowedDraft {
    found: Candidate,
    /// Tokens of the stream since the draft was found.
    emitted: Vec<u32>,
    /// The last node that came true.
    at: Option<u32>,
}

impl FollowedDrafts {
    /// Follows a draft that was found at the current end of the text, unless one of its kind is followed already.
    pub(super) fn add(&mut self, candidate: &Candidate) {
        let kind = u32::BITS - candidate.match_len.leading_zeros();
        let slot = &mut self.open[(kind as usize).clamp(1, KINDS) - 1];
        slot.get_or_insert_with(|| FollowedDraft {
            found: candidate.clone(),
            emitted: Vec::new(),
            at: None,
        });
    }

    /// Takes the next tokens of the text. Calls `learn` with each draft that is decided by them, and with the tokens
    /// that followed it.
    pub(super) fn advance(&mut self, tokens: &[u32], mut learn: impl FnMut(&Candidate, &[u32])) {
        for slot in &mut self.open {
            if slot.as_mut().is_some_and(|draft| draft.follow(tokens))
                && let Some(draft) = slot.take()
            {
                learn(&draft.found, &draft.emitted);
            }
        }
    }

    /// Ends the text.
    pub(super) fn end(&mut self, mut learn: impl FnMut(&Candidate, &[u32])) {
        for draft in self.open.iter_mut().filter_map(Option::take) {
            learn(&draft.found, &draft.emitted);
        }
    }
}

impl FollowedDraft {
    /// Takes the next tokens. Returns whether the draft is decided.
    fn follow(&mut self, tokens: &[u32]) -> bool {
        for token in tokens {
            self.emitted.push(*token);
            let Some(node) = self.found.tree.child(self.at, *token) else {
                return true;
            };
            self.at = Some(node);
        }
        let parents = &mut self.found.tree.parents();
        !parents.any(|parent| parent == self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::chain;
    use super::*;

    #[test]
    fn drafts_are_followed_to_their_end_one_of_each_kind() {
        let mut followed = FollowedDrafts::default();
        let mut learnt: Vec<(u32, Vec<u32>)> = Vec::new();
        followed.add(&chain(&[1, 2, 3, 4], 1));
        followed.advance(&[1], |_, _| panic!("the draft is not decided yet"));
        // A draft of another kind, and one of a kind that is followed already.
        followed.add(&chain(&[2, 9, 9], 2));
        followed.add(&chain(&[7, 7, 7], 1));
        let mut learn = |found: &Candidate, emitted: &[u32]| {
            learnt.push((found.match_len, emitted.to_vec()));
        };
        followed.advance(&[2, 3], &mut learn);
        followed.advance(&[4, 5], &mut learn);
        followed.add(&chain(&[6], 200));
        followed.end(&mut learn);
        followed.end(|_, _| panic!("every draft is learnt once"));
        let expected = [(2, vec![2, 3]), (1, vec![1, 2, 3, 4, 5]), (200, vec![])];
        assert_eq!(learnt, expected);
    }
}
