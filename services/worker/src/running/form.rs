//! The form that a request's output must have, as a source of drafts.

use std::sync::{Mutex, PoisonError};

use refrain_output_grammar::Matcher;
use refrain_speculation::draft::{Candidate, Form, within_form};

/// The form of a running request. It only costs drafts if it fails: the engine holds the output to it anyway.
pub(crate) struct RunningForm {
    /// Drafts are looked for on several threads, each of which has another request. `None` after a failure.
    matcher: Mutex<Option<Matcher>>,
}

/// A matcher that remembers whether it failed.
struct Place<'a> {
    matcher: &'a mut Matcher,
    failed: bool,
}

impl Form for Place<'_> {
    fn enter(&mut self, token: u32) -> bool {
        let entered = self.matcher.advance_while_allowed(&[token]);
        self.failed |= entered.is_err();
        entered == Ok(1)
    }

    fn leave(&mut self, count: usize) {
        self.failed |= self.matcher.rollback(count).is_err();
    }

    fn forced(&mut self, max: usize) -> Vec<u32> {
        let forced = self.matcher.forced(max);
        self.failed |= forced.is_err();
        forced.unwrap_or_default()
    }
}

impl RunningForm {
    pub(crate) fn new(matcher: Matcher) -> Self {
        RunningForm {
            matcher: Mutex::new(Some(matcher)),
        }
    }

    /// The draft after `output`, cut and grown by the form to at most `nodes_max` tokens.
    pub(super) fn bind(
        &self,
        output: &[u32],
        found: Option<Candidate>,
        nodes_max: u32,
    ) -> Option<Candidate> {
        let mut matcher = self.matcher.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut at) = matcher.take() else {
            return found;
        };
        let new = output.get(at.len()..);
        if new.is_none_or(|new| at.advance(new).is_err()) {
            return found;
        }
        let mut place = Place {
            matcher: &mut at,
            failed: false,
        };
        let bound = within_form(found.as_ref(), nodes_max as usize, &mut place);
        if place.failed {
            return found;
        }
        *matcher = Some(at);
        bound
    }
}
