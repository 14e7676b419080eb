//! Turns the JSON of a client into a [`ParsedRequest`]. All checks are made here, and none later. The standing of the
//! caller then makes a [`GenerateRequest`] of it, which can be carried out.

mod body;
mod bound_output;
mod end_user;
mod faults;
mod fields;
mod generate_request;
mod known_turns;
mod messages;
mod other_fields;
mod output_form;
mod parsing;
mod prompt;
mod refusal;
mod samples;
mod session;
mod tools;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use refrain_accounts::tenants::Caller;
use refrain_output_parsers::{ParserOptions, ReasoningParserKind};
use refrain_protocol::chunk::{Speculation, Urgency};
use refrain_protocol::engine::{OutputForm, Sampling, TextForm};
use refrain_protocol::openai::Parameters;
use refrain_protocol::scheduling::RequestClass;
use refrain_protocol::{ApiError, ErrorKind, TokenId};
use refrain_tokenization::STAGE;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use crate::config::GatewayTuning;
use crate::models::{Model, Models};
use body::{ChatFields, CompletionFields, RequestBody};
use prompt::PromptRoom;
use tools::{CallDemand, Tools};

pub(crate) use bound_output::{BoundOutput, FormSource};
pub(crate) use end_user::EndUser;
pub use generate_request::GenerateRequest;
pub use known_turns::{KnownTurns, TemplatedChat};
pub(crate) use messages::IMAGE_LEFT_OUT;
pub(crate) use other_fields::check_metadata;
pub use other_fields::check_supported;
pub(crate) use prompt::ContextWords;
pub use samples::{SampleBody, SamplingFields};
pub(crate) use session::NamedUser;
pub use session::session_of_heads;
pub(crate) use tools::is_deferred;

/// The endpoint that was called, which decides the shape of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

impl Endpoint {
    /// The name of the operation in the OpenTelemetry conventions.
    pub(crate) fn operation(self) -> &'static str {
        match self {
            Endpoint::Chat => "chat",
            Endpoint::Completion => "text_completion",
        }
    }
}

/// One prompt, ready to be decoded.
#[derive(Clone, Debug)]
pub(crate) struct PreparedPrompt {
    pub(crate) tokens: Arc<[TokenId]>,
    /// Output limit that fits the context. It is 0 where only the prompt is wanted.
    pub(crate) max_new_tokens: u32,
    /// The prompt as text, if the answer has to begin with it.
    pub(crate) echo: String,
}

/// The parts of the tokens that the answer shows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OutputOptions {
    /// The stop text that ended the output is a part of it.
    pub(crate) has_stop_text: bool,
    /// Special tokens have text.
    pub(crate) shows_special: bool,
    /// The answer has the token ids.
    pub(crate) has_token_ids: bool,
    /// Most likely tokens that the answer shows in each place of the output, if it has log-probabilities.
    pub(crate) top_logprobs: Option<u32>,
    /// Log-probabilities name tokens by their ids.
    pub(crate) names_ids: bool,
    /// The log-probabilities of the output begin with those of the prompt.
    pub(crate) echoes_logprobs: bool,
    /// The same as `top_logprobs` for the prompt, apart from the output.
    pub(crate) prompt_logprobs: Option<u32>,
}

impl OutputOptions {
    /// Whether the worker has to score the prompt.
    pub(crate) fn scores_prompt(&self) -> bool {
        self.echoes_logprobs || self.prompt_logprobs.is_some()
    }
}

