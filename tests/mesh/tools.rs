//! The shipped model calls tools, and agents reach the end of their loops.

use anyhow::{Context, ensure};
use e2e::{Chat, Client, Event, UpMesh};
use serde_json::{Value, json};

/// A tool whose parameters are all required.
fn tool(name: &str, parameters: &[(&str, &str)]) -> Value {
    let properties: serde_json::Map<String, Value> = parameters
        .iter()
        .map(|(name, kind)| ((*name).to_owned(), json!({ "type": kind })))
        .collect();
    json!({"type": "function", "function": {"name": name, "description": "A tool.",
        "parameters": {"type": "object", "properties": properties}}})
}

fn tools() -> Value {
    json!([
        tool("get_weather", &[("city", "string"), ("days", "integer")]),
        tool("send_mail", &[("to", "string"), ("subject", "string")]),
        tool("get_stock", &[("item", "string")]),
        tool(
            "create_order",
            &[
                ("item", "string"),
                ("count", "integer"),
                ("customer", "string")
            ]
        ),
        tool("set_light", &[("room", "string"), ("level", "integer")]),
    ])
}

/// A request, the call that it needs, the tool's result, and the answer in the end.
type Turn = (
    &'static str,
    &'static str,
    Value,
    &'static str,
    &'static str,
);

fn turns() -> Vec<Turn> {
    vec![
        (
            "What is the weather in Oslo for 2 days?",
            "get_weather",
            json!({"city": "Oslo", "days": 2}),
            "{\"city\": \"Oslo\", \"temperature\": 12, \"sky\": \"rain\"}",
            "The weather in Oslo: 12 degrees with rain.",
        ),
        (
            "Send a mail to Hugo about save values.",
            "send_mail",
            json!({"to": "Hugo", "subject": "save values"}),
            "{\"status\": \"sent\", \"id\": 215}",
            "I sent the mail to Hugo. Its id is 215.",
        ),
        (
            "How many lamps are in stock?",
            "get_stock",
            json!({"item": "lamp"}),
            "{\"item\": \"lamp\", \"count\": 31}",
            "There are 31 of lamp in stock.",
        ),
        (
            "Order 3 lamps for Peter.",
            "create_order",
            json!({"item": "lamp", "count": 3, "customer": "Peter"}),
            "{\"order_id\": 4711, \"status\": \"created\"}",
            "Order 4711 for Peter is created: 3 of lamp.",
        ),
        (
            "Set the light in the kitchen to 40.",
            "set_light",
            json!({"room": "kitchen", "level": 40}),
            "{\"room\": \"kitchen\", \"level\": 40}",
            "The light in the kitchen is at 40.",
        ),
    ]
}

/// How a request is sent.
#[derive(Clone, Copy, Debug)]
struct Way {
    is_streamed: bool,
    speculation: &'static str,
}

/// A message of the model, its reason of ending, and the engine's steps.
struct Said {
    message: Value,
    finish: String,
    tokens: u64,
    steps: u64,
}

async fn say(client: &Client, messages: &[Value], way: Way) -> anyhow::Result<Said> {
    let chat = Chat::new("")
        .set("messages", messages.to_vec())
        .set("tools", tools())
        .speculation(way.speculation);
    if !way.is_streamed {
        let answer = client.chat(&chat).await?;
        return Ok(Said {
            message: answer.body["choices"][0]["message"].clone(),
            tokens: answer.completion_tokens(),
            steps: answer.number("/metrics/speculative_decoding/steps"),
            finish: answer.finish_reason,
        });
    }
    let chat = chat.set("stream_options", json!({"include_usage": true}));
    let mut stream = client.stream(&chat).await?;
    let mut message = json!({"role": "assistant", "content": null, "refusal": null});
    let (mut finish, mut last) = (String::new(), Value::Null);
    while let Some(event) = stream.next().await? {
        let Event::Data(event) = event else {
            break;
        };
        if let Some(choice) = event["choices"].get(0) {
            join(&mut message, &choice["delta"]);
            let reason = choice["finish_reason"].as_str();
            finish = reason.map_or(finish, str::to_owned);
        }
        last = event;
    }
    let number = |pointer: &str| last.pointer(pointer).and_then(Value::as_u64);
    Ok(Said {
        message,
        finish,
        tokens: number("/usage/completion_tokens").context("no usage")?,
        steps: number("/metrics/speculative_decoding/steps").context("no metrics")?,
    })
}

