//! One tenant asks for forms that are built to cost much, while another one goes on with its own requests.
//!
//! It prints how long the requests of the latter take: alone, beside chats without forms, and beside the forms.
//! `REFRAIN_HOSTILE_FORMS` sets the number of forms, `REFRAIN_HOSTILE_TOKENS` the most tokens of an output,
//! `REFRAIN_HOSTILE_IN_FLIGHT` how many are asked for at once, and `REFRAIN_HOSTILE_SEED` chooses other forms. The
//! worker has 16 places. With all of them taken, the other tenant waits for one, as it would beside any requests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use e2e::{Chat, Client, Reply, UpMesh, number_of};
use refrain_output_grammar::testing::{HostileForm, hostile_forms};
use refrain_protocol::engine::TextForm;
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// Requests of each kind by which the other tenant goes on alone.
const ALONE: usize = 200;

/// A chat without a form, of so many tokens.
fn harmless_chat(tokens: u32) -> Chat {
    Chat::new("Go on.")
        .max_tokens(tokens)
        .sampled(1.0, 1)
        .endless()
}

fn hostile_chat(form: &HostileForm, tokens: u32) -> Chat {
    let form = match &form.text {
        TextForm::JsonSchema(text) => {
            json!({"json": serde_json::from_str::<Value>(text).unwrap_or_default()})
        }
        TextForm::Regex(text) => json!({"regex": text}),
        TextForm::Choice(texts) => json!({"choice": texts}),
        TextForm::Lark(text) | TextForm::Ebnf(text) => json!({"grammar": text}),
        _ => json!({"json_object": true}),
    };
    harmless_chat(tokens).set("structured_outputs", form)
}

/// The times of requests of one kind.
#[derive(Default)]
struct Times(Vec<Duration>);

impl Times {
    async fn chat(&mut self, client: &Client, chat: &Chat) -> anyhow::Result<()> {
        let started = Instant::now();
        client.chat(chat).await?;
        self.0.push(started.elapsed());
        Ok(())
    }

    /// The time that this share of them took at most, milliseconds.
    fn at(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let place = (sorted.len() as f64 * share).ceil() as usize;
        let time = sorted.get(place.saturating_sub(1)).copied();
        time.unwrap_or_default().as_secs_f64() * 1e3
    }

    fn print(&self, name: &str) {
        let (half, most, last) = (self.at(0.5), self.at(0.99), self.at(1.0));
        println!(
            "{name:<34}{:>6} {half:>9.1} {most:>9.1} {last:>9.1}",
            self.0.len()
        );
    }
}

/// The requests of the tenant that goes on: plain chats, and chats with a small schema that is new each time.
struct Others {
    client: Client,
    schemas: usize,
}

/// The times of the tenant that goes on.
#[derive(Default)]
struct TimesOfOthers {
    plain: Times,
    schemas: Times,
}

impl Others {
    async fn go_on(&mut self, times: &mut TimesOfOthers) -> anyhow::Result<()> {
        let chat = Chat::new("What is next?").max_tokens(4).speculation("off");
        times.plain.chat(&self.client, &chat).await?;
        self.schemas += 1;
        let form = json!({"json": {"enum": [format!("answer {}", self.schemas)]}});
        let chat = Chat::new("Answer.")
            .max_tokens(24)
            .set("structured_outputs", form);
        times.schemas.chat(&self.client, &chat).await
    }

    /// Goes on by itself.
    async fn alone(&mut self) -> anyhow::Result<TimesOfOthers> {
        let mut times = TimesOfOthers::default();
        for _ in 0..ALONE {
            self.go_on(&mut times).await?;
        }
        Ok(times)
    }
}

impl TimesOfOthers {
    fn print(&self, when: &str) {
        self.plain.print(&format!("plain chats {when}"));
        self.schemas.print(&format!("small schemas {when}"));
    }
}

/// An answer to a hostile form has an output, or says that the form is at fault or that too many wait.
fn check(kind: &str, reply: &Reply) -> anyhow::Result<()> {
    let text = &reply.text;
    ensure!(
        [200, 400, 429].contains(&reply.status),
        "{kind}: {} {text}",
        reply.status
    );
    let error = &reply.json()["error"];
    ensure!(
        reply.status == 200 || error["message"].is_string(),
        "{kind}: {text}"
    );
    Ok(())
}

