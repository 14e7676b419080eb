//! The shapes of requests and responses of models, wherever they stand in a record.
//!
//! Nothing here knows a tool. A request is an object with messages or a prompt; a response is one with choices,
//! output items, candidates or the content of an assistant; and both may be texts under one of many names.

use serde_json::Value;

use super::call::Content;
use super::members::{Object, first_of, has_any, is_named_any, named, within, words};
use super::streams;
use super::turns::{Role, Turn, body_text, content_text, json_text, tools_text};

/// Keys of lists of messages.
const MESSAGES: &str = "messages input_messages contents input inputs prompt conversations \
    conversation chat_messages chat_history dialog dialogue history turns traj transcript \
    request query chosen";
/// Requests and responses are looked for so deep in a record.
const DEPTH_MAX: usize = 4;

/// Names of texts that are prompts.
const PROMPTS: &str = "prompt prompttext inputtext instruction question query usermessage \
    userprompt inputs input problem source request message";
/// Names of texts that are outputs, which no other text of a record is called.
const OUTPUTS: &str = "output outputs completion response responsetext outputtext generatedtext \
    modeloutput modelresponse assistantresponse assistant chosen generation modelanswer out \
    resps responses completions predictions";
/// Names of outputs in tokens.
const TOKENS: &str = "outputtokenids outputids responseids completionids";
/// Names of texts that are outputs, if nothing else is.
const ANSWERS: &str = "answer reply result prediction generated target assistantmessage \
    modelpatch content text";

fn is_output_name(key: &str) -> bool {
    is_named_any(key, OUTPUTS) || key == "choices"
}

/// Whether a column of a table holds outputs or conversations.
pub(super) fn is_output_column(column: &str) -> bool {
    let column = column.trim_start_matches('\u{feff}').trim();
    [OUTPUTS, ANSWERS, "messages conversations"]
        .iter()
        .any(|names| is_named_any(column, names))
}

/// Members in which a response is not looked for.
fn is_request_name(key: &str) -> bool {
    const NAMES: &str = "request requestbody requestbodydata input inputs prompt messages \
        metadata tools kwargs params proxyserverrequest obj";
    is_named_any(key, NAMES)
}

/// Why a request and a response are what they are; names of APIs for the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    Chat,
    Completions,
    Responses,
    Anthropic,
    Gemini,
    /// Texts under names such as `prompt` and `output`.
    Named,
}

/// The question to a model.
#[derive(Clone, Debug)]
pub(super) enum Prompt {
    Turns(Vec<Turn>),
    Plain(Content),
}

/// The answers of a model: one content for each choice.
pub(super) struct Answers {
    pub(super) api: Api,
    pub(super) choices: Vec<Content>,
    /// Whether only its name says that it is an output, and whether nothing else has such a name.
    pub(super) is_by_name: bool,
    pub(super) is_sure: bool,
}

impl Prompt {
    /// Whether there are answers among the turns.
    pub(super) fn is_answered(&self) -> bool {
        let is_answer = |turn: &Turn| turn.role == Role::Assistant;
        matches!(self, Prompt::Turns(turns) if turns.iter().any(is_answer))
    }
}

impl Answers {
    /// Whether this text is the only answer.
    pub(super) fn is_only(&self, text: &str) -> bool {
        match &self.choices[..] {
            [Content::Text(pieces)] => pieces.concat().trim() == text.trim(),
            _ => false,
        }
    }
}

/// The prompt of a request, anywhere in a record: messages before texts, and texts before objects of variables.
pub(super) fn prompt_in(record: &Object) -> Option<Prompt> {
    let objects = within(record, DEPTH_MAX, is_output_name);
    let objects = || objects.iter().copied();
    objects()
        .find_map(messages_of)
        .map(Prompt::Turns)
        .or_else(|| objects().find_map(text_prompt_of))
        .or_else(|| objects().find_map(variables_of))
}

/// The answers of a response, anywhere in a record: by its shape, then by its name.
pub(super) fn answers_in(record: &Object) -> Option<Answers> {
    let objects = within(record, DEPTH_MAX, is_request_name);
    let objects = || objects.iter().copied();
    objects()
        .find_map(response_of)
        .or_else(|| objects().find_map(|object| named_answer_of(object, OUTPUTS, answer_contents)))
        .or_else(|| objects().find_map(|object| named_answer_of(object, TOKENS, token_contents)))
        .or_else(|| {
            named_answer_of(record, ANSWERS, answer_contents).map(|answers| Answers {
                is_sure: false,
                ..answers
            })
        })
        .or_else(|| objects().find_map(|object| named_answer_of(object, OUTPUTS, schema_contents)))
}

