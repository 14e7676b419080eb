//! Turns records into calls, whatever tool wrote them.
//!
//! A record is searched for a request with its response, then for a whole conversation, then for one half of a call
//! whose other half stands elsewhere, then for one message of a conversation that is logged message by message.

use std::collections::{HashSet, VecDeque};

use serde_json::Value;

use super::call::{Content, LoggedCall};
use super::forms::{self, Form};
use super::halves::{Half, Halves, Waiting};
use super::members::{NESTED, Object, first_of, named, open_texts, within, words};
use super::names::Names;
use super::shapes::{Answers, Api, Prompt, answers_in, prompt_in};
use super::spans;
use super::summary::LogSummary;
use super::thread::Thread;
use super::turns::{OPENING, Role, Turn};

/// Records in records are entered so deep.
const DEPTH_MAX: usize = 6;
const NO_CALL: &str = "it has neither a prompt nor an output under a known name";
/// Conversations that are open at once.
const THREADS_MAX: usize = 64;
/// Turns that are known, so that logs which repeat conversations do not count them twice.
const KNOWN_TURNS_MAX: usize = 1 << 20;

/// Ids by which the halves of a call are joined.
const JOINS: &str = "customid requestid rid correlationid callid litellmcallid spanid \
    xrequestid key";

/// Turns records into calls.
#[derive(Default)]
pub(super) struct RecordReader {
    /// Calls that are ready.
    ready: VecDeque<LoggedCall>,
    pub(super) summary: LogSummary,
    halves: Halves,
    /// A request without an id, whose response may be the next record.
    last_request: Option<Waiting>,
    /// Conversations that are logged message by message, the latest used last.
    threads: Vec<(String, Form, Thread)>,
    known_turns: HashSet<u64>,
    last_at_ms: u64,
    /// Conversations without an id, for the ids that they get.
    unnamed: u64,
    /// Names that hold until the end of the file.
    file_names: Names,
    file: String,
}

/// The use of a record.
#[derive(Default)]
struct Findings {
    calls: u64,
    /// Whether something is kept for later.
    is_kept: bool,
    reason: Option<&'static str>,
}

impl Findings {
    fn kept() -> Self {
        Findings {
            is_kept: true,
            ..Findings::default()
        }
    }

    fn because(reason: &'static str) -> Self {
        Findings {
            reason: Some(reason),
            ..Findings::default()
        }
    }
}

/// Where a value stands in a record, and what is known from there.
#[derive(Clone, Copy)]
struct Place<'a> {
    names: &'a Names,
    form: Option<Form>,
    depth: usize,
    position: &'a dyn Fn() -> String,
}

impl Place<'_> {
    fn waiting(&self, half: Half, form: Form) -> Waiting {
        Waiting {
            half,
            names: self.names.clone(),
            form,
            position: (self.position)(),
        }
    }
}

impl RecordReader {
    /// The next call that is ready.
    pub(super) fn next_ready(&mut self) -> Option<LoggedCall> {
        self.ready.pop_front()
    }

    pub(super) fn begin_file(&mut self, name: &str) {
        self.file = name.to_owned();
        self.file_names = Names::default();
        self.summary.files += 1;
    }

    /// Ends a list of records. Conversations that could go on until here are complete.
    pub(super) fn end_list(&mut self) {
        for (_, form, thread) in std::mem::take(&mut self.threads) {
            self.close_thread(form, thread);
        }
        self.end_request();
    }

    /// Ends the log.
    pub(super) fn end(&mut self) {
        self.end_list();
        while let Some(waiting) = self.halves.give_up(true) {
            self.give_up_half(waiting);
        }
    }

    /// Adds a call that needs no search.
    pub(super) fn add_call(&mut self, form: Form, call: LoggedCall) {
        self.summary.add_form(form, 1, 1);
        self.push(call);
    }

    /// Reads a record.
    pub(super) fn read(&mut self, mut record: Value, position: &dyn Fn() -> String) {
        if let Value::Object(object) = &mut record {
            if let Some(row) = spans::opened_row(object) {
                *object = row;
            }
            open_texts(object, 0);
        }
        let names = self.file_names.clone();
        let place = Place {
            names: &names,
            form: None,
            depth: 0,
            position,
        };
        let found = self.walk(&record, place);
        if found.calls == 0 && !found.is_kept {
            let reason = found.reason.unwrap_or(NO_CALL);
            self.summary.leave_out(reason, position);
        }
    }

    fn walk(&mut self, value: &Value, place: Place) -> Findings {
        match value {
            Value::Array(list) => match Turn::list(value) {
                Some(turns) => {
                    let (prompt, form) = (Prompt::Turns(turns), place.form.unwrap_or("messages"));
                    self.hold(prompt, form, None, place)
                }
                None if place.depth < DEPTH_MAX => self.walk_all(list, place),
                None => Findings::default(),
            },
            Value::Object(object) => self.walk_object(object, place),
            _ => Findings::default(),
        }
    }

