//! Tests of the answers, by events that are written out.

use refrain_output_parsers::Event;
use refrain_protocol::openai::PromptTokensDetails;

use super::*;
use crate::surfaces::items::example;

fn usage() -> Usage {
    Usage {
        prompt_tokens: 10,
        completion_tokens: 7,
        total_tokens: 17,
        prompt_tokens_details: PromptTokensDetails { cached_tokens: 4 },
        ..Usage::default()
    }
}

fn writer() -> MessagesWriter {
    MessagesWriter::with(1, "m".into(), 10, ["x".to_owned()].into())
}

fn progress(events: Vec<Event>, finish: Option<FinishReason>) -> ChoiceProgress {
    ChoiceProgress {
        events,
        finish,
        ..ChoiceProgress::default()
    }
}

/// The events in frames, whose names and types must be the same.
fn events(frames: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(frames).unwrap();
    let frames = text.split_terminator("\n\n").map(|frame| {
        let (name, data) = frame.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: ").unwrap(), event["type"]);
        event
    });
    frames.collect()
}

#[test]
fn a_stream_has_the_events_in_their_order() {
    let mut writer = writer();
    let mut frames = writer.begin().unwrap();
    for event in example() {
        let changes = writer.take(progress(vec![event], None));
        writer.write(&mut frames, changes).unwrap();
    }
    writer.take(progress(Vec::new(), Some(FinishReason::Stop)));
    frames.extend(writer.end(&usage()).unwrap());
    let events = events(&frames);
    let said: Vec<String> = events
        .iter()
        .map(|event| {
            let at = |path| {
                event
                    .pointer(path)
                    .and_then(Value::as_str)
                    .unwrap_or_default()
            };
            let (block, delta) = (at("/content_block/type"), at("/delta/type"));
            format!("{} {block}{delta}", at("/type")).trim().to_owned()
        })
        .collect();
    assert_eq!(
        said,
        [
            "message_start",
            "ping",
            "content_block_start thinking",
            "content_block_delta thinking_delta",
            "content_block_delta thinking_delta",
            "content_block_delta signature_delta",
            "content_block_stop",
            "content_block_start text",
            "content_block_delta text_delta",
            "content_block_stop",
            "content_block_start tool_use",
            "content_block_delta input_json_delta",
            "content_block_delta input_json_delta",
            "content_block_stop",
            "content_block_start tool_use",
            "content_block_delta input_json_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], 10);
    assert_eq!(events[0]["message"]["stop_reason"], Value::Null);
    assert_eq!(events[10]["content_block"]["id"], "call_a");
    assert_eq!(events[17]["delta"]["stop_reason"], "tool_use");
    assert_eq!(events[17]["usage"]["output_tokens"], 7);
    assert_eq!(events[17]["usage"]["cache_read_input_tokens"], 4);
    assert_eq!(events[17]["usage"]["input_tokens"], 6);
}

#[test]
fn a_whole_answer_has_the_same_blocks() {
    let mut writer = writer();
    writer.take(progress(example(), Some(FinishReason::Stop)));
    let message = writer.whole(&usage());
    assert_eq!(
        message["content"],
        json!([
            {"type": "thinking", "thinking": "Let me see.", "signature": SIGNATURE},
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "call_b", "name": "time", "input": {"INVALID_JSON": "{\"ci"}},
        ])
    );
    assert_eq!(message["stop_reason"], "tool_use");
}

#[test]
fn the_stop_reason_says_why_it_ended() {
    let text = || vec![Event::Text("a".into())];
    for (events, finish, stop, reason) in [
        (text(), FinishReason::Stop, None, "end_turn"),
        (text(), FinishReason::Length, None, "max_tokens"),
        (
            text(),
            FinishReason::Stop,
            Some("x".to_owned()),
            "stop_sequence",
        ),
        (example(), FinishReason::Length, None, "max_tokens"),
        (Vec::new(), FinishReason::Stop, None, "end_turn"),
    ] {
        let mut writer = writer();
        let mut last = progress(events, Some(finish));
        last.stop_text = stop.as_ref().map(|_| 0);
        writer.take(last);
        let message = writer.whole(&usage());
        assert_eq!(message["stop_reason"], reason);
        assert_eq!(message["stop_sequence"], json!(stop));
    }
}

#[test]
fn a_call_without_a_name_of_its_own_gets_one() {
    let mut writer = writer();
    let start = Event::CallStart {
        index: 0,
        id: None,
        name: "f".into(),
    };
    writer.take(progress(vec![start], Some(FinishReason::Stop)));
    let block = writer.whole(&usage())["content"][0].clone();
    assert!(block["id"].as_str().unwrap().starts_with("toolu_"));
    assert_eq!(block["input"], json!({}));
}

#[test]
fn an_error_in_a_stream_is_an_event() {
    let error = ApiError::invalid("a", "no");
    let events = events(&writer().failed(&error).unwrap());
    assert_eq!(events[0]["error"]["type"], "invalid_request_error");
}
