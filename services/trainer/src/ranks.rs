//! Calls that give engines their ranks in a group of processes: each engine gets its own part of the ranks.
//!
//! A trainer takes this listener for one engine with as many devices as all engines have together, so it gives it one
//! range of ranks. SGLang adds the rank of each of its devices to `rank_offset`, and so do vLLM and the servers of
//! AReaL and prime-rl. So the first engine gets that offset, and each further one the offset after the engine before.

use refrain_protocol::ApiError;
use refrain_protocol::error::code;
use serde_json::{Map, Value};

/// Calls that give an engine its ranks in a group of processes.
const WITH_RANKS: [&str; 4] = [
    "/init_weights_update_group",
    "/init_weight_transfer_engine",
    "/init_broadcaster",
    "/areal_init_weights_update_group",
];

/// Whether a call gives ranks.
pub(super) fn has_ranks(path: &str) -> bool {
    WITH_RANKS.contains(&path)
}

/// The field of vLLM's call that has the others.
const NESTED: &str = "init_info";

/// The bodies of a call for engines with these numbers of devices, in that order.
///
/// # Errors
/// The call has no `rank_offset`, or its group has fewer ranks than the engines have devices.
pub(super) fn divided(
    path: &str,
    body: &Map<String, Value>,
    sizes: &[u32],
) -> Result<Vec<Map<String, Value>>, ApiError> {
    let is_nested = body.get(NESTED).is_some_and(Value::is_object);
    let ranks = match body.get(NESTED) {
        Some(Value::Object(nested)) => nested,
        _ => body,
    };
    let number = |name: &str| ranks.get(name).and_then(Value::as_u64);
    let Some(base) = number("rank_offset") else {
        let message = format!(
            "{path}: the call has no rank_offset, so it is for one engine, and the model has {}; use one worker, or \
             weights from a directory",
            sizes.len()
        );
        return Err(
            ApiError::invalid("rank_offset", message).with_code(code::UNSUPPORTED_BY_ENGINE)
        );
    };
    let all: u64 = sizes.iter().map(|size| u64::from(*size)).sum();
    for name in ["world_size", "inference_world_size"] {
        if let Some(group) = number(name).filter(|group| base.saturating_add(all) > *group) {
            let message = format!(
                "{name}: the engines have {all} devices together, and a group of {group} has no room for them from \
                 rank {base} on; GET /get_world_size tells their number"
            );
            return Err(ApiError::invalid(name, message));
        }
    }
    let mut offset = base;
    let mut bodies = Vec::new();
    for size in sizes {
        let mut own = ranks.clone();
        own.insert("rank_offset".into(), offset.into());
        if own.contains_key("engine_world_size") {
            own.insert("engine_world_size".into(), (*size).into());
        }
        offset += u64::from(*size);
        if is_nested {
            let mut whole = body.clone();
            whole.insert(NESTED.into(), own.into());
            own = whole;
        }
        bodies.push(own);
    }
    Ok(bodies)
}

/// Calls that tell how many devices an engine has: that of vLLM, and those of SGLang.
pub(super) const SIZE_CALLS: [&str; 3] = ["/get_world_size", "/server_info", "/get_server_info"];

/// The number of devices of an engine, as its answer to one of [`SIZE_CALLS`] has it.
pub(super) fn read_size(answer: &str) -> Option<u32> {
    let facts: Value = serde_json::from_str(answer).ok()?;
    let number = |name: &str| u32::try_from(facts[name].as_u64()?).ok();
    let size = match number("world_size") {
        Some(size) => size,
        None => number("tp_size")?.checked_mul(number("pp_size").unwrap_or(1))?,
    };
    (size > 0).then_some(size)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn divide(body: Value, sizes: &[u32]) -> Result<Vec<Value>, ApiError> {
        let Value::Object(body) = body else {
            panic!("an object")
        };
        let bodies = divided("/init", &body, sizes)?;
        Ok(bodies.into_iter().map(Value::from).collect())
    }

    #[test]
    fn each_engine_gets_the_ranks_after_those_of_the_engine_before() {
        // slime and AReaL, for SGLang: the trainer has rank 0.
        let call = |offset: u64| json!({"rank_offset": offset, "world_size": 8, "group_name": "g"});
        assert_eq!(
            divide(call(1), &[4, 2, 1]),
            Ok(vec![call(1), call(5), call(7)])
        );
        // vLLM has the ranks in an object of its own.
        let call = |offset: u64| json!({"init_info": {"rank_offset": offset, "world_size": 5, "master_port": 1}});
        assert_eq!(divide(call(1), &[2, 2]), Ok(vec![call(1), call(3)]));
        // prime-rl counts from 0, and each engine has to know its own size.
        let call = |offset: u64, own: u64| json!({"rank_offset": offset, "inference_world_size": 6, "engine_world_size": own});
        assert_eq!(
            divide(call(0, 6), &[4, 2]),
            Ok(vec![call(0, 4), call(4, 2)])
        );
    }

    #[test]
    fn a_group_without_room_or_without_an_offset_is_refused() {
        let error = divide(json!({"rank_offset": 1, "world_size": 4}), &[2, 2]).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("world_size"));
        assert!(error.message.contains("4 devices"), "{error}");
        let prime = json!({"rank_offset": 0, "inference_world_size": 3});
        assert!(divide(prime, &[2, 2]).is_err());
        // An older prime-rl numbers its servers.
        let servers = json!({"server_rank": 0, "num_inference_server": 1});
        let error = divide(servers, &[1, 1]).unwrap_err();
        assert!(error.has_code("unsupported_by_engine"), "{error}");
    }

    #[test]
    fn an_engine_tells_its_number_of_devices() {
        assert_eq!(read_size(r#"{"world_size": 8}"#), Some(8));
        assert_eq!(read_size(r#"{"tp_size": 4, "pp_size": 2}"#), Some(8));
        assert_eq!(read_size(r#"{"tp_size": 4}"#), Some(4));
        for unknown in [
            "",
            "{}",
            "[]",
            r#"{"world_size": 0}"#,
            r#"{"tp_size": "4"}"#,
        ] {
            assert_eq!(read_size(unknown), None, "{unknown}");
        }
    }
}
