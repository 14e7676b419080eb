//! What drafts that nobody had verified turn out to be worth, as the stream goes on.

use refrain_speculation::Candidate;

/// Drafts that are followed at once: one per power of two of the matches that they were found under. The first of its
/// kind is followed to its end, so that far tokens are judged as often as near ones.
const KINDS: usize = 8;

/// The drafts of one chunk whose fate is open.
#[derive(Default)]
pub(crate) struct Lessons {
    open: [Option<Lesson>; KINDS],
}

struct Lesson {
    found: Candidate,
    said: Vec<u32>,
    /// The node that was said last.
    at: Option<u32>,
}

impl Lessons {
    /// A draft is found here. It is followed if no other of its kind is.
    pub(crate) fn found(&mut self, candidate: &Candidate) {
        let kind = u32::BITS - candidate.match_len.leading_zeros();
        let place = &mut self.open[(kind as usize).clamp(1, KINDS) - 1];
        place.get_or_insert_with(|| Lesson {
            found: candidate.clone(),
            said: Vec::new(),
            at: None,
        });
    }

    /// So the text goes on. Calls `learn` with each draft whose fate is decided, and what was said instead.
    pub(crate) fn said(&mut self, tokens: &[u32], mut learn: impl FnMut(&Candidate, &[u32])) {
        for place in &mut self.open {
            if place.as_mut().is_some_and(|lesson| lesson.follow(tokens))
                && let Some(lesson) = place.take()
            {
                learn(&lesson.found, &lesson.said);
            }
        }
    }

    /// The text ends.
    pub(crate) fn end(&mut self, mut learn: impl FnMut(&Candidate, &[u32])) {
        for lesson in self.open.iter_mut().filter_map(Option::take) {
            learn(&lesson.found, &lesson.said);
        }
    }
}

impl Lesson {
    /// Returns whether its fate is decided.
    fn follow(&mut self, tokens: &[u32]) -> bool {
        for token in tokens {
            self.said.push(*token);
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
        let mut lessons = Lessons::default();
        let mut learnt: Vec<(u32, Vec<u32>)> = Vec::new();
        lessons.found(&chain(&[1, 2, 3, 4], 1));
        lessons.said(&[1], |_, _| panic!("its fate is open"));
        // Of another kind, and of one that is followed already.
        lessons.found(&chain(&[2, 9, 9], 2));
        lessons.found(&chain(&[7, 7, 7], 1));
        let mut learn = |found: &Candidate, said: &[u32]| {
            learnt.push((found.match_len, said.to_vec()));
        };
        lessons.said(&[2, 3], &mut learn);
        lessons.said(&[4, 5], &mut learn);
        lessons.found(&chain(&[6], 200));
        lessons.end(&mut learn);
        lessons.end(|_, _| panic!("all are told once"));
        let expected = [(2, vec![2, 3]), (1, vec![1, 2, 3, 4, 5]), (200, vec![])];
        assert_eq!(learnt, expected);
    }
}
