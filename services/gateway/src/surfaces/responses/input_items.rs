//! The input of a stored response as a list of items, page by page.

use std::time::Instant;

use refrain_protocol::{ApiError, ErrorKind};
use serde::Deserialize;
use serde_json::{Value, json};

use super::history::HistoryItem;
use super::item_ids::{item_id, place_of};
use super::store::ResponseStore;
use super::tools::CalledTool;

/// Items of a page, if a request names no number.
const PAGE_DEFAULT: usize = 20;
/// Most items of a page, as with OpenAI.
const PAGE_MAX: usize = 100;

/// The query that asks for a page. OpenAI's `include` names nothing that is stored here.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct PageQuery {
    limit: Option<usize>,
    order: Option<Order>,
    after: Option<String>,
}

/// The order of the items. Newest first is OpenAI's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    Asc,
    #[default]
    Desc,
}

/// A page of the items before the output of a response, those of the responses that it continues included.
///
/// # Errors
/// There is no such response, or the page is not one of it.
pub(crate) fn input_items(
    store: &ResponseStore,
    tenant: &str,
    id: &str,
    page: &PageQuery,
    now: Instant,
) -> Result<Value, ApiError> {
    let response = store.get(tenant, id, now).ok_or_else(unknown_response)?;
    let limit @ 1..=PAGE_MAX = page.limit.unwrap_or(PAGE_DEFAULT) else {
        let message = format!("limit: must be 1 to {PAGE_MAX}");
        return Err(ApiError::invalid("limit", message));
    };
    let count = response.history.len().saturating_sub(response.items.len());
    let mut places: Vec<usize> = (0..count).collect();
    if page.order.unwrap_or_default() == Order::Desc {
        places.reverse();
    }
    if let Some(after) = &page.after {
        let named = place_of(after).filter(|(of, _)| of == id);
        let found = named.and_then(|(_, place)| places.iter().position(|other| *other == place));
        let Some(found) = found else {
            let message = "after: must be the id of an item of this response";
            return Err(ApiError::invalid("after", message));
        };
        places.drain(..=found);
    }
    let has_more = places.len() > limit;
    places.truncate(limit);
    let items = places.iter().filter_map(|place| {
        let item = response.history.get(*place)?;
        Some(item_value(item, &item_id(id, *place, item)))
    });
    let items: Vec<Value> = items.collect();
    let id_of = |item: Option<&Value>| item.map(|item| item["id"].clone());
    Ok(json!({
        "object": "list", "first_id": id_of(items.first()), "last_id": id_of(items.last()),
        "has_more": has_more, "data": items,
    }))
}

/// The error for a response that is not in the store.
pub(crate) fn unknown_response() -> ApiError {
    let message = "there is no such response here; it was not stored, is forgotten, or belongs to another key";
    ApiError {
        kind: ErrorKind::NotFound,
        ..ApiError::invalid("id", message)
    }
}

fn item_value(item: &HistoryItem, id: &str) -> Value {
    let status = "completed";
    match item {
        HistoryItem::Message { role, text } => {
            let part = match *role {
                "assistant" => {
                    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
                }
                _ => json!({"type": "input_text", "text": text}),
            };
            json!({"type": "message", "id": id, "status": status, "role": role, "content": [part]})
        }
        HistoryItem::Reasoning(text) => json!({
            "type": "reasoning", "id": id, "status": status, "summary": [],
            "content": [{"type": "reasoning_text", "text": text}], "encrypted_content": null,
        }),
        HistoryItem::Call {
            id: call,
            tool,
            given,
        } => call_value(id, status, call, tool, given),
        HistoryItem::CallOutput {
            id: call,
            text,
            is_custom,
        } => {
            let kind = match is_custom {
                true => "custom_tool_call_output",
                false => "function_call_output",
            };
            json!({"type": kind, "id": id, "status": status, "call_id": call, "output": text})
        }
    }
}