/// Requests of which each of some askers takes the next one.
struct Crowd {
    client: Client,
    /// The kind of each request, and its body. The bodies are written before, because a client that writes long ones
    /// would hold up the one that is timed.
    asked: Vec<(&'static str, String)>,
    next: AtomicUsize,
}

impl Crowd {
    fn new(client: Client, asked: impl Iterator<Item = (&'static str, Chat)>) -> Arc<Self> {
        let asked = asked.map(|(kind, chat)| (kind, chat.body().to_string()));
        Arc::new(Crowd {
            client,
            asked: asked.collect(),
            next: AtomicUsize::new(0),
        })
    }

    /// Asks for one after another. Returns how many answers had which status.
    async fn ask(self: Arc<Self>) -> anyhow::Result<BTreeMap<u16, usize>> {
        let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
        while let Some((kind, body)) = self.asked.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let reply = self.client.post("/v1/chat/completions", body.clone());
            let reply = reply.await?;
            check(kind, &reply)?;
            *statuses.entry(reply.status).or_default() += 1;
        }
        Ok(statuses)
    }

    /// Asks for all, while others go on. Returns their times, and how many answers had which status.
    async fn beside(
        self: Arc<Self>,
        others: &mut Others,
        in_flight: usize,
    ) -> anyhow::Result<(TimesOfOthers, BTreeMap<u16, usize>)> {
        let mut askers = JoinSet::new();
        for _ in 0..in_flight {
            askers.spawn(self.clone().ask());
        }
        let mut times = TimesOfOthers::default();
        let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
        while !askers.is_empty() {
            others.go_on(&mut times).await?;
            while let Some(asker) = askers.try_join_next() {
                for (status, answers) in asker?? {
                    *statuses.entry(status).or_default() += answers;
                }
            }
        }
        Ok((times, statuses))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_forms_of_one_tenant_hold_no_other_up() -> anyhow::Result<()> {
    let count = number_of("REFRAIN_HOSTILE_FORMS", 18)?;
    let tokens = number_of("REFRAIN_HOSTILE_TOKENS", 8)?;
    let in_flight = number_of("REFRAIN_HOSTILE_IN_FLIGHT", 12)?;
    let forms = hostile_forms(number_of("REFRAIN_HOSTILE_SEED", 3)?, count);
    let mesh = UpMesh::start().await?;
    let mut others = Others {
        client: mesh.client_of_another(),
        schemas: 0,
    };
    others.go_on(&mut TimesOfOthers::default()).await?;
    let alone = others.alone().await?;
    let harmless = (0..4 * count).map(|_| ("no form", harmless_chat(tokens)));
    let harmless = Crowd::new(mesh.client(), harmless);
    let (beside_harmless, _) = harmless.beside(&mut others, in_flight).await?;
    let hostile = forms
        .iter()
        .map(|form| (form.kind, hostile_chat(form, tokens)));
    let hostile = Crowd::new(mesh.client(), hostile);
    let (beside_hostile, statuses) = hostile.beside(&mut others, in_flight).await?;
    let after = others.alone().await?;
    println!("milliseconds                       count       p50       p99       max");
    alone.print("alone");
    beside_harmless.print("beside chats");
    beside_hostile.print("beside forms");
    after.print("after");
    let of = |status| statuses.get(&status).copied().unwrap_or_default();
    println!(
        "answers to {count} hostile forms: {} of 200, {} of 400, {} of 429",
        of(200),
        of(400),
        of(429)
    );
    // Forms that hold others up make them wait for seconds. Chats without forms take more of the engine than they do.
    let half = |times: &Times| times.at(0.5);
    let (forms, chats) = (half(&beside_hostile.plain), half(&beside_harmless.plain));
    ensure!(
        forms < 4.0 * chats,
        "half of the plain chats took more than {forms} ms beside forms, and {chats} ms beside chats"
    );
    mesh.stop().await;
    Ok(())
}