/// A request as its body says. Only [`ParsedRequest::chat`] and [`ParsedRequest::completion`] create one, so its
/// users need not check it again. It has no standing yet, so it cannot be carried out.
#[derive(Debug)]
pub struct ParsedRequest {
    pub(crate) endpoint: Endpoint,
    pub(crate) tenant: String,
    pub(crate) model: Arc<Model>,
    /// The name by which the client called the model, which the answer repeats.
    pub(crate) model_name: String,
    pub(crate) prompts: Vec<PreparedPrompt>,
    pub(crate) choices_per_prompt: u32,
    /// Choices of each prompt that the answer has: the best ones.
    pub(crate) answers_per_prompt: u32,
    /// How to sample. `choice` is 0 here; each choice sets its own.
    pub(crate) sampling: Sampling,
    pub(crate) stops: Arc<[String]>,
    pub(crate) output: OutputOptions,
    /// Names of fields that the gateway does not know.
    pub(crate) unknown_fields: Vec<String>,
    pub(crate) is_stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) session: Option<String>,
    /// The name of the conversation, if the body has one and no session.
    pub(crate) prompt_cache_key: Option<String>,
    pub(crate) group: Option<String>,
    /// Whether somebody waits for each token, as the body says.
    pub(crate) asked_class: RequestClass,
    /// The end user, if the client names one.
    pub(crate) end_user: Option<EndUser>,
    /// The metrics of the answer have its steps.
    pub(crate) traces_steps: bool,
    pub(crate) speculation: Speculation,
    /// How urgent it is, as the body says.
    pub(crate) asked_urgency: Urgency,
    /// The output that the client predicts.
    pub(crate) prediction: Option<Arc<[TokenId]>>,
    /// How the output is parsed; `None`: all of it is text.
    pub(crate) parsing: Option<ParserOptions>,
    /// Whether calls are answered in the shape of the deprecated `functions`.
    pub(crate) answers_function_call: bool,
    /// Whether the client named the function to be called. The output then ends with `stop`, as with OpenAI.
    pub(crate) names_call: bool,
    /// The parts that the client wrote of the form in `sampling`.
    pub(crate) form_sources: Vec<FormSource>,
    /// The form that takes the place of that in `sampling` where a schema that need not hold cannot be compiled.
    pub(crate) loose_form: Option<Box<OutputForm>>,
    /// The form that holds the texts of tools to their grammars. It takes the place of that in `sampling` where it
    /// can be compiled.
    pub(crate) tight_form: Option<Box<BoundOutput>>,
    /// Most tokens of a chunk that the request asks for; `None`: it has no wish.
    pub(crate) chunk_tokens: Option<u32>,
    /// The signal by which a trainer aborts the request. `None`: it is not a trainer's, and nobody aborts it.
    pub(crate) abort: Option<CancellationToken>,
    /// Keeps other modules from creating one.
    _sealed: (),
}

/// Output limit of text completions that set none: OpenAI's default.
pub(crate) const COMPLETION_MAX_TOKENS: u64 = 16;

/// The objects by which the bodies of a tenant are read.
#[derive(Clone, Copy)]
pub struct RequestReader<'a> {
    pub(crate) tenant: &'a str,
    pub(crate) models: &'a Models,
    pub(crate) limits: &'a GatewayTuning,
    /// The grammars of the texts that tools take as their only argument, by the names of the tools.
    pub(crate) grammars: Option<&'a HashMap<String, TextForm>>,
    /// The words of refusals for lack of context.
    pub(crate) context_words: ContextWords,
    /// The model of bodies that name none, or `default`.
    pub(crate) default_model: Option<&'a str>,
    /// The turns of chats whose tokens are known.
    pub(crate) known_turns: Option<&'a dyn KnownTurns>,
}

impl<'a> RequestReader<'a> {
    /// The same for bodies that name no model, or `default`.
    pub fn for_model(self, model: &'a str) -> Self {
        RequestReader {
            default_model: Some(model),
            ..self
        }
    }

    /// Whether chats may go on from known turns.
    pub fn has_known_turns(&self) -> bool {
        self.known_turns.is_some()
    }

    /// The same for chats that may go on from these turns.
    pub fn with_known_turns(self, known_turns: &'a dyn KnownTurns) -> Self {
        RequestReader {
            known_turns: Some(known_turns),
            ..self
        }
    }
}

