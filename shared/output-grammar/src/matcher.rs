//! Follows an output token by token, and says which tokens may come next.

use std::fmt;
use std::sync::Arc;

use llguidance::toktrie::SimpleVob;
use parking_lot::Mutex;

use crate::mask::TokenMask;
use crate::parser::{Failed, Parser};
use crate::stop::StopSignal;
use crate::{GrammarError, TokenId};

/// A part of the output that is free. It ends with one of some tokens.
#[derive(Clone, Debug)]
pub(crate) struct FreePart {
    pub(crate) until: Vec<TokenId>,
    /// Whether that token is already the first of what follows.
    pub(crate) end_is_bound: bool,
}

/// Gives the grammar a token. Returns whether it took it.
type Consume = fn(&mut Parser, TokenId) -> Result<bool, Failed>;

/// For a token that a mask allowed.
fn consume_allowed(grammar: &mut Parser, token: TokenId) -> Result<bool, Failed> {
    grammar.consume(token).map(|()| true)
}

/// For any token. Where a text is forced, only the token by which the tokenizer begins it is in the mask.
fn consume_any(grammar: &mut Parser, token: TokenId) -> Result<bool, Failed> {
    let is_other = |first: &TokenId| *first != token;
    if !grammar.is_over() && grammar.forced().first().is_some_and(is_other) {
        return Ok(false);
    }
    grammar.try_consume(token)
}

/// The parts of an output around the text of its grammar.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The token that opens the first free part, where the output may also begin without that part.
    pub(crate) opened_by: Option<TokenId>,
    /// The parts before the text.
    pub(crate) free_parts: Vec<FreePart>,
    /// The tokens that end an output.
    pub(crate) eos: Vec<TokenId>,
}

/// The beginning of all outputs of a form.
pub(crate) struct GrammarStart {
    /// The grammar at its beginning. It is only cloned.
    pub(crate) parser: Mutex<Parser>,
    /// The first tokens of its text.
    pub(crate) first: SimpleVob,
    pub(crate) layout: Layout,
    /// Maximum work of the parser for one output.
    pub(crate) work_max: u64,
}

/// Maximum number of tokens that are followed without a mask. Only a mask renews the work that a grammar may take.
const TOKENS_WITHOUT_MASK_MAX: usize = 64;

/// The state of one output in a grammar.
///
/// All answers depend on the tokens of the output alone, not on what was asked or rolled back before. Only the limits
/// of [`crate::GrammarLimits`] count what was rolled back as well. So an error may come earlier than for an output
/// that never went back, and [`Matcher::restart`] finds out if it would come there too.
pub struct Matcher {
    start: Arc<GrammarStart>,
    grammar: Parser,
    stop: StopSignal,
    /// Tokens beside those of the layout that end this output.
    stops: Vec<TokenId>,
    /// Lengths of the output at the ends of the free parts that are over.
    ends: Vec<usize>,
    output: Vec<TokenId>,
    /// Tokens at the beginning of the output that came together, and not one after another with masks between them.
    together_len: usize,
    /// Tokens at the end of the output that came after the end of the text.
    len_after_end: usize,
    /// Tokens that may come next, if they were asked for since the last change.
    allowed: Option<TokenMask>,
    failed: bool,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut matcher = f.debug_struct("Matcher");
        matcher.field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(start: Arc<GrammarStart>) -> Self {
        Matcher::stopped_by(start, StopSignal::default())
    }

    fn stopped_by(start: Arc<GrammarStart>, stop: StopSignal) -> Self {
        let grammar = start.parser.lock().deep_clone();
        stop.follow(grammar.cancellation());
        Matcher {
            start,
            grammar,
            stop,
            stops: Vec::new(),
            ends: Vec::new(),
            output: Vec::new(),
            together_len: 0,
            len_after_end: 0,
            allowed: None,
            failed: false,
        }
    }

    /// The matcher of an output that also ends with one of `stops`. Where the form allows the end, it allows them.
    /// After an end it allows them alone, so that the output does end.
    #[must_use]
    pub fn with_stops(self, stops: &[TokenId]) -> Self {
        let size = self.grammar.vocabulary().vocab_size();
        let stops = stops.iter().copied().filter(|stop| (*stop as usize) < size);
        Matcher {
            stops: stops.collect(),
            ..self
        }
    }

