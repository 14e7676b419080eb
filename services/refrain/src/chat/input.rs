//! The meaning of a line of the input: a command, or a question.

/// The commands, for people.
pub(super) const HELP: &str = "\
/new          begin another conversation
/system TEXT  set the system prompt, or none without TEXT
/help         show this
/quit         end; so do Ctrl-D, and Ctrl-C outside of an answer
Every other line is a question.";

/// A line of the input.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input<'a> {
    /// A blank line.
    Nothing,
    /// Another conversation.
    New,
    /// The system prompt, or none.
    System(Option<&'a str>),
    /// The list of commands.
    Help,
    /// The end.
    Quit,
    /// A command that does not exist.
    Unknown(&'a str),
    /// A message to the model.
    Question(&'a str),
}

impl<'a> Input<'a> {
    pub(super) fn read(line: &'a str) -> Self {
        let line = line.trim();
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match (name, rest.trim_start()) {
            ("", _) => Input::Nothing,
            ("/new", "") => Input::New,
            ("/system", text) => Input::System(Some(text).filter(|text| !text.is_empty())),
            ("/help", "") => Input::Help,
            ("/quit", "") => Input::Quit,
            // Words after a command that takes none would be lost.
            _ if line.starts_with('/') => Input::Unknown(line),
            _ => Input::Question(line),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_known_by_their_whole_name() {
        for (line, input) in [
            ("", Input::Nothing),
            ("  \t", Input::Nothing),
            ("/new", Input::New),
            (" /help ", Input::Help),
            ("/quit", Input::Quit),
            ("/system", Input::System(None)),
            ("/system  Be brief. ", Input::System(Some("Be brief."))),
            ("/quits", Input::Unknown("/quits")),
            ("/new topic", Input::Unknown("/new topic")),
            ("What is /new?", Input::Question("What is /new?")),
        ] {
            assert_eq!(Input::read(line), input, "{line:?}");
        }
        for line in HELP.lines().filter(|line| line.starts_with('/')) {
            let name = line.split_whitespace().next().unwrap();
            assert!(!matches!(Input::read(name), Input::Unknown(_)), "{line}");
        }
    }
}
