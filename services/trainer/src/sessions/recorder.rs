//! Records the output of a turn, before its end is told to the agent.

use std::sync::Arc;

use refrain_gateway::{
    ChoiceFigures, Event, EventObserver, GenerateRequest, OutputToken, RelayEvent,
};
use refrain_protocol::ApiError;
use refrain_protocol::openai::FinishReason;
use refrain_service_kit::clock;

use super::digests::{self, AnswerWords};
use super::known_session::EnteredSession;
use super::session::Place;
use super::turns::Turn;

/// The observer of a request that is a turn of a session.
pub(crate) struct Recorder {
    entered: EnteredSession,
    request: Arc<GenerateRequest>,
    choices: Vec<Recorded>,
}

/// The output of a choice so far.
#[derive(Default)]
struct Recorded {
    events: Vec<Event>,
    tokens: Vec<OutputToken>,
    finish: Option<FinishReason>,
    figures: Option<ChoiceFigures>,
}

impl Recorder {
    /// The recorder of a request.
    pub(crate) fn new(entered: EnteredSession, request: Arc<GenerateRequest>) -> Self {
        let mut choices = Vec::new();
        choices.resize_with(request.choice_count(), Recorded::default);
        Recorder {
            entered,
            request,
            choices,
        }
    }

    /// Adds the turns to the session. An output without a token is none.
    fn record(&mut self) -> Result<(), ApiError> {
        let mut choices = std::mem::take(&mut self.choices);
        choices.retain(|recorded| !recorded.tokens.is_empty());
        if choices.is_empty() {
            return Ok(());
        }
        let place = self.entered.place;
        // All choices of a chat have one prompt.
        let prompt = self.request.prompt_tokens(0).unwrap_or_default();
        let turns = |parent, known: usize| {
            let turn = |recorded: &Recorded| recorded.turn(place, parent, &prompt[known..]);
            choices.iter().map(turn).collect()
        };
        self.entered.session.add(place, prompt, turns)
    }
}

impl Recorded {
    /// The turn of this output. `prompt` is what it adds to the turn before.
    fn turn(&self, place: Place, parent: Option<u32>, prompt: &[u32]) -> Turn {
        let mut versions: Vec<(u32, u64)> = Vec::new();
        for token in &self.tokens {
            match versions.last_mut() {
                Some((count, version)) if *version == token.weight_version => *count += 1,
                _ => versions.push((1, token.weight_version)),
            }
        }
        let logprob = |token: &OutputToken| token.logprob.as_ref().map(|one| one.logprob);
        let logprobs = self.tokens.iter().map(logprob);
        let words = AnswerWords::of_events(&self.events);
        Turn {
            parent,
            prompt: prompt.to_vec(),
            output: self.tokens.iter().map(|token| token.id).collect(),
            logprobs: logprobs
                .map(|logprob| logprob.unwrap_or(f32::NAN))
                .collect(),
            versions,
            finish: self.finish.map_or("", FinishReason::as_str).to_owned(),
            figures: self.figures.unwrap_or_default().into(),
            digest: place
                .digest
                .map(|digest| digests::with_answer(digest, &words)),
            ended_s: clock::unix_s(),
        }
    }
}

impl EventObserver for Recorder {
    fn observe(&mut self, event: &RelayEvent) -> Result<(), ApiError> {
        match event {
            RelayEvent::Progress { index, progress } => {
                if let Some(choice) = self.choices.get_mut(*index as usize) {
                    for event in &progress.events {
                        event.clone().append(&mut choice.events);
                    }
                    choice.tokens.extend(progress.tokens.iter().cloned());
                    choice.finish = progress.finish.or(choice.finish);
                    choice.figures = progress.figures.or(choice.figures);
                }
                // An agent may take the end of the last choice for the end of the answer.
                let is_over =
                    |choice: &Recorded| choice.finish.is_some() && choice.figures.is_some();
                match self.choices.iter().all(is_over) {
                    true => self.record(),
                    false => Ok(()),
                }
            }
            RelayEvent::Done(_) => self.record(),
            RelayEvent::Failed(_) => Ok(()),
        }
    }
}