impl RequestReader<'_> {
    /// The room of a model. A prompt is cut to `keep` tokens, if that is given.
    fn room(&self, model: &Model, keep: Option<usize>) -> PromptRoom {
        let context = self.models.max_context(model);
        PromptRoom::new(model, context, keep, self.context_words)
    }
}

impl ParsedRequest {
    /// Reads the body of `/v1/chat/completions`, which is freed once it is parsed.
    ///
    /// # Errors
    /// `InvalidRequest` with the field at fault, or `NotFound` for an unknown model.
    pub fn chat(body: Bytes, reader: &RequestReader<'_>) -> Result<Self, ApiError> {
        let RequestBody::<ChatFields> {
            mut parameters,
            required: messages,
            own: mut chat,
            form,
            mut others,
        } = read(&body)?;
        drop(body);
        if let Some(model) = reader.default_model
            && is_default(&parameters.model)
        {
            model.clone_into(&mut parameters.model);
        }
        fields::check_model(&parameters)?;
        let model = reader.models.get(reader.tenant, &parameters.model)?;
        let end_user = others.end_user.end_user();
        let prompt_cache_key = others.prompt_cache_key.take();
        let mut unknown_fields = others.checked()?;
        let asked_form = form.asked(&mut unknown_fields)?;
        let messages = messages::checked(messages)?;
        fields::check_chat(&chat)?;
        let tools = Tools::read(&mut chat)?;
        tools.check_shown(&model)?;
        let top_logprobs = fields::chat_logprobs(&chat)?;
        let mut request = ParsedRequest::common(
            Endpoint::Chat,
            &parameters,
            reader.tenant,
            model,
            top_logprobs,
        )?;
        request.check_choices(1, reader.limits)?;
        let prediction = chat.prediction.take();
        let keep = fields::kept_prompt_tokens(&parameters)?;
        let room = reader.room(&request.model, keep);
        let end = prompt::PromptEnd::of(&chat)?;
        let kwargs = chat.chat_template_kwargs;
        let shown = tools.shown.clone();
        let known = reader.known_turns;
        let tokens = prompt::chat(messages, shown, kwargs, &request.model, room, end, known)?;
        request.answers_function_call = tools.are_functions;
        request.names_call = tools.demand == CallDemand::Named;
        let is_open = parsing::reasoning_is_open(&request.model, &tokens);
        let model = &request.model;
        let bound = bound_output::bound_chat(&tools, asked_form.clone(), model, is_open)?;
        let held = |_: &&_| reader.models.compiles_forms(model);
        let held = reader.grammars.filter(held);
        let held = held.and_then(|grammars| tools.with_grammars(grammars));
        let tight = held.map(|tools| bound_output::bound_chat(&tools, asked_form, model, is_open));
        // A model whose format cannot express it only reads the grammars.
        request.tight_form = tight.and_then(Result::ok).flatten().map(Box::new);
        request.parsing = parsing::options(tools, &request.model, is_open, request.is_stream);
        request.bind(bound);
        let asked = parameters.max_completion_tokens.or(parameters.max_tokens);
        let fallback = request.model.default_max_tokens.map(u64::from);
        let max_new_tokens = room.output_limit("messages", tokens.len(), asked, fallback)?;
        if max_new_tokens == 0 {
            return Err(ApiError::invalid(
                "max_tokens",
                "max_tokens: must be at least 1",
            ));
        }
        fields::check_min_tokens(&request.sampling, max_new_tokens)?;
        request.chunk_tokens = fields::chunk_tokens(&parameters, &request.sampling, reader.limits);
        request.unknown_fields = unknown_fields;
        request.end_user = end_user;
        request.prompt_cache_key = prompt_cache_key;
        request.prediction = prompt::prediction(prediction, &request.model, room)?;
        request.prompts = vec![PreparedPrompt {
            tokens: tokens.into(),
            max_new_tokens,
            echo: String::new(),
        }];
        Ok(request)
    }

