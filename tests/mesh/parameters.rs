//! Parameters beside OpenAI's own, on the shipped model: each changes the output as it says, and drafts do not.

use anyhow::{Context, ensure};
use e2e::{Chat, Client, TINY_MODEL, UpMesh, varied_prompts};
use serde_json::{Value, json};

const TOKENS_MAX: u32 = 48;

async fn complete(client: &Client, fields: Value) -> anyhow::Result<Value> {
    let mut body = json!({"model": TINY_MODEL, "temperature": 0, "seed": 0});
    for (name, value) in fields.as_object().context("an object")? {
        body[name] = value.clone();
    }
    let reply = client.post("/v1/completions", body.to_string()).await?;
    ensure!(reply.status == 200, "{}: {}", reply.status, reply.text);
    Ok(reply.json())
}

fn numbers(list: &Value) -> Vec<Option<f64>> {
    let list = list.as_array().into_iter().flatten();
    list.map(Value::as_f64).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_of_outputs_are_where_the_request_wants_them() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let prompts = varied_prompts(24);
    let mut ended = 0;
    for prompt in &prompts {
        let chat = Chat::new(prompt).max_tokens(TOKENS_MAX);
        let plain = client.chat(&chat).await?;
        if plain.finish_reason != "stop" || ended == 4 {
            continue;
        }
        ended += 1;
        let len = plain.completion_tokens();
        let on = client.chat(&chat.clone().set("ignore_eos", true)).await?;
        ensure!(on.finish_reason == "length" && on.completion_tokens() == u64::from(TOKENS_MAX));
        ensure!(on.text.starts_with(&plain.text), "the beginning differs");
        let least = (len + 5).min(u64::from(TOKENS_MAX));
        let longer = client.chat(&chat.clone().set("min_tokens", least)).await?;
        ensure!(
            longer.completion_tokens() >= least,
            "{} of {least}",
            longer.completion_tokens()
        );
        // A stop text ends the output from the least length on.
        let middle: String = plain.text.chars().skip(2).take(2).collect();
        let stopped = client
            .chat(&chat.clone().set("stop", json!([&middle])))
            .await?;
        ensure!(!stopped.text.contains(&middle));
        let with = chat
            .clone()
            .set("stop", json!([&middle]))
            .set("include_stop_str_in_output", true);
        let with = client.chat(&with).await?;
        ensure!(
            with.text == stopped.text + &middle,
            "the stop text is missing: {:?}",
            with.text
        );
        let late = chat
            .clone()
            .set("stop", json!([&middle]))
            .set("min_tokens", len);
        ensure!(client.chat(&late).await?.completion_tokens() >= len);
    }
    ensure!(ended == 4, "only {ended} outputs ended by themselves");
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn penalties_change_the_output_and_drafts_do_not() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let penalized = |chat: &Chat| {
        chat.clone()
            .set("repetition_penalty", 1.3)
            .set("presence_penalty", 0.4)
            .set("frequency_penalty", 0.3)
            .set("min_tokens", 20)
            .set("bad_words", json!(["the", "of a"]))
    };
    let prompts = varied_prompts(12);
    let plain: Vec<Chat> = prompts
        .iter()
        .enumerate()
        .flat_map(|(number, prompt)| {
            let chat = Chat::new(prompt).max_tokens(TOKENS_MAX);
            [chat.clone(), chat.sampled(0.8, number as u64)]
        })
        .collect();
    let chats: Vec<Chat> = plain.iter().map(penalized).collect();
    let without = client.chat_all(&plain, "off", 8).await?;
    let expected = client.chat_all(&chats, "off", 1).await?;
    let changed = without.iter().zip(&expected);
    let changed = changed
        .filter(|(before, now)| before.text != now.text)
        .count();
    ensure!(changed > 0, "penalties changed nothing");
    let mut accepted = 0;
    for mode in ["suffix", "eagle3", "auto"] {
        let answers = client.chat_all(&chats, mode, 8).await?;
        for (number, (expected, answer)) in expected.iter().zip(&answers).enumerate() {
            ensure!(
                expected.text == answer.text,
                "request {number} differs with drafts {mode}"
            );
            ensure!(expected.completion_tokens() == answer.completion_tokens());
            accepted += answer.accepted();
        }
        // Chunks continue an output on the same tokens.
        let cut: Vec<Chat> = chats
            .iter()
            .map(|chat| chat.clone().set("chunk_tokens", 7))
            .collect();
        for (expected, answer) in expected.iter().zip(client.chat_all(&cut, mode, 8).await?) {
            ensure!(
                expected.text == answer.text,
                "chunks change the output with drafts {mode}"
            );
        }
    }
    ensure!(accepted > 0, "no draft was accepted");
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_echoed_prompt_is_scored_as_it_would_have_been_generated() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    for prompt in [
        "SELECT name FROM users",
        "def add(a, b):\n    return",
        "The weather in Oslo",
    ] {
        let said = complete(
            &client,
            json!({"prompt": prompt, "max_tokens": 24, "logprobs": 2, "return_token_ids": true}),
        )
        .await?;
        let choice = &said["choices"][0];
        let before = choice["prompt_token_ids"]
            .as_array()
            .context("prompt ids")?
            .clone();
        let after = choice["token_ids"]
            .as_array()
            .context("output ids")?
            .clone();
        let expected = numbers(&choice["logprobs"]["token_logprobs"]);
        ensure!(expected.len() == after.len() && !after.is_empty());
        let whole = [&*before, &*after].concat();
        for max_tokens in [0, 1] {
            let scored = complete(
                &client,
                json!({"prompt": [whole], "max_tokens": max_tokens, "logprobs": 1, "echo": true}),
            )
            .await?;
            let choice = &scored["choices"][0];
            let logprobs = &choice["logprobs"];
            let all = numbers(&logprobs["token_logprobs"]);
            let generated = all.len() - whole.len();
            ensure!(
                generated == max_tokens,
                "{generated} of {max_tokens} tokens"
            );
            ensure!(all[0].is_none() && all[1..].iter().all(Option::is_some));
            ensure!(
                all[before.len()..whole.len()] == expected[..],
                "other log-probabilities"
            );
            ensure!(logprobs["top_logprobs"][0].is_null());
            let top = logprobs["top_logprobs"]
                .as_array()
                .context("alternatives")?;
            ensure!(
                top.len() == all.len()
                    && logprobs["tokens"].as_array().map(Vec::len) == Some(all.len())
            );
            ensure!(choice["finish_reason"] == "length");
            ensure!(scored["usage"]["prompt_tokens"] == whole.len());
            ensure!(scored["usage"]["completion_tokens"] == max_tokens);
        }
        // Steps verify many forced tokens at once.
        let scored = complete(
            &client,
            json!({"prompt": [whole], "max_tokens": 0, "logprobs": 0, "echo": true}),
        );
        let steps = scored.await?["metrics"]["speculative_decoding"]["steps"].as_u64();
        ensure!(
            steps.is_some_and(|steps| steps < whole.len() as u64),
            "{steps:?} steps"
        );
    }
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_scored_apart_from_its_output() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let prompt = "SELECT name FROM users";
    let echoed = complete(
        &client,
        json!({"prompt": prompt, "max_tokens": 3, "logprobs": 2, "echo": true, "return_token_ids": true}),
    )
    .await?;
    let echoed = &echoed["choices"][0];
    let ids = echoed["prompt_token_ids"].as_array().context("ids")?;
    let expected = numbers(&echoed["logprobs"]["token_logprobs"]);
    let asked = json!({"prompt": prompt, "max_tokens": 3, "logprobs": 1, "prompt_logprobs": 2});
    let scored = complete(&client, asked).await?;
    let scored = &scored["choices"][0];
    ensure!(numbers(&scored["logprobs"]["token_logprobs"]) == expected[ids.len()..]);
    let top = scored["logprobs"]["top_logprobs"]
        .as_array()
        .context("top")?;
    ensure!(
        top.iter()
            .all(|top| top.as_object().is_some_and(|top| top.len() <= 2))
    );
    check_prompt_logprobs(&scored["prompt_logprobs"], ids, &expected)?;

    // Without `logprobs`, the output has none.
    let asked = json!({"prompt": prompt, "max_tokens": 3, "prompt_logprobs": 0});
    let scored = complete(&client, asked).await?;
    ensure!(scored["choices"][0]["logprobs"].is_null());
    check_prompt_logprobs(&scored["choices"][0]["prompt_logprobs"], ids, &expected)?;

    // The prompt of a chat is scored in the same way, beside the message.
    let chat = Chat::new("What is the weather in Oslo?").max_tokens(4);
    let plain = client.chat(&chat).await?;
    let scored = chat.set("prompt_logprobs", 1).set("return_token_ids", true);
    let scored = client.chat(&scored).await?;
    ensure!(scored.text == plain.text, "another answer");
    let ids = scored.body["prompt_token_ids"].as_array().context("ids")?;
    let echoed = complete(
        &client,
        json!({"prompt": [ids], "max_tokens": 0, "logprobs": 0, "echo": true}),
    )
    .await?;
    let expected = numbers(&echoed["choices"][0]["logprobs"]["token_logprobs"]);
    check_prompt_logprobs(&scored.body["prompt_logprobs"], ids, &expected)?;
    ensure!(scored.body["choices"][0]["logprobs"].is_null());
    mesh.stop().await;
    Ok(())
}

