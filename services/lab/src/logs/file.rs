//! Reads one file of a log, whatever form it has.

use std::io::{BufRead, Cursor, Read};
use std::path::Path;

use anyhow::Context;
use refrain_suffix_index::Token;
use serde::Deserialize;
use serde_json::Value;

use super::call::{Content, LoggedCall, RecordedCall};
use super::members::has_word;
use super::names::Names;
use super::pieces::{Piece, Pieces};
use super::python;
use super::record::RecordReader;
use super::source::{self, ReadProgress, headed};
use super::texts::{self, Lines, Table, TextKind, Transcript, TranscriptStep};

/// Bytes from which the form of a file is told.
const HEAD_BYTES: u64 = 64 << 10;

const NOT_JSON: &str = "no JSON, or a record that was cut off";
const TOO_LONG: &str = "a record of more than 64 MiB";

/// The call of Refrain's own form, which `refrain store export` writes. It is read without a tree of values, because
/// tokens as values take ten times their size.
#[derive(Deserialize)]
struct OwnCall {
    workload: Option<String>,
    tenant: Option<String>,
    session: Option<String>,
    group: Option<String>,
    model: Option<String>,
    created_ms: Option<u64>,
    duration_ms: Option<u64>,
    first_ms: Option<u64>,
    prompt_token_ids: Option<Vec<Token>>,
    output_token_ids: Vec<Token>,
    prompt: Option<String>,
}

impl From<OwnCall> for LoggedCall {
    fn from(own: OwnCall) -> Self {
        let prompt = match (own.prompt_token_ids, own.prompt) {
            (Some(ids), _) => Content::Tokens(ids),
            (None, Some(text)) => Content::text(text),
            (None, None) => Content::default(),
        };
        LoggedCall {
            head: RecordedCall {
                workload: own.workload,
                tenant: own.tenant,
                session: own.session,
                group: own.group,
                model: own.model,
                at_ms: own.created_ms,
                duration_ms: own.duration_ms,
                first_ms: own.first_ms,
                ..RecordedCall::default()
            },
            prompt,
            output: Content::Tokens(own.output_token_ids),
        }
    }
}

/// Reads a file into `records`. `found` takes the calls as they come, and returns false to end the reading.
pub(super) fn read(
    path: &Path,
    in_folder: bool,
    progress: ReadProgress,
    records: &mut RecordReader,
    found: &mut dyn FnMut(&mut RecordReader) -> bool,
) -> anyhow::Result<()> {
    let name = path.display().to_string();
    let stream = source::open(path, progress).with_context(|| source::unreadable(path))?;
    let (head, rest) = headed(stream, HEAD_BYTES).with_context(|| format!("{name}, line 1"))?;
    let unread = source::unread(&head).or_else(|| {
        let is_cut_letter = |error: std::str::Utf8Error| error.error_len().is_none();
        let is_text = std::str::from_utf8(&head).map_or_else(is_cut_letter, |_| true);
        (!is_text).then_some("a file that is no text in UTF-8")
    });
    if let Some(reason) = unread {
        records.summary.leave_out(reason, || name);
        return Ok(());
    }
    if head.trim_ascii().is_empty() {
        records.summary.leave_out("an empty file", || name);
        return Ok(());
    }
    records.begin_file(&name);
    let text = String::from_utf8_lossy(&head).into_owned();
    let text = text.trim_start_matches('\u{feff}').trim_start();
    let after = text.strip_prefix('[').map(str::trim_start);
    let is_json =
        text.starts_with('{') || after.is_some_and(|after| after.starts_with(['{', '[', '"', ']']));
    let kind = texts::kind_of(text);
    let stream: Box<dyn BufRead + Send> = Box::new(Cursor::new(head).chain(rest));
    let mut reader = FileReader {
        name: &name,
        records,
        found,
    };
    if is_json {
        return reader.pieces(stream);
    }
    let is_prose = path.extension().is_none_or(|end| {
        let known = if in_folder {
            "txt text"
        } else {
            "txt text out md"
        };
        end.to_str().is_some_and(|end| has_word(known, end))
    });
    match kind {
        TextKind::Table { delimiter } => reader.table(stream, delimiter),
        TextKind::AiderChat | TextKind::AiderCalls => reader.transcript(stream, kind),
        TextKind::Lines => reader.lines(stream),
        TextKind::Plain if !is_prose => {
            reader
                .records
                .summary
                .leave_out("a file of no known form", || name.clone());
            Ok(())
        }
        TextKind::Plain => reader.plain(stream),
    }
}

struct FileReader<'a> {
    name: &'a str,
    records: &'a mut RecordReader,
    found: &'a mut dyn FnMut(&mut RecordReader) -> bool,
}