    fn walk_all<'a>(
        &mut self,
        values: impl IntoIterator<Item = &'a Value>,
        place: Place,
    ) -> Findings {
        let depth = place.depth + 1;
        let mut all = Findings::default();
        for value in values {
            let found = self.walk(value, Place { depth, ..place });
            all.calls += found.calls;
            all.is_kept |= found.is_kept;
            all.reason = all.reason.or(found.reason);
        }
        all
    }

    fn walk_object(&mut self, object: &Object, outer: Place) -> Findings {
        let span = spans::opened(object);
        let object = span.as_ref().unwrap_or(object);
        let names = &Names::of(object, outer.names);
        let form = outer.form.or_else(|| forms::of(object));
        let form = form.or_else(|| span.as_ref().map(|_| "OpenTelemetry spans"));
        let place = Place {
            names,
            form,
            ..outer
        };
        let nested = words(NESTED).filter_map(|key| object.get(key));
        let nested: Vec<&Value> = nested.filter(|value| forms::has_records(value)).collect();
        if !nested.is_empty() && place.depth < DEPTH_MAX {
            let members = nested.iter().flat_map(|value| match value {
                Value::Object(members) => members.values().collect(),
                Value::Array(list) => list.iter().collect(),
                _ => Vec::new(),
            });
            let found = self.walk_all(members.collect::<Vec<_>>(), place);
            if found.calls > 0 || found.is_kept || place.depth > 0 {
                return found;
            }
        }
        self.read_object(object, place)
    }

    /// Reads an object that is one record.
    fn read_object(&mut self, object: &Object, place: Place) -> Findings {
        if forms::is_bookkeeping(object) {
            if forms::names_others(object) {
                self.file_names = Names::of(object, &self.file_names);
            }
            return self.add_message(forms::instructions(object), place);
        }
        if forms::is_other_step(object) {
            return Findings::because("a step that is no call of a model");
        }
        if let Some(message) = forms::message_of_thread(object) {
            return self.add_message(message, place);
        }
        if let Some(turn) = forms::bare_message(object) {
            return self.add_message(Some(turn), place);
        }
        let prompt = prompt_in(object);
        let answers =
            answers_in(object).filter(|answers| match prompt.as_ref().and_then(last_said) {
                // A conversation may end with the answer that stands beside it once more, or with another one than a
                // reference that stands there.
                Some(last) => !answers.is_by_name && !answers.is_only(last),
                None => true,
            });
        let failed = has_failed(object);
        let has_turns = matches!(prompt, Some(Prompt::Turns(_)));
        if answers.is_none() && !has_turns && !failed && place.depth < DEPTH_MAX {
            // An instruction may stand beside the list of what followed it.
            let is_inner =
                |value: &&Value| value.is_array() || (value.is_object() && prompt.is_none());
            let found = self.walk_all(object.values().filter(is_inner), place);
            if found.calls > 0 || found.is_kept {
                return found;
            }
        }
        let id = join_id(object);
        match (prompt, answers) {
            (Some(prompt), Some(answers)) => {
                // The request may have been logged when it came, and once more with its response.
                self.end_request_named(id);
                let form = place.form;
                let form = form.unwrap_or_else(|| forms::of_api(&prompt, answers.api));
                self.pair(prompt, answers, place.names, form)
            }
            (_, answers) if failed && answers.as_ref().is_none_or(|answers| answers.is_by_name) => {
                self.end_request_named(id);
                Findings::because("the call failed, so it has no output")
            }
            (Some(prompt), None) => {
                // A list that ends with an answer waits for none.
                let id = id.filter(|_| last_said(&prompt).is_none());
                let form = if prompt.is_answered() {
                    "messages"
                } else {
                    "requests"
                };
                self.hold(prompt, place.form.unwrap_or(form), id, place)
            }
            (None, Some(answers)) => self.answer(object, answers, id, place),
            (None, None) => Findings::default(),
        }
    }

    /// Adds a line of a conversation that is logged line by line.
    fn add_message(&mut self, turn: Option<Turn>, place: Place) -> Findings {
        match turn {
            Some(turn) => {
                let form = place.form.unwrap_or("messages, one by one");
                self.add_turn(turn, place.names, form);
                Findings::kept()
            }
            None => Findings::because("a line of bookkeeping, without a text of the model"),
        }
    }

    /// Holds a request until its response comes: the one of the same id, or else the next record.
    fn hold(&mut self, prompt: Prompt, form: Form, id: Option<String>, place: Place) -> Findings {
        let waiting = place.waiting(Half::Prompt(prompt), form);
        match id {
            Some(id) => self.join(id, waiting),
            None => {
                self.end_request();
                self.last_request = Some(waiting);
                Findings::kept()
            }
        }
    }

    /// A response whose request stands elsewhere, or nowhere.
    fn answer(
        &mut self,
        object: &Object,
        answers: Answers,
        id: Option<String>,
        place: Place,
    ) -> Findings {
        let form = place.form.unwrap_or("responses");
        if let Some(id) = id {
            return self.join(id, place.waiting(Half::Answers(answers), form));
        }
        if answers.is_by_name && !answers.is_sure {
            return Findings::default();
        }
        if let Some(request) = self.last_request.take()
            && let Half::Prompt(prompt) = request.half
        {
            let names = Names::of(object, &request.names);
            return self.pair(prompt, answers, &names, "requests and responses, in turn");
        }
        self.pair(
            Prompt::Plain(Content::default()),
            answers,
            place.names,
            form,
        )
    }

    /// A request with its response.
    fn pair(&mut self, prompt: Prompt, answers: Answers, names: &Names, form: Form) -> Findings {
        let prompt = match prompt {
            // A chat may be logged by its question alone.
            Prompt::Plain(Content::Text(pieces))
                if !matches!(answers.api, Api::Completions | Api::Named) =>
            {
                Prompt::Turns(vec![Turn::new(Role::User, pieces.concat())])
            }
            prompt => prompt,
        };
        let calls = self.emit(prompt, answers.choices, names);
        if calls > 0 {
            self.summary.add_form(form, 1, calls);
        }
        Findings {
            calls,
            ..Findings::because("the output is empty")
        }
    }

    /// A call for each choice. Choices of one request are a group.
    fn emit(&mut self, prompt: Prompt, choices: Vec<Content>, names: &Names) -> u64 {
        let prompt = match prompt {
            Prompt::Plain(content) => content,
            Prompt::Turns(turns) => {
                let mut pieces: Vec<_> = turns.iter().map(Turn::segment).collect();
                pieces.push(OPENING.into());
                Content::Text(pieces)
            }
        };
        let choices: Vec<Content> = choices
            .into_iter()
            .filter(|choice| !choice.is_empty())
            .collect();
        let group = (choices.len() > 1).then(|| {
            self.unnamed += 1;
            format!("{} group {}", self.file, self.unnamed)
        });
        let calls = choices.len() as u64;
        for output in choices {
            let mut head = names.head();
            head.group = head.group.or_else(|| group.clone());
            self.push(LoggedCall {
                head,
                prompt: prompt.clone(),
                output,
            });
        }
        calls
    }

    /// A whole conversation: a call for each turn of the assistant.
    fn conversation_calls(&mut self, turns: Vec<Turn>, names: Names) -> u64 {
        self.unnamed += 1;
        let names = names.with_session(|| format!("{} conversation {}", self.file, self.unnamed));
        let mut thread = Thread::new(names);
        let mut calls: Vec<(u64, LoggedCall)> = Vec::new();
        for turn in turns {
            calls.extend(thread.add(turn, None));
        }
        calls.extend(thread.end());
        let last = calls.len().saturating_sub(1);
        let mut count = 0;
        for (at, (key, call)) in calls.into_iter().enumerate() {
            if self.known_turns.len() >= KNOWN_TURNS_MAX {
                self.known_turns.clear();
            }
            // A request repeats the turns before it. Its last turn is new, or said once more.
            if self.known_turns.insert(key) || at == last {
                count += 1;
                self.push(call);
            }
        }
        count
    }

    /// A turn of a conversation that is logged turn by turn.
    pub(super) fn add_turn(&mut self, turn: Turn, names: &Names, form: Form) {
        let key = names.session().unwrap_or_default().to_owned();
        let at = self.threads.iter().position(|(open, ..)| *open == key);
        let mut open = match at {
            Some(at) => self.threads.remove(at),
            None => {
                if self.threads.len() >= THREADS_MAX {
                    let (_, form, thread) = self.threads.remove(0);
                    self.close_thread(form, thread);
                }
                self.unnamed += 1;
                let names = names
                    .clone()
                    .with_session(|| format!("{} conversation {}", self.file, self.unnamed));
                self.summary.add_form(form, 1, 0);
                (key, form, Thread::new(names))
            }
        };
        let call = open.2.add(turn, Some(names));
        if let Some((_, call)) = call {
            self.summary.add_form(form, 0, 1);
            self.push(call);
        }
        self.threads.push(open);
    }

    /// A conversation whose last turn is the answer.
    pub(super) fn add_answered(&mut self, mut turns: Vec<Turn>, form: Form) {
        let Some(answer) = turns.pop().filter(|turn| turn.role == Role::Assistant) else {
            return;
        };
        let calls = self.emit(
            Prompt::Turns(turns),
            vec![Content::text(answer.text)],
            &Names::default(),
        );
        self.summary.add_form(form, 1, calls);
    }

    fn close_thread(&mut self, form: Form, mut thread: Thread) {
        if let Some((_, call)) = thread.end() {
            self.summary.add_form(form, 0, 1);
            self.push(call);
        }
    }

    /// Keeps a half until the other one comes, or joins them.
    fn join(&mut self, id: String, new: Waiting) -> Findings {
        let Some(old) = self.halves.take(&id) else {
            return self.keep_half(id, new);
        };
        let (request, response) = match old.half {
            Half::Prompt(_) => (old, new),
            Half::Answers(_) => (new, old),
        };
        match (request.half, response.half) {
            (Half::Prompt(prompt), Half::Answers(answers)) => {
                let form = forms::joined(request.form, response.form);
                let names = request.names.beside(&response.names);
                self.pair(prompt, answers, &names, form)
            }
            // OpenTelemetry logs each message by itself.
            (Half::Prompt(Prompt::Turns(mut turns)), Half::Prompt(Prompt::Turns(more)))
                if more.len() == 1 && !turns.ends_with(&more) =>
            {
                turns.extend(more);
                let half = Half::Prompt(Prompt::Turns(turns));
                self.keep_half(id, Waiting { half, ..request })
            }
            // Two halves of one kind have this id, so one stays alone.
            (first, half) => {
                self.give_up_half(Waiting {
                    half: first,
                    ..request
                });
                self.keep_half(id, Waiting { half, ..response })
            }
        }
    }

    fn keep_half(&mut self, id: String, waiting: Waiting) -> Findings {
        self.halves.keep(id, waiting);
        while let Some(oldest) = self.halves.give_up(false) {
            self.give_up_half(oldest);
        }
        Findings::kept()
    }

    /// A half whose other half did not come. An output alone is a call; a request may hold earlier answers.
    fn give_up_half(&mut self, waiting: Waiting) {
        let calls = match waiting.half {
            Half::Answers(answers) => self.emit(
                Prompt::Plain(Content::default()),
                answers.choices,
                &waiting.names,
            ),
            Half::Prompt(Prompt::Turns(turns))
                if turns.iter().any(|turn| turn.role == Role::Assistant) =>
            {
                self.conversation_calls(turns, waiting.names)
            }
            Half::Prompt(_) => {
                let reason = "a request without its response";
                return self.summary.leave_out(reason, || waiting.position);
            }
        };
        if calls > 0 {
            self.summary.add_form(waiting.form, 1, calls);
        }
    }

    /// Drops the request of this id, whose call is told otherwise.
    fn end_request_named(&mut self, id: Option<String>) {
        if id.and_then(|id| self.halves.take(&id)).is_none() {
            self.end_request();
        }
    }

    fn end_request(&mut self) {
        if let Some(waiting) = self.last_request.take() {
            self.give_up_half(waiting);
        }
    }

    fn push(&mut self, call: LoggedCall) {
        if call.prompt.is_empty() {
            self.summary.calls_without_prompt += 1;
        }
        if let Some(at_ms) = call.head.at_ms {
            if at_ms < self.last_at_ms {
                self.summary.calls_out_of_order += 1;
            }
            self.last_at_ms = at_ms;
        }
        self.ready.push_back(call);
    }
}

