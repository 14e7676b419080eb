//! Shapes the events of a request, so that they do not tell how many tokens a step brought.
//!
//! Without a shape an event has what an engine step brought, when it brought it. Where drafts are accepted, steps
//! bring several tokens at once. So whoever watches a stream learns whether somebody of the same namespace was told
//! the same before (arXiv 2411.01076). A shape makes events of equal numbers of tokens, and with a pace also at equal
//! times. A pace hides what is faster than itself, so it has to be slower than plain decoding.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use crate::relay::choice::ChoiceProgress;
use crate::relay::events::RelayEvent;
use refrain_accounts::tenants::StreamShape;

/// Tokens of an event. The last one of a choice has fewer.
const EVENT_TOKENS: usize = 8;

/// Events that wait until they have their shape.
#[derive(Debug)]
pub(super) struct StreamShaper {
    shape: StreamShape,
    /// When the first output came, and how many times of a pace have passed since then.
    began: Option<Instant>,
    beats: u32,
    /// Output of each choice that is not sent yet, token by token.
    waiting: BTreeMap<u32, VecDeque<ChoiceProgress>>,
    /// The last event of the request.
    last: Option<RelayEvent>,
}

impl StreamShaper {
    pub(super) fn new(shape: StreamShape) -> Self {
        StreamShaper {
            shape,
            began: None,
            beats: 0,
            waiting: BTreeMap::new(),
            last: None,
        }
    }

    /// Takes an event in. Output comes token by token.
    pub(super) fn push(&mut self, event: RelayEvent, now: Instant) {
        match event {
            RelayEvent::Progress { index, progress } => {
                self.began.get_or_insert(now);
                self.waiting.entry(index).or_default().push_back(progress);
            }
            last => self.last = Some(last),
        }
    }

    /// When [`StreamShaper::release`] may have something that it does not have before. `None`: after the next event.
    pub(super) fn due(&self) -> Option<Instant> {
        let StreamShape::Pace { per_token } = self.shape else {
            return None;
        };
        let waits = self.waiting.values().any(|line| !line.is_empty());
        let began = self.began.filter(|_| waits)?;
        Some(began + per_token * EVENT_TOKENS as u32 * (self.beats + 1))
    }

    /// The events that may be sent now.
    pub(super) fn release(&mut self, now: Instant) -> Vec<RelayEvent> {
        let mut released = Vec::new();
        match self.shape {
            StreamShape::Size => while self.release_one_of_each(&mut released) {},
            StreamShape::Pace { .. } => {
                while self.due().is_some_and(|due| due <= now) {
                    self.beats += 1;
                    self.release_one_of_each(&mut released);
                }
            }
        }
        if self.waiting.values().all(VecDeque::is_empty) {
            released.extend(self.last.take());
        }
        released
    }

    /// Releases an event of each choice that has a whole one. Returns whether there was any.
    fn release_one_of_each(&mut self, released: &mut Vec<RelayEvent>) -> bool {
        let before = released.len();
        for (&index, line) in &mut self.waiting {
            let tokens: usize = line.iter().map(|piece| piece.tokens.len()).sum();
            let ends = self.last.is_some() || line.iter().any(|piece| piece.finish.is_some());
            if line.is_empty() || (tokens < EVENT_TOKENS && !ends) {
                continue;
            }
            let mut progress = ChoiceProgress::default();
            // Pieces without tokens, such as an end, go with those before them.
            let next_fits = |line: &VecDeque<ChoiceProgress>, tokens: usize| {
                let next = line.front();
                next.is_some_and(|next| tokens == 0 || tokens + next.tokens.len() <= EVENT_TOKENS)
            };
            while next_fits(line, progress.tokens.len())
                && let Some(piece) = line.pop_front()
            {
                progress.append(piece);
            }
            released.push(RelayEvent::Progress { index, progress });
        }
        released.len() > before
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use refrain_output_parsers::Event;
    use refrain_protocol::openai::FinishReason;

    use super::*;
    use crate::relay::choice::OutputToken;

    const PER_TOKEN: Duration = Duration::from_millis(10);

    fn token(id: u32) -> RelayEvent {
        let progress = ChoiceProgress {
            events: vec![Event::Text(format!("{id} "))],
            tokens: vec![OutputToken {
                id,
                logprob: None,
                weight_version: 0,
            }],
            ..ChoiceProgress::default()
        };
        RelayEvent::Progress { index: 0, progress }
    }

    fn end() -> RelayEvent {
        let progress = ChoiceProgress {
            finish: Some(FinishReason::Stop),
            ..ChoiceProgress::default()
        };
        RelayEvent::Progress { index: 0, progress }
    }

    /// When events were sent, in milliseconds, and their numbers of tokens. The last event of the request has none.
    /// Steps bring `step` tokens, each takes `step_ms`.
    fn sent(shape: StreamShape, tokens: usize, step: usize, step_ms: u64) -> Vec<(u64, usize)> {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut shaper = StreamShaper::new(shape);
        let mut sent = Vec::new();
        let mut texts = String::new();
        let (mut given, mut is_over) = (0, false);
        for ms in 0..10_000 {
            if ms % step_ms == 0 && !is_over {
                for _ in 0..step.min(tokens - given) {
                    shaper.push(token(given as u32), at(ms));
                    given += 1;
                }
                if given == tokens {
                    shaper.push(end(), at(ms));
                    shaper.push(RelayEvent::Done(Box::default()), at(ms));
                    is_over = true;
                }
            }
            for event in shaper.release(at(ms)) {
                sent.push(match event {
                    RelayEvent::Progress { progress, .. } => {
                        for event in progress.events {
                            if let Event::Text(text) = event {
                                texts += &text;
                            }
                        }
                        (ms, progress.tokens.len())
                    }
                    _ => (ms, 0),
                });
            }
        }
        let whole: String = (0..tokens).map(|id| format!("{id} ")).collect();
        assert_eq!(texts, whole, "text was lost or changed its order");
        sent
    }

    #[test]
    fn events_have_the_same_sizes_whatever_steps_bring() {
        let sizes = |step| -> Vec<usize> {
            let sent = sent(StreamShape::Size, 21, step, 5);
            sent.into_iter().map(|(_, tokens)| tokens).collect()
        };
        for step in [1, 2, 5, 7, 21] {
            assert_eq!(sizes(step), [8, 8, 5, 0], "{step} tokens a step");
        }
    }

    #[test]
    fn a_pace_hides_when_tokens_come_as_long_as_they_come_faster() {
        let pace = StreamShape::Pace {
            per_token: PER_TOKEN,
        };
        let plain = sent(pace, 20, 1, 6);
        assert_eq!(plain, [(80, 8), (160, 8), (240, 4), (240, 0)]);
        for step in [2, 3, 9, 20] {
            assert_eq!(sent(pace, 20, step, 6), plain, "{step} tokens a step");
        }
        // Tokens that come slower than the pace show.
        assert_ne!(sent(pace, 20, 1, 30), plain);
    }

    #[test]
    fn a_failure_comes_after_the_output_before_it() {
        let now = Instant::now();
        let mut shaper = StreamShaper::new(StreamShape::Size);
        shaper.push(token(1), now);
        assert!(shaper.release(now).is_empty());
        let failed = refrain_protocol::ApiError::internal("gone");
        shaper.push(RelayEvent::Failed(failed), now);
        let events = shaper.release(now);
        let [RelayEvent::Progress { .. }, RelayEvent::Failed(_)] = &events[..] else {
            panic!("{events:?}");
        };
    }
}
