//! Tests of the answers, by events that are written out.

use std::time::Duration;

use refrain_output_parsers::Event;
use refrain_service_kit::telemetry::Metrics;

use super::super::store::{ResponseStore, StoreLimits};
use super::super::tools::ToolNames;
use super::*;
use crate::metrics::GatewayMetrics;
use crate::surfaces::ChatBody;
use crate::surfaces::items::example;

fn usage() -> Usage {
    Usage {
        prompt_tokens: 10,
        completion_tokens: 7,
        total_tokens: 17,
        ..Usage::default()
    }
}

fn writer(store: Option<Arc<ResponseStore>>) -> ResponsesWriter {
    let given = serde_json::from_value(json!({"metadata": {"a": "b"}})).unwrap();
    let echo = Echo {
        fields: super::super::echo::fields(&given, store.is_some()),
        tenant: "t".into(),
        tools: ToolNames::default(),
        history: vec![Arc::new(HistoryItem::Message {
            role: "user",
            text: "a".into(),
        })],
        store,
    };
    ResponsesWriter::with(1, 2, "m".into(), echo)
}

fn progress(events: Vec<Event>, finish: Option<FinishReason>) -> ChoiceProgress {
    ChoiceProgress {
        events,
        finish,
        ..ChoiceProgress::default()
    }
}

/// The events of a stream, whose numbers must be 0, 1, 2 and so on.
fn stream(writer: &mut ResponsesWriter, steps: Vec<ChoiceProgress>) -> Vec<Value> {
    let mut frames = writer.begin().unwrap();
    for step in steps {
        frames.extend(writer.progress(0, step).unwrap());
    }
    let summary = RequestSummary {
        usage: usage(),
        ..RequestSummary::default()
    };
    frames.extend(writer.done(&summary).unwrap());
    let text = String::from_utf8(frames).unwrap();
    let events = text
        .split_terminator("\n\n")
        .enumerate()
        .map(|(number, frame)| {
            let (name, data) = frame.split_once('\n').unwrap();
            let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: ").unwrap(), event["type"]);
            assert_eq!(event["sequence_number"], number);
            event
        });
    events.collect()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .map(|kind| kind.strip_prefix("response.").unwrap())
        .collect()
}

#[test]
fn a_stream_has_the_events_in_their_order() {
    let mut steps: Vec<_> = example()
        .into_iter()
        .map(|event| progress(vec![event], None))
        .collect();
    steps.push(progress(Vec::new(), Some(FinishReason::ToolCalls)));
    let events = stream(&mut writer(None), steps);
    assert_eq!(
        kinds(&events),
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
    );
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["usage"], Value::Null);
    assert_eq!(events[11]["content_index"], 0);
    assert_eq!(events[11]["output_index"], 1);
    assert_eq!(events[11]["item_id"], events[9]["item"]["id"]);
    assert_eq!(events[15]["item"]["arguments"], "");
    assert_eq!(events[18]["arguments"], "{\"city\": \"Oslo\"}");
    assert_eq!(events[18].get("content_index"), None);
    let response = &events[24]["response"];
    assert_eq!(response["usage"]["total_tokens"], 17);
    assert_eq!(response["metadata"], json!({"a": "b"}));
    let statuses: Vec<_> = response["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| &item["status"])
        .collect();
    assert_eq!(
        statuses,
        ["completed", "completed", "completed", "incomplete"]
    );
}

