//! Answers as streams of events.

use std::time::Duration;

use futures_util::StreamExt;
use refrain_protocol::scheduling::LeaseOutcome;
use serde_json::{Value, json};

use crate::mesh::{Bench, chat, tuned};

const CHAT: &str = "/v1/chat/completions";

/// The text of one choice in the events of a chat.
pub(crate) fn streamed_text(events: &[Value], index: u64) -> String {
    let choices = events
        .iter()
        .flat_map(|event| event["choices"].as_array().unwrap());
    let deltas = choices.filter(|choice| choice["index"] == index);
    deltas
        .filter_map(|choice| choice["delta"]["content"].as_str())
        .collect()
}

#[tokio::test]
async fn a_chat_streams_in_openais_shape() {
    let bench = Bench::new().await;
    let (events, done) = bench.stream(CHAT, &chat(json!({"stream": true}))).await;
    assert!(done);
    assert_eq!(streamed_text(&events, 0), "hello world, this is the answer");
    for event in &events {
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(
            (&event["id"], &event["created"]),
            (&events[0]["id"], &events[0]["created"])
        );
        assert_eq!(event["choices"].as_array().unwrap().len(), 1);
        assert!(event.get("usage").is_none() && event.get("metrics").is_none());
    }
    assert_eq!(
        events[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    assert_eq!(events[0]["choices"][0]["finish_reason"], json!(null));
    let last = &events[events.len() - 1]["choices"][0];
    assert_eq!(
        (&last["delta"], &last["finish_reason"]),
        (&json!({}), &json!("stop"))
    );
    let finished = events
        .iter()
        .filter(|event| !event["choices"][0]["finish_reason"].is_null());
    assert_eq!(finished.count(), 1);
}

#[tokio::test]
async fn the_usage_is_in_the_last_event_if_asked_for() {
    let bench = Bench::new().await;
    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let (events, done) = bench.stream(CHAT, &chat(options)).await;
    assert!(done);
    let (last, earlier) = events.split_last().unwrap();
    assert!(
        earlier
            .iter()
            .all(|event| event.get("usage") == Some(&Value::Null))
    );
    assert_eq!(last["choices"], json!([]));
    let tokens = bench.mesh.script().reply.len();
    assert_eq!(last["usage"]["completion_tokens"], tokens);
    assert_eq!(
        last["metrics"]["speculative_decoding"]["by_source"]["suffix"]["emitted"],
        tokens
    );
    assert_eq!(last["metrics"]["timings"]["chunks"], 1);
}

#[tokio::test]
async fn events_have_the_steps_that_brought_them_if_asked_for() {
    let bench = Bench::new().await;
    bench.mesh.script().step_tokens = 3;
    let options =
        json!({"stream": true, "step_trace": true, "stream_options": {"include_usage": true}});
    let (events, done) = bench.stream(CHAT, &chat(options)).await;
    assert!(done);
    let (last, earlier) = events.split_last().unwrap();
    let of_events: Vec<&Value> = earlier
        .iter()
        .filter_map(|event| event["choices"][0]["steps"].as_array())
        .flatten()
        .collect();
    let of_answer = last["metrics"]["step_trace"]["steps"].as_array().unwrap();
    assert_eq!(of_events, of_answer.iter().collect::<Vec<_>>());
    assert!(of_events.len() > 1, "{of_events:?}");
    let tokens = of_events
        .iter()
        .flat_map(|step| step["tokens"].as_array().unwrap());
    let text: String = tokens.filter_map(Value::as_str).collect();
    assert_eq!(text, streamed_text(earlier, 0));
}

#[tokio::test]
async fn choices_interleave_by_index() {
    let bench = Bench::new().await;
    bench.mesh.script().step_pause = Duration::from_millis(2);
    let (events, _) = bench
        .stream(CHAT, &chat(json!({"stream": true, "n": 2})))
        .await;
    for index in 0..2 {
        assert_eq!(
            streamed_text(&events, index),
            "hello world, this is the answer"
        );
    }
    let order: Vec<_> = events
        .iter()
        .map(|event| event["choices"][0]["index"].as_u64().unwrap())
        .collect();
    let switches = order.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(switches > 2, "one after the other: {order:?}");
}

#[tokio::test]
async fn no_part_of_a_stop_text_is_sent() {
    let bench = Bench::new().await;
    bench.mesh.reply("first second\n\nUser: third");
    for step_tokens in [1, 2, 3, 7, 50] {
        bench.mesh.script().step_tokens = step_tokens;
        let body = chat(json!({"stream": true, "stop": ["\n\nUser:"]}));
        let (events, done) = bench.stream(CHAT, &body).await;
        assert!(done);
        assert_eq!(streamed_text(&events, 0), "first second");
        assert_eq!(
            events[events.len() - 1]["choices"][0]["finish_reason"],
            "stop"
        );
        bench.mesh.settled().await;
    }
    assert_eq!(bench.mesh.log().cuts.len(), 5);
    // Text that only began like a stop text is sent.
    bench.mesh.reply("a\n\nUse");
    let (events, _) = bench
        .stream(CHAT, &chat(json!({"stream": true, "stop": "\n\nUser:"})))
        .await;
    assert_eq!(streamed_text(&events, 0), "a\n\nUse");
}

#[tokio::test]
async fn every_streamed_token_has_its_log_probability() {
    let bench = Bench::new().await;
    let fields = json!({"stream": true, "logprobs": true, "top_logprobs": 1, "stop": "answer",
                        "stream_options": {"include_usage": true}});
    let (events, _) = bench.stream(CHAT, &chat(fields)).await;
    let entries: usize = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .map(Vec::len)
        .sum();
    assert_eq!(
        entries as u64,
        events.last().unwrap()["usage"]["completion_tokens"]
            .as_u64()
            .unwrap()
    );
    assert_eq!(streamed_text(&events, 0), "hello world, this is the ");
}

#[tokio::test]
async fn completions_stream_in_their_own_shape() {
    let bench = Bench::new().await;
    let body =
        json!({"model": "tiny", "prompt": "p", "stream": true, "echo": true, "max_tokens": 100});
    let (events, done) = bench.stream("/v1/completions", &body).await;
    assert!(done);
    assert!(
        events
            .iter()
            .all(|event| event["object"] == "text_completion")
    );
    let text: String = events
        .iter()
        .map(|event| event["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, "phello world, this is the answer");
    assert_eq!(
        events.last().unwrap()["choices"][0]["finish_reason"],
        "stop"
    );
}

#[tokio::test]
async fn half_a_character_waits_for_the_other_half() {
    let bench = Bench::new().await;
    bench.mesh.reply("\u{1f980}\u{e9}\u{4f60}");
    bench.mesh.script().step_tokens = 1;
    let (events, _) = bench.stream(CHAT, &chat(json!({"stream": true}))).await;
    assert_eq!(streamed_text(&events, 0), "\u{1f980}\u{e9}\u{4f60}");
    // The events are the role, three characters and the end.
    assert_eq!(events.len(), 5);
}

#[tokio::test]
async fn a_client_that_leaves_stops_the_work() {
    let bench = Bench::new().await;
    bench.mesh.reply(&"word ".repeat(40));
    // The whole output would take far longer than the test waits.
    bench.mesh.script().step_pause = Duration::from_secs(2);
    let response = bench
        .post(CHAT, &chat(json!({"stream": true, "n": 2})))
        .send()
        .await
        .unwrap();
    let mut body = response.bytes_stream();
    body.next().await.unwrap().unwrap();
    bench.mesh.wait_for_streams(2).await;
    drop(body);
    bench.mesh.settled().await;
    assert!(
        bench
            .mesh
            .log()
            .finishes
            .iter()
            .all(|finish| finish.outcome == LeaseOutcome::Aborted
                && finish.worker_ended_ms_ago.is_none())
    );
    assert!(bench.mesh.log().cuts.is_empty());
    assert_eq!(
        bench.metric("refrain_gateway_requests_total{status=\"499\"}"),
        1.0
    );
    assert_eq!(bench.metric("refrain_gateway_requests_in_flight"), 0.0);
}

#[tokio::test]
async fn a_client_that_leaves_a_silent_stream_stops_the_work() {
    let bench = Bench::new().await;
    bench.mesh.mishap(0, crate::mesh::Mishap::Hang(1));
    let response = bench
        .post(CHAT, &chat(json!({"stream": true})))
        .send()
        .await
        .unwrap();
    let mut body = response.bytes_stream();
    body.next().await.unwrap().unwrap();
    drop(body);
    bench.mesh.settled().await;
}

#[tokio::test]
async fn a_client_that_leaves_before_a_plain_answer_stops_the_work() {
    let bench = Bench::new().await;
    bench.mesh.mishap(0, crate::mesh::Mishap::Hang(1));
    let request = bench.post(CHAT, &chat(json!({}))).send();
    let waiting = tokio::spawn(request);
    bench.mesh.wait_for_streams(1).await;
    waiting.abort();
    bench.mesh.settled().await;
}

#[tokio::test]
async fn an_idle_stream_is_kept_alive() {
    let config = tuned(|tuning| {
        tuning.stream_head_wait = Duration::from_millis(20);
        tuning.stream_keep_alive = Duration::from_millis(20);
    });
    let bench = Bench::with(config).await;
    bench.mesh.script().silent_from_call = 0;
    let response = bench
        .post(CHAT, &chat(json!({"stream": true})))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.bytes_stream();
    let comment = body.next().await.unwrap().unwrap();
    assert!(comment.starts_with(b":"));
}