impl FileReader<'_> {
    fn at(&self, line: u64) -> String {
        format!("{}, line {line}", self.name)
    }

    /// Reads JSON, in lines, printed over lines, or as a list.
    fn pieces(&mut self, stream: impl Read) -> anyhow::Result<()> {
        let mut pieces = Pieces::new(stream);
        loop {
            let piece = pieces.advance().with_context(|| self.at(pieces.line()))?;
            let Some(piece) = piece else { break };
            let line = pieces.line();
            match piece {
                Piece::Json => self.json(pieces.bytes(), line),
                Piece::Line => self.line(&String::from_utf8_lossy(pieces.bytes()), line),
                Piece::ListEnd => self.records.end_list(),
                Piece::TooLong => self
                    .records
                    .summary
                    .leave_out(TOO_LONG, || format!("{}, line {line}", self.name)),
            }
            if !(self.found)(self.records) {
                return Ok(());
            }
        }
        self.end()
    }

    fn json(&mut self, bytes: &[u8], line: u64) {
        if memchr::memmem::find(bytes, b"\"output_token_ids\"").is_some()
            && let Ok(own) = serde_json::from_slice::<OwnCall>(bytes)
        {
            return self.records.add_call("Refrain calls", own.into());
        }
        let name = self.name;
        if let Ok(value) = serde_json::from_slice::<Value>(bytes) {
            return self.records.read(value, &|| format!("{name}, line {line}"));
        }
        // A record that was cut off may have taken the lines after it. Each is read by itself.
        for (after, bytes) in bytes.split(|byte| *byte == b'\n').enumerate() {
            let at = || format!("{name}, line {}", line + after as u64);
            let bytes = bytes.trim_ascii();
            let value = serde_json::from_slice(bytes).ok();
            let value = value.or_else(|| python::literal(std::str::from_utf8(bytes).ok()?));
            match value {
                Some(value @ Value::Object(_)) => self.records.read(value, &at),
                _ if bytes.is_empty() => {}
                _ => self.records.summary.leave_out(NOT_JSON, at),
            }
        }
    }

    fn line(&mut self, line: &str, number: u64) {
        let name = self.name;
        let at = || format!("{name}, line {number}");
        match texts::line_value(line) {
            Some(value) => self.records.read(value, &at),
            None if line.trim().is_empty() => {}
            None => self
                .records
                .summary
                .leave_out("a line of text without a call", at),
        }
    }

    fn lines(&mut self, stream: Box<dyn BufRead + Send>) -> anyhow::Result<()> {
        let mut lines = Lines::new(stream);
        while let Some(line) = lines
            .next()
            .with_context(|| format!("{}, line {}", self.name, lines.number))?
        {
            self.line(&line, lines.number);
            if !(self.found)(self.records) {
                return Ok(());
            }
        }
        self.end()
    }

    fn table(&mut self, stream: Box<dyn BufRead + Send>, delimiter: u8) -> anyhow::Result<()> {
        let mut table = Table::open(stream, delimiter).with_context(|| self.at(1))?;
        let name = self.name;
        loop {
            match table.next() {
                Ok(Some((row, line))) => self.records.read(row, &|| format!("{name}, line {line}")),
                Ok(None) => break,
                // A row that is no text in UTF-8. Other errors are of the file.
                Err(error) if matches!(error.kind(), csv::ErrorKind::Utf8 { .. }) => {
                    self.records
                        .summary
                        .leave_out("a row that is no text in UTF-8", || name.to_owned());
                }
                Err(error) => return Err(error).with_context(|| name.to_owned()),
            }
            if !(self.found)(self.records) {
                return Ok(());
            }
        }
        self.end()
    }

    fn transcript(
        &mut self,
        stream: Box<dyn BufRead + Send>,
        kind: TextKind,
    ) -> anyhow::Result<()> {
        let mut lines = Lines::new(stream);
        let mut transcript = Transcript::default();
        let mut names = Names::default();
        while let Some(line) = lines
            .next()
            .with_context(|| format!("{}, line {}", self.name, lines.number))?
        {
            let steps = match kind {
                TextKind::AiderChat => transcript.chat_line(&line),
                _ => transcript.call_line(&line).into_iter().collect(),
            };
            for step in steps {
                self.step(step, &mut names);
            }
            if !(self.found)(self.records) {
                return Ok(());
            }
        }
        let last = match kind {
            TextKind::AiderChat => transcript.turn_ends().map(TranscriptStep::Turn),
            _ => transcript.call_ends(),
        };
        if let Some(step) = last {
            self.step(step, &mut names);
        }
        self.end()
    }

    fn step(&mut self, step: TranscriptStep, names: &mut Names) {
        match step {
            TranscriptStep::Session(of) => {
                self.records.end_list();
                *names = *of;
            }
            TranscriptStep::Turn(turn) => self.records.add_turn(turn, names, "aider transcripts"),
            TranscriptStep::Call(turns) => self.records.add_answered(turns, "aider calls"),
        }
    }

    fn plain(&mut self, stream: Box<dyn BufRead + Send>) -> anyhow::Result<()> {
        let mut lines = Lines::new(stream);
        let mut paragraph = String::new();
        loop {
            let line = lines
                .next()
                .with_context(|| format!("{}, line {}", self.name, lines.number))?;
            let is_end = line.is_none();
            match line {
                Some(line) if !line.trim().is_empty() => {
                    paragraph.push_str(&line);
                    paragraph.push('\n');
                }
                _ if !paragraph.is_empty() => {
                    self.records.add_call(
                        "plain text, an output in each paragraph",
                        texts::plain_call(&paragraph),
                    );
                    paragraph.clear();
                }
                _ => {}
            }
            if !(self.found)(self.records) {
                return Ok(());
            }
            if is_end {
                return self.end();
            }
        }
    }

    /// Ends the file. Halves of calls wait on, since batches have their answers in another file.
    fn end(&mut self) -> anyhow::Result<()> {
        self.records.end_list();
        (self.found)(self.records);
        Ok(())
    }
}
