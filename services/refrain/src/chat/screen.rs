//! Answers, notes and prompts on a terminal, or plain text in a pipe.

use std::io::{IsTerminal, Write};

use super::answer::Span;

const ACCEPTED: &str = "\x1b[32m";
const DIM: &str = "\x1b[2m";
const RESET: &str = "\x1b[0m";

/// The two outputs of the process. Answers go to the first, so that a script has nothing else there.
pub(super) struct Screen {
    out: Box<dyn Write + Send>,
    notes: Box<dyn Write + Send>,
    /// Whether somebody types the questions and reads the answers.
    is_interactive: bool,
    has_colours: bool,
    notes_have_colours: bool,
    /// Whether the line of the answer has no end yet.
    is_within_line: bool,
    was_reasoning: bool,
}

impl Screen {
    pub(super) fn of_process() -> Self {
        let is_terminal = std::io::stdout().is_terminal();
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        let has_colours =
            is_terminal && variable("NO_COLOR").is_empty() && variable("TERM") != "dumb";
        Screen {
            out: Box::new(std::io::stdout()),
            notes: Box::new(std::io::stderr()),
            is_interactive: is_terminal && std::io::stdin().is_terminal(),
            has_colours,
            notes_have_colours: has_colours && std::io::stderr().is_terminal(),
            is_within_line: false,
            was_reasoning: false,
        }
    }

    pub(super) fn is_interactive(&self) -> bool {
        self.is_interactive
    }

    /// Says who answers, and what the colour means.
    pub(super) fn greet(&mut self, url: &str, model: &str) -> std::io::Result<()> {
        if !self.is_interactive {
            return Ok(());
        }
        let mut line = format!("{model} at {url}; /help lists the commands.");
        if self.notes_have_colours {
            line +=
                &format!(" {RESET}{ACCEPTED}This colour{RESET}{DIM} is text that drafts brought.");
        }
        self.note(&line)
    }

    pub(super) fn prompt(&mut self) -> std::io::Result<()> {
        if self.is_interactive {
            write!(self.out, "> ")?;
        }
        self.out.flush()
    }

    /// Ends the line of a prompt that nobody answered.
    pub(super) fn leave(&mut self) -> std::io::Result<()> {
        match self.is_interactive {
            true => writeln!(self.out),
            false => Ok(()),
        }
    }

    /// Shows a part of an answer. A pipe gets no reasoning.
    pub(super) fn show(&mut self, span: &Span) -> std::io::Result<()> {
        if span.is_reasoning && !self.is_interactive {
            return Ok(());
        }
        if self.was_reasoning && !span.is_reasoning && self.is_within_line {
            writeln!(self.out)?;
        }
        self.was_reasoning = span.is_reasoning;
        let text = match self.is_interactive {
            true => printable(&span.text),
            false => span.text.clone(),
        };
        let style = match (span.is_reasoning, span.is_drafted) {
            _ if !self.has_colours => String::new(),
            (false, true) => ACCEPTED.to_owned(),
            (true, true) => format!("{DIM}{ACCEPTED}"),
            (true, false) => DIM.to_owned(),
            (false, false) => String::new(),
        };
        let end = if style.is_empty() { "" } else { RESET };
        write!(self.out, "{style}{text}{end}")?;
        self.is_within_line = true;
        self.out.flush()
    }

    /// Ends the line of an answer. In a pipe an empty answer is a line as well.
    pub(super) fn end_answer(&mut self) -> std::io::Result<()> {
        self.was_reasoning = false;
        if std::mem::take(&mut self.is_within_line) || !self.is_interactive {
            writeln!(self.out)?;
        }
        self.out.flush()
    }

    /// Says something about an answer, or about this program.
    pub(super) fn note(&mut self, text: &str) -> std::io::Result<()> {
        match self.notes_have_colours {
            true => writeln!(self.notes, "{DIM}{text}{RESET}"),
            false => writeln!(self.notes, "{text}"),
        }
    }

    /// Says what went wrong.
    pub(super) fn fault(&mut self, text: &str) -> std::io::Result<()> {
        let text = printable(text);
        writeln!(self.notes, "{text}")
    }
}

/// Text without the characters by which a model could steer a terminal.
fn printable(text: &str) -> String {
    let is_plain = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().filter(is_plain).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// An answer as a screen shows it.
    fn shown(is_interactive: bool, has_colours: bool) -> String {
        let out = Shared::default();
        let mut screen = Screen {
            out: Box::new(out.clone()),
            notes: Box::new(out.clone()),
            is_interactive,
            has_colours,
            notes_have_colours: has_colours,
            is_within_line: false,
            was_reasoning: false,
        };
        for (text, is_drafted, is_reasoning) in [
            ("Hm.", false, true),
            ("SELECT\x1b[2J", true, false),
            (" 1", false, false),
        ] {
            let span = Span {
                text: text.to_owned(),
                is_drafted,
                is_reasoning,
            };
            screen.show(&span).unwrap();
        }
        screen.end_answer().unwrap();
        screen.note("2 tokens").unwrap();
        let bytes = out.0.lock().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn only_a_terminal_with_colours_gets_them() {
        assert_eq!(
            shown(true, true),
            "\x1b[2mHm.\x1b[0m\n\x1b[32mSELECT[2J\x1b[0m 1\n\x1b[2m2 tokens\x1b[0m\n"
        );
        assert_eq!(shown(true, false), "Hm.\nSELECT[2J 1\n2 tokens\n");
        assert_eq!(shown(false, false), "SELECT\x1b[2J 1\n2 tokens\n");
    }
}