    /// Ends the work of this matcher from elsewhere, when nobody wants its output any longer.
    pub fn stop_signal(&self) -> StopSignal {
        self.stop.clone()
    }

    /// The work of the parser so far, with that for what was taken back. Its unit is that of
    /// [`crate::GrammarLimits::output_work_max`].
    pub fn work(&self) -> u64 {
        self.grammar.work()
    }

    fn ends_output(&self, token: TokenId) -> bool {
        self.start.layout.eos.contains(&token) || self.stops.contains(&token)
    }

    /// Length of the output so far, in tokens.
    pub fn len(&self) -> usize {
        self.output.len()
    }

    /// The output so far.
    pub fn output(&self) -> &[TokenId] {
        &self.output
    }

    /// Whether the output has no token yet.
    pub fn is_empty(&self) -> bool {
        self.output.is_empty()
    }

    /// The free part that the output is in.
    fn free_part(&self) -> Option<&FreePart> {
        let skipped = usize::from(self.may_be_opened());
        self.start.layout.free_parts.get(self.ends.len() + skipped)
    }

    /// Whether the next token decides if the output has its first free part.
    fn may_be_opened(&self) -> bool {
        self.start.layout.opened_by.is_some() && self.is_empty() && self.ends.is_empty()
    }

    fn fail<T>(&mut self, reason: &'static str) -> Result<T, GrammarError> {
        self.failed = true;
        Err(GrammarError::Matching(reason))
    }

    fn check(&self) -> Result<(), GrammarError> {
        match self.failed {
            true => Err(GrammarError::Matching("it failed before")),
            false => Ok(()),
        }
    }

    /// Appends tokens to the output, which were sampled from the masks. Where the output has none yet, they are
    /// followed with few masks, which is far less work. After an error the matcher cannot be used until
    /// [`Matcher::restart`].
    ///
    /// # Errors
    /// The grammar does not allow them, or is too complex at this place.
    pub fn advance(&mut self, tokens: &[TokenId]) -> Result<(), GrammarError> {
        match (self.is_empty(), tokens) {
            (true, _) => {
                self.advance_with_masks(tokens, TOKENS_WITHOUT_MASK_MAX)?;
                self.together_len = tokens.len();
                Ok(())
            }
            // The token was chosen from a mask.
            (false, [_]) => self.advance_with_masks(tokens, TOKENS_WITHOUT_MASK_MAX),
            (false, _) => self.advance_with_masks(tokens, 1),
        }
    }

    /// Begins anew with an output, as one that never went back. This takes as long as the masks of the output took.
    /// It also mends a matcher that failed. After an error the matcher still has this output.
    ///
    /// # Errors
    /// As [`Matcher::advance`].
    pub fn restart(&mut self, output: &[TokenId]) -> Result<(), GrammarError> {
        let together = self.together_len.min(output.len());
        self.begin_again(output, together)
    }

    /// As [`Matcher::restart`], with a mask before each token.
    ///
    /// # Errors
    /// As [`Matcher::advance`].
    pub fn restart_with_masks(&mut self, output: &[TokenId]) -> Result<(), GrammarError> {
        self.begin_again(output, 0)
    }

    fn begin_again(&mut self, output: &[TokenId], together_len: usize) -> Result<(), GrammarError> {
        let stops = std::mem::take(&mut self.stops);
        *self = Matcher::stopped_by(self.start.clone(), self.stop.clone());
        self.stops = stops;
        self.together_len = together_len;
        let (together, others) = output.split_at(together_len);
        let begun = self.advance_with_masks(together, TOKENS_WITHOUT_MASK_MAX);
        let begun = begun.and_then(|()| self.advance_with_masks(others, 1));
        if begun.is_err() {
            self.output = output.to_vec();
        }
        begun
    }

    /// Appends tokens, with a mask before each that has a multiple of `distance` as its number.
    fn advance_with_masks(
        &mut self,
        tokens: &[TokenId],
        distance: usize,
    ) -> Result<(), GrammarError> {
        self.check()?;
        for (number, token) in (1..).zip(tokens) {
            if number % distance == 0 {
                self.allowed()?;
            }
            if !self.advance_by_one(*token, consume_allowed)? {
                return self.fail("it has a token that the form does not allow");
            }
        }
        Ok(())
    }

