//! Filling the table of `--spec-type ngram-mod`, which all slots share.
//!
//! The server fills it from the prompt of each request, when it begins to generate. So a request for one token, of
//! which nobody reads the answer, is enough.

use refrain_protocol::{ApiError, ErrorKind, TokenId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::engine::client::parse;
use crate::engine::slots::{EngineSlots, PrimerCalls};

pub(super) const CALLS: PrimerCalls = PrimerCalls {
    slots_path: "/slots",
    read_slots,
    body,
};

/// The slot of the primer. A server that was just started gives its other slots to requests first.
const PRIMER_SLOT: u64 = 0;

#[derive(Deserialize)]
struct Slot {
    id: u64,
    is_processing: bool,
    /// Whether the server drafts by itself.
    #[serde(default)]
    speculative: bool,
    #[serde(default)]
    id_task: Option<u64>,
}

fn read_slots(page: &[u8]) -> Result<EngineSlots, ApiError> {
    let slots: Vec<Slot> = parse(page)?;
    let lacks = |what| Err(ApiError::new(ErrorKind::InvalidRequest, what));
    if slots.len() < 2 {
        return lacks(
            "the llama-server has no slot to spare for the primer; start it with -np of one more than \
             worker.running_max",
        );
    }
    if !slots.iter().all(|slot| slot.speculative) {
        return lacks(
            "the llama-server does not draft by itself; start it with --spec-type ngram-mod, or set \
             worker.engine.primer.tokens_max = 0",
        );
    }
    let is_busy = |is_primers| {
        let mut of = slots
            .iter()
            .filter(|slot| (slot.id == PRIMER_SLOT) == is_primers);
        of.any(|slot| slot.is_processing)
    };
    Ok(EngineSlots {
        last_request: slots.iter().filter_map(|slot| slot.id_task).max(),
        is_free: !is_busy(true),
        has_others: is_busy(false),
    })
}

fn body(text: &[TokenId]) -> Value {
    json!({
        "prompt": text,
        "n_predict": 1,
        "temperature": 0,
        "id_slot": PRIMER_SLOT,
        "cache_prompt": false,
        "stream": false,
        "response_fields": ["stop"],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slots of a real llama-server (of llama-cpp-python 0.3.36), without their parameters.
    fn page(speculates: bool, first_is_busy: bool) -> String {
        format!(
            r#"[{{"id":0,"n_ctx":2048,"speculative":{speculates},"is_processing":{first_is_busy}}},
            {{"id":1,"n_ctx":2048,"speculative":{speculates},"is_processing":true,"id_task":762,"params":{{}}}},
            {{"id":2,"n_ctx":2048,"speculative":{speculates},"is_processing":false,"id_task":40,"params":{{}}}}]"#
        )
    }

    #[test]
    fn slots_tell_whether_the_primers_is_free_and_how_many_requests_there_were() {
        for is_busy in [false, true] {
            let slots = read_slots(page(true, is_busy).as_bytes()).unwrap();
            let expected = EngineSlots {
                last_request: Some(762),
                is_free: !is_busy,
                has_others: true,
            };
            assert_eq!(slots, expected);
        }
    }

    #[test]
    fn a_server_that_cannot_be_primed_is_told_how_to_be_started() {
        let plain = read_slots(page(false, false).as_bytes()).unwrap_err();
        assert!(plain.message.contains("--spec-type ngram-mod"));
        let single = br#"[{"id":0,"speculative":true,"is_processing":false}]"#;
        assert!(read_slots(single).unwrap_err().message.contains("-np"));
        assert!(read_slots(b"{}").is_err());
    }
}
