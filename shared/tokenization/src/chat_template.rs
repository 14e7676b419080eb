//! Chat templates: messages become tokens, by the Jinja template of the model's authors.
//!
//! The prompt must be the one that the model was trained on, so every difference between this engine and Python's
//! Jinja2 is a fault. `tests/templates/run` compares the prompts of published templates with those of transformers.
//!
//! | file | content |
//! |---|---|
//! | `answered.rs` | The end of a prompt, behind an answer that the model sampled. |
//! | `environment.rs` | Jinja as transformers sets it up, and what its errors mean. |
//! | `growth.rs` | How long the values of a template may become. |
//! | `template_input.rs` | The variables of a template: messages in the shapes that templates expect. |
//! | `roles.rs` | Which messages a template shows, and where else their texts go. |
//! | `content_forms.rs` | Whether a template reads content as text or as a list of parts. |
//! | `jinja_source.rs` | Constructs that are translated before the template is compiled. |
//! | `python_text.rs`, `python_json.rs` | Values as Python writes them. |
//! | `clock.rs` | The date that templates ask for. |

mod answered;
mod chat_input;
mod clock;
#[cfg(test)]
mod construct_tests;
mod content_forms;
mod environment;
#[cfg(test)]
mod fuzz_tests;
mod growth;
#[cfg(test)]
mod hostile_tests;
mod jinja_source;
mod older_fields;
mod python_json;
mod python_text;
#[cfg(test)]
mod role_tests;
mod roles;
mod template_input;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;

use minijinja::value::Value;
use minijinja::{Environment, Error};

use self::clock::Moment;
use self::content_forms::ContentForms;
use self::environment::{INSTRUCTIONS_MAX, describe, environment, failure};
use self::growth::VALUE_LENGTH_MAX;
use self::roles::{ShownRoles, lost_role};
use self::template_input::{
    Shape, any_string, append_to_last_message, map_strings, unused_character, variables,
};
use crate::{JsonList, STAGE, TokenId, TokenizationError, Tokenizer};

pub use self::answered::SampledAnswer;
pub use self::chat_input::ChatInput;

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The names of the special tokens that the template may call by name, such as `bos_token`.
    names: Vec<String>,
    /// How the template reads the content of messages.
    forms: ContentForms,
    /// Which messages the template shows. `None` if it shows none, so that they stay as they are.
    roles: Option<ShownRoles>,
}

/// The sources of a model's templates.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TemplateSources<'a> {
    /// The template of all chats.
    pub(crate) default: &'a str,
    /// The template of chats with tools, if it is another.
    pub(crate) tool_use: Option<&'a str>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

const TEMPLATE_NAME: &str = "chat_template";

/// The name of the template of chats with tools, here and in lists of templates.
const TOOL_TEMPLATE_NAME: &str = "tool_use";

/// The files of the two templates in a model's folder.
pub(crate) const TEMPLATE_FILE: &str = "chat_template.jinja";
pub(crate) const TOOL_TEMPLATE_FILE: &str = "additional_chat_templates/tool_use.jinja";

/// The name of the default in lists of templates.
const DEFAULT_NAME: &str = "default";

/// A variable of the request with this name sets the date, which is what `strftime_now` says.
const DATE_VARIABLE: &str = "strftime_now";

/// Maximum number of instructions of rendering a sample at the start.
const SAMPLE_INSTRUCTIONS_MAX: u64 = 20_000;

/// Longest rendered prompt, bytes: several times the largest body of a request.
const PROMPT_BYTES_MAX: usize = VALUE_LENGTH_MAX;

/// Room that a rendered prompt begins with, bytes. Templates write it in many small pieces.
const PROMPT_BYTES_USUAL: usize = 2 << 10;

/// The end of the names under which templates may call special tokens, such as `bos_token`.
const TOKEN_SUFFIX: &str = "_token";

/// Fields of `tokenizer_config.json` with further special tokens by name.
const NAMED_TOKENS: [&str; 2] = ["extra_special_tokens", "model_specific_special_tokens"];

