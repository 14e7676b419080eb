//! Logs that are no JSON: rows of a table, transcripts of aider, lines that engines print, and plain text.

use std::cell::Cell;
use std::io::{BufRead, Read};
use std::rc::Rc;

use serde_json::{Map, Value};

use super::call::{Content, LoggedCall};
use super::members::{is_named, looks_like_json};
use super::names::Names;
use super::pieces::PIECE_BYTES_MAX;
use super::python;
use super::shapes::is_output_column;
use super::turns::{Role, Turn};

/// A kind of text, as the beginning of a file shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextKind {
    Table {
        delimiter: u8,
    },
    /// `.aider.chat.history.md`
    AiderChat,
    /// `.aider.llm.history`
    AiderCalls,
    /// Lines with values in them.
    Lines,
    /// Paragraphs, each an output.
    Plain,
}

/// The kind of a text that begins so.
pub(super) fn kind_of(head: &str) -> TextKind {
    let mut lines = head
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    if first.starts_with("# aider chat started at") {
        return TextKind::AiderChat;
    }
    if first.starts_with("TO LLM ") {
        return TextKind::AiderCalls;
    }
    for delimiter in [b',', b'\t', b';'] {
        let mut header = csv::ReaderBuilder::new()
            .has_headers(false)
            .delimiter(delimiter)
            .from_reader(first.as_bytes())
            .into_records();
        let columns = header.next().and_then(Result::ok).unwrap_or_default();
        if columns.iter().any(is_output_column)
            && (columns.len() > 1 || delimiter == b',')
            && first.len() < 4096
        {
            return TextKind::Table { delimiter };
        }
    }
    match head
        .lines()
        .take(200)
        .any(|line| line_value(line).is_some())
    {
        true => TextKind::Lines,
        false => TextKind::Plain,
    }
}

/// The record in a line of a log: JSON after a prefix, or values of Python with their names.
pub(super) fn line_value(line: &str) -> Option<Value> {
    let at = line.find('{');
    if let Some(json) = at
        .map(|at| line[at..].trim_end())
        .filter(|json| looks_like_json(json))
        && let Some(value) = serde_json::from_str(json)
            .ok()
            .or_else(|| python::literal(json))
    {
        return Some(value);
    }
    // Only these lines of engines have texts; others name settings.
    let marks = [
        ("Received request ", ""),
        ("Generated response ", ""),
        ("Request ", " details:"),
        ("Receive: obj=", ""),
        ("Finish: obj=", ""),
    ];
    let (at, begin) = marks.iter().find_map(|(begin, also)| {
        let at = line.find(begin).filter(|_| line.contains(also))?;
        Some((at, *begin))
    })?;
    let mut said = &line[at..];
    let mut values = Map::new();
    if !begin.contains('=') {
        // vLLM names a request before a colon.
        said = &said[begin.len()..];
        let id = said.split([':', ' ']).next()?;
        values.insert("request_id".to_owned(), id.into());
        values.insert("vllm_request_id".to_owned(), id.into());
        said = &said[id.len()..];
        // An answer is logged as it comes, and once more as a whole.
        if said.starts_with(" (streaming delta)") {
            return None;
        }
    }
    values.extend(python::named_values(said)?);
    Some(Value::Object(values))
}

/// The rows of a table, as objects by the names of its columns.
pub(super) struct Table {
    rows: csv::Reader<Limited>,
    columns: csv::StringRecord,
    left: Rc<Cell<usize>>,
}

/// A stream that ends with an error if one row takes too much of it: a quote that is not closed would take all.
struct Limited {
    stream: Box<dyn BufRead + Send>,
    left: Rc<Cell<usize>>,
}

impl Read for Limited {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let bytes = self.stream.read(into)?;
        let left = self.left.get().checked_sub(bytes);
        self.left
            .set(left.ok_or_else(|| std::io::Error::other("a row has more than 64 MiB"))?);
        Ok(bytes)
    }
}

impl Table {
    pub(super) fn open(stream: Box<dyn BufRead + Send>, delimiter: u8) -> csv::Result<Self> {
        let left = Rc::new(Cell::new(PIECE_BYTES_MAX));
        let limited = Limited {
            stream,
            left: left.clone(),
        };
        let mut rows = csv::ReaderBuilder::new()
            .delimiter(delimiter)
            .flexible(true)
            .from_reader(limited);
        let columns = rows.headers()?.clone();
        Ok(Table {
            rows,
            columns,
            left,
        })
    }

    /// The next row and its line.
    pub(super) fn next(&mut self) -> csv::Result<Option<(Value, u64)>> {
        self.left.set(PIECE_BYTES_MAX);
        let mut row = csv::StringRecord::new();
        if !self.rows.read_record(&mut row)? {
            return Ok(None);
        }
        let line = row.position().map_or(0, csv::Position::line);
        let cells = self
            .columns
            .iter()
            .zip(&row)
            .filter(|(_, cell)| !cell.is_empty());
        let cell = |(column, cell): (&str, &str)| {
            let is_list = is_named(column, "messages") || is_named(column, "conversations");
            let parsed = match looks_like_json(cell) && is_list {
                // Tables of Python have lists as Python prints them.
                true => serde_json::from_str(cell)
                    .ok()
                    .or_else(|| python::literal(cell)),
                false => None,
            };
            (
                column.trim_start_matches('\u{feff}').to_owned(),
                parsed.unwrap_or_else(|| cell.into()),
            )
        };
        Ok(Some((Value::Object(cells.map(cell).collect()), line)))
    }
}