/// The messages of a request, after its instructions and definitions of tools.
fn messages_of(request: &Object) -> Option<Vec<Turn>> {
    let lists = words(MESSAGES).filter_map(|key| request.get(key));
    let mut turns = lists.into_iter().find_map(Turn::list);
    if turns.is_none()
        && let Some(Value::String(text)) = request.get("input")
    {
        // The Responses API takes a text as well.
        let is_request = has_any(request, "instructions tools max_output_tokens");
        turns = is_request.then(|| vec![Turn::new(Role::User, text.as_str())]);
    }
    let mut turns = turns?;
    // The question may stand beside the turns before it.
    let question = first_of(request, "message question").and_then(Value::as_str);
    if let (Some(question), true) = (question, has_any(request, "chat_history history")) {
        turns.push(Turn::new(Role::User, question));
    }
    let system = first_of(
        request,
        "system instructions systemInstruction system_instruction base_instructions",
    )
    .map(content_text)
    .filter(|text| !text.is_empty());
    let tools = named(request, "tools functions tooldefinitions").and_then(tools_text);
    let mut said: Vec<String> = system.into_iter().collect();
    if let (Some(_), true) = (
        &tools,
        turns.first().is_some_and(|turn| turn.role == Role::System),
    ) {
        said.push(turns.remove(0).text);
    }
    said.extend(tools);
    if !said.is_empty() {
        turns.insert(0, Turn::new(Role::System, said.join("\n\n")));
    }
    Some(turns)
}

fn text_prompt_of(request: &Object) -> Option<Prompt> {
    let ids = first_of(request, "prompt_token_ids input_ids prompt_ids").and_then(token_ids);
    let text = named(request, PROMPTS).or_else(|| {
        // SGLang calls a prompt `text`, and so do many what is none.
        request
            .get("sampling_params")
            .and_then(|_| request.get("text"))
    });
    let prompt = match text.map(|text| (text, named(request, "input context"))) {
        Some((Value::String(text), more)) => {
            // Alpaca's instruction has an input besides.
            let more = more
                .and_then(Value::as_str)
                .filter(|more| more != text && !more.is_empty());
            match more {
                Some(more) => Content::text(format!("{text}\n\n{more}")),
                None => Content::text(text.as_str()),
            }
        }
        Some((Value::Array(list), _)) => {
            match (token_ids(&Value::Array(list.clone())), &list[..]) {
                (Some(ids), _) => Content::Tokens(ids),
                (None, [Value::String(text)]) => Content::text(text.as_str()),
                _ => return None,
            }
        }
        _ => Content::Tokens(ids?),
    };
    Some(Prompt::Plain(prompt))
}

/// The variables that a chain writes into its prompt.
fn variables_of(request: &Object) -> Option<Prompt> {
    let variables = named(request, "input inputs prompt")?
        .as_object()
        .filter(|inner| !inner.is_empty())?;
    let text = match (variables.len(), variables.values().next()?) {
        (1, Value::String(text)) => text.clone(),
        _ => json_text(&Value::Object(variables.clone())),
    };
    Some(Prompt::Plain(Content::text(text)))
}

/// Tokens, if the value is a list of them.
fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let list = value.as_array().filter(|list| !list.is_empty())?;
    let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
    list.iter().map(id).collect()
}