    /// Reads the body of `/v1/completions`. One that names no model, or `default`, is for `default_model`. Without a
    /// limit on its output it has `default_max_tokens`, or fills the context.
    ///
    /// # Errors
    /// As [`ParsedRequest::chat`].
    pub fn completion(
        body: Bytes,
        reader: &RequestReader<'_>,
        default_model: Option<&str>,
        default_max_tokens: Option<u64>,
    ) -> Result<Self, ApiError> {
        let mut read: RequestBody<CompletionFields> = read(&body)?;
        drop(body);
        if let Some(model) = default_model
            && is_default(&read.parameters.model)
        {
            model.clone_into(&mut read.parameters.model);
        }
        let top_logprobs = fields::completion_logprobs(&read.own)?;
        ParsedRequest::of_prompts(read, top_logprobs, reader, default_max_tokens)
    }

    /// Makes a request of the prompts of a completion. `top_logprobs` is what the client may see of each token.
    fn of_prompts(
        body: RequestBody<CompletionFields>,
        top_logprobs: Option<u32>,
        reader: &RequestReader<'_>,
        default_max_tokens: Option<u64>,
    ) -> Result<Self, ApiError> {
        let RequestBody {
            parameters,
            required: prompt,
            own: completion,
            form,
            mut others,
        } = body;
        fields::check_model(&parameters)?;
        let model = reader.models.get(reader.tenant, &parameters.model)?;
        let end_user = others.end_user.end_user();
        let prompt_cache_key = others.prompt_cache_key.take();
        let mut unknown_fields = others.checked()?;
        let asked_form = form.asked(&mut unknown_fields)?;
        let best_of = fields::best_of(&parameters, &completion)?;
        let mut request = ParsedRequest::common(
            Endpoint::Completion,
            &parameters,
            reader.tenant,
            model,
            top_logprobs,
        )?;
        if best_of > request.choices_per_prompt {
            request.choices_per_prompt = best_of;
            // The best ones are found by their log-probabilities.
            request.sampling.top_logprobs.get_or_insert(0);
        }
        let asked = parameters.max_tokens.or(parameters.max_completion_tokens);
        // This comes before anything is encoded, since a body may have very many prompts.
        let count = prompt::count(&prompt);
        request.check_choices(count, reader.limits)?;
        request.unknown_fields = unknown_fields;
        request.end_user = end_user;
        request.prompt_cache_key = prompt_cache_key;
        request.bind(bound_output::bound_completion(asked_form));
        request.chunk_tokens = fields::chunk_tokens(&parameters, &request.sampling, reader.limits);
        let echoes = completion.echo == Some(true);
        request.output.echoes_logprobs = echoes && top_logprobs.is_some();
        let keep = fields::kept_prompt_tokens(&parameters)?;
        let room = reader.room(&request.model, keep);
        for tokens in prompt::completions(prompt, &request.model, room)? {
            let max_new_tokens =
                room.output_limit("prompt", tokens.len(), asked, default_max_tokens)?;
            let is_scored = request.output.prompt_logprobs.is_some();
            if max_new_tokens == 0 && !echoes && !is_scored {
                let message =
                    "max_tokens: must be at least 1, or 0 where the prompt is echoed or scored";
                return Err(ApiError::invalid("max_tokens", message));
            }
            fields::check_min_tokens(&request.sampling, max_new_tokens)?;
            let echo = match echoes {
                true => request.model.tokenizer.decode(&tokens),
                false => String::new(),
            };
            request.prompts.push(PreparedPrompt {
                tokens: tokens.into(),
                max_new_tokens,
                echo,
            });
        }
        Ok(request)
    }

