//! The form that a session's output must have: follows the text, cuts and guides drafts, and masks logits.

use std::collections::HashMap;
use std::fmt;

use refrain_output_grammar::{GrammarError, Matcher, StopSignal, TokenMask};
use refrain_protocol::engine::Draft;
use refrain_protocol::{ApiError, ErrorKind, TokenId};

use super::form_pace::FormPace;
use crate::drafter::{AllowedTokens, DraftForm};

/// Delay after which a session may be opened whose form was not compiled yet. Most forms take 1 to 10 ms.
const COMPILING_RETRY_AFTER_MS: u64 = 5;

/// Delay after which an item may come again whose form is worked on. One mask takes at most about 20 ms.
const WORKING_RETRY_AFTER_MS: u64 = 2;

/// Tokens that an item brings again, for which the delay is a millisecond longer. They take about as long to be sent.
const TOKENS_PER_RETRY_MS: usize = 1_000;

/// Fewer masks are made faster in turn than on a thread of their own.
const MASKS_AHEAD_MIN: usize = 8;

/// Maximum number of tokens that a step follows by itself. More come where a session opens with an output.
const FOLLOWED_MAX: usize = 8;

/// Parts of the saved time, of which a draft gets one for the question which nodes are allowed. Their masks take
/// longer, and get what is left.
const JUDGING_PARTS: u32 = 3;

/// Why a form has no answer for a step.
#[derive(Debug)]
pub(super) enum FormFault {
    /// The work for it is left to another thread. The item comes again.
    Later,
    /// The output cannot be held to the form any longer.
    Failed(GrammarError),
}

impl From<GrammarError> for FormFault {
    fn from(error: GrammarError) -> Self {
        FormFault::Failed(error)
    }
}

/// The state of a session's output in its form.
pub(crate) struct SessionForm {
    /// Has seen the text from `start` on, without what is `behind`.
    matcher: Matcher,
    /// Tokens of the text that the matcher has yet to see.
    behind: Vec<TokenId>,
    /// The output with which the matcher has to begin anew, before it sees what is `behind`.
    anew: Option<Vec<TokenId>>,
    /// The error of work that was done between two steps.
    failure: Option<GrammarError>,
    /// How much of the work is done in steps. `None`: all of it.
    pace: Option<FormPace>,
    /// Position of the first token that the form is about.
    start: usize,
    /// Number of tokens of the text that the form is about. In a step the matcher goes on from there.
    at_text: usize,
    /// Masks that were made before the target's logits were there, by the tokens between the text and the place.
    /// `None` stands for all tokens.
    ahead: HashMap<Vec<TokenId>, Option<TokenMask>>,
    /// Whether drafts were visited since the matcher began.
    has_visited: bool,
    /// Whether a limit was met after drafts were visited. All drafts are cut from then on, so that the limits count
    /// the text alone.
    cuts_all: bool,
}

impl fmt::Debug for SessionForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut form = f.debug_struct("SessionForm");
        form.field("start", &self.start).finish_non_exhaustive()
    }
}

/// The error for an output that its form cannot hold.
pub(crate) fn form_error(error: &GrammarError) -> ApiError {
    ApiError::invalid("sampling.form", error.to_string()).with_code("output_form")
}

/// The error for a form that was lost by a panic of the thread that worked on it.
pub(super) fn lost() -> ApiError {
    ApiError::internal("the form of the output was lost while it was worked on")
}

/// The error for a session whose form is not compiled yet.
pub(crate) fn compiling() -> ApiError {
    let message = "the form of the output is being compiled; send the item again";
    ApiError::new(ErrorKind::Overloaded, message)
        .with_code("engine_form_compiling")
        .with_retry_after_ms(COMPILING_RETRY_AFTER_MS)
}

/// Code of the error for an item whose form is worked on.
pub(crate) const FORM_WORKING: &str = "engine_form_working";

/// The error for a session whose form has work to do outside the steps.
pub(super) fn working() -> ApiError {
    let message = "the form of the output is being followed; send the item again";
    ApiError::new(ErrorKind::Overloaded, message)
        .with_code(FORM_WORKING)
        .with_retry_after_ms(WORKING_RETRY_AFTER_MS)
}

/// As [`working`], for an item that opens its session with this text.
pub(super) fn working_on_opening(text_len: usize) -> ApiError {
    let longer = (text_len / TOKENS_PER_RETRY_MS) as u64;
    working().with_retry_after_ms(WORKING_RETRY_AFTER_MS + longer)
}

