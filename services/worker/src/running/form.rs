//! The form that a request's output must have, as a source of drafts.

use std::time::Duration;

use parking_lot::Mutex;
use refrain_output_grammar::Matcher;
use refrain_service_kit::clock::thread_time;
use refrain_speculation::draft::{Candidate, Form, within_form};

/// Work of the parser after which a form brings no drafts any longer, in the unit of
/// [`refrain_output_grammar::GrammarLimits::output_work_max`]. All requests of the batch wait for it.
const WORK_MAX: u64 = 20_000_000;

/// Processor time of one draft, for which all requests of the batch wait. A draft that takes longer ends there.
const DRAFT_TIME_MAX: Duration = Duration::from_millis(2);

/// Drafts that took too long after which a form brings none any longer. The first ones of a form take longest.
const LATE_DRAFTS_MAX: u32 = 4;

/// The form of a running request. It only costs drafts if it fails: the engine holds the output to it anyway.
pub(crate) struct RunningForm {
    /// Drafts are looked for on several threads, each of which has another request. `None` after a failure.
    at: Mutex<Option<OutputPlace>>,
}

/// The end of the output in its form.
struct OutputPlace {
    matcher: Matcher,
    /// Drafts so far that took too long.
    late_drafts: u32,
}

/// The place of a draft in its form.
struct DraftPlace<'a> {
    matcher: &'a mut Matcher,
    /// The time of this thread at which the draft ends.
    until: Duration,
    is_late: bool,
    failed: bool,
}

impl DraftPlace<'_> {
    /// Whether the draft may go on, which it may not after its time.
    fn may_go_on(&mut self) -> bool {
        self.is_late |= thread_time() >= self.until;
        !self.is_late
    }
}

impl Form for DraftPlace<'_> {
    fn enter(&mut self, token: u32) -> bool {
        if !self.may_go_on() {
            return false;
        }
        let entered = self.matcher.advance_while_allowed(&[token]);
        self.failed |= entered.is_err();
        entered == Ok(1)
    }

    fn leave(&mut self, count: usize) {
        self.failed |= self.matcher.rollback(count).is_err();
    }

    fn forced(&mut self, max: usize) -> Vec<u32> {
        if !self.may_go_on() {
            return Vec::new();
        }
        let forced = self.matcher.forced(max);
        self.failed |= forced.is_err();
        forced.unwrap_or_default()
    }
}

impl RunningForm {
    pub(crate) fn new(matcher: Matcher) -> Self {
        let at = OutputPlace {
            matcher,
            late_drafts: 0,
        };
        RunningForm {
            at: Mutex::new(Some(at)),
        }
    }

    /// The draft after `output`, cut and grown by the form to at most `nodes_max` tokens.
    pub(super) fn bind(
        &self,
        output: &[u32],
        found: Option<Candidate>,
        nodes_max: u32,
    ) -> Option<Candidate> {
        let mut slot = self.at.lock();
        let Some(mut at) = slot.take() else {
            return found;
        };
        let until = thread_time() + DRAFT_TIME_MAX;
        let new = output.get(at.matcher.len()..);
        if new.is_none_or(|new| at.matcher.advance(new).is_err()) {
            return found;
        }
        let mut place = DraftPlace {
            matcher: &mut at.matcher,
            until,
            is_late: false,
            failed: false,
        };
        let bound = within_form(found.as_ref(), nodes_max as usize, &mut place);
        if place.failed {
            return found;
        }
        at.late_drafts += u32::from(!place.may_go_on());
        let goes_on = at.late_drafts < LATE_DRAFTS_MAX && at.matcher.work() <= WORK_MAX;
        *slot = Some(at).filter(|_| goes_on);
        bound
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use refrain_output_grammar::{GrammarCompiler, GrammarLimits};
    use refrain_protocol::engine::{OutputForm, TextForm};
    use refrain_speculation::draft::{DraftNode, Origin, Scope, Source};
    use refrain_tokenization::testing::{IM_END, byte_level_files};

    use super::*;

    fn found(tokens: &[u32]) -> Candidate {
        let node = |(place, token): (usize, &u32)| DraftNode {
            token: *token,
            parent: (place as u32).checked_sub(1),
            probability: 0.9f32.powi(place as i32 + 1),
            count: 3,
            match_len: 3,
            witnesses: None,
            origin: Origin {
                source: Source::Suffix,
                scope: Scope::Tenant,
                place: None,
            },
        };
        let nodes = tokens.iter().enumerate().map(node).collect();
        Candidate::new(nodes, 4, Source::Suffix, Scope::Tenant).unwrap()
    }

    #[test]
    fn drafts_follow_the_output_and_a_failure_only_costs_drafts() {
        let tokenizer = Arc::new(byte_level_files().tokenizer().unwrap());
        let encode = |text: &str| tokenizer.encode(text).unwrap();
        let grammars = GrammarCompiler::new(
            tokenizer.clone(),
            tokenizer.vocab_size(),
            &[IM_END],
            GrammarLimits::default(),
        );
        let text = TextForm::Choice(vec!["hello: yes.".into(), "hello: no.".into()]);
        let grammar = grammars.unwrap().compile(&OutputForm::new(text)).unwrap();
        let form = RunningForm::new(grammar.matcher());
        let drafted = |output: &str, found: Option<Candidate>| {
            let bound = form.bind(&encode(output), found, 32);
            bound.map(|bound| {
                (
                    tokenizer.decode(&bound.tree.tokens().collect::<Vec<_>>()),
                    bound.source,
                )
            })
        };
        let suffix = || Some(found(&encode("hello: maybe")));
        assert_eq!(drafted("", None), Some(("hello: ".into(), Source::Grammar)));
        assert_eq!(
            drafted("", suffix()),
            Some(("hello: ".into(), Source::Grammar))
        );
        assert_eq!(drafted("hello: ", None), None);
        let yes = Some(found(&encode("ye")));
        assert_eq!(
            drafted("hello: ", yes),
            Some(("yes.".into(), Source::Suffix))
        );
        assert_eq!(
            drafted("hello: n", None),
            Some(("o.".into(), Source::Grammar))
        );
        // Nothing is known of an output that the form does not have.
        assert_eq!(
            drafted("hello: nz", suffix()),
            Some(("hello: maybe".into(), Source::Suffix))
        );
        assert_eq!(drafted("hello: ", None), None);
    }
}
