//! `refrain chat`: a conversation with a running gateway, in a terminal or with lines from a pipe.
//!
//! `client` sends the questions, `answer` reads the events of an answer, and `screen` prints it.

mod answer;
mod client;
mod fault;
mod input;
mod screen;

use std::io::BufRead;

use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use self::answer::AnswerFigures;
use self::client::ChatClient;
use self::input::{HELP, Input};
use self::screen::Screen;
use crate::{command, config};

/// The gateway, and the fields of the requests to it.
#[derive(Args)]
pub struct ChatArgs {
    /// URL of the gateway.
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,
    /// API key of a tenant [default: the first key of `refrain up`].
    #[arg(
        long,
        value_name = "KEY",
        env = "REFRAIN_API_KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,
    /// Model [default: the first that the gateway lists].
    #[arg(long)]
    model: Option<String>,
    /// System prompt of the conversation. `/system TEXT` sets another one.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Which drafts may be used: `auto`, `suffix`, `eagle3`, `draft_model` or `off` [default: the gateway's choice].
    #[arg(long, value_name = "MODE")]
    speculation: Option<String>,
    /// Most tokens of an answer [default: the gateway's limit].
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// Temperature. At 0 an equal question has an equal answer, which earlier ones draft best.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
}

/// Talks until the input ends.
///
/// # Errors
/// Nothing listens at the URL, the key is refused, or a question of a pipe has no answer.
pub fn run(args: ChatArgs) -> anyhow::Result<()> {
    command::run(chat(args))
}

async fn chat(args: ChatArgs) -> anyhow::Result<()> {
    let default_key = || config::dev_keys().into_iter().next().unwrap_or_default();
    let key = args.api_key.unwrap_or_else(default_key);
    let client = ChatClient::connect(&args.url, key)?;
    let listed = client.first_model().await?;
    let model = args.model.unwrap_or(listed);
    let mut screen = Screen::of_process();
    screen.greet(&args.url, &model)?;
    let mut conversation = Conversation {
        client,
        // A field that is null has its default.
        fields: json!({
            "model": model,
            "temperature": args.temperature,
            "speculation": args.speculation,
            "max_tokens": args.max_tokens,
            "stream": true,
            "stream_options": {"include_usage": true},
        }),
        system: args.system,
        messages: Vec::new(),
        traces_steps: true,
    };
    // From here on an interrupt ends an answer, or the program at its prompt.
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut lines = input_lines();
    let mut unanswered = 0;
    loop {
        screen.prompt()?;
        let line = tokio::select! {
            line = lines.recv() => line,
            _ = interrupts.recv() => None,
        };
        let Some(line) = line else {
            screen.leave()?;
            break;
        };
        match Input::read(&line?) {
            Input::Nothing => {}
            Input::Quit => break,
            Input::Help => screen.note(HELP)?,
            Input::New => conversation.messages.clear(),
            Input::System(text) => conversation.system = text.map(str::to_owned),
            Input::Unknown(name) => {
                screen.fault(&format!("There is no command {name}; /help lists them."))?;
            }
            Input::Question(text) => {
                if let Err(fault) = conversation.ask(text, &mut screen, &mut interrupts).await {
                    unanswered += 1;
                    screen.fault(&format!("{fault:#}"))?;
                }
            }
        }
    }
    // A script learns of it by the status; a person has seen it.
    if unanswered > 0 && !screen.is_interactive() {
        bail!("questions without an answer: {unanswered}");
    }
    Ok(())
}

/// The lines of the standard input. A thread of its own reads them, which the end of the program does not wait for.
fn input_lines() -> mpsc::Receiver<std::io::Result<String>> {
    let (sender, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let is_fault = line.is_err();
            if sender.blocking_send(line).is_err() || is_fault {
                return;
            }
        }
    });
    lines
}

/// The messages so far, and the way to ask the next question.
struct Conversation {
    client: ChatClient,
    /// The fields of all requests.
    fields: Value,
    system: Option<String>,
    messages: Vec<Value>,
    /// Whether requests ask for their steps, which some tenants may not see.
    traces_steps: bool,
}

impl Conversation {
    /// Asks a question and shows its answer, until an interrupt ends it. Both become a part of the conversation,
    /// unless nothing was answered.
    async fn ask(
        &mut self,
        question: &str,
        screen: &mut Screen,
        interrupts: &mut Signal,
    ) -> anyhow::Result<()> {
        self.messages
            .push(json!({"role": "user", "content": question}));
        let mut text = String::new();
        let answered = tokio::select! {
            answered = self.answer(&mut text, screen) => answered.map(Some),
            // Without a reader of its events the gateway ends the request.
            _ = interrupts.recv() => Ok(None),
        };
        screen.end_answer()?;
        let has_ended = matches!(answered, Ok(Some(_)));
        if answered.is_err() || (text.is_empty() && !has_ended) {
            self.messages.pop();
        } else {
            self.messages
                .push(json!({"role": "assistant", "content": text}));
        }
        let told = answered?.map_or_else(|| "stopped".to_owned(), |figures| figures.line());
        Ok(screen.note(&told)?)
    }

    /// Shows an answer, and adds its text to `text`.
    async fn answer(
        &mut self,
        text: &mut String,
        screen: &mut Screen,
    ) -> anyhow::Result<AnswerFigures> {
        let mut answer = match self.client.ask(&self.body()).await {
            Err(fault) if self.traces_steps && fault.is_about("step_trace") => {
                self.traces_steps = false;
                self.client.ask(&self.body()).await?
            }
            answer => answer?,
        };
        while let Some(spans) = answer.next_spans().await? {
            for span in &spans {
                screen.show(span)?;
                if !span.is_reasoning {
                    text.push_str(&span.text);
                }
            }
        }
        Ok(answer.into_figures())
    }

    /// The body of the next request.
    fn body(&self) -> Value {
        let system = self.system.iter();
        let system = system.map(|text| json!({"role": "system", "content": text}));
        let mut body = self.fields.clone();
        body["messages"] = system.chain(self.messages.iter().cloned()).collect();
        body["step_trace"] = self.traces_steps.into();
        body
    }
}