    /// Appends tokens to the output, up to the first that the grammar does not allow. Returns their number.
    ///
    /// # Errors
    /// The grammar is too complex at this place. The matcher cannot be used until [`Matcher::restart`].
    pub fn advance_while_allowed(&mut self, tokens: &[TokenId]) -> Result<usize, GrammarError> {
        self.check()?;
        for (place, token) in tokens.iter().enumerate() {
            if self.advance_by_one(*token, consume_any)? {
                continue;
            }
            // Where the work that the last mask renewed has run out, no token seems to be allowed.
            if self.allowed().is_ok() {
                return Ok(place);
            }
            let output = std::mem::take(&mut self.output);
            self.restart(&output)?;
            return Ok(place + self.advance_mask_by_mask(&tokens[place..])?);
        }
        Ok(tokens.len())
    }

    /// As [`Matcher::advance_while_allowed`], with the work of a mask for each token.
    fn advance_mask_by_mask(&mut self, tokens: &[TokenId]) -> Result<usize, GrammarError> {
        for (place, token) in tokens.iter().enumerate() {
            self.allowed()?;
            if !self.advance_by_one(*token, consume_any)? {
                return Ok(place);
            }
        }
        Ok(tokens.len())
    }

    fn advance_by_one(&mut self, token: TokenId, consume: Consume) -> Result<bool, GrammarError> {
        let opened = self.may_be_opened();
        if opened && Some(token) == self.start.layout.opened_by {
            self.output.push(token);
            self.allowed = None;
            return Ok(true);
        }
        if opened {
            self.ends.push(0);
        }
        let (is_free, ends, is_bound) = match self.free_part() {
            Some(part) => {
                let ends = part.until.contains(&token);
                (true, ends, ends && part.end_is_bound)
            }
            None => (false, false, true),
        };
        // An end token may also stand inside a grammar, such as the one after a call.
        let after_end = !is_free && self.ends_output(token) && self.may_end()?;
        let allowed = match (after_end, is_bound) {
            (true, _) => true,
            (_, true) => self.len_after_end == 0 && self.consume(token, consume)?,
            _ => true,
        };
        if !allowed {
            if opened {
                self.ends.clear();
            }
            return Ok(false);
        }
        self.output.push(token);
        self.len_after_end += usize::from(after_end);
        if ends {
            self.ends.push(self.len());
        }
        self.allowed = None;
        Ok(true)
    }

    fn consume(&mut self, token: TokenId, consume: Consume) -> Result<bool, GrammarError> {
        match consume(&mut self.grammar, token) {
            Ok(consumed) => Ok(consumed),
            Err(Failed) => self.fail("the grammar is too complex here, or does not allow a token"),
        }
    }

    /// Takes the last `count` tokens of the output back.
    ///
    /// # Errors
    /// The output has fewer tokens, or an earlier call failed.
    pub fn rollback(&mut self, count: usize) -> Result<(), GrammarError> {
        self.check()?;
        if count > self.len() {
            return self.fail("more tokens were taken back than it has");
        }
        if count == 0 {
            return Ok(());
        }
        let len = self.len() - count;
        let bound = self.bound_len(len);
        let bound_before = self.bound_len(self.len()) - self.len_after_end;
        self.len_after_end = self.len_after_end.saturating_sub(count);
        let bound = bound - self.len_after_end;
        if self.grammar.rollback(bound_before - bound).is_err() {
            return self.fail("the grammar cannot go back");
        }
        // At the beginning it is open again whether there is a free part.
        self.ends.retain(|end| *end <= len && len > 0);
        self.output.truncate(len);
        self.together_len = self.together_len.min(len);
        self.allowed = None;
        Ok(())
    }

    /// How many of the first `len` tokens of the output the grammar has seen, with those after the end.
    fn bound_len(&self, len: usize) -> usize {
        let parts = &self.start.layout.free_parts;
        let Some(last) = parts.last() else {
            return len;
        };
        match self.ends.get(parts.len() - 1) {
            Some(end) if *end <= len => len - end + usize::from(last.end_is_bound),
            _ => 0,
        }
    }

