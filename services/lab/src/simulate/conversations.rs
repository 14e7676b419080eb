//! Conversations out of recorded calls.
//!
//! Recordings may hold only the end of each prompt. So the context of a turn is put together again: the recorded
//! prompt is laid over the place where its beginning is found in the text so far. Where it is not found, but the end
//! of the text is found in the prompt, what follows it there is new. Otherwise the turn begins a text of its own.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use anyhow::ensure;
use lru::LruCache;
use refrain_protocol::NamespaceId;
use refrain_protocol::prefix::{PrefixHash, mark, prefix_hashes};
use refrain_protocol::scheduling::SessionHash;
use refrain_suffix_index::Token;

use super::options::SimulateOptions;
use super::random::Random;
use super::workload::{Job, Turn, Workload};
use crate::logs::RecordedCall;

/// Tokens at the beginning of a prompt by which it is found in the text so far.
const BEGINNING_TOKENS: usize = 32;
/// Tokens at the end of a text by which it is found in the next prompt, longest first.
const ANCHOR_TOKENS: [usize; 4] = [64, 32, 16, 8];
/// The stream of pauses.
const PAUSES: u64 = 3;

/// Conversations.
pub(super) struct Conversations {
    pub(super) workload: Workload,
    /// The first turn of each.
    pub(super) first_turns: Vec<usize>,
    /// Tokens of all final contexts.
    pub(super) text_tokens: u64,
}

impl Conversations {
    /// Calls without a session are conversations of one turn.
    pub(super) fn recorded(
        name: String,
        calls: impl Iterator<Item = anyhow::Result<RecordedCall>>,
        options: &SimulateOptions,
    ) -> anyhow::Result<Self> {
        let mut sessions: Vec<Vec<Arc<RecordedCall>>> = Vec::new();
        let mut numbers = BTreeMap::new();
        for call in calls {
            let call = call?;
            if call.output.is_empty() {
                continue;
            }
            let next = sessions.len();
            let key = call
                .session
                .clone()
                .map(|session| (call.tenant.clone(), session));
            let number = key.map_or(next, |key| *numbers.entry(key).or_insert(next));
            if number == next {
                sessions.push(Vec::new());
            }
            sessions[number].push(Arc::new(call));
        }
        ensure!(
            !sessions.is_empty(),
            "{name}: there is no call with an output"
        );
        let mut of = Conversations {
            workload: Workload {
                name,
                groups: 1,
                ..Workload::default()
            },
            first_turns: Vec::new(),
            text_tokens: 0,
        };
        let mut random = Random::new(options.seed, PAUSES);
        for calls in sessions {
            let session = SessionHash(of.first_turns.len() as u64);
            let session = options.session_names.then_some(session);
            of.add(&calls, session, options.think_s, &mut random);
        }
        let longest = of.workload.jobs.iter().map(|job| job.output_tokens).max();
        of.workload.output_max = longest.unwrap_or(1);
        Ok(of)
    }

    fn add(
        &mut self,
        calls: &[Arc<RecordedCall>],
        session: Option<SessionHash>,
        think_s: f64,
        random: &mut Random,
    ) {
        let namespace = NamespaceId(0);
        let mut text: Vec<Token> = Vec::new();
        self.first_turns.push(self.workload.jobs.len());
        for (nth, call) in calls.iter().enumerate() {
            let is_last = nth + 1 == calls.len();
            if !continue_with(&mut text, &call.prompt) {
                self.text_tokens += text.len() as u64;
                text.clone_from(&call.prompt);
            }
            let before = prefix_hashes(&namespace, &text);
            let prompt_tokens = (text.len() as u32).max(1);
            text.extend_from_slice(&call.output);
            let number = self.workload.jobs.len();
            // The exponential distribution.
            let pause_s = -think_s * (1.0 - random.uniform()).ln();
            self.workload.jobs.push(Job {
                group: 0,
                prompt_tokens,
                output_tokens: call.output.len() as u32,
                expected_tokens: None,
                text: None,
                turn: Some(Turn {
                    session,
                    next: (!is_last).then_some((number + 1, pause_s)),
                    before,
                    after: prefix_hashes(&namespace, &text),
                }),
            });
        }
        self.text_tokens += text.len() as u64;
    }