/// The answers of an object that is a response by its shape.
fn response_of(object: &Object) -> Option<Answers> {
    let answers = |api, choices: Vec<String>| Answers {
        api,
        choices: choices.into_iter().map(Content::text).collect(),
        is_by_name: false,
        is_sure: true,
    };
    // A stream, as a list of its events.
    let streamed = object
        .values()
        .find_map(|value| streams::joined(value.as_array()?));
    if let Some(whole) = streamed {
        return response_of(whole.as_object()?);
    }
    if let Some(choices) = object.get("choices").and_then(Value::as_array) {
        let is_text = |choice: &Value| choice.get("text").is_some_and(Value::is_string);
        let api = match choices.iter().any(is_text) {
            true => Api::Completions,
            false => Api::Chat,
        };
        let texts: Vec<String> = choices
            .iter()
            .filter_map(|choice| choice_text(choice.as_object()?))
            .collect();
        return (!texts.is_empty()).then(|| answers(api, texts));
    }
    if let Some(items) = object.get("output").or(object.get("output_messages")) {
        // OpenTelemetry has the list one level deeper.
        let turns = Turn::list(items.get("messages").unwrap_or(items));
        if let Some(text) = turns.as_deref().and_then(assistant_text) {
            return Some(answers(Api::Responses, vec![text]));
        }
    }
    if let Some(list) = object.get("candidates").and_then(Value::as_array) {
        let texts = list
            .iter()
            .filter_map(|candidate| candidate.get("content")?.as_object().map(body_text));
        let texts: Vec<String> = texts.collect();
        return (!texts.is_empty()).then(|| answers(Api::Gemini, texts));
    }
    if let Some(mut list) = object.get("generations").and_then(Value::as_array) {
        if let [Value::Array(inner)] = &list[..] {
            list = inner;
        }
        let of = |value: &Value| {
            let generation = value.as_object()?;
            let message = generation.get("message").and_then(Turn::of);
            message
                .map(|turn| turn.text)
                .or_else(|| Some(generation.get("text")?.as_str()?.to_owned()))
        };
        return list
            .iter()
            .map(of)
            .collect::<Option<Vec<_>>>()
            .map(|texts| answers(Api::Chat, texts));
    }
    // A message of an assistant, alone or as a member.
    let member = object.get("message").and_then(Value::as_object);
    let (message, turn) = [Some(object), member]
        .into_iter()
        .flatten()
        .find_map(|message| Some((message, Turn::of_object(message)?)))
        .filter(|(_, turn)| turn.role == Role::Assistant)?;
    let api = match message.get("content") {
        Some(Value::Array(_)) => Api::Anthropic,
        _ => Api::Chat,
    };
    Some(answers(api, vec![turn.text]))
}

/// The text of a choice, whole or of a stream.
fn choice_text(choice: &Object) -> Option<String> {
    if let Some(Value::String(text)) = choice.get("text") {
        return Some(text.clone());
    }
    Some(body_text(choice.get("message")?.as_object()?))
}

/// The assistant's last turns of a list, joined.
fn assistant_text(turns: &[Turn]) -> Option<String> {
    let from = turns
        .iter()
        .rposition(|turn| turn.role != Role::Assistant)
        .map_or(0, |at| at + 1);
    let texts: Vec<&str> = turns[from..]
        .iter()
        .map(|turn| turn.text.as_str())
        .collect();
    (!texts.is_empty()).then(|| texts.join("\n"))
}

/// The answer under one of these names, if it `is_answer`.
fn named_answer_of(
    object: &Object,
    names: &str,
    is_answer: impl Fn(&Value) -> Option<Vec<Content>>,
) -> Option<Answers> {
    let choices = words(names).find_map(|name| is_answer(named(object, name)?))?;
    Some(Answers {
        api: Api::Named,
        choices,
        is_by_name: true,
        is_sure: true,
    })
}

fn answer_contents(value: &Value) -> Option<Vec<Content>> {
    let one = |text: String| Some(vec![Content::text(text)]);
    match value {
        Value::String(text) => one(text.clone()),
        Value::Array(list) => {
            if let [inner @ Value::Array(_)] = &list[..] {
                return answer_contents(inner);
            }
            if let Some(turns) = Turn::list(value) {
                return one(assistant_text(&turns)?);
            }
            // vLLM's and TGI's lists of outputs.
            let of = |value: &Value| match value {
                Value::String(text) => Some(Content::text(text.as_str())),
                Value::Object(output) => first_of(output, "text generated_text content")?
                    .as_str()
                    .map(Content::text),
                _ => None,
            };
            let texts: Option<Vec<Content>> = list.iter().map(of).collect();
            texts.filter(|texts| !texts.is_empty())
        }
        Value::Object(inner) => {
            if let Some(answers) = response_of(inner) {
                return Some(answers.choices);
            }
            let keys = "text content output response completion generated_text answer value";
            one(first_of(inner, keys)?.as_str()?.to_owned())
        }
        _ => None,
    }
}

fn token_contents(value: &Value) -> Option<Vec<Content>> {
    token_ids(value).map(|ids| vec![Content::Tokens(ids)])
}

/// An object of a schema, as the model wrote it.
fn schema_contents(value: &Value) -> Option<Vec<Content>> {
    let inner = value.as_object().filter(|inner| !inner.is_empty())?;
    let is_status = has_any(inner, "status status_code error messages");
    // Embeddings, rankings, images and lists of models are answers of a server, and no output of a model.
    let is_list = ["data", "results", "embeddings"].iter().any(|key| {
        let list = inner.get(*key).and_then(Value::as_array);
        list.is_some_and(|list| list.iter().all(|item| !item.is_string()))
    });
    (!is_status && !is_list).then(|| vec![Content::text(json_text(value))])
}