    /// Creates a request without prompts from the fields that both endpoints have.
    fn common(
        endpoint: Endpoint,
        parameters: &Parameters,
        tenant: &str,
        model: Arc<Model>,
        top_logprobs: Option<u32>,
    ) -> Result<Self, ApiError> {
        fields::check_names(parameters)?;
        let prompt_logprobs = fields::prompt_logprobs(parameters)?;
        // An engine has one number for prompt and output; the answer shows as many as asked for.
        let scored = top_logprobs.max(prompt_logprobs);
        let choices = fields::choices(parameters)?;
        Ok(ParsedRequest {
            endpoint,
            tenant: tenant.to_owned(),
            model_name: parameters.model.clone(),
            prompts: Vec::new(),
            choices_per_prompt: choices,
            answers_per_prompt: choices,
            sampling: fields::sampling(parameters, &model, scored)?,
            stops: fields::stops(parameters)?.into(),
            output: OutputOptions {
                has_stop_text: parameters.include_stop_str_in_output.unwrap_or(false),
                shows_special: !parameters.skip_special_tokens.unwrap_or(true),
                has_token_ids: parameters.return_token_ids.unwrap_or(false),
                top_logprobs,
                names_ids: parameters.return_tokens_as_token_ids.unwrap_or(false),
                echoes_logprobs: false,
                prompt_logprobs,
            },
            unknown_fields: Vec::new(),
            is_stream: parameters.stream.unwrap_or(false),
            include_usage: fields::include_usage(parameters)?,
            session: parameters.session.clone(),
            prompt_cache_key: None,
            group: parameters.group.clone(),
            asked_class: fields::class(parameters),
            speculation: parameters.speculation.unwrap_or_default(),
            end_user: None,
            traces_steps: parameters.step_trace.unwrap_or(false),
            asked_urgency: fields::urgency(parameters)?,
            prediction: None,
            parsing: None,
            answers_function_call: false,
            names_call: false,
            form_sources: Vec::new(),
            loose_form: None,
            tight_form: None,
            chunk_tokens: None,
            abort: None,
            model,
            _sealed: (),
        })
    }

    /// Binds the output to a form.
    fn bind(&mut self, bound: Option<BoundOutput>) {
        if let Some(bound) = bound {
            self.sampling.form = Some(Box::new(bound.form));
            self.form_sources = bound.parts;
            self.loose_form = bound.loose.map(Box::new);
            if let Some(parsing) = &mut self.parsing {
                parsing.calls_are_bound = bound.binds_calls;
            }
        }
    }

    /// Holds the texts of tools to their grammars, as `tight_form` says.
    pub(crate) fn tighten_form(&mut self) {
        let tight = self.tight_form.take();
        self.bind(tight.map(|tight| *tight));
    }

    /// An error of an engine, with the client's own field where it is about the form of the output.
    pub(crate) fn form_error(&self, mut error: ApiError, has_output: bool) -> ApiError {
        if self.sampling.form.is_none() {
            return error;
        }
        let asks = |param: &str| {
            let fields = ["sampling.form", "response_format", "structured_outputs"];
            fields.iter().any(|field| param.starts_with(field))
        };
        if !error.param.as_deref().is_some_and(asks) {
            return error;
        }
        let place = FormSource::place_of_all(&self.form_sources).to_owned();
        if has_output && error.kind == ErrorKind::InvalidRequest {
            // The form is larger than it seemed. The same request would fail again.
            let message = format!(
                "{place}: the output could not be held to this form: {}",
                error.message
            );
            return ApiError::invalid(place, message).with_code("output_form");
        }
        let old = error.param.take().unwrap_or_default();
        let reason = error.message.strip_prefix(&format!("{old}: "));
        error.message = format!("{place}: {}", reason.unwrap_or(&error.message));
        error.param = Some(place);
        error
    }

    /// Gives the places of a form's parts the names that they have in another API.
    pub(crate) fn rename_form_places(&mut self, renamed: impl Fn(ApiError) -> ApiError) {
        let tight = self
            .tight_form
            .iter_mut()
            .flat_map(|tight| &mut tight.parts);
        for source in self.form_sources.iter_mut().chain(tight) {
            let place = std::mem::take(&mut source.place);
            source.place = renamed(ApiError::invalid(&*place, ""))
                .param
                .unwrap_or(place);
        }
    }