    /// Tokens that have to be read if all KV is one cache of `kv_tokens` that drops what was not used for longest,
    /// and turns come in this order. `None` is a cache without a limit.
    pub(super) fn tokens_to_read(&self, order: &[usize], kv_tokens: Option<u64>) -> u64 {
        let mut kept: LruCache<PrefixHash, u64> = LruCache::unbounded();
        let (mut kept_tokens, mut read) = (0, 0);
        for &job in order {
            let job = &self.workload.jobs[job];
            let Some(turn) = &job.turn else { continue };
            let held = turn
                .before
                .iter()
                .take_while(|prefix| kept.contains(*prefix))
                .count();
            let held = held.checked_sub(1).map_or(0, mark);
            read += u64::from(job.prompt_tokens - held.min(job.prompt_tokens - 1));
            for (nth, prefix) in turn.after.iter().enumerate().rev() {
                let tokens = u64::from(mark(nth) - nth.checked_sub(1).map_or(0, mark));
                kept_tokens += tokens;
                if let Some(before) = kept.put(*prefix, tokens) {
                    kept_tokens -= before;
                }
            }
            while kv_tokens.is_some_and(|most| kept_tokens > most) {
                match kept.pop_lru() {
                    Some((_, tokens)) => kept_tokens -= tokens,
                    None => break,
                }
            }
        }
        read
    }

    /// Distinct tokens of all contexts, as far as they are hashed.
    pub(super) fn distinct_tokens(&self) -> u64 {
        let mut seen = HashSet::new();
        let turns = self
            .workload
            .jobs
            .iter()
            .filter_map(|job| job.turn.as_ref());
        let mut tokens = 0;
        for turn in turns {
            for (nth, prefix) in turn.after.iter().enumerate() {
                if seen.insert(*prefix) {
                    tokens += u64::from(mark(nth) - nth.checked_sub(1).map_or(0, mark));
                }
            }
        }
        tokens
    }
}

/// Adds what is new in a prompt. Returns `false` where the prompt does not go on with the text.
fn continue_with(text: &mut Vec<Token>, prompt: &[Token]) -> bool {
    let beginning = &prompt[..BEGINNING_TOKENS.min(prompt.len())];
    if beginning.len() == BEGINNING_TOKENS
        && let Some(at) = text
            .windows(BEGINNING_TOKENS)
            .rposition(|window| window == beginning)
    {
        text.truncate(at);
        text.extend_from_slice(prompt);
        return true;
    }
    for anchor in ANCHOR_TOKENS {
        let Some(tail) = text.len().checked_sub(anchor).map(|from| &text[from..]) else {
            continue;
        };
        let Some(at) = prompt.windows(anchor).rposition(|window| window == tail) else {
            continue;
        };
        let new = prompt[at + anchor..].to_vec();
        text.extend(new);
        return true;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_prompt_goes_on_with_the_text() {
        let mut text: Vec<Token> = (0..500).collect();
        let prompt: Vec<Token> = (300..520).collect();
        assert!(continue_with(&mut text, &prompt));
        assert_eq!(text, (0..520).collect::<Vec<_>>());
        assert!(!continue_with(&mut text, &[7; 300]));
        // The last words of the text are rendered in another way.
        let prompt: Vec<Token> = (300..510).chain(900..950).collect();
        assert!(continue_with(&mut text, &prompt));
        assert_eq!(text, (0..510).chain(900..950).collect::<Vec<_>>());
        let mut text: Vec<Token> = (0..500).collect();
        assert!(continue_with(
            &mut text,
            &(484..600).collect::<Vec<_>>()[2..]
        ));
        assert_eq!(text, (0..600).collect::<Vec<_>>());
    }
}