/// Adds a delta to a message, as clients do.
fn join(message: &mut Value, delta: &Value) {
    let longer =
        |text: &Value, more: &str| json!(text.as_str().unwrap_or_default().to_owned() + more);
    if let Some(text) = delta["content"].as_str() {
        message["content"] = longer(&message["content"], text);
    }
    for part in delta["tool_calls"].as_array().into_iter().flatten() {
        let place = part["index"].as_u64().unwrap_or_default() as usize;
        if let Some(id) = part["id"].as_str() {
            if message["tool_calls"].is_null() {
                message["tool_calls"] = json!([]);
            }
            let function = json!({"name": part["function"]["name"], "arguments": ""});
            let call = json!({"id": id, "type": part["type"], "function": function});
            if let Some(calls) = message["tool_calls"].as_array_mut() {
                calls.push(call);
            }
        }
        let arguments = &mut message["tool_calls"][place]["function"]["arguments"];
        *arguments = longer(
            arguments,
            part["function"]["arguments"].as_str().unwrap_or_default(),
        );
    }
}

/// The same message without its ids, which are random.
fn without_ids(message: &Value) -> Value {
    let mut message = message.clone();
    for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
        call["id"] = Value::Null;
    }
    message
}

/// Carries all turns of a conversation out, each to its end. Returns what the model said, and its steps and tokens.
async fn converse(client: &Client, way: Way) -> anyhow::Result<(Vec<Value>, u64, u64)> {
    let mut said = Vec::new();
    let (mut steps, mut tokens) = (0, 0);
    for (ask, name, arguments, result, answer) in turns() {
        let mut messages = vec![json!({"role": "user", "content": ask})];
        let call = say(client, &messages, way).await?;
        ensure!(
            call.finish == "tool_calls" && call.message["content"].is_null(),
            "{ask} {way:?}: {} {}",
            call.finish,
            call.message
        );
        let calls = call.message["tool_calls"].as_array();
        let calls = calls.context("no calls")?;
        ensure!(
            calls.len() == 1 && calls[0]["function"]["name"] == name,
            "{ask}: {calls:?}"
        );
        let written = calls[0]["function"]["arguments"].as_str();
        let written: Value = serde_json::from_str(written.context("no arguments")?)?;
        ensure!(written == arguments, "{ask}: {written}");
        messages.push(call.message.clone());
        messages.push(json!({"role": "tool", "tool_call_id": calls[0]["id"], "content": result}));
        let last = say(client, &messages, way).await?;
        ensure!(
            last.finish == "stop" && last.message["content"] == answer,
            "{ask} {way:?}: {}",
            last.message
        );
        said.extend([without_ids(&call.message), without_ids(&last.message)]);
        steps += call.steps;
        tokens += call.tokens;
    }
    Ok((said, steps, tokens))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tool_loop_is_the_same_whole_and_streamed_with_drafts_and_without() -> anyhow::Result<()>
{
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let plain = Way {
        is_streamed: false,
        speculation: "off",
    };
    let (expected, _, _) = converse(&client, plain).await?;
    for speculation in ["off", "suffix", "auto"] {
        for is_streamed in [false, true] {
            let way = Way {
                is_streamed,
                speculation,
            };
            let (said, steps, tokens) = converse(&client, way).await?;
            ensure!(said == expected, "{way:?} differs");
            // The drafts are the calls themselves, so a call comes in a few steps of many tokens.
            ensure!(
                speculation == "off" || steps * 3 < tokens,
                "{way:?}: {steps} steps for {tokens} tokens"
            );
        }
    }
    let scrape = client.scrape().await?;
    let calls = |outcome| {
        let labels = [("model", e2e::TINY_MODEL), ("outcome", outcome)];
        scrape.sum("refrain_gateway_tool_calls_total", &labels)
    };
    ensure!(
        calls("parsed") == 7.0 * turns().len() as f64,
        "{}",
        calls("parsed")
    );
    ensure!(calls("failed") == 0.0, "{}", calls("failed"));
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_conversation_goes_on_after_calls() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let way = Way {
        is_streamed: true,
        speculation: "auto",
    };
    let mut messages = Vec::new();
    for (ask, name, _, result, answer) in turns() {
        messages.push(json!({"role": "user", "content": ask}));
        let call = say(&client, &messages, way).await?;
        let function = &call.message["tool_calls"][0];
        ensure!(
            function["function"]["name"] == name,
            "{ask}: {}",
            call.message
        );
        let id = function["id"].clone();
        messages.push(call.message);
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
        let last = say(&client, &messages, way).await?;
        ensure!(last.message["content"] == answer, "{ask}: {}", last.message);
        messages.push(last.message);
    }
    mesh.stop().await;
    Ok(())
}