    fn check_choices(&self, prompts: usize, limits: &GatewayTuning) -> Result<(), ApiError> {
        let most = limits.choices_max;
        if prompts > most as usize {
            return Err(ApiError::invalid(
                "prompt",
                format!("the request has {prompts} prompts; at most {most} are allowed"),
            ));
        }
        let choices = prompts * self.choices_per_prompt as usize;
        if choices > most as usize {
            let is_best_of = self.choices_per_prompt > self.answers_per_prompt;
            return Err(ApiError::invalid(
                if is_best_of { "best_of" } else { "n" },
                format!("the request has {choices} choices; at most {most} are allowed"),
            ));
        }
        Ok(())
    }

    /// Holds the calls of the output to less, as `loose_form` says.
    pub(crate) fn loosen_form(&mut self) {
        if let Some(loose) = self.loose_form.take() {
            self.sampling.form = Some(loose);
        }
    }

    /// Checks that the answer may have its steps, if it should.
    ///
    /// # Errors
    /// The request has several choices, or its tenant hides what drafts bring.
    pub(crate) fn check_trace(&self, caller: &Caller) -> Result<(), ApiError> {
        let refused = |message| Err(ApiError::invalid("step_trace", message));
        if !self.traces_steps {
            return Ok(());
        }
        if caller.policy.hides_metrics || caller.policy.shape.is_some() {
            return refused(
                "step_trace: the answers of this tenant do not tell what drafts bring (hides_metrics or stream_shaping)",
            );
        }
        if self.choice_count() > 1 {
            return refused("step_trace: only a request for one choice can have it");
        }
        Ok(())
    }

    /// The public name of its model.
    pub fn model_id(&self) -> &str {
        &self.model.id
    }

    /// Makes it a rollout that this signal aborts.
    pub fn into_rollout(mut self, abort: CancellationToken) -> Self {
        self.asked_class = RequestClass::Rollout;
        self.abort = Some(abort);
        self
    }

    /// Makes it a turn of this session, whose tokens have log-probabilities whether or not the answer shows them.
    pub fn into_turn(mut self, session: &str) -> Self {
        self.session.get_or_insert_with(|| session.to_owned());
        self.sampling.top_logprobs.get_or_insert(0);
        self
    }

    /// Tokens of all prompts.
    pub(crate) fn input_tokens(&self) -> u64 {
        let prompts = self.prompts.iter();
        prompts.map(|prompt| prompt.tokens.len() as u64).sum()
    }

    /// Number of choices: prompts times choices of each.
    pub fn choice_count(&self) -> usize {
        self.prompts.len() * self.choices_per_prompt as usize
    }

    /// Whether the output may have reasoning apart from its text.
    pub(crate) fn may_reason(&self) -> bool {
        let parsing = self.parsing.as_ref();
        parsing.is_some_and(|parsing| parsing.reasoning_as != ReasoningParserKind::None)
    }

    /// Whether the engine has to report log-probabilities.
    pub(crate) fn wants_logprobs(&self) -> bool {
        self.sampling.top_logprobs.is_some()
    }
}

/// Parses a body.
///
/// # Errors
/// `InvalidRequest` with the name of the field at fault.
pub fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let _stage = tracing::trace_span!(target: STAGE, "parse").entered();
    // The place of a fault is not kept at first, since that takes time and memory for each key. A faulty body is read
    // once more for it.
    if let Ok(value) = serde_json::from_slice(body) {
        return Ok(value);
    }
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut deserializer)
        .map_err(|error| faults::fault(&error.path().to_string(), error.inner()))?;
    deserializer
        .end()
        .map_err(|error| faults::not_json(&error))?;
    Ok(value)
}

/// Whether a body leaves the choice of the model to its listener.
fn is_default(model: &str) -> bool {
    matches!(model, "" | "default")
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