impl SessionForm {
    /// With a pace, costly work is left to [`SessionForm::prepare`], on another thread.
    pub(super) fn new(matcher: Matcher, start: usize, pace: Option<FormPace>) -> Self {
        SessionForm {
            matcher,
            behind: Vec::new(),
            anew: None,
            failure: None,
            pace,
            start,
            at_text: 0,
            ahead: HashMap::new(),
            has_visited: false,
            cuts_all: false,
        }
    }

    /// Ends the work of the form from another thread.
    pub(super) fn stop_signal(&self) -> StopSignal {
        self.matcher.stop_signal()
    }

    /// Position of the first token that the form is about.
    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// Follows a text whose tokens from `keep` on are new.
    ///
    /// # Errors
    /// The text does not have the form.
    pub(super) fn follow(&mut self, keep: usize, text: &[TokenId]) -> Result<(), GrammarError> {
        let output = text.get(self.start..).unwrap_or_default();
        let seen = self.matcher.len();
        let kept = keep.saturating_sub(self.start).min(seen);
        // A session that opens again brings a text that its form may have followed meanwhile.
        let again = self.matcher.output()[kept..]
            .iter()
            .zip(output.iter().skip(kept));
        let kept = kept + again.take_while(|(own, new)| own == new).count();
        if kept < seen {
            // The caller goes back to where there was no fault yet.
            self.failure = None;
        }
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        self.behind.clear();
        if self.anew.is_some() {
            self.anew = Some(output.to_vec());
            return Ok(());
        }
        let new = &output[kept..];
        let followed = self.matcher.rollback(seen - kept);
        if followed.is_ok() && self.pace.is_some() && new.len() > FOLLOWED_MAX {
            self.behind = new.to_vec();
            return Ok(());
        }
        // Masks on the way take work on themselves, so a text can be followed step by step if at all.
        match followed.and_then(|()| self.matcher.advance(new)) {
            Err(_) if self.pace.is_some() => self.anew = Some(output.to_vec()),
            Err(_) => self.matcher.restart_with_masks(output)?,
            Ok(()) => {}
        }
        self.at_text = self.matcher.len();
        Ok(())
    }

    /// Whether [`SessionForm::prepare`] has to be called on another thread before the next step.
    pub(super) fn must_leave(&self) -> bool {
        self.is_behind()
            || (self.is_slow() && self.failure.is_none() && !self.matcher.is_prepared())
    }

    /// Whether the matcher has yet to see tokens of the text.
    fn is_behind(&self) -> bool {
        self.anew.is_some() || !self.behind.is_empty()
    }

    fn is_slow(&self) -> bool {
        self.pace.as_ref().is_some_and(FormPace::is_slow)
    }

    /// Does what the next step needs: follows the text, and makes the mask after it.
    pub(super) fn prepare(&mut self) {
        let begun = match self.anew.take() {
            Some(output) => self.restart(&output),
            None => Ok(()),
        };
        let behind = std::mem::take(&mut self.behind);
        let followed = begun.and_then(|()| self.catch_up(&behind));
        // The step did not wait for this mask, but the next one may take as long.
        let made = followed
            .and_then(|()| FormPace::spend(&mut self.pace, || self.matcher.allowed().map(|_| ())));
        let made = match made {
            Err(_) if self.has_visited => {
                let output = self.matcher.output().to_vec();
                let begun = self.restart(&output);
                begun.and_then(|()| self.matcher.allowed().map(|_| ()))
            }
            made => made,
        };
        self.failure = made.err();
        self.at_text = self.matcher.len();
    }

    /// Follows tokens of the text. Work for drafts that was done before does not count.
    fn catch_up(&mut self, behind: &[TokenId]) -> Result<(), GrammarError> {
        let seen = self.matcher.len();
        let Err(error) = self.matcher.advance(behind) else {
            return Ok(());
        };
        let output = [&self.matcher.output()[..seen], behind].concat();
        let again = match self.has_visited {
            true => self.restart(&output),
            false => Err(error),
        };
        // Masks on the way take work on themselves, so a text can be followed step by step if at all.
        again.or_else(|error| match behind.len() > 1 {
            true => self.matcher.restart_with_masks(&output),
            false => Err(error),
        })
    }

    fn restart(&mut self, output: &[TokenId]) -> Result<(), GrammarError> {
        self.has_visited = false;
        self.cuts_all = true;
        self.matcher.restart(output)
    }

    /// Whether the form is about the token after a text of this length. Otherwise that token is forced.
    pub(super) fn binds(&self, text_len: usize) -> bool {
        text_len >= self.start
    }

    /// The tokens between the text and the place of the matcher.
    fn path(&self) -> &[TokenId] {
        &self.matcher.output()[self.at_text..]
    }

