//! The form that a session's output must have: follows the text, cuts and guides drafts, and masks logits.

use std::collections::HashMap;
use std::fmt;

use refrain_output_grammar::{GrammarError, Matcher, TokenMask};
use refrain_protocol::engine::Draft;
use refrain_protocol::{ApiError, ErrorKind, TokenId};

use crate::drafter::{AllowedTokens, DraftForm};

/// Delay after which a session may be opened whose form was not compiled yet. Most forms take 1 to 10 ms.
const COMPILING_RETRY_AFTER_MS: u64 = 5;

/// Fewer masks are made faster in turn than on a thread of their own.
const MASKS_AHEAD_MIN: usize = 8;

/// The state of a session's output in its form.
pub(crate) struct SessionForm {
    /// Has seen the text from `start` on.
    matcher: Matcher,
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

/// The error for a session whose form is not compiled yet.
pub(crate) fn compiling() -> ApiError {
    let message = "the form of the output is being compiled; send the item again";
    ApiError::new(ErrorKind::Overloaded, message)
        .with_code("engine_form_compiling")
        .with_retry_after_ms(COMPILING_RETRY_AFTER_MS)
}

impl SessionForm {
    pub(crate) fn new(matcher: Matcher, start: usize) -> Self {
        SessionForm {
            matcher,
            start,
            at_text: 0,
            ahead: HashMap::new(),
            has_visited: false,
            cuts_all: false,
        }
    }

    /// Follows a text whose tokens from `keep` on are new.
    ///
    /// # Errors
    /// The text does not have the form.
    pub(super) fn follow(&mut self, keep: usize, text: &[TokenId]) -> Result<(), GrammarError> {
        let seen = self.matcher.len();
        let kept = keep.saturating_sub(self.start).min(seen);
        let output = text.get(self.start..).unwrap_or_default();
        let followed = self.matcher.rollback(seen - kept);
        let followed = followed.and_then(|()| self.matcher.advance(&output[kept..]));
        // Masks on the way take work on themselves, so a text can be followed step by step if at all.
        let followed = followed.or_else(|_| self.matcher.restart(output));
        self.at_text = self.matcher.len();
        followed
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
    ) -> Result<T, GrammarError> {
        match work(&mut self.matcher) {
            Err(_) if self.has_visited => {
                self.begin_anew(self.matcher.len())?;
                work(&mut self.matcher)
            }
            done => done,
        }
    }

    /// Begins anew with the first `len` tokens of the output.
    fn begin_anew(&mut self, len: usize) -> Result<(), GrammarError> {
        (self.has_visited, self.cuts_all) = (false, true);
        self.ahead.clear();
        let output = self.matcher.output()[..len].to_vec();
        self.matcher.restart(&output)
    }

    /// Which nodes of a draft after the text the form allows. It keeps the node of a token that it does not judge.
    pub(super) fn allowed_nodes(&mut self, draft: &Draft, text_len: usize) -> Vec<bool> {
        let mut allowed = vec![false; draft.tokens.len()];
        if !self.binds(text_len) {
            allowed.fill(true);
            return allowed;
        }
        let mark = |node: Option<usize>, _: &mut Matcher| {
            if let Some(node) = node {
                allowed[node] = true;
            }
            Ok(())
        };
        self.visit(draft, &|_| true, mark);
        allowed
    }

    /// Makes the masks after the text and after the nodes of the draft that are `computed`, if they are not there.
    pub(super) fn make_masks(
        &mut self,
        draft: &Draft,
        computed: &[Option<usize>],
        text_len: usize,
    ) {
        if !self.binds(text_len) || self.cuts_all {
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
        if self.visit(draft, &|node| computed[node].is_some(), make) {
            self.ahead = ahead;
        }
    }

    /// Goes to the end of the text and to all nodes that are wanted and allowed, whose parents are too. Returns
    /// whether it came back. The matcher is at the end of the text again either way, and if it did not come back,
    /// drafts are cut from then on.
    fn visit(
        &mut self,
        draft: &Draft,
        wanted: &dyn Fn(usize) -> bool,
        at: impl FnMut(Option<usize>, &mut Matcher) -> Result<(), GrammarError>,
    ) -> bool {
        if self.cuts_all {
            return false;
        }
        self.has_visited = true;
        let len = self.matcher.len();
        let is_back = self.visit_nodes(draft, wanted, at).is_ok();
        if !is_back {
            // An error of the text itself comes up again at its next token.
            let _ = self.begin_anew(len);
        }
        is_back
    }

    fn visit_nodes(
        &mut self,
        draft: &Draft,
        wanted: &dyn Fn(usize) -> bool,
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
            if wanted(node) && matcher.advance_while_allowed(&[token])? == 1 {
                at(Some(node), matcher)?;
                open.extend(children[node + 1].iter().map(|child| (*child, before + 1)));
            }
        }
        matcher.rollback(matcher.len() - root)
    }

    /// The tokens that may stand at `position`, which is the next one. `None`: all.
    pub(super) fn mask(&mut self, position: usize) -> Result<Option<&TokenMask>, GrammarError> {
        if !self.binds(position) {
            return Ok(None);
        }
        if !self.ahead.contains_key(self.path()) {
            self.without_drafts(|matcher| matcher.allowed().map(|_| ()))?;
        }
        match self.ahead.get(&self.matcher.output()[self.at_text..]) {
            Some(mask) => Ok(mask.as_ref()),
            None => self.matcher.allowed(),
        }
    }

    /// Follows the token that was emitted at `position`.
    pub(super) fn push(&mut self, position: usize, token: TokenId) -> Result<(), GrammarError> {
        match position < self.start {
            true => Ok(()),
            false => self.without_drafts(|matcher| matcher.advance(&[token])),
        }
    }

    /// Forgets the masks of a draft. The text has what was emitted.
    pub(super) fn end_step(&mut self) {
        self.ahead.clear();
        self.at_text = self.matcher.len();
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
        if self.cuts_all {
            return AllowedTokens::None;
        }
        self.has_visited = true;
        let len = self.matcher.len();
        self.mask_after(path).unwrap_or_else(|_| {
            // An error of the text itself comes up again at its next token.
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

/// Runs `pass`, and makes the masks of `tasks` on at most `threads` threads beside it. Masks that are not made here
/// are made when they are needed, which is less work in all.
pub(super) fn beside<T>(tasks: Vec<MaskTask<'_>>, threads: usize, pass: impl FnOnce() -> T) -> T {
    let nodes = |task: &MaskTask<'_>| task.computed.iter().flatten().count() + 1;
    let masks: usize = tasks.iter().map(nodes).sum();
    if threads == 0 || masks < MASKS_AHEAD_MIN {
        return pass();
    }
    let mut shares: Vec<Vec<MaskTask<'_>>> = Vec::new();
    shares.resize_with(threads.min(tasks.len()), Vec::new);
    let count = shares.len();
    for (place, task) in tasks.into_iter().enumerate() {
        shares[place % count].push(task);
    }
    std::thread::scope(|scope| {
        for share in shares {
            scope.spawn(move || {
                for task in share {
                    task.form
                        .make_masks(task.draft, task.computed, task.text_len);
                }
            });
        }
        pass()
    })
}
