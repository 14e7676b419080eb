//! Sessions of agents at the trainers' listener: the trainer gets exactly the tokens that the engine saw and sampled.

use std::net::SocketAddr;

use anyhow::{Context as _, ensure};
use e2e::{Client, HttpMesh, PATIENCE, Service, UpMesh, free_addr, wait_until};
use serde_json::{Value, json};

/// An agent that keeps its history as agents do, and the session that its turns belong to.
struct Agent {
    trainer: Client,
    session: &'static str,
    messages: Vec<Value>,
    /// The tokens that the answers showed, prompt and output of the last turn.
    seen: Vec<Value>,
}

fn trainer_settings(addr: SocketAddr) -> String {
    format!("[gateway.trainer]\nlisten = \"{addr}\"\ntenant = \"one\"\n")
}

fn trainer_client(addr: SocketAddr) -> Client {
    Client::new(&format!("http://{addr}"), "").without_key()
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    json!([{"type": "function",
        "function": {"name": "get_weather", "description": "A tool.", "parameters": parameters}}])
}

impl Agent {
    fn new(addr: SocketAddr, session: &'static str) -> Self {
        Agent {
            trainer: trainer_client(addr),
            session,
            messages: Vec::new(),
            seen: Vec::new(),
        }
    }

    fn say(&mut self, role: &str, content: &str) {
        self.messages
            .push(json!({"role": role, "content": content}));
    }

    /// Asks for the next answer, and takes it into the history. Returns the answer.
    async fn turn(&mut self, change: impl FnOnce(&mut Value)) -> anyhow::Result<Value> {
        let mut body = json!({
            "model": "default", "messages": self.messages, "max_tokens": 24, "return_token_ids": true,
            "temperature": 1.0, "seed": self.messages.len(),
        });
        change(&mut body);
        let path = format!("/sessions/{}/v1/chat/completions", self.session);
        let reply = self.trainer.post(&path, body.to_string()).await?;
        ensure!(reply.status == 200, "{} {}", reply.status, reply.text);
        let answer = reply.json();
        let choice = &answer["choices"][0];
        self.messages.push(choice["message"].clone());
        let prompt = list(&answer["prompt_token_ids"])?;
        self.seen = [prompt, list(&choice["token_ids"])?].concat();
        Ok(answer)
    }

    async fn trajectories(&self) -> anyhow::Result<Vec<Value>> {
        let path = format!("/sessions/{}/trajectories", self.session);
        let reply = self.trainer.get(&path).await?;
        ensure!(reply.status == 200, "{} {}", reply.status, reply.text);
        list(&reply.json()["trajectories"])
    }
}

fn list(value: &Value) -> anyhow::Result<Vec<Value>> {
    value
        .as_array()
        .cloned()
        .with_context(|| format!("no list: {value}"))
}