    /// The tokens that may come next; never an empty set. `None`: all tokens of the vocabulary.
    ///
    /// # Errors
    /// The grammar is too complex at this place, or an earlier call failed.
    pub fn allowed(&mut self) -> Result<Option<&TokenMask>, GrammarError> {
        self.check()?;
        if self.free_part().is_some() {
            return Ok(None);
        }
        if self.allowed.is_none() {
            let vocabulary = self.grammar.vocabulary();
            let mask = match (self.len_after_end, self.stops.is_empty()) {
                (0, _) => self.next_mask(),
                (_, true) => Ok(vocabulary.eos_token_set()),
                (_, false) => Ok(vocabulary.alloc_token_set()),
            };
            let Ok(mut mask) = mask else {
                return self.fail("the grammar is too complex here");
            };
            if self.work() > self.start.work_max {
                return self.fail("the grammar is too ambiguous for an output of this length");
            }
            if !self.stops.is_empty() && self.may_end()? {
                self.stops.iter().for_each(|stop| mask.allow_token(*stop));
            }
            if let (true, Some(token)) = (self.may_be_opened(), self.start.layout.opened_by) {
                mask.allow_token(token);
            }
            self.allowed = Some(TokenMask(mask));
        }
        Ok(self.allowed.as_ref())
    }

    /// The next mask of the grammar. One that forces a token is confirmed: where a limit cuts off the search for the
    /// forced text, the library tokenizes what it has found, and says nothing of the limit until the next token.
    fn next_mask(&mut self) -> Result<SimpleVob, Failed> {
        if self.bound_len(self.len()) == 0 {
            return Ok(self.start.first.clone());
        }
        let mask = TokenMask(self.grammar.mask()?);
        if let Some(token) = mask.only()
            && !self.grammar.is_over()
            && !self.start.layout.eos.contains(&token)
        {
            self.grammar.consume(token)?;
            self.grammar.rollback(1)?;
        }
        Ok(mask.0)
    }

    /// Whether it takes no work to say which tokens may come next.
    pub fn is_prepared(&self) -> bool {
        let is_known = self.allowed.is_some() || self.bound_len(self.len()) == 0;
        self.failed || is_known || self.free_part().is_some()
    }

    /// Whether `token` may come next.
    ///
    /// # Errors
    /// As [`Matcher::allowed`].
    pub fn accepts(&mut self, token: TokenId) -> Result<bool, GrammarError> {
        let allowed = self.allowed()?;
        Ok(allowed.is_none_or(|mask| mask.contains(token)))
    }

    /// The tokens that the grammar forces from here on, whatever the model: at most `max` of them.
    ///
    /// # Errors
    /// As [`Matcher::allowed`].
    pub fn forced(&mut self, max: usize) -> Result<Vec<TokenId>, GrammarError> {
        let mut forced = Vec::new();
        while forced.len() < max && self.free_part().is_none() && !self.may_be_opened() {
            if self.must_end() {
                let token = self.allowed()?.and_then(TokenMask::only);
                if let (Some(token), 0) = (token, self.len_after_end)
                    && self.advance_by_one(token, consume_allowed)?
                {
                    forced.push(token);
                }
                break;
            }
            // A mask would say no more: where the library knows of no forced token, it may still have one alone, but
            // to find that out costs more than the token saves.
            let run = self.grammar.forced();
            let mut taken = 0;
            for token in run.iter().take(max - forced.len()) {
                if !self.advance_by_one(*token, Parser::try_consume)? {
                    break;
                }
                forced.push(*token);
                taken += 1;
            }
            if taken == 0 {
                break;
            }
        }
        self.rollback(forced.len())?;
        Ok(forced)
    }

    /// Whether the output may end here.
    ///
    /// # Errors
    /// As [`Matcher::allowed`].
    pub fn may_end(&mut self) -> Result<bool, GrammarError> {
        self.check()?;
        if self.free_part().is_some() || self.len_after_end > 0 {
            return Ok(true);
        }
        if self.grammar.is_over() && !self.grammar.has_failed() {
            return Ok(true);
        }
        match self.grammar.is_accepting() {
            Ok(accepting) => Ok(accepting),
            Err(_) => self.fail("the grammar is too complex here"),
        }
    }

    /// Whether the output has an end token after its text, so that it is over.
    pub fn is_over(&self) -> bool {
        self.len_after_end > 0
    }

    /// Whether the output must end here: nothing but an end token is allowed.
    pub fn must_end(&self) -> bool {
        let stopped = self.grammar.is_over() && !self.grammar.has_failed();
        let is_bound = self.free_part().is_none() && !self.may_be_opened();
        is_bound && (self.len_after_end > 0 || stopped)
    }
}
