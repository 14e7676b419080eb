//! Cuts a stream into values of JSON and lines of other text, without parsing and in bounded memory.
//!
//! Values may stand in lines, be printed over many lines, follow each other, or be the elements of one list.

use std::io::Read;

use super::members::words;

/// The longest value or line that is accepted, in bytes. A parsed value takes several times its size in memory.
pub(super) const PIECE_BYTES_MAX: usize = 64 << 20;

const READ_BYTES: usize = 64 << 10;

/// Bytes by which it is told whether a list of records begins.
const HEAD_BYTES: usize = 4 << 10;

/// Keys of an object whose list, as its first member, holds the records.
const LISTS: &str = "data records logs results items rows calls requests observations traces \
    generations conversations";

/// Keys with which messages begin, and the bytes in which one of them stands.
const MESSAGE_KEYS: [&[u8]; 4] = [b"role", b"from", b"\"text\"", b"message"];
const MESSAGE_BYTES: usize = 24;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// A value, or bytes that begin like one.
    Json,
    /// A line that begins otherwise.
    Line,
    /// The end of a list.
    ListEnd,
    /// A value or line that was cut off, since it is too long.
    TooLong,
}

/// The pieces of a stream.
pub(super) struct Pieces<R> {
    stream: R,
    buffer: Vec<u8>,
    /// Place of the next byte in the buffer, and of the piece that was returned last.
    next: usize,
    piece: std::ops::Range<usize>,
    is_at_end: bool,
    /// Whether the elements of a list are returned, and whether the list is a member of an object.
    in_list: bool,
    in_object: bool,
    /// Line feeds before `next`, and the number of the line in which the last piece began.
    lines: u64,
    line: u64,
}

impl<R: Read> Pieces<R> {
    pub(super) fn new(stream: R) -> Self {
        Pieces {
            stream,
            buffer: Vec::new(),
            next: 0,
            piece: 0..0,
            is_at_end: false,
            in_list: false,
            in_object: false,
            lines: 0,
            line: 0,
        }
    }

