//! Chat templates: messages become tokens, by the Jinja template of the model's authors.

mod chat_input;
#[cfg(test)]
mod fuzz_tests;
mod python_json;
mod template_input;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use self::python_json::to_json;
use self::template_input::{
    StringMap, append_to_last_message, map_strings, unused_character, variables,
};
use crate::{TokenId, TokenizationError, Tokenizer};

pub use self::chat_input::ChatInput;

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The special tokens that the template may call by name, such as `bos_token`.
    names: Vec<(String, String)>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

const TEMPLATE_NAME: &str = "chat_template";

/// Most instructions of one rendering. A template takes some hundred per message, and a request has at most some ten
/// thousand messages. So only a loop within a loop over a very long chat, or a faulty template, reaches this limit.
/// The limit does not bound a template that doubles a string again and again. Templates come from the operator, with
/// the model.
const INSTRUCTIONS_MAX: u64 = 20_000_000;

/// Longest rendered prompt, bytes: several times the largest body of a request.
const PROMPT_BYTES_MAX: usize = 64 << 20;

/// Names under which templates may call special tokens.
const TOKEN_NAMES: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

impl ChatTemplate {
    /// Compiles a template. `names` are the special tokens that it may call by name.
    ///
    /// # Errors
    /// The error says what is wrong with the template, and in which line.
    pub(crate) fn new(
        source: &str,
        names: Vec<(String, String)>,
    ) -> Result<Self, TokenizationError> {
        let mut environment = Environment::new();
        let faulty = |error: Error| TokenizationError::Model {
            file: "chat_template",
            reason: describe(&error),
        };
        // The library for which these templates are written sets Jinja up in this way.
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(faulty)?,
        );
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        // Python prints these three values with a capital letter.
        environment.set_formatter(|out, state, value| {
            let printed = match (value.kind(), value.is_true()) {
                (ValueKind::Bool, true) => Value::from("True"),
                (ValueKind::Bool, false) => Value::from("False"),
                (ValueKind::None, _) => Value::from("None"),
                _ => value.clone(),
            };
            minijinja::escape_formatter(out, state, &printed)
        });
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<String, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        // `strftime_now` is absent on purpose: templates that use it fall back to a fixed date, and a prompt that
        // changed every day would miss all caches.
        environment.set_fuel(Some(INSTRUCTIONS_MAX));
        environment
            .add_template_owned(TEMPLATE_NAME, source.to_owned())
            .map_err(faulty)?;
        Ok(ChatTemplate { environment, names })
    }

    /// Compiles the template of a model's files: `chat_template.jinja`, or else `chat_template` in
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// The template does not compile, or the configuration is not valid JSON.
    pub(crate) fn from_files(
        template: Option<&str>,
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
        let names = TOKEN_NAMES
            .iter()
            .filter_map(|name| {
                let token = &config[*name];
                let text = token.as_str().or_else(|| token["content"].as_str())?;
                Some(((*name).to_owned(), text.to_owned()))
            })
            .collect();
        let listed = || {
            let templates = config["chat_template"].as_array()?;
            templates
                .iter()
                .find(|template| template["name"] == "default")?["template"]
                .as_str()
        };
        match template
            .or_else(|| config["chat_template"].as_str())
            .or_else(listed)
        {
            None => Ok(None),
            Some(source) => ChatTemplate::new(source, names).map(Some),
        }
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
    /// # Errors
    /// The template refuses the messages, the vocabulary cannot spell the text, or the prompt is too long
    /// ([`TokenizationError::TooLong`]).
    pub fn encode_within(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
        add_generation_prompt: bool,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        let variables = variables(input);
        self.encode_variables(
            tokenizer,
            &variables,
            add_generation_prompt,
            None,
            tokens_max,
        )
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
        let mut variables = variables(input);
        let mark = unused_character(&variables)?;
        append_to_last_message(&mut variables, &format!("{mark} "))?;
        self.encode_variables(tokenizer, &variables, false, Some(mark), tokens_max)
    }

    fn encode_variables(
        &self,
        tokenizer: &Tokenizer,
        variables: &BTreeMap<String, Value>,
        add_generation_prompt: bool,
        mark: Option<char>,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        let guard = unused_character(variables)?;
        let mut guarded = false;
        let mut map = |text: &str| {
            let text = tokenizer.guard(text, guard);
            guarded |= text.is_some();
            text
        };
        let mut text = self.render_mapped(variables, add_generation_prompt, &mut map)?;
        if let Some(mark) = mark {
            cut_at_mark(&mut text, mark)?;
        }
        tokenizer.check_length(&text, guarded.then_some(guard), tokens_max)?;
        if guarded {
            tokenizer.encode_guarded(&text, guard)
        } else {
            tokenizer.encode_trusted(&text)
        }
    }

    /// The prompt as text.
    #[cfg(test)]
    pub(crate) fn render(
        &self,
        input: &ChatInput,
        add_generation_prompt: bool,
    ) -> Result<String, TokenizationError> {
        self.render_mapped(&variables(input), add_generation_prompt, &mut |_| None)
    }

    /// Renders the template, with the strings of the variables replaced by `map`.
    fn render_mapped(
        &self,
        variables: &BTreeMap<String, Value>,
        add_generation_prompt: bool,
        map: &mut StringMap<'_>,
    ) -> Result<String, TokenizationError> {
        let failed = |error: Error| TokenizationError::Render(describe(&error));
        let template = self
            .environment
            .get_template(TEMPLATE_NAME)
            .map_err(failed)?;
        let mut context: BTreeMap<String, Value> = variables
            .iter()
            .map(|(name, value)| (name.clone(), map_strings(value, map)))
            .collect();
        let names = self.names.iter();
        context.extend(names.map(|(name, text)| (name.clone(), Value::from(text))));
        context.insert("documents".into(), Value::from(()));
        context.insert(
            "add_generation_prompt".into(),
            Value::from(add_generation_prompt),
        );
        let mut prompt = BoundedText::default();
        let rendered = template.render_captured_to(Value::from(context), &mut prompt);
        if prompt.is_full {
            return Err(TokenizationError::Input(format!(
                "the messages make a prompt of more than {PROMPT_BYTES_MAX} bytes; shorten them"
            )));
        }
        rendered.map_err(failed)?;
        String::from_utf8(prompt.bytes)
            .map_err(|error| TokenizationError::Render(error.to_string()))
    }
}

/// A rendered prompt of at most [`PROMPT_BYTES_MAX`] bytes.
#[derive(Default)]
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

/// The error's message without the excerpt of the template that debug builds add.
fn describe(error: &Error) -> String {
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("it took more than {INSTRUCTIONS_MAX} instructions; send fewer messages");
    }
    let message = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{message} (template line {line})"),
        None => message,
    }
}
