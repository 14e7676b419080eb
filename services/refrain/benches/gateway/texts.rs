//! The bodies of requests. Their texts are lines of this project's own pages in random order, so each text is new and
//! none is random letters.

use anyhow::ensure;
use refrain_tokenization::Tokenizer;
use serde_json::{Value, json};

use crate::MODEL;

/// Pages whose lines make the texts: prose, code and tables.
const PAGES: [&str; 4] = [
    include_str!("../../../../ARCHITECTURE.md"),
    include_str!("../../../../docs/benchmarks.md"),
    include_str!("../../../../docs/operations.md"),
    include_str!("../../src/roles.rs"),
];

/// Makes texts. Equal seeds make equal texts.
pub(crate) struct Texts {
    lines: Vec<&'static str>,
    state: u64,
}

impl Texts {
    pub(crate) fn new(seed: u64) -> Self {
        let lines = PAGES.iter().flat_map(|page| page.lines());
        Texts {
            lines: lines.filter(|line| line.len() > 20).collect(),
            state: seed,
        }
    }

    /// The next random number, by splitmix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// A text of this many bytes, or a few less so that it ends with a whole character.
    pub(crate) fn text(&mut self, bytes: usize) -> String {
        let mut text = String::with_capacity(bytes + 200);
        while text.len() < bytes {
            let at = self.next() as usize % self.lines.len();
            text.push_str(self.lines[at]);
            text.push('\n');
        }
        while text.len() > bytes {
            text.pop();
        }
        text
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// The body of a chat, in the order of fields in which clients send them. `rate` is that of the engine's tokens per
/// second; 0: at once.
pub(crate) fn chat(messages: &[Value], tokens: u64, stream: bool, rate: u64) -> Vec<u8> {
    let messages = Value::from(messages.to_vec());
    let rate = match rate {
        0 => String::new(),
        rate => format!("\"top_k\":{rate},"),
    };
    format!(
        "{{\"model\":\"{MODEL}\",\"messages\":{messages},\"max_tokens\":{tokens},\"temperature\":0.7,{rate}\
         \"stream\":{stream}}}"
    )
    .into_bytes()
}

/// A short question.
pub(crate) fn short(texts: &mut Texts) -> Vec<Value> {
    let question = format!("What does this line mean? {}", texts.text(80));
    vec![
        message("system", "You answer with one word."),
        message("user", &question),
    ]
}

/// A question about a text of this many bytes.
pub(crate) fn long(texts: &mut Texts, bytes: usize) -> Vec<Value> {
    vec![
        message("system", "You summarise texts."),
        message("user", &texts.text(bytes)),
    ]
}

/// A conversation of at least `tokens` tokens, in turns of some hundred tokens.
pub(crate) fn conversation(
    texts: &mut Texts,
    tokenizer: &Tokenizer,
    tokens: usize,
) -> anyhow::Result<Vec<Value>> {
    let mut messages = vec![message("system", "You help with this project.")];
    let mut count = 0;
    while count < tokens {
        let text = texts.text(1_000);
        count += tokenizer.encode(&text)?.len();
        let role = ["assistant", "user"][messages.len() % 2];
        messages.push(message(role, &text));
    }
    if messages.len() % 2 == 1 {
        messages.push(message("user", "Go on."));
    }
    ensure!(messages.len() % 2 == 0, "the last message is the user's");
    Ok(messages)
}

/// The next turn of a conversation: an answer, and a new question.
pub(crate) fn turn(texts: &mut Texts, messages: &mut Vec<Value>) {
    messages.push(message("assistant", &texts.text(700)));
    messages.push(message("user", &texts.text(700)));
}

/// A conversation whose body has this many bytes.
pub(crate) fn of_bytes(texts: &mut Texts, bytes: usize) -> Vec<Value> {
    let mut messages = vec![message("system", "You help with this project.")];
    let mut written = 0;
    while written < bytes {
        let text = texts.text(6_000);
        let role = ["assistant", "user"][messages.len() % 2];
        let next = message(role, &text);
        written += next.to_string().len() + 1;
        messages.push(next);
    }
    messages
}