impl ChatTemplate {
    /// Compiles a model's templates. `names` are the special tokens that they may call by name.
    ///
    /// # Errors
    /// The error says what is wrong with the template, and in which line.
    pub(crate) fn new(
        sources: TemplateSources<'_>,
        names: Vec<(String, String)>,
    ) -> Result<Self, TokenizationError> {
        let mut environment = environment().map_err(faulty)?;
        environment
            .add_template_owned(TEMPLATE_NAME, jinja_source::translate(sources.default))
            .map_err(faulty)?;
        if let Some(source) = sources.tool_use {
            environment
                .add_template_owned(TOOL_TEMPLATE_NAME, jinja_source::translate(source))
                .map_err(faulty)?;
        }
        // Templates find here what a request does not set, so that each rendering begins with its messages only.
        for (name, text) in &names {
            environment.add_global(name.clone(), text);
        }
        environment.add_global("documents", ());
        environment.add_global(DATE_VARIABLE, date_function(Moment::now));
        let mut template = ChatTemplate {
            environment,
            names: names.into_iter().map(|(name, _)| name).collect(),
            forms: ContentForms::default(),
            roles: None,
        };
        template.environment.set_fuel(Some(SAMPLE_INSTRUCTIONS_MAX));
        let sample = |messages: Vec<Value>| {
            let unchanged = ContentForms::unchanged();
            let input = ChatInput::default();
            let variables = variables(&input, &messages, Shape::Filled, &unchanged);
            template.render_variables(variables, true).ok()
        };
        let forms = ContentForms::of(&sample);
        let roles = ShownRoles::of(&sample, &forms);
        (template.forms, template.roles) = (forms, roles);
        template.environment.set_fuel(Some(INSTRUCTIONS_MAX));
        Ok(template)
    }

