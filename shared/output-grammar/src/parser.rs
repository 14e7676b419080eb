//! The library's parser, whose calls are counted, end where they are told to, and fail for good.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use llguidance::api::StopReason;
use llguidance::toktrie::{SimpleVob, TokTrie};
use llguidance::{CancellationHandle, TokenParser, panic_utils};
use refrain_service_kit::clock::thread_time;

use crate::TokenId;
use crate::size::parser_bytes;

/// Tokens of an output by which the time of others is foretold. Each may take as long as one mask: about 20 ms.
const TRIED_TOKENS: usize = 3;

/// A parser in the middle of an output. After a call that failed, all others fail as well.
pub(crate) struct Parser {
    parser: TokenParser,
    has_failed: bool,
    work: u64,
}

/// A call failed: a limit was met, a token is not allowed, or the parser was stopped.
pub(crate) struct Failed;

impl Parser {
    /// Begins with a parser that has read nothing. It returns the first mask as well, and how long it took.
    ///
    /// # Errors
    /// There is no text, or a limit was met. This is the library's message.
    pub(crate) fn begin(mut parser: TokenParser) -> Result<(Self, SimpleVob, Duration), String> {
        parser.start_without_prompt();
        parser.enable_cancellation();
        let computer = parser.bias_computer.clone();
        let mut begun = Parser {
            parser,
            has_failed: false,
            work: 0,
        };
        // A mask looks for forced text before it sets the lexer's limits, so the tokens are tried once before.
        let tried = begun.call(|parser| {
            parser.parser.compute_bias(&*computer, &[]);
            Ok(())
        });
        let began = thread_time();
        let first = tried.and_then(|()| begun.mask());
        let time = thread_time().saturating_sub(began);
        let error = || {
            let message = begun.parser.error_message();
            message.unwrap_or_else(|| "no text".to_owned())
        };
        let first = first.map_err(|_| error())?;
        begun.parser.invalidate_bias_cache();
        begun.work = 0;
        Ok((begun, first, time))
    }

    /// Tries an output of a few tokens on a copy. Returns the longest time of a token and the mask after it.
    pub(crate) fn try_tokens(&self, first: &SimpleVob) -> Duration {
        let mut tried = self.deep_clone();
        let mut mask = Ok(first.clone());
        let mut longest = Duration::ZERO;
        for _ in 0..TRIED_TOKENS {
            // The first tokens of a vocabulary are single bytes, with which few outputs begin.
            let middle = mask.map(|mask| mask.iter().nth(mask.num_set() / 2));
            let Ok(Some(token)) = middle else { break };
            let began = thread_time();
            mask = tried.consume(token).and_then(|()| tried.mask());
            longest = longest.max(thread_time().saturating_sub(began));
        }
        longest
    }

    /// A parser at the same place, which shares nothing with this one.
    pub(crate) fn deep_clone(&self) -> Self {
        Parser {
            parser: self.parser.deep_clone(),
            ..*self
        }
    }

    /// The work so far. The rows of a call count as many items as they have on average, times all of them.
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// Makes the calls fail from another thread.
    pub(crate) fn cancellation(&self) -> Option<CancellationHandle> {
        self.parser.cancellation_handle()
    }

    /// About the bytes of this parser.
    pub(crate) fn bytes(&self) -> usize {
        parser_bytes(&self.parser)
    }

    pub(crate) fn vocabulary(&self) -> &TokTrie {
        self.parser.token_env.tok_trie()
    }

    fn call<T>(
        &mut self,
        call: impl FnOnce(&mut TokenParser) -> anyhow::Result<T>,
    ) -> Result<T, Failed> {
        if self.has_failed {
            return Err(Failed);
        }
        let (rows, items) = self.counts();
        let parser = &mut self.parser;
        let done = panic_utils::catch_unwind(AssertUnwindSafe(|| call(parser)));
        let (rows_then, items_then) = self.counts();
        let (rows, items) = (rows_then - rows, items_then - items);
        let work = items.saturating_mul(items) / rows.max(1);
        self.work = self.work.saturating_add(work);
        // A call that was stopped returned nothing complete.
        let is_stopped = self.cancellation().is_some_and(|stop| stop.is_cancelled());
        match done {
            Ok(done) if !is_stopped => Ok(done),
            _ => {
                self.has_failed = true;
                Err(Failed)
            }
        }
    }

    fn counts(&self) -> (u64, u64) {
        let stats = self.parser.parser_stats();
        (stats.rows as u64, stats.all_items as u64)
    }

    /// Whether the text is over, or a call failed.
    pub(crate) fn is_over(&self) -> bool {
        self.has_failed || self.parser.stop_reason() != StopReason::NotStopped
    }

    /// Whether a call failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// The tokens that may come next, or the end tokens where the text is over.
    pub(crate) fn mask(&mut self) -> Result<SimpleVob, Failed> {
        self.call(|parser| match parser.stop_reason() {
            StopReason::NotStopped => parser.compute_mask(),
            _ => Ok(parser.token_env.tok_trie().eos_token_set()),
        })
    }

    /// Goes on with a token that a mask allowed.
    pub(crate) fn consume(&mut self, token: TokenId) -> Result<(), Failed> {
        self.call(|parser| {
            parser.consume_token(token)?;
            parser.check_stop().map(|_| ())
        })
    }

    /// Goes on with a token if it is allowed.
    pub(crate) fn try_consume(&mut self, token: TokenId) -> Result<bool, Failed> {
        match self.call(|parser| parser.validate_token(token))? {
            true => self.consume(token).map(|()| true),
            false => Ok(false),
        }
    }

    /// The tokens of the text that is forced here, if there is one.
    pub(crate) fn forced(&mut self) -> Vec<TokenId> {
        let forced = self.call(|parser| Ok(parser.compute_ff_tokens()));
        forced.unwrap_or_default()
    }

    pub(crate) fn is_accepting(&mut self) -> Result<bool, Failed> {
        self.call(|parser| Ok(parser.is_accepting()))
    }

    pub(crate) fn rollback(&mut self, count: usize) -> Result<(), Failed> {
        self.call(|parser| parser.rollback(count))
    }
}
