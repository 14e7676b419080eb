//! A reader of Rust sources that is just good enough for import paths: tokens, items, and `use` declarations.

use std::collections::BTreeSet;

/// A path that a module mentions, such as `crate::a::B` or `super::c`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PathUse {
    /// The segments of the path. A glob ends with `*`.
    pub(super) segments: Vec<String>,
    /// The name under which a `use` declaration makes the target known; `None` for a path within code.
    pub(super) alias: Option<String>,
    /// Whether it is a `pub use`, with or without a restriction.
    pub(super) is_reexport: bool,
    /// The inline modules of the file around the path.
    pub(super) inline_modules: Vec<String>,
}

/// The parts of a source file that matter for imports. Test code is left out.
#[derive(Debug, Default)]
pub(super) struct Source {
    /// Modules in files of their own that the file declares.
    pub(super) declared: BTreeSet<String>,
    /// Such modules that are declared for tests only.
    pub(super) declared_for_tests: BTreeSet<String>,
    /// Names of the items that the file defines.
    pub(super) defined: BTreeSet<String>,
    /// Paths in `use` declarations and in code.
    pub(super) paths: Vec<PathUse>,
    /// Identifiers in the code outside of `use` declarations.
    pub(super) mentioned: BTreeSet<String>,
}

impl Source {
    /// Reads a file.
    pub(super) fn read(text: &str) -> Self {
        let mut reader = Reader {
            tokens: without_visibility_paths(tokens(text)),
            at: 0,
            source: Source::default(),
        };
        reader.block(&mut Vec::new());
        reader.source
    }
}

/// The tokens with `pub(in a::b)` reduced to `pub`: the path of a visibility imports nothing.
fn without_visibility_paths(tokens: Vec<String>) -> Vec<String> {
    let mut kept: Vec<String> = Vec::with_capacity(tokens.len());
    let mut is_hidden = false;
    for token in tokens {
        if is_hidden {
            is_hidden = token != ")";
        } else if token == "in" && kept.ends_with(&["pub".to_owned(), "(".to_owned()]) {
            kept.pop();
            is_hidden = true;
        } else {
            kept.push(token);
        }
    }
    kept
}

/// Identifiers, `::`, and single characters, without comments, strings and white space.
fn tokens(text: &str) -> Vec<String> {
    let characters: Vec<char> = text.chars().collect();
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    let mut tokens: Vec<String> = Vec::new();
    let mut at = 0;
    while let Some(&character) = characters.get(at) {
        let next = characters.get(at + 1).copied().unwrap_or(' ');
        if character == '/' && next == '/' {
            while characters.get(at).is_some_and(|one| *one != '\n') {
                at += 1;
            }
        } else if character == '/' && next == '*' {
            while at < characters.len()
                && !(characters[at] == '*' && characters.get(at + 1) == Some(&'/'))
            {
                at += 1;
            }
            at += 2;
        } else if let Some(end) = raw_string_end(&characters, at) {
            at = end;
        } else if character == '"' {
            at = string_end(&characters, at);
        } else if character == '\'' {
            // A character or a lifetime.
            at = match (next, characters.get(at + 2)) {
                ('\\', _) => {
                    let rest = &characters[at + 3..];
                    at + 4
                        + rest
                            .iter()
                            .position(|one| *one == '\'')
                            .unwrap_or(rest.len())
                }
                (_, Some('\'')) => at + 3,
                _ => at + 1,
            };
        } else if is_word(character) {
            let start = at;
            while characters.get(at).is_some_and(|one| is_word(*one)) {
                at += 1;
            }
            tokens.push(characters[start..at].iter().collect());
        } else if character == ':' && next == ':' {
            tokens.push("::".to_owned());
            at += 2;
        } else {
            if !character.is_whitespace() {
                tokens.push(character.to_string());
            }
            at += 1;
        }
    }
    tokens
}