    /// Does what a text without drafts would do as well. The cost of drafts does not count: if a limit is met after
    /// they were visited, the work begins anew without them.
    fn without_drafts<T>(
        &mut self,
        work: impl Fn(&mut Matcher) -> Result<T, GrammarError>,
    ) -> Result<T, FormFault> {
        match FormPace::spend(&mut self.pace, || work(&mut self.matcher)) {
            Err(_) if self.has_visited => {
                self.begin_anew(self.matcher.len())?;
                Ok(work(&mut self.matcher)?)
            }
            done => Ok(done?),
        }
    }

    /// Begins anew with the first `len` tokens of the output, here or on another thread.
    fn begin_anew(&mut self, len: usize) -> Result<(), FormFault> {
        self.ahead.clear();
        let output = self.matcher.output()[..len].to_vec();
        if self.pace.is_some() {
            self.anew = Some(output);
            return Err(FormFault::Later);
        }
        Ok(self.restart(&output)?)
    }

    /// Which nodes of a draft after the text the form allows. It keeps the node of a token that it does not judge.
    pub(super) fn allowed_nodes(&mut self, draft: &Draft, text_len: usize) -> Vec<bool> {
        let mut allowed = vec![false; draft.tokens.len()];
        if !self.binds(text_len) {
            allowed.fill(true);
            return allowed;
        }
        if self.is_slow() {
            return allowed;
        }
        let mark = |node: Option<usize>, _: &mut Matcher| {
            if let Some(node) = node {
                allowed[node] = true;
            }
            Ok(())
        };
        self.visit(draft, JUDGING_PARTS, &|_| true, mark);
        allowed
    }

    /// Makes the masks after the text and after the nodes of the draft that are `computed`, if they are not there.
    pub(super) fn make_masks(
        &mut self,
        draft: &Draft,
        computed: &[Option<usize>],
        text_len: usize,
    ) {
        if !self.binds(text_len) || self.cuts_all || self.must_leave() {
            return;
        }
        let (mut ahead, at_text) = (std::mem::take(&mut self.ahead), self.at_text);
        let make = |_: Option<usize>, matcher: &mut Matcher| {
            if !ahead.contains_key(&matcher.output()[at_text..]) {
                let mask = matcher.allowed()?.cloned();
                ahead.insert(matcher.output()[at_text..].to_vec(), mask);
            }
            Ok(())
        };
        if self.visit(draft, 1, &|node| computed[node].is_some(), make) {
            self.ahead = ahead;
        }
    }

    /// Goes to the end of the text and to all nodes that are wanted and allowed, whose parents are too, as far as one
    /// of so many parts of the saved time allows. Returns whether it came back to the end of the text. If it did not,
    /// it begins anew, and drafts are cut from then on.
    fn visit(
        &mut self,
        draft: &Draft,
        parts: u32,
        wanted: &dyn Fn(usize) -> bool,
        at: impl FnMut(Option<usize>, &mut Matcher) -> Result<(), GrammarError>,
    ) -> bool {
        if self.cuts_all || self.anew.is_some() {
            return false;
        }
        self.has_visited = true;
        let len = self.matcher.len();
        let mut pace = self.pace.take();
        let is_over = FormPace::slice(pace.as_ref(), parts);
        let visit = || self.visit_nodes(draft, wanted, &is_over, at);
        let is_back = FormPace::spend(&mut pace, visit).is_ok();
        self.pace = pace;
        if !is_back {
            // An error is ignored here: the same one is returned for the next token.
            let _ = self.begin_anew(len);
        }
        is_back
    }

    fn visit_nodes(
        &mut self,
        draft: &Draft,
        wanted: &dyn Fn(usize) -> bool,
        is_over: &dyn Fn() -> bool,
        mut at: impl FnMut(Option<usize>, &mut Matcher) -> Result<(), GrammarError>,
    ) -> Result<(), GrammarError> {
        let mut children: Vec<Vec<usize>> = vec![Vec::new(); draft.tokens.len() + 1];
        for (node, parent) in draft.parents.iter().enumerate().rev() {
            children[parent.map_or(0, |parent| parent as usize + 1)].push(node);
        }
        let matcher = &mut self.matcher;
        let root = matcher.len();
        at(None, matcher)?;
        let mut open: Vec<(usize, usize)> = children[0].iter().map(|node| (*node, root)).collect();
        while let Some((node, before)) = open.pop() {
            matcher.rollback(matcher.len() - before)?;
            let token = draft.tokens[node];
            if is_over() {
                break;
            }
            if wanted(node) && matcher.advance_while_allowed(&[token])? == 1 {
                at(Some(node), matcher)?;
                open.extend(children[node + 1].iter().map(|child| (*child, before + 1)));
            }
        }
        matcher.rollback(matcher.len() - root)
    }