/// Lines of a text, of bounded length.
pub(super) struct Lines {
    stream: Box<dyn BufRead + Send>,
    buffer: Vec<u8>,
    pub(super) number: u64,
}

impl Lines {
    pub(super) fn new(stream: Box<dyn BufRead + Send>) -> Self {
        Lines {
            stream,
            buffer: Vec::new(),
            number: 0,
        }
    }

    /// The next line, without its end. Bytes that are not UTF-8 are replaced.
    pub(super) fn next(&mut self) -> std::io::Result<Option<String>> {
        self.buffer.clear();
        let limit = PIECE_BYTES_MAX as u64;
        (&mut self.stream)
            .take(limit)
            .read_until(b'\n', &mut self.buffer)?;
        self.number += 1;
        if self.buffer.is_empty() {
            return Ok(None);
        }
        let line = String::from_utf8_lossy(&self.buffer);
        Ok(Some(line.trim_end_matches(['\n', '\r']).to_owned()))
    }
}

/// A step of a transcript that a line ends or begins.
pub(super) enum TranscriptStep {
    /// A session begins.
    Session(Box<Names>),
    Turn(Turn),
    /// A whole conversation, asked and answered.
    Call(Vec<Turn>),
}

/// Reads aider's transcripts line by line.
#[derive(Default)]
pub(super) struct Transcript {
    role: Option<Role>,
    text: String,
    sessions: u64,
    /// The turns of a call of `.aider.llm.history`, and whether its answer has begun.
    turns: Vec<Turn>,
    is_answer: bool,
}

impl Transcript {
    /// Reads a line of `.aider.chat.history.md`.
    pub(super) fn chat_line(&mut self, line: &str) -> Vec<TranscriptStep> {
        let mut steps = Vec::new();
        if let Some(time) = line.strip_prefix("# aider chat started at ") {
            steps.extend(self.turn_ends().map(TranscriptStep::Turn));
            self.sessions += 1;
            let of = serde_json::json!({"session": format!("aider {}", self.sessions), "timestamp": time});
            if let Value::Object(of) = of {
                let names = Names::of(&of, &Names::default());
                steps.push(TranscriptStep::Session(Box::new(names)));
            }
            return steps;
        }
        let (role, text) = match (line.strip_prefix("#### "), line.strip_prefix("> ")) {
            (Some(said), _) => (Role::User, said.trim_end()),
            // These are aider's own words. Its output of commands goes into the next prompt.
            (_, Some(told)) => (Role::Tool, told.trim_end()),
            _ if line.is_empty() && self.role != Some(Role::Assistant) => return steps,
            _ => (Role::Assistant, line),
        };
        if self.role != Some(role) {
            steps.extend(self.turn_ends().map(TranscriptStep::Turn));
            self.role = Some(role);
        }
        self.text.push_str(text);
        self.text.push('\n');
        steps
    }

    /// Reads a line of `.aider.llm.history`.
    pub(super) fn call_line(&mut self, line: &str) -> Option<TranscriptStep> {
        if line.starts_with("TO LLM ") {
            let ended = self.call_ends();
            self.is_answer = false;
            return ended;
        }
        if line.starts_with("LLM RESPONSE ") || line == "-------" {
            let turn = self.turn_ends();
            self.turns.extend(turn);
            self.is_answer |= line != "-------";
            return None;
        }
        let (name, text) = line.split_once(' ').unwrap_or((line, ""));
        let role = match name {
            "SYSTEM" => Role::System,
            "USER" => Role::User,
            "ASSISTANT" => Role::Assistant,
            _ => return None,
        };
        if self.role != Some(role) {
            let turn = self.turn_ends();
            self.turns.extend(turn);
            self.role = Some(role);
        }
        self.text.push_str(text);
        self.text.push('\n');
        None
    }

    /// Ends the turn that is being read.
    pub(super) fn turn_ends(&mut self) -> Option<Turn> {
        let role = self.role.take()?;
        let text = std::mem::take(&mut self.text);
        let text = text.trim_matches('\n');
        (!text.is_empty()).then(|| Turn::new(role, text))
    }

    /// Ends the call that is being read.
    pub(super) fn call_ends(&mut self) -> Option<TranscriptStep> {
        let turn = self.turn_ends();
        self.turns.extend(turn);
        let turns = std::mem::take(&mut self.turns);
        (self.is_answer && !turns.is_empty()).then_some(TranscriptStep::Call(turns))
    }
}

/// The call of a paragraph that is an output.
pub(super) fn plain_call(text: &str) -> LoggedCall {
    LoggedCall {
        output: Content::text(text.trim_end()),
        ..LoggedCall::default()
    }
}