/// The end of a raw string that begins here, such as `br#"..."#`.
fn raw_string_end(characters: &[char], start: usize) -> Option<usize> {
    let is_word = |at: usize| {
        characters
            .get(at)
            .is_some_and(|one| one.is_alphanumeric() || *one == '_')
    };
    if start > 0 && is_word(start - 1) {
        return None;
    }
    let mut at = start + usize::from(matches!(characters.get(start), Some('b' | 'c')));
    if characters.get(at) != Some(&'r') {
        return None;
    }
    at += 1;
    let hashes = characters[at..]
        .iter()
        .take_while(|one| **one == '#')
        .count();
    at += hashes;
    if characters.get(at) != Some(&'"') {
        return None;
    }
    at += 1;
    while at < characters.len() {
        let closes = characters[at] == '"'
            && characters[at + 1..]
                .iter()
                .take(hashes)
                .filter(|one| **one == '#')
                .count()
                == hashes;
        if closes {
            return Some(at + 1 + hashes);
        }
        at += 1;
    }
    Some(at)
}

fn string_end(characters: &[char], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(character) = characters.get(at) {
        match character {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    at
}

struct Reader {
    tokens: Vec<String>,
    at: usize,
    source: Source,
}

impl Reader {
    fn peek(&self, ahead: usize) -> &str {
        self.tokens.get(self.at + ahead).map_or("", String::as_str)
    }

    /// Reads to the end of the file or of the block around it.
    fn block(&mut self, inline_modules: &mut Vec<String>) {
        let mut depth = 0usize;
        while self.at < self.tokens.len() {
            match self.peek(0) {
                "#" if self.is_test_attribute() => self.skip_test_item(),
                "#" => self.skip_attribute(),
                "{" => {
                    depth += 1;
                    self.at += 1;
                }
                "}" => {
                    self.at += 1;
                    match depth.checked_sub(1) {
                        Some(outer) => depth = outer,
                        None => return,
                    }
                }
                "mod" if self.peek(2) == ";" => {
                    self.source.declared.insert(self.peek(1).to_owned());
                    self.at += 3;
                }
                "mod" if self.peek(2) == "{" => {
                    inline_modules.push(self.peek(1).to_owned());
                    self.at += 3;
                    self.block(inline_modules);
                    inline_modules.pop();
                }
                // `use<'a>` in a type is not a declaration.
                "use" if self.peek(1) != "<" => self.use_declaration(inline_modules),
                "struct" | "enum" | "union" | "trait" | "type" | "const" | "static" | "fn" => {
                    let name = match self.peek(1) {
                        "mut" => self.peek(2),
                        name => name,
                    };
                    self.source.defined.insert(name.to_owned());
                    self.at += 1;
                }
                "macro_rules" => {
                    self.source.defined.insert(self.peek(2).to_owned());
                    self.skip_macro();
                }
                _ => self.code(inline_modules),
            }
        }
    }

    /// Skips the rules of a macro. Their `super` depends on the place of the call.
    fn skip_macro(&mut self) {
        let mut depth = 0usize;
        while self.at < self.tokens.len() {
            let token = self.peek(0).to_owned();
            self.at += 1;
            match token.as_str() {
                "{" => depth += 1,
                "}" if depth == 1 => return,
                "}" => depth -= 1,
                _ => {}
            }
        }
    }

    /// Reads a token of code, or a path.
    fn code(&mut self, inline_modules: &[String]) {
        let continues = self.at > 0 && self.tokens[self.at - 1] == "::";
        let first = self.peek(0).to_owned();
        self.at += 1;
        let is_word =
            |token: &str| token.starts_with(|one: char| one.is_alphanumeric() || one == '_');
        if !is_word(&first) {
            return;
        }
        let mut segments = vec![first];
        while self.peek(0) == "::" && is_word(self.peek(1)) {
            segments.push(self.peek(1).to_owned());
            self.at += 2;
        }
        self.source.mentioned.insert(segments[0].clone());
        if segments.len() > 1 && !continues {
            self.source.paths.push(PathUse {
                segments,
                alias: None,
                is_reexport: false,
                inline_modules: inline_modules.to_owned(),
            });
        }
    }

    fn use_declaration(&mut self, inline_modules: &[String]) {
        let before = self.at.checked_sub(1).map(|at| self.tokens[at].as_str());
        // `pub use` or `pub(crate) use`.
        let is_reexport = matches!(before, Some("pub" | ")"));
        self.at += 1;
        let mut found = Vec::new();
        self.use_tree(&[], &mut found);
        self.at += usize::from(self.peek(0) == ";");
        for (segments, alias) in found {
            self.source.paths.push(PathUse {
                segments,
                alias: Some(alias),
                is_reexport,
                inline_modules: inline_modules.to_owned(),
            });
        }
    }

    fn use_tree(&mut self, prefix: &[String], found: &mut Vec<(Vec<String>, String)>) {
        let mut path = prefix.to_vec();
        loop {
            match self.peek(0) {
                "" | ";" | "," | "}" => break,
                "::" => self.at += 1,
                "{" => {
                    self.at += 1;
                    while !matches!(self.peek(0), "" | "}") {
                        self.use_tree(&path, found);
                        self.at += usize::from(self.peek(0) == ",");
                    }
                    self.at += 1;
                    return;
                }
                "as" => {
                    let alias = self.peek(1).to_owned();
                    self.at += 2;
                    found.push((path, alias));
                    return;
                }
                segment => {
                    if segment != "self" || path.is_empty() {
                        path.push(segment.to_owned());
                    }
                    self.at += 1;
                }
            }
        }
        if let Some(last) = path.last().cloned() {
            found.push((path, last));
        }
    }

    /// Whether an attribute that mentions `cfg` and `test`, and no `not`, begins here.
    fn is_test_attribute(&self) -> bool {
        let end = self.attribute_end();
        let words = &self.tokens[self.at..end];
        let has = |word: &str| words.iter().any(|token| token == word);
        // `any(test, feature = "...")` is for other builds as well.
        has("cfg") && has("test") && !has("not") && !has("any")
            || words.get(2).is_some_and(|word| word == "test")
    }

    fn attribute_end(&self) -> usize {
        let mut depth = 0usize;
        let mut at = self.at + 1;
        while let Some(token) = self.tokens.get(at) {
            at += 1;
            match token.as_str() {
                "[" => depth += 1,
                "]" if depth <= 1 => break,
                "]" => depth -= 1,
                _ => {}
            }
        }
        at
    }

    fn skip_attribute(&mut self) {
        self.at = self.attribute_end();
    }

    /// Skips an attribute and the item, field, variant or statement behind it.
    fn skip_test_item(&mut self) {
        self.skip_attribute();
        while self.peek(0) == "#" {
            self.skip_attribute();
        }
        let is_item = matches!(
            self.peek(0),
            "fn" | "mod"
                | "struct"
                | "impl"
                | "use"
                | "pub"
                | "const"
                | "static"
                | "enum"
                | "trait"
                | "type"
                | "async"
                | "unsafe"
                | "extern"
                | "let"
                | "macro_rules"
                | "thread_local"
        );
        let start = self.at;
        let mut depth = 0usize;
        while self.at < self.tokens.len() {
            match self.peek(0) {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" => depth = depth.saturating_sub(1),
                "}" if depth == 0 => break,
                "}" => {
                    depth -= 1;
                    if depth == 0 && self.peek(1) != ";" && self.peek(1) != "." {
                        self.at += 1;
                        break;
                    }
                }
                ";" if depth == 0 => {
                    self.at += 1;
                    break;
                }
                "," if depth == 0 && !is_item => {
                    self.at += 1;
                    break;
                }
                _ => {}
            }
            self.at += 1;
        }
        let item = &self.tokens[start..self.at];
        if let Some(place) = item.iter().position(|token| token == "mod")
            && item.get(place + 2).is_some_and(|token| token == ";")
        {
            self.source
                .declared_for_tests
                .insert(item[place + 1].clone());
        }
    }
}