    /// The tokens that may stand at `position`, which is the next one. `None`: all.
    pub(super) fn mask(&mut self, position: usize) -> Result<Option<&TokenMask>, FormFault> {
        if !self.binds(position) {
            return Ok(None);
        }
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        let is_made = !self.is_behind() && self.ahead.contains_key(self.path());
        if !is_made && self.must_leave() {
            return Err(FormFault::Later);
        }
        if !is_made {
            self.without_drafts(|matcher| matcher.allowed().map(|_| ()))?;
        }
        match self.ahead.get(&self.matcher.output()[self.at_text..]) {
            Some(mask) => Ok(mask.as_ref()),
            None => Ok(self.matcher.allowed()?),
        }
    }

    /// Follows the token that was emitted at `position`. An error comes with the next mask, so that it ends the
    /// output at the same token whether the step had a draft or not.
    pub(super) fn push(&mut self, position: usize, token: TokenId) {
        if position < self.start {
            return;
        }
        if self.is_slow() || self.anew.is_some() {
            self.behind.push(token);
            return;
        }
        match self.without_drafts(|matcher| matcher.advance(&[token])) {
            Ok(()) => {}
            Err(FormFault::Later) => self.behind.push(token),
            Err(FormFault::Failed(error)) => self.failure = Some(error),
        }
    }

    /// Forgets the masks of a draft. The text has what was emitted, which are `emitted` tokens.
    pub(super) fn end_step(&mut self, emitted: usize) {
        self.ahead.clear();
        self.at_text = self.matcher.len();
        self.pace.iter_mut().for_each(|pace| pace.earn(emitted));
    }

    /// As [`DraftForm::allowed_after`], with an error if the form is too complex there.
    fn mask_after(&mut self, path: &[TokenId]) -> Result<AllowedTokens, GrammarError> {
        let matcher = &mut self.matcher;
        let taken = matcher.advance_while_allowed(path)?;
        let allowed = match taken == path.len() && !matcher.is_over() {
            false => AllowedTokens::None,
            true => {
                let mask = matcher.allowed()?.cloned();
                self.ahead.insert(path.to_vec(), mask.clone());
                mask.map_or(AllowedTokens::All, AllowedTokens::These)
            }
        };
        matcher.rollback(taken)?;
        Ok(allowed)
    }
}

impl DraftForm for SessionForm {
    fn allowed_after(&mut self, path: &[TokenId]) -> AllowedTokens {
        if self.cuts_all || self.must_leave() || self.is_slow() {
            return AllowedTokens::None;
        }
        self.has_visited = true;
        let len = self.matcher.len();
        let mut pace = self.pace.take();
        let allowed = FormPace::spend(&mut pace, || self.mask_after(path));
        self.pace = pace;
        allowed.unwrap_or_else(|_| {
            // An error is ignored here: the same one is returned for the next token.
            let _ = self.begin_anew(len);
            AllowedTokens::None
        })
    }
}

/// A session whose masks are to be made, with its draft.
pub(super) struct MaskTask<'a> {
    pub(super) form: &'a mut SessionForm,
    pub(super) draft: &'a Draft,
    pub(super) computed: &'a [Option<usize>],
    pub(super) text_len: usize,
}

/// The threads that make masks during forward passes. They last: what a new thread takes to get memory of its own can
/// be more than the time of its masks.
#[derive(Debug)]
pub(super) struct MaskThreads(Option<rayon::ThreadPool>);

impl MaskThreads {
    /// Starts so many threads. Without any, masks are made when they are needed.
    pub(super) fn new(threads: usize) -> Self {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.thread_name(|_| "masks".to_owned());
        let pool = (threads > 0).then(|| pool.build());
        MaskThreads(pool.and_then(Result::ok))
    }

    /// Runs `pass`, and makes the masks of `tasks` beside it. Masks that are not made here are made when they are
    /// needed, which is less work in all.
    pub(super) fn beside<T>(&self, tasks: Vec<MaskTask<'_>>, pass: impl FnOnce() -> T) -> T {
        let nodes = |task: &MaskTask<'_>| task.computed.iter().flatten().count() + 1;
        let masks: usize = tasks.iter().map(nodes).sum();
        let Some(pool) = self.0.as_ref().filter(|_| masks >= MASKS_AHEAD_MIN) else {
            return pass();
        };
        pool.in_place_scope(|scope| {
            for task in tasks {
                scope.spawn(move |_| {
                    task.form
                        .make_masks(task.draft, task.computed, task.text_len);
                });
            }
            pass()
        })
    }
}