    /// Compiles the templates of a model's files: `chat_template.jinja` with those in `additional_chat_templates`, or
    /// else `chat_template` in `tokenizer_config.json`, which can be a list of templates with names.
    ///
    /// # Errors
    /// A template does not compile, or the configuration is not valid JSON.
    pub(crate) fn from_files(
        template: Option<&[u8]>,
        tool_template: Option<&[u8]>,
        tokenizer_config: Option<&[u8]>,
    ) -> Result<Option<Self>, TokenizationError> {
        let config: serde_json::Value = match tokenizer_config {
            None => serde_json::Value::Null,
            Some(bytes) => {
                serde_json::from_slice(bytes).map_err(|error| TokenizationError::Model {
                    file: "tokenizer_config.json",
                    reason: error.to_string(),
                })?
            }
        };
        let text = |file: &'static str, bytes| {
            std::str::from_utf8(bytes).map_err(|error| TokenizationError::Model {
                file,
                reason: error.to_string(),
            })
        };
        let template = template
            .map(|bytes| text(TEMPLATE_FILE, bytes))
            .transpose()?;
        let tool_template = tool_template.map(|bytes| text(TOOL_TEMPLATE_FILE, bytes));
        let tool_template = tool_template.transpose()?;
        let listed = |name: &str| {
            let templates = config["chat_template"].as_array()?;
            let found = templates.iter().find(|template| template["name"] == name);
            found?["template"].as_str()
        };
        let sources = match template {
            Some(default) => Some((default, tool_template)),
            None => {
                let default = config["chat_template"].as_str();
                let default = default.or_else(|| listed(DEFAULT_NAME));
                default.map(|default| (default, listed(TOOL_TEMPLATE_NAME)))
            }
        };
        let sources = sources.map(|(default, tool_use)| TemplateSources { default, tool_use });
        sources
            .map(|sources| ChatTemplate::new(sources, token_names(&config)))
            .transpose()
    }

    /// Fixes the date that templates see, such as `2026-01-31` or `2026-01-31T12:00:00`. Otherwise it is the time
    /// now, in UTC.
    ///
    /// # Errors
    /// The text is no date.
    pub fn with_date(mut self, date: &str) -> Result<Self, TokenizationError> {
        let date = parse_date(date)?;
        let function = date_function(move || date);
        self.environment.add_global(DATE_VARIABLE, function);
        Ok(self)
    }

    /// Renders a small chat, which shows whether the template can be used at all.
    ///
    /// # Errors
    /// [`TokenizationError::Render`] if the template fails, and [`TokenizationError::Input`] if it makes too much of
    /// such a chat. A template that refuses this chat is sound.
    pub fn check(&self) -> Result<(), TokenizationError> {
        let message = Value::from_pairs([("role", "user"), ("content", "Hello")]);
        let input = ChatInput::new(JsonList(vec![message]), None, None);
        match self.in_shapes(&input, |variables| self.render_variables(variables, true)) {
            Err(error @ (TokenizationError::Render(_) | TokenizationError::Input(_))) => Err(error),
            _ => Ok(()),
        }
    }

    /// The template's own text.
    pub fn source(&self) -> String {
        let template = self.environment.get_template(TEMPLATE_NAME);
        template.map_or_else(|_| String::new(), |template| template.source().to_owned())
    }

    /// Renders and encodes a prompt. Special tokens that the template writes are recognised. Those that a string of
    /// the input contains, or would complete, are ordinary text.
    ///
    /// A character that does not occur in the input, the *guard*, is put inside such places before rendering. So
    /// templates can cut, trim and compare strings as usual. Only unguarded text in the rendered prompt can be a
    /// special token, and the guards are then removed. Encoding messages one by one was rejected: merges across the
    /// border of template and content would differ from those in training. Nearly every input needs no guard, and is
    /// encoded as one text.
    ///
    /// A prompt that surely has more than `tokens_max` tokens is refused without encoding it. A prompt that is
    /// accepted can still have more.
    ///
    /// A variable of the request named `strftime_now` sets the date that the template sees. A prompt with today's
    /// date changes every day, so cached prefixes end where the date begins.
    ///
    /// # Errors
    /// The template refuses the messages ([`TokenizationError::Refused`]) or fails ([`TokenizationError::Render`]),
    /// the vocabulary cannot spell the text, or the prompt is too long ([`TokenizationError::TooLong`]).
    pub fn encode_within(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
        add_generation_prompt: bool,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        self.in_shapes(input, |variables| {
            self.encode_variables(
                tokenizer,
                variables,
                add_generation_prompt,
                None,
                tokens_max,
            )
        })
    }

    /// Compiles one template for all chats, without names.
    #[cfg(test)]
    pub(crate) fn of_source(source: &str) -> Result<Self, TokenizationError> {
        let sources = TemplateSources {
            default: source,
            tool_use: None,
        };
        ChatTemplate::new(sources, Vec::new())
    }

    /// As [`ChatTemplate::encode_within`], for a prompt that ends with the text of the last message. The model goes
    /// on with it.
    ///
    /// The end of that text is marked before rendering, and the prompt is cut at the mark, as transformers does it. A
    /// template that trims the text makes the mark lose the space behind it, and the prompt is trimmed there as well.
    ///
    /// # Errors
    /// The template does not write the last message, or as for [`ChatTemplate::encode_within`].
    pub fn encode_continued_within(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        self.in_shapes(input, |mut variables| {
            let mark = unused_character(variables.values())?;
            append_to_last_message(&mut variables, &format!("{mark} "))?;
            self.encode_variables(tokenizer, variables, false, Some(mark), tokens_max)
        })
    }

    fn encode_variables(
        &self,
        tokenizer: &Tokenizer,
        variables: BTreeMap<String, Value>,
        add_generation_prompt: bool,
        mark: Option<char>,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        let (mut text, guard) = self.render_guarded(tokenizer, variables, add_generation_prompt)?;
        if let Some(mark) = mark {
            cut_at_mark(&mut text, mark)?;
        }
        tokenizer.encode_rendered(&text, guard, tokens_max)
    }

    /// Renders the template with a guard inside each special token that a user wrote. Returns the guard too, if any
    /// was needed.
    fn render_guarded(
        &self,
        tokenizer: &Tokenizer,
        variables: BTreeMap<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<(String, Option<char>), TokenizationError> {
        let mut values = variables.values();
        let needs_guard =
            values.any(|value| any_string(value, &mut |text| tokenizer.needs_guard(text)));
        let (variables, guard) = match needs_guard {
            false => (variables, None),
            true => {
                let guard = unused_character(variables.values())?;
                let mut map = |text: &str| tokenizer.guard(text, guard);
                let guarded = variables
                    .into_iter()
                    .map(|(name, value)| (name, map_strings(&value, &mut map)));
                (guarded.collect(), Some(guard))
            }
        };
        let text = self.render_all(variables, add_generation_prompt)?;
        Ok((text, guard))
    }

    /// The prompt as text.
    #[cfg(test)]
    pub(crate) fn render(
        &self,
        input: &ChatInput,
        add_generation_prompt: bool,
    ) -> Result<String, TokenizationError> {
        self.in_shapes(input, |variables| {
            self.render_all(variables, add_generation_prompt)
        })
    }

    /// Renders the input in the shape that most templates expect. Where the template fails, the shapes follow that
    /// some templates need. Where it refuses the chat, or leaves a text out, other arrangements of the messages
    /// follow. The error is the first one.
    fn in_shapes<T>(
        &self,
        input: &ChatInput,
        render: impl Fn(BTreeMap<String, Value>) -> Result<T, TokenizationError>,
    ) -> Result<T, TokenizationError> {
        let _stage = tracing::trace_span!(target: STAGE, "template").entered();
        let mut failure = None;
        let mut tried: Vec<BTreeMap<String, Value>> = Vec::new();
        let attempts = match self.roles {
            Some(roles) => roles.attempts().map(Some).to_vec(),
            None => vec![None],
        };
        for roles in attempts {
            let arranged = roles.and_then(|roles| roles.arrange(&input.messages.0));
            let messages = arranged.as_deref().unwrap_or(&input.messages.0);
            for shape in Shape::ALL {
                let variables = variables(input, messages, shape, &self.forms);
                if tried.contains(&variables) {
                    continue;
                }
                tried.push(variables.clone());
                use TokenizationError::{NotShown, Refused, Render};
                match render(variables) {
                    Err(error @ Render(_)) => {
                        failure.get_or_insert(error);
                    }
                    Err(error @ (Refused(_) | NotShown(_))) => {
                        failure.get_or_insert(error);
                        break;
                    }
                    done => return done,
                }
            }
        }
        Err(failure.unwrap_or_else(|| TokenizationError::Render(String::new())))
    }

    /// Renders the template with these variables, and sees to it that no message is lost.
    fn render_all(
        &self,
        variables: BTreeMap<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TokenizationError> {
        let messages = variables.get("messages").cloned().unwrap_or_default();
        let prompt = self.render_variables(variables, add_generation_prompt)?;
        let lost = self.roles.and_then(|_| lost_role(&messages, &prompt));
        match lost {
            Some(role) => Err(TokenizationError::NotShown(role)),
            None => Ok(prompt),
        }
    }

    /// Renders the template with these variables.
    fn render_variables(
        &self,
        mut variables: BTreeMap<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TokenizationError> {
        let has_tools = variables.get("tools").is_some_and(|tools| !tools.is_none());
        let tool_template = || self.environment.get_template(TOOL_TEMPLATE_NAME).ok();
        let template = match has_tools.then(tool_template).flatten() {
            Some(template) => template,
            None => self
                .environment
                .get_template(TEMPLATE_NAME)
                .map_err(|error| failure(&error))?,
        };
        if let Some(date) = variables.get_mut(DATE_VARIABLE) {
            let parsed = parse_date(date.as_str().unwrap_or_default())
                .map_err(|error| TokenizationError::Input(format!("{DATE_VARIABLE}: {error}")))?;
            *date = date_function(move || parsed);
        }
        // A request cannot give the name of a special token to another text.
        variables.retain(|name, _| !self.names.contains(name));
        variables.insert(
            "add_generation_prompt".into(),
            Value::from(add_generation_prompt),
        );
        let mut prompt = BoundedText {
            bytes: Vec::with_capacity(PROMPT_BYTES_USUAL),
            is_full: false,
        };
        let rendered = template.render_captured_to(Value::from(variables), &mut prompt);
        if prompt.is_full {
            return Err(TokenizationError::Input(format!(
                "the messages make a prompt of more than {PROMPT_BYTES_MAX} bytes; shorten them"
            )));
        }
        rendered.map_err(|error| failure(&error))?;
        String::from_utf8(prompt.bytes)
            .map_err(|error| TokenizationError::Render(error.to_string()))
    }
}

/// The special tokens in `tokenizer_config.json` that have a name.
fn token_names(config: &serde_json::Value) -> Vec<(String, String)> {
    let text = |token: &serde_json::Value| {
        let text = token.as_str().or_else(|| token["content"].as_str());
        text.map(str::to_owned)
    };
    let named = NAMED_TOKENS
        .iter()
        .filter_map(|field| config[*field].as_object());
    let top = config.as_object().into_iter().flatten();
    top.filter(|(name, _)| name.ends_with(TOKEN_SUFFIX))
        .chain(named.flatten())
        .filter_map(|(name, token)| Some((name.clone(), text(token)?)))
        .collect()
}

/// The function by which templates ask for the date.
fn date_function(date: impl Fn() -> Moment + Send + Sync + 'static) -> Value {
    Value::from_function(move |format: &str| date().format(format))
}

fn parse_date(text: &str) -> Result<Moment, TokenizationError> {
    Moment::parse(text).ok_or_else(|| {
        TokenizationError::Input(
            "must be a date such as 2026-01-31, or with a time of day, 2026-01-31T12:00:00".into(),
        )
    })
}

fn faulty(error: Error) -> TokenizationError {
    TokenizationError::Model {
        file: "chat_template",
        reason: describe(&error),
    }
}

/// A rendered prompt of at most [`PROMPT_BYTES_MAX`] bytes.
struct BoundedText {
    bytes: Vec<u8>,
    /// Whether a longer text was refused.
    is_full: bool,
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > PROMPT_BYTES_MAX - self.bytes.len() {
            self.is_full = true;
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Cuts a prompt at the mark behind the text that is to be continued.
fn cut_at_mark(text: &mut String, mark: char) -> Result<(), TokenizationError> {
    let at = text.rfind(mark).ok_or_else(|| {
        TokenizationError::Input(
            "the model's chat template does not write the last message, so it cannot be continued"
                .into(),
        )
    })?;
    let is_trimmed = !text[at + mark.len_utf8()..].starts_with(' ');
    text.truncate(at);
    if is_trimmed {
        text.truncate(text.trim_end().len());
    }
    Ok(())
}