/// The log-probabilities that the engine gives to all tokens but the first, by a call of its own.
async fn scored(trainer: &Client, tokens: &[Value]) -> anyhow::Result<Vec<f64>> {
    let body = json!({"input_ids": tokens, "return_logprob": true, "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 1}});
    let answer = trainer.post("/generate", body.to_string()).await?.json();
    let scores = list(&answer["meta_info"]["input_token_logprobs"])?;
    let scores = scores.iter().skip(1).map(|one| one[0].as_f64());
    scores
        .collect::<Option<_>>()
        .context("a token without a log-probability")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trajectory_has_the_tokens_that_the_engine_saw_and_trains() -> anyhow::Result<()> {
    let addr = free_addr()?;
    let mesh = Box::pin(UpMesh::start_with(&trainer_settings(addr))).await?;
    let mut agent = Agent::new(addr, "s-1");
    agent.say("system", "You are an agent.");
    for turn in 0..5 {
        agent.say("user", &format!("Write about the lamp number {turn}."));
        let before = agent.seen.clone();
        agent.turn(|_| {}).await?;
        ensure!(
            agent.seen.starts_with(&before),
            "turn {turn} has other tokens than those that were sampled"
        );
    }
    let [trajectory] = &agent.trajectories().await?[..] else {
        anyhow::bail!("one trajectory was expected");
    };
    ensure!(list(&trajectory["token_ids"])? == agent.seen);
    // At this temperature the model writes what its tokenizer would not spell so.
    let text = json!({"model": "refrain-tiny", "tokens": agent.seen});
    let text = mesh
        .client()
        .post("/detokenize", text.to_string())
        .await?
        .json();
    let again = json!({"model": "refrain-tiny", "prompt": text["prompt"]});
    let again = mesh
        .client()
        .post("/tokenize", again.to_string())
        .await?
        .json();
    ensure!(
        list(&again["tokens"])? != agent.seen,
        "the test shows nothing"
    );
    // A trainer that computes them anew has the same ones.
    let scores = scored(&agent.trainer, &agent.seen).await?;
    let (mask, logprobs) = (
        list(&trajectory["loss_mask"])?,
        list(&trajectory["logprobs"])?,
    );
    let mut sampled = 0;
    for (place, score) in (1..).zip(scores) {
        if mask[place] == 1 {
            let told = logprobs[place].as_f64().context("a log-probability")?;
            ensure!(
                (told - score).abs() < 3e-5,
                "token {place}: {told}, and {score} anew"
            );
            sampled += 1;
        } else {
            ensure!(logprobs[place] == 0.0);
        }
    }
    let turns = list(&trajectory["turns"])?;
    let outputs = turns.iter().map(|turn| {
        let place = |name: &str| turn[name].as_u64().unwrap_or_default();
        place("end") - place("output_start")
    });
    ensure!(outputs.sum::<u64>() == sampled && turns.len() == 5);
    // Each turn after the first found what was before it in the cache of the engine.
    for pair in turns.windows(2) {
        let known = pair[0]["end"].as_u64().context("a place")?;
        let cached = pair[1]["cached_tokens"].as_u64().context("a number")?;
        ensure!(
            cached + 32 > known,
            "{cached} of {known} tokens were cached"
        );
    }
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edited_history_is_a_branch_and_sessions_end() -> anyhow::Result<()> {
    let addr = free_addr()?;
    let mesh = Box::pin(UpMesh::start_with(&trainer_settings(addr))).await?;
    let mut agent = Agent::new(addr, "s.2");
    agent.say("user", "Write about the lamp.");
    agent.turn(|_| {}).await?;
    let first_turn = agent.seen.clone();
    agent.say("user", "And the table.");
    agent.turn(|_| {}).await?;
    let whole = agent.seen.clone();
    // The agent takes the last answer back, and says something else.
    agent.messages.truncate(2);
    agent.say("user", "And the chair.");
    agent.turn(|_| {}).await?;
    ensure!(agent.seen.starts_with(&first_turn) && !agent.seen.starts_with(&whole));
    // It forgets all but the last message, as agents do when the context is full.
    agent.messages.drain(..2);
    agent.say("user", "And the door.");
    agent.turn(|_| {}).await?;
    let trajectories = agent.trajectories().await?;
    let shared: Vec<_> = trajectories
        .iter()
        .map(|one| one["shared_tokens"].as_u64())
        .collect();
    ensure!(
        shared == [Some(0), Some(first_turn.len() as u64), Some(0)],
        "{shared:?}"
    );
    ensure!(list(&trajectories[0]["token_ids"])? == whole);
    ensure!(list(&trajectories[2]["token_ids"])? == agent.seen);
    // Two choices of one turn are two trajectories.
    agent.messages.truncate(1);
    agent.turn(|body| body["n"] = json!(2)).await?;
    ensure!(agent.trajectories().await?.len() == 5);

    let trainer = &agent.trainer;
    let made = trainer.post("/sessions", "{}").await?.json();
    let made = made["session_id"].as_str().context("an id")?.to_owned();
    let listed = list(&trainer.get("/sessions").await?.json()["sessions"])?;
    ensure!(listed.len() == 2 && listed.iter().any(|one| one["session_id"] == made.as_str()));
    let request = trainer.request(reqwest::Method::DELETE, "/sessions/s.2");
    ensure!(trainer.send(request).await?.status == 204);
    for path in [
        "/sessions/s.2",
        "/sessions/s.2/trajectories",
        "/sessions/%2e%2e/trajectories",
    ] {
        let reply = trainer.get(path).await?;
        ensure!(
            reply.status == 404 && reply.json()["error"]["message"].is_string(),
            "{path}"
        );
    }
    let hostile = trainer
        .post("/sessions/.x/v1/chat/completions", "{}")
        .await?;
    ensure!(hostile.status == 400, "{}", hostile.text);
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_tools_go_on_in_each_api_of_agents() -> anyhow::Result<()> {
    let addr = free_addr()?;
    let mesh = Box::pin(UpMesh::start_with(&trainer_settings(addr))).await?;
    let question = "What is the weather in Oslo for 2 days?";
    let result = "{\"city\": \"Oslo\", \"temperature\": 12, \"sky\": \"rain\"}";
    let trainer = trainer_client(addr);
    let post = async |path: &str, body: Value| {
        let reply = trainer.post(path, body.to_string()).await?;
        ensure!(
            reply.status == 200,
            "{path}: {} {}",
            reply.status,
            reply.text
        );
        Ok(reply.json())
    };

    let mut agent = Agent::new(addr, "chat");
    agent.say("user", question);
    let greedy = |body: &mut Value| {
        body["tools"] = tools();
        body["temperature"] = json!(0);
        body["max_tokens"] = json!(100);
    };
    let answer = agent.turn(greedy).await?;
    ensure!(
        answer["choices"][0]["finish_reason"] == "tool_calls",
        "{answer}"
    );
    let call = agent.messages[1]["tool_calls"][0]["id"].clone();
    let before = agent.seen.clone();
    agent
        .messages
        .push(json!({"role": "tool", "content": result, "tool_call_id": call}));
    let answer = agent.turn(greedy).await?;
    ensure!(agent.seen.starts_with(&before), "{answer}");
    let content = &answer["choices"][0]["message"]["content"];
    ensure!(
        content
            .as_str()
            .is_some_and(|text| text.contains("12 degrees")),
        "{answer}"
    );

    let parameters = tools()[0]["function"]["parameters"].clone();
    let tool = json!({"name": "get_weather", "description": "A tool.", "input_schema": parameters});
    let mut body = json!({"model": "default", "max_tokens": 100, "temperature": 0, "tools": [tool],
        "messages": [{"role": "user", "content": question}]});
    let answer = post("/sessions/messages/v1/messages", body.clone()).await?;
    let blocks = list(&answer["content"])?;
    let call = blocks
        .iter()
        .find(|block| block["type"] == "tool_use")
        .context("a call")?;
    let results = json!([{"type": "tool_result", "tool_use_id": call["id"], "content": result}]);
    for message in [
        json!({"role": "assistant", "content": blocks}),
        json!({"role": "user", "content": results}),
    ] {
        body["messages"]
            .as_array_mut()
            .context("a list")?
            .push(message);
    }
    post("/sessions/messages/v1/messages", body).await?;

    let tool = json!({"type": "function", "name": "get_weather", "description": "A tool.",
        "parameters": tools()[0]["function"]["parameters"]});
    let mut body = json!({"model": "default", "max_output_tokens": 100, "temperature": 0, "tools": [tool],
        "input": [{"role": "user", "content": question}]});
    let answer = post("/sessions/responses/v1/responses", body.clone()).await?;
    let items = list(&answer["output"])?;
    let call = items
        .iter()
        .find(|item| item["type"] == "function_call")
        .context("a call")?;
    let result =
        json!({"type": "function_call_output", "call_id": call["call_id"], "output": result});
    body["input"]
        .as_array_mut()
        .context("a list")?
        .extend(items.iter().cloned().chain([result]));
    post("/sessions/responses/v1/responses", body).await?;

    // A session that the head names has to be made first.
    let made = trainer
        .post("/sessions", "{\"session_id\": \"by-head\"}")
        .await?;
    ensure!(made.json()["session_id"] == "by-head");
    let chat = json!({"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4});
    let request = trainer.request(reqwest::Method::POST, "/v1/chat/completions");
    let request = request
        .header("x-session-id", "by-head")
        .body(chat.to_string());
    ensure!(trainer.send(request).await?.status == 200);

    for (session, turns) in [
        ("chat", 2),
        ("messages", 2),
        ("responses", 2),
        ("by-head", 1),
    ] {
        let shown = trainer.get(&format!("/sessions/{session}")).await?.json();
        ensure!(
            shown["turns"] == turns && shown["trajectories"] == 1,
            "{session}: {shown}"
        );
    }
    let scrape = mesh.client().scrape().await?;
    let prompts = "refrain_gateway_trainer_session_turns_total";
    ensure!(scrape.sum(prompts, &[("prompt", "rendered_anew")]) == 0.0);
    ensure!(scrape.sum(prompts, &[("prompt", "continued")]) == 3.0);
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_turn_that_was_answered_is_lost_whatever_is_killed() -> anyhow::Result<()> {
    let addr = free_addr()?;
    let folder = tempfile::tempdir()?;
    let sessions = folder.path().display();
    let settings = format!(
        "{}[gateway.trainer.sessions]\nfolder = \"{sessions}\"\n",
        trainer_settings(addr)
    );
    let mut mesh = HttpMesh::start_children(1, &settings, &[]).await?;
    mesh.ready().await;
    let mut agent = Agent::new(addr, "killed");
    for service in [
        None,
        Some(Service::Gateway),
        Some(Service::Worker(0)),
        Some(Service::Engine(0)),
    ] {
        if let Some(service) = service {
            mesh.kill(service).await?;
            mesh.start_child(service).await?;
        }
        agent.say("user", "Go on.");
        let (history, before) = (agent.messages.clone(), agent.seen.clone());
        wait_until("the agent has its answer", async || {
            // An agent repeats a turn that failed.
            agent.messages.clone_from(&history);
            agent.turn(|_| {}).await.ok()
        })
        .await;
        ensure!(agent.seen.starts_with(&before), "after {service:?}");
    }
    let [trajectory] = &agent.trajectories().await?[..] else {
        anyhow::bail!("one trajectory was expected");
    };
    ensure!(list(&trajectory["token_ids"])? == agent.seen);
    ensure!(list(&trajectory["turns"])?.len() == 4);

    // A turn in the middle of which the gateway dies was not answered. Its session goes on from the turn before.
    agent.say("user", "At length.");
    let (history, before) = (agent.messages.clone(), agent.seen.clone());
    let long = |body: &mut Value| {
        body["max_tokens"] = json!(2_000);
        body["ignore_eos"] = json!(true);
    };
    let mut dying = Agent::new(addr, "killed");
    dying.messages.clone_from(&history);
    let cut = tokio::spawn(async move { dying.turn(long).await.map(|_| ()) });
    let engine = mesh.client_of(Service::Worker(0));
    wait_until("the turn is decoded", async || {
        let scrape = engine.scrape().await.ok()?;
        (scrape.sum("refrain_worker_chunks_running", &[]) > 0.0).then_some(())
    })
    .await;
    mesh.kill(Service::Gateway).await?;
    ensure!(tokio::time::timeout(PATIENCE, cut).await??.is_err());
    mesh.start_child(Service::Gateway).await?;
    wait_until("the agent has its answer", async || {
        agent.messages.clone_from(&history);
        agent.turn(|_| {}).await.ok()
    })
    .await;
    ensure!(agent.seen.starts_with(&before));
    ensure!(agent.trajectories().await?.len() == 1);
    mesh.stop().await
}