/// Checks that each token of a prompt has its log-probability, and that the ranks are in their order.
fn check_prompt_logprobs(
    shown: &Value,
    ids: &[Value],
    expected: &[Option<f64>],
) -> anyhow::Result<()> {
    let shown = shown.as_array().context("no prompt_logprobs")?;
    ensure!(shown.len() == ids.len() && shown[0].is_null(), "{shown:?}");
    for (place, entries) in shown.iter().enumerate().skip(1) {
        let own = &entries[ids[place].to_string()];
        ensure!(
            own["logprob"].as_f64() == expected[place],
            "{place}: {entries}"
        );
        ensure!(own["decoded_token"].is_string());
        let entries = entries.as_object().context("no entries")?;
        let ranked = |rank: u64| entries.values().find(|entry| entry["rank"] == rank);
        if let (Some(first), Some(second)) = (ranked(1), ranked(2)) {
            ensure!(first["logprob"].as_f64() >= second["logprob"].as_f64());
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_best_of_several_outputs_are_answered() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let asked = json!({
        "prompt": ["SELECT name FROM", "The weather in"], "max_tokens": 8, "temperature": 1.5, "seed": 7,
        "return_token_ids": true,
    });
    let with = |fields: Value| {
        let mut body = asked.clone();
        for (name, value) in fields.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    };
    let all = complete(&client, with(json!({"n": 5, "logprobs": 0}))).await?;
    let mean = |choice: &Value| {
        let logprobs = numbers(&choice["logprobs"]["token_logprobs"]);
        logprobs.iter().flatten().sum::<f64>() / logprobs.len() as f64
    };
    let all = all["choices"].as_array().context("choices")?;
    let mut expected = Vec::new();
    for of_prompt in all.chunks(5) {
        let mut of_prompt: Vec<&Value> = of_prompt.iter().collect();
        of_prompt.sort_by(|one, other| mean(other).total_cmp(&mean(one)));
        expected.extend(of_prompt[..2].iter().map(|choice| &choice["token_ids"]));
    }
    let best = complete(&client, with(json!({"n": 2, "best_of": 5}))).await?;
    let choices = best["choices"].as_array().context("choices")?;
    let ids: Vec<&Value> = choices.iter().map(|choice| &choice["token_ids"]).collect();
    ensure!(ids == expected, "{ids:?} instead of {expected:?}");
    for (index, choice) in choices.iter().enumerate() {
        ensure!(
            choice["index"] == index && choice["logprobs"].is_null(),
            "{choice}"
        );
    }
    // The outputs that are not answered cost as much as the others.
    let tokens: usize = all
        .iter()
        .filter_map(|choice| choice["token_ids"].as_array().map(Vec::len))
        .sum();
    ensure!(best["usage"]["completion_tokens"] == tokens);
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_that_nobody_knows_are_refused_where_the_operator_wants_it() -> anyhow::Result<()> {
    let mesh = UpMesh::start_with("[gateway]\nstrict_fields = true\n").await?;
    let client = mesh.client();
    let chat = Chat::new("a").max_tokens(2);
    client.chat(&chat.clone().set("user", "u")).await?;
    let reply = client
        .post(
            "/v1/chat/completions",
            chat.set("no_such_field", 1).body().to_string(),
        )
        .await?;
    ensure!(
        reply.status == 400 && reply.json()["error"]["param"] == "no_such_field",
        "{}",
        reply.text
    );
    mesh.stop().await;
    Ok(())
}