/// The id by which the halves of a call are joined.
fn join_id(object: &Object) -> Option<String> {
    match within(object, 1, |_| false)
        .into_iter()
        .find_map(|object| named(object, JOINS))?
    {
        Value::String(id) => Some(id.clone()),
        Value::Number(id) => Some(id.to_string()),
        _ => None,
    }
}

fn has_failed(object: &Object) -> bool {
    let error = first_of(
        object,
        "error exception error_str statusMessage error_information",
    );
    let is_error = error.is_some_and(|error| match error {
        Value::String(text) => !text.is_empty(),
        Value::Object(inner) => !inner.is_empty(),
        Value::Bool(is_error) => *is_error,
        _ => false,
    });
    let status = named(object, "status level").and_then(Value::as_str);
    is_error
        || status.is_some_and(|status| {
            ["failure", "failed", "error", "ERROR", "FAILURE"].contains(&status)
        })
        || object.get("response").is_some_and(|response| {
            response.get("error").is_some_and(|error| !error.is_null())
                || response
                    .get("status_code")
                    .and_then(Value::as_u64)
                    .is_some_and(|code| code >= 400)
        })
}

/// The text of the assistant's turn with which a prompt ends, if it ends so.
fn last_said(prompt: &Prompt) -> Option<&str> {
    match prompt {
        Prompt::Turns(turns) => {
            let last = turns.last().filter(|turn| turn.role == Role::Assistant)?;
            Some(&last.text)
        }
        Prompt::Plain(_) => None,
    }
}
