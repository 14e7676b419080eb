//! Fields of chats that only servers of rollouts have: the tokens of a prompt, and the facts about an output.

use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use refrain_gateway::{
    ChoiceProgress, EventObserver, KnownTurns, RelayEvent, RequestEvents, RequestSummary,
    SurfaceWriter, TemplatedChat, check_supported,
};
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::TokenizationError;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::body::{OneOrMore, checked_names};
use super::sglang::SglangShape;
use super::sglang_writer::SglangWriter;

/// The fields of a body, beside those that all chats have.
#[derive(Debug, Default, Deserialize)]
pub(super) struct AgentFields {
    /// The prompt as tokens, in place of what the template makes of the messages.
    pub(super) input_ids: Option<Vec<TokenId>>,
    /// Whether each choice has the `meta_info` of SGLang.
    #[serde(default)]
    return_meta_info: Option<bool>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    continue_final_message: Option<bool>,
    /// Names of the request, by which it can be aborted.
    #[serde(default)]
    rid: Option<OneOrMore<String>>,
    #[serde(skip)]
    names: Vec<String>,
    #[serde(default)]
    return_routed_experts: Value,
    #[serde(default)]
    return_indexer_topk: Value,
    #[serde(default)]
    return_hidden_states: Value,
    #[serde(default)]
    required_prefix_token_ids: Value,
    #[serde(default)]
    no_stop_trim: Value,
}

impl AgentFields {
    /// Reads them out of a body, whose other faults are found elsewhere.
    ///
    /// # Errors
    /// One of them is not what it should be, or cannot be carried out.
    pub(super) fn read(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields: AgentFields = refrain_gateway::read(body)?;
        fields.names = checked_names("rid", fields.rid.take())?;
        let named = [
            ("return_routed_experts", &mut fields.return_routed_experts),
            ("return_indexer_topk", &mut fields.return_indexer_topk),
            ("return_hidden_states", &mut fields.return_hidden_states),
            (
                "required_prefix_token_ids",
                &mut fields.required_prefix_token_ids,
            ),
            ("no_stop_trim", &mut fields.no_stop_trim),
        ];
        let names = named.each_ref().map(|(name, _)| *name);
        let set = named.map(|(name, value)| (name.to_owned(), std::mem::take(value)));
        check_supported("", &Map::from_iter(set), &names)?;
        if fields.input_ids.is_some() && fields.continue_final_message == Some(true) {
            let message = "input_ids: cannot be combined with continue_final_message: true; end the tokens where it goes on";
            return Err(ApiError::invalid("input_ids", message));
        }
        if fields.shows_facts() && fields.stream == Some(true) {
            let message = "return_meta_info: cannot be combined with stream: true";
            return Err(ApiError::invalid("return_meta_info", message));
        }
        Ok(fields)
    }

    /// Whether each choice has the facts about its output.
    pub(super) fn shows_facts(&self) -> bool {
        self.return_meta_info == Some(true)
    }

    /// The shape of the facts.
    pub(super) fn shape(&self) -> SglangShape {
        SglangShape {
            names: self.names.clone(),
            ..SglangShape::default()
        }
    }

    /// The names of the request.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }
}

/// A prompt that the body gives as tokens.
pub(super) struct GivenPrompt(pub(super) Vec<TokenId>);

impl KnownTurns for GivenPrompt {
    fn prompt(&self, chat: &TemplatedChat<'_>) -> Result<Option<Vec<TokenId>>, TokenizationError> {
        let size = chat.tokenizer.vocab_size();
        match self.0.iter().find(|id| **id >= size) {
            _ if self.0.is_empty() => {
                let message = "input_ids: must have at least one token";
                Err(TokenizationError::Input(message.to_owned()))
            }
            Some(id) => Err(TokenizationError::Input(format!(
                "input_ids: {id} is no token of the model, whose vocabulary has {size}"
            ))),
            None => Ok(Some(self.0.clone())),
        }
    }
}

/// Gathers the facts about an output while another writer writes the answer, and adds them at the end.
pub(super) struct FactsWriter {
    writer: Box<dyn SurfaceWriter>,
    facts: Arc<Mutex<SglangWriter>>,
}

/// Shows the output to the writer of facts.
struct FactsObserver(Arc<Mutex<SglangWriter>>);

impl FactsWriter {
    /// Wraps the writer of a whole answer, whose events the observer has to see.
    pub(super) fn new(
        writer: Box<dyn SurfaceWriter>,
        facts: SglangWriter,
    ) -> (Self, Box<dyn EventObserver>) {
        let facts = Arc::new(Mutex::new(facts));
        let observer = Box::new(FactsObserver(facts.clone()));
        (FactsWriter { writer, facts }, observer)
    }
}

/// An answer with the facts about its choices.
fn with_facts(body: &[u8], facts: &SglangWriter) -> serde_json::Result<Vec<u8>> {
    let mut answer: Value = serde_json::from_slice(body)?;
    let choices = answer["choices"].as_array_mut().into_iter().flatten();
    for (index, choice) in choices.enumerate() {
        choice["meta_info"] = facts.meta_info(index)?;
        // Its readers want a text, where OpenAI has null.
        let content = &mut choice["message"]["content"];
        if content.is_null() {
            *content = "".into();
        }
    }
    serde_json::to_vec(&answer)
}

impl EventObserver for FactsObserver {
    fn observe(&mut self, event: &RelayEvent) -> Result<(), ApiError> {
        if let RelayEvent::Progress { index, progress } = event {
            self.0.lock().add(*index, progress.clone());
        }
        Ok(())
    }
}

#[async_trait]
impl SurfaceWriter for FactsWriter {
    fn progress(&mut self, index: u32, progress: ChoiceProgress) -> Result<Vec<u8>, ApiError> {
        self.writer.progress(index, progress)
    }

    fn done(&mut self, summary: &RequestSummary) -> Result<Vec<u8>, ApiError> {
        self.writer.done(summary)
    }

    async fn collect(self: Box<Self>, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        let body = self.writer.collect(events).await?;
        with_facts(&body, &self.facts.lock()).map_err(ApiError::internal)
    }
}
