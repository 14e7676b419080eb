//! Reads the text of a grammar, and says where a fault is.

use crate::GrammarError;

/// The rest of a text.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    text: &'a str,
    pub(crate) rest: &'a str,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Reader { text, rest: text }
    }

    pub(crate) fn fault(&self, reason: &str) -> GrammarError {
        let before = &self.text[..self.text.len() - self.rest.len()];
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        GrammarError::at(format!("line {line}, column {column}"), reason)
    }

    pub(crate) fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Takes all characters up to the first that is not one of these.
    pub(crate) fn take_while(&mut self, is_one: impl Fn(char) -> bool) -> &'a str {
        let len = self.rest.find(|c| !is_one(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(len);
        self.rest = rest;
        taken
    }

    /// The next character, which stays.
    pub(crate) fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    pub(crate) fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.rest = &self.rest[next.len_utf8()..];
        Some(next)
    }

    /// The text of a string whose first quote is taken already.
    pub(crate) fn string(&mut self) -> Result<String, GrammarError> {
        let mut text = String::new();
        loop {
            match self.peek() {
                Some('"') => {
                    self.next();
                    return Ok(text);
                }
                None | Some('\n') => return Err(self.fault("a string is not closed")),
                Some(_) => text.push(self.character()?),
            }
        }
    }

    /// A character of a string or class, which may be escaped.
    pub(crate) fn character(&mut self) -> Result<char, GrammarError> {
        let next = self.next();
        if next != Some('\\') {
            return next.ok_or_else(|| self.fault("the grammar ends here"));
        }
        let Some(escaped) = self.next() else {
            return Err(self.fault("the grammar ends here"));
        };
        let digits = match escaped {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other if !other.is_alphanumeric() => return Ok(other),
            _ => return Err(self.fault("this escape is not known")),
        };
        let code = self
            .rest
            .get(..digits)
            .and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let Some(character) = code.and_then(char::from_u32) else {
            return Err(self.fault("this escape names no character"));
        };
        self.rest = &self.rest[digits..];
        Ok(character)
    }
}