#[test]
fn calls_come_back_by_the_names_that_the_client_gave() {
    let tools = json!({"tools": [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
        {"type": "custom", "name": "p"},
    ]});
    let names = || {
        let given = serde_json::from_value(tools.clone()).unwrap();
        super::super::tools::tools(&given, &mut ChatBody::default()).unwrap()
    };
    let call = |index: u32, name: &str, arguments: [&str; 2]| {
        let start = Event::CallStart {
            index,
            id: None,
            name: name.into(),
        };
        let parts = arguments.map(|delta| Event::CallArguments {
            index,
            delta: delta.into(),
        });
        let end = Event::CallEnd {
            index,
            intact: true,
        };
        let events = std::iter::once(start).chain(parts).chain([end]);
        events
            .map(|event| progress(vec![event], None))
            .collect::<Vec<_>>()
    };
    let steps = [
        call(0, "n__g", ["{\"a\":", "1}"]),
        call(1, "p", ["{\"input\": \"a\\n", "b\"}"]),
    ];
    let mut streamed = writer(None);
    streamed.echo.tools = names();
    let events = stream(&mut streamed, steps.concat());
    let seen = kinds(&events);
    assert_eq!(
        seen[2..],
        [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
            "completed",
        ]
    );
    for event in [&events[2], &events[6]] {
        let item = &event["item"];
        assert_eq!(
            (&item["name"], &item["namespace"]),
            (&json!("g"), &json!("n"))
        );
    }
    assert_eq!(events[7]["item"]["input"], "");
    assert_eq!(events[8]["delta"], "a\nb");
    assert_eq!(events[9]["input"], "a\nb");
    let output = &events[11]["response"]["output"];
    assert_eq!(output[0]["arguments"], "{\"a\":1}");
    assert_eq!(output[1]["type"], "custom_tool_call");
    assert_eq!(
        (&output[1]["name"], &output[1]["input"]),
        (&json!("p"), &json!("a\nb"))
    );
    assert!(output[1]["id"].as_str().unwrap().starts_with("ctc_"));
}

#[test]
fn a_whole_answer_equals_the_last_event_of_its_stream() {
    let mut streamed = writer(None);
    let steps = example()
        .into_iter()
        .map(|event| progress(vec![event], None));
    let events = stream(&mut streamed, steps.collect());
    let mut whole = writer(None);
    whole.take(progress(example(), None));
    let (_, response) = whole.end(&usage()).unwrap();
    assert_eq!(response, events.last().unwrap()["response"]);
    assert_eq!(
        response["output"][0]["content"][0],
        json!({"type": "reasoning_text", "text": "Let me see."})
    );
    assert_eq!(response["output"][1]["content"][0]["text"], "I ask.");
    assert_eq!(response["output"][2]["call_id"], "call_a");
}

#[test]
fn an_output_at_its_limit_is_incomplete() {
    let said = progress(vec![Event::Text("a".into())], Some(FinishReason::Length));
    let events = stream(&mut writer(None), vec![said]);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(
        last["response"]["incomplete_details"]["reason"],
        "max_output_tokens"
    );
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
}

#[test]
fn a_stream_that_fails_says_so_in_its_last_event() {
    let mut writer = writer(None);
    writer.begin().unwrap();
    let error = ApiError::new(ErrorKind::Overloaded, "too many");
    let frames = String::from_utf8(writer.failed(&error).unwrap()).unwrap();
    let event: Value = serde_json::from_str(frames.split_once("data: ").unwrap().1).unwrap();
    assert_eq!(
        (&event["type"], &event["sequence_number"]),
        (&json!("response.failed"), &json!(2))
    );
    assert_eq!(event["response"]["status"], "failed");
    assert_eq!(
        event["response"]["error"],
        json!({"code": "rate_limit_exceeded", "message": "too many"})
    );
}

#[test]
fn a_finished_answer_is_stored_with_its_conversation() {
    let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
    let limits = StoreLimits {
        bytes_max: 1 << 20,
        tenant_responses_max: 9,
        age_max: Duration::from_secs(60),
    };
    let store = Arc::new(ResponseStore::new(limits, Arc::new(metrics)));
    let mut writer = writer(Some(store.clone()));
    writer.take(progress(example(), None));
    let (_, response) = writer.end(&usage()).unwrap();
    let id = response["id"].as_str().unwrap();
    let stored = store.get("t", id, Instant::now()).unwrap();
    assert_eq!(
        serde_json::from_slice::<Value>(&stored.body).unwrap(),
        response
    );
    assert_eq!(stored.history.len(), 5);
    let item = response["output"][2]["id"].as_str().unwrap();
    assert!(
        matches!(&*store.item("t", item).unwrap(), HistoryItem::Call { id, .. } if id == "call_a")
    );
}
