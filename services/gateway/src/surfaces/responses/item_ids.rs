//! The ids of the items of a stored response's input.

use super::history::HistoryItem;

/// The part of an id between its response and the place of the item.
const PLACE_MARK: &str = "_in";

/// The id of an item of the input. It tells the response and the place, so nothing has to be stored for it.
pub(super) fn item_id(response: &str, place: usize, item: &HistoryItem) -> String {
    let kind = match item {
        HistoryItem::Message { .. } => "msg",
        HistoryItem::Reasoning(_) => "rs",
        HistoryItem::Call { tool, .. } if tool.is_custom => "ctc",
        HistoryItem::Call { .. } => "fc",
        HistoryItem::CallOutput {
            is_custom: true, ..
        } => "ctco",
        HistoryItem::CallOutput { .. } => "fco",
    };
    let number = response.strip_prefix("resp_").unwrap_or(response);
    format!("{kind}_{number}{PLACE_MARK}{place}")
}

/// The response and the place of an id of [`item_id`].
pub(super) fn place_of(id: &str) -> Option<(String, usize)> {
    let (rest, place) = id.rsplit_once(PLACE_MARK)?;
    let (_, number) = rest.split_once('_')?;
    Some((format!("resp_{number}"), place.parse().ok()?))
}