/// A call as an item.
pub(super) fn call_value(
    id: &str,
    status: &str,
    call_id: &str,
    tool: &CalledTool,
    given: &str,
) -> Value {
    let (kind, field) = match tool.is_custom {
        true => ("custom_tool_call", "input"),
        false => ("function_call", "arguments"),
    };
    let mut item = json!({
        "type": kind, "id": id, "status": status, "call_id": call_id, "name": tool.name, field: given,
    });
    if let Some(namespace) = &tool.namespace {
        item["namespace"] = namespace.as_str().into();
    }
    item
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use bytes::Bytes;
    use refrain_service_kit::telemetry::Metrics;

    use super::super::store::{StoreLimits, StoredResponse};
    use super::*;
    use crate::metrics::GatewayMetrics;

    /// A store with one response, `resp_9`, that has five items of input and one of output.
    fn stored() -> ResponseStore {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        let limits = StoreLimits {
            bytes_max: 1 << 20,
            tenant_responses_max: 3,
            age_max: Duration::from_secs(60),
        };
        let store = ResponseStore::new(limits, Arc::new(metrics));
        let message = |role, text: &str| HistoryItem::Message {
            role,
            text: text.into(),
        };
        let history = [
            message("user", "a"),
            HistoryItem::Reasoning("hm".into()),
            HistoryItem::Call {
                id: "c".into(),
                tool: CalledTool {
                    name: "f".into(),
                    ..CalledTool::default()
                },
                given: "{}".into(),
            },
            HistoryItem::CallOutput {
                id: "c".into(),
                text: "12".into(),
                is_custom: false,
            },
            message("assistant", "b"),
            message("assistant", "the output"),
        ];
        let response = StoredResponse {
            body: Bytes::from("{}"),
            history: history.into_iter().map(Arc::new).collect(),
            items: vec!["msg_9_0".into()],
        };
        store.insert("t", "resp_9", response, Instant::now());
        store
    }

    fn page(store: &ResponseStore, query: Value) -> Result<Value, ApiError> {
        let query = serde_json::from_value(query).unwrap();
        input_items(store, "t", "resp_9", &query, Instant::now())
    }

    fn ids(page: &Value) -> Vec<&str> {
        let items = page["data"].as_array().unwrap();
        items
            .iter()
            .map(|item| item["id"].as_str().unwrap())
            .collect()
    }

    #[test]
    fn all_input_is_listed_in_either_order_and_not_the_output() {
        let store = stored();
        let newest_first = page(&store, json!({})).unwrap();
        let ordered = [
            "msg_9_in0",
            "rs_9_in1",
            "fc_9_in2",
            "fco_9_in3",
            "msg_9_in4",
        ];
        assert_eq!(
            ids(&page(&store, json!({"order": "asc"})).unwrap()),
            ordered
        );
        assert!(ids(&newest_first).into_iter().rev().eq(ordered));
        assert_eq!(newest_first["has_more"], false);
        assert_eq!(newest_first["first_id"], "msg_9_in4");
        assert_eq!(newest_first["data"][0]["content"][0]["type"], "output_text");
        assert_eq!(newest_first["data"][1]["output"], "12");
        assert_eq!(newest_first["data"][2]["arguments"], "{}");
        assert_eq!(newest_first["data"][3]["content"][0]["text"], "hm");
        assert_eq!(
            newest_first["data"][4]["content"][0],
            json!({"type": "input_text", "text": "a"})
        );
    }

    #[test]
    fn pages_follow_one_another_to_the_end() {
        let store = stored();
        let (mut after, mut seen) = (Value::Null, Vec::new());
        loop {
            let page = page(&store, json!({"order": "asc", "limit": 2, "after": after})).unwrap();
            seen.extend(ids(&page).into_iter().map(str::to_owned));
            after = page["last_id"].clone();
            if page["has_more"] == false {
                break;
            }
        }
        assert_eq!(
            seen,
            [
                "msg_9_in0",
                "rs_9_in1",
                "fc_9_in2",
                "fco_9_in3",
                "msg_9_in4"
            ]
        );
        for id in &seen {
            assert!(store.item("t", id).is_some(), "{id} cannot be referred to");
            assert!(store.item("u", id).is_none(), "{id} is shown to others");
        }
    }

    #[test]
    fn a_page_that_is_none_is_refused() {
        let store = stored();
        for (query, param) in [
            (json!({"limit": 0}), "limit"),
            (json!({"limit": 101}), "limit"),
            (json!({"after": "msg_8_in0"}), "after"),
            (json!({"after": "msg_9_in5"}), "after"),
            (json!({"after": "msg_9_0"}), "after"),
            (json!({"after": ""}), "after"),
        ] {
            let error = page(&store, query).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param));
        }
        let strangers = input_items(&store, "u", "resp_9", &PageQuery::default(), Instant::now());
        assert_eq!(strangers.unwrap_err().kind, ErrorKind::NotFound);
    }
}