    /// The bytes of the last piece.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.piece.clone()]
    }

    /// The number of the line in which the last piece began, from 1.
    pub(super) fn line(&self) -> u64 {
        self.line
    }

    /// The next piece, or `None` at the end.
    pub(super) fn advance(&mut self) -> std::io::Result<Option<Piece>> {
        loop {
            let Some(byte) = self.byte(0)? else {
                self.piece = 0..0;
                self.line = self.lines + 1;
                return Ok(None);
            };
            match byte {
                b' ' | b'\t' | b'\r' | b'\n' | 0xef | 0xbb | 0xbf => self.skip(1),
                b',' if self.in_list => self.skip(1),
                b']' if self.in_list => {
                    self.skip(1);
                    self.in_list = false;
                    self.line = self.lines + 1;
                    self.piece = 0..0;
                    return Ok(Some(Piece::ListEnd));
                }
                // The members after the list, which say nothing about its records.
                _ if self.in_object && !self.in_list => {
                    self.in_object = false;
                    self.skip_members()?;
                }
                b'{' | b'[' => match bytes_before_records(self.head()?) {
                    Some(bytes) if !self.in_list => {
                        self.skip(bytes);
                        self.in_list = true;
                        self.in_object = byte == b'{';
                    }
                    _ if byte == b'{' || begins_values(self.head()?) => {
                        return self.value().map(Some);
                    }
                    _ => return self.rest_of_line(Piece::Line).map(Some),
                },
                _ => return self.rest_of_line(Piece::Line).map(Some),
            }
        }
    }

    /// The byte at this place after the next one.
    fn byte(&mut self, ahead: usize) -> std::io::Result<Option<u8>> {
        while self.next + ahead >= self.buffer.len() && !self.is_at_end {
            self.fill()?;
        }
        Ok(self.buffer.get(self.next + ahead).copied())
    }

    fn fill(&mut self) -> std::io::Result<()> {
        if self.next >= READ_BYTES {
            self.buffer.drain(..self.next);
            self.next = 0;
        }
        let len = self.buffer.len();
        self.buffer.resize(len + READ_BYTES, 0);
        let read = self.stream.read(&mut self.buffer[len..]);
        self.buffer
            .truncate(len + read.as_ref().map_or(0, |bytes| *bytes));
        match read {
            Ok(bytes) => self.is_at_end = bytes == 0,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn skip(&mut self, bytes: usize) {
        let end = (self.next + bytes).min(self.buffer.len());
        self.lines += memchr::memchr_iter(b'\n', &self.buffer[self.next..end]).count() as u64;
        self.next = end;
    }

    /// The next bytes.
    fn head(&mut self) -> std::io::Result<&[u8]> {
        self.byte(HEAD_BYTES)?;
        let end = self.buffer.len().min(self.next + HEAD_BYTES);
        Ok(&self.buffer[self.next..end])
    }

    /// Skips the rest of an object.
    fn skip_members(&mut self) -> std::io::Result<()> {
        let (mut depth, mut in_string) = (1_u64, false);
        while let Some(byte) = self.byte(0)? {
            match (in_string, byte) {
                (true, b'\\') => self.skip(1),
                (_, b'"') => in_string = !in_string,
                (false, b'{' | b'[') => depth += 1,
                (false, b'}' | b']') => depth -= 1,
                _ => {}
            }
            self.byte(1)?;
            self.skip(1);
            if depth == 0 {
                break;
            }
        }
        Ok(())
    }

    /// The value that begins here.
    fn value(&mut self) -> std::io::Result<Piece> {
        let mut scan = Scan::default();
        let mut at = 0;
        loop {
            while self.next + at >= self.buffer.len() && !self.is_at_end {
                self.fill()?;
            }
            let rest = &self.buffer[self.next + at..];
            if rest.is_empty() {
                // The file ends within a value.
                return Ok(self.returned(at, Piece::Json));
            }
            match scan.scan(rest) {
                Scanned::All => at += rest.len(),
                Scanned::Ends(bytes) => return Ok(self.returned(at + bytes, Piece::Json)),
            }
            if at > PIECE_BYTES_MAX {
                self.returned(at, Piece::TooLong);
                return self.rest_of_line(Piece::TooLong);
            }
        }
    }

    fn returned(&mut self, bytes: usize, piece: Piece) -> Piece {
        self.line = self.lines + 1;
        self.piece = self.next..self.next + bytes;
        self.lines += memchr::memchr_iter(b'\n', self.bytes()).count() as u64;
        self.next += bytes;
        piece
    }

    /// The line from here on. A line that is too long is cut off, and its rest is skipped.
    fn rest_of_line(&mut self, piece: Piece) -> std::io::Result<Piece> {
        let mut at = 0;
        loop {
            let rest = &self.buffer[self.next + at..];
            let end = memchr::memchr(b'\n', rest).map(|end| at + end);
            at += rest.len();
            if let Some(end) = end.or((self.is_at_end).then_some(at)) {
                return Ok(self.returned(end, piece));
            }
            if at > PIECE_BYTES_MAX {
                self.buffer.clear();
                self.next = 0;
                self.fill()?;
                return self.rest_of_line(Piece::TooLong);
            }
            self.fill()?;
        }
    }
}

/// The bytes before the records, if a text begins with a list of them, or with an object whose first member is one.
fn bytes_before_records(head: &[u8]) -> Option<usize> {
    let mut rest = head;
    if let Some(object) = head.strip_prefix(b"{") {
        let key = object.trim_ascii_start().strip_prefix(b"\"")?;
        let key_len = memchr::memchr(b'"', key)?;
        if !words(LISTS).any(|list| list.as_bytes() == &key[..key_len]) {
            return None;
        }
        let value = key[key_len + 1..].trim_ascii_start().strip_prefix(b":")?;
        rest = value.trim_ascii_start();
    }
    rest = rest.strip_prefix(b"[")?;
    let first = rest.trim_ascii_start();
    // A list of messages is no list of records.
    let first_key = &first[..first.len().min(MESSAGE_BYTES)];
    let is_message = head.starts_with(b"{")
        && MESSAGE_KEYS
            .iter()
            .any(|key| memchr::memmem::find(first_key, key).is_some());
    (first.starts_with(b"{") && !is_message).then(|| head.len() - rest.len())
}

/// Whether a list of values begins. Loggers begin lines with a time in brackets.
fn begins_values(head: &[u8]) -> bool {
    let first = head
        .get(1..)
        .and_then(|list| list.trim_ascii_start().first());
    matches!(first, Some(b'{' | b'[' | b'"' | b']'))
}

enum Scanned {
    /// The value goes on after these bytes.
    All,
    /// It ends after so many, or is none.
    Ends(usize),
}

/// Where a scan is within a value.
#[derive(Default)]
struct Scan {
    /// The lists and objects around; true for an object.
    open: Vec<bool>,
    in_string: bool,
    is_escaped: bool,
    /// The last byte outside of strings that is no white space, and whether a line ended after it.
    last: u8,
    is_new_line: bool,
}

impl Scan {
    fn scan(&mut self, bytes: &[u8]) -> Scanned {
        let mut at = 0;
        while at < bytes.len() {
            if self.in_string {
                if std::mem::take(&mut self.is_escaped) {
                    at += 1;
                    continue;
                }
                let Some(found) = memchr::memchr3(b'"', b'\\', b'\n', &bytes[at..]) else {
                    return Scanned::All;
                };
                at += found;
                match bytes[at] {
                    b'"' => {
                        self.in_string = false;
                        self.last = b'"';
                    }
                    b'\\' => self.is_escaped = true,
                    // No text of JSON has a line feed, so this line was cut off.
                    _ => return Scanned::Ends(at),
                }
                at += 1;
                continue;
            }
            let byte = bytes[at];
            match byte {
                b'\n' => self.is_new_line = true,
                b' ' | b'\t' | b'\r' => {}
                b'{' | b'[' | b'"' => {
                    // A value cannot begin here, so the line before was cut off, and this one is another record.
                    let in_object = self.open.last() == Some(&true);
                    let is_misplaced = match self.last {
                        b',' | b'{' => in_object && byte != b'"',
                        b'[' | b':' | 0 => false,
                        _ => true,
                    };
                    if is_misplaced && self.is_new_line && byte != b'"' {
                        return Scanned::Ends(at);
                    }
                    match byte {
                        b'"' => self.in_string = true,
                        _ => self.open.push(byte == b'{'),
                    }
                    (self.last, self.is_new_line) = (byte, false);
                }
                b'}' | b']' => {
                    self.open.pop();
                    (self.last, self.is_new_line) = (byte, false);
                    if self.open.is_empty() {
                        return Scanned::Ends(at + 1);
                    }
                }
                _ => (self.last, self.is_new_line) = (byte, false),
            }
            at += 1;
        }
        Scanned::All
    }
}
