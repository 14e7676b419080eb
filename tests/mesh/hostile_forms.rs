//! One tenant asks for forms that are built to cost much, while another one goes on with its own requests.
//!
//! It prints how long the requests of both take. `REFRAIN_HOSTILE_FORMS` sets the number of forms,
//! `REFRAIN_HOSTILE_TOKENS` the most tokens of an output, and `REFRAIN_HOSTILE_SEED` chooses other forms.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use e2e::{Chat, Client, Reply, UpMesh, number_of};
use futures_util::future::try_join_all;
use refrain_output_grammar::testing::{HostileForm, hostile_forms};
use refrain_protocol::engine::TextForm;
use serde_json::{Value, json};

/// Forms that are asked for at once.
const IN_FLIGHT: usize = 16;
/// Requests of the other tenant before and after the forms.
const ALONE: usize = 60;

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
    let chat = Chat::new("Go on.")
        .max_tokens(tokens)
        .sampled(1.0, 1)
        .endless();
    chat.set("structured_outputs", form)
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

    fn print(&mut self, name: &str) {
        self.0.sort_unstable();
        let at = |share: f64| {
            let place = (self.0.len() as f64 * share).ceil() as usize;
            let time = self.0.get(place.saturating_sub(1)).copied();
            time.unwrap_or_default().as_secs_f64() * 1e3
        };
        let (half, most, last) = (at(0.5), at(0.99), at(1.0));
        println!(
            "{name:<24}{:>6} {half:>9.1} {most:>9.1} {last:>9.1}",
            self.0.len()
        );
    }
}

/// The requests of the tenant that goes on: plain chats, and chats with a small schema that is new each time.
struct Others {
    client: Client,
    schemas: usize,
}

impl Others {
    async fn plain(&self, times: &mut Times) -> anyhow::Result<()> {
        let chat = Chat::new("What is next?").max_tokens(4).speculation("off");
        times.chat(&self.client, &chat).await
    }

    async fn schema(&mut self, times: &mut Times) -> anyhow::Result<()> {
        self.schemas += 1;
        let form = json!({"json": {"enum": [format!("answer {}", self.schemas)]}});
        let chat = Chat::new("Answer.")
            .max_tokens(24)
            .set("structured_outputs", form);
        times.chat(&self.client, &chat).await
    }
}

/// An answer to a hostile form has an output, or says that the form is at fault or that too many wait.
fn check(form: &HostileForm, reply: &Reply) -> anyhow::Result<()> {
    let (kind, text) = (form.kind, &reply.text);
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_forms_of_one_tenant_hold_no_other_up() -> anyhow::Result<()> {
    let count = number_of("REFRAIN_HOSTILE_FORMS", 18)?;
    let tokens = number_of("REFRAIN_HOSTILE_TOKENS", 8)?;
    let forms = hostile_forms(number_of("REFRAIN_HOSTILE_SEED", 3)?, count);
    let mesh = UpMesh::start().await?;
    let attacker = mesh.client();
    let mut others = Others {
        client: mesh.client_of_another(),
        schemas: 0,
    };
    let [mut before, mut during, mut after] =
        [Times::default(), Times::default(), Times::default()];
    let (mut schemas_before, mut schemas_during) = (Times::default(), Times::default());
    others.schema(&mut Times::default()).await?;
    for _ in 0..ALONE {
        others.plain(&mut before).await?;
        others.schema(&mut schemas_before).await?;
    }
    let (next, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let ask = || async {
        let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
        while let Some(form) = forms.get(next.fetch_add(1, Ordering::Relaxed)) {
            let body = hostile_chat(form, tokens).body().to_string();
            let reply = attacker.post("/v1/chat/completions", body).await?;
            check(form, &reply)?;
            *statuses.entry(reply.status).or_default() += 1;
            ended.fetch_add(1, Ordering::Relaxed);
        }
        anyhow::Ok(statuses)
    };
    let attack = try_join_all((0..IN_FLIGHT).map(|_| ask()));
    let go_on = async {
        while ended.load(Ordering::Relaxed) < forms.len() {
            others.plain(&mut during).await?;
            others.schema(&mut schemas_during).await?;
        }
        anyhow::Ok(())
    };
    let (statuses, ()) = tokio::try_join!(attack, go_on)?;
    for _ in 0..ALONE {
        others.plain(&mut after).await?;
    }
    println!("milliseconds             count       p50       p99       max");
    before.print("plain chats before");
    during.print("plain chats meanwhile");
    after.print("plain chats after");
    schemas_before.print("small schemas before");
    schemas_during.print("small schemas meanwhile");
    let of = |status: u16| {
        statuses
            .iter()
            .filter_map(move |own| own.get(&status))
            .sum::<usize>()
    };
    println!(
        "answers to {count} hostile forms: {} of 200, {} of 400, {} of 429",
        of(200),
        of(400),
        of(429)
    );
    // Far more of the other tenant's requests were answered than there were waits for one hostile form.
    ensure!(
        during.0.len() * IN_FLIGHT >= count,
        "{} chats",
        during.0.len()
    );
    mesh.stop().await;
    Ok(())
}
