//! The time that the prompts of calls take on the modelled engine.

use std::collections::HashMap;

use refrain_suffix_index::Token;

use super::sample::TenantWorkload;
use crate::logs::RecordedCall;
use crate::replay::{EngineModel, StepLoad};

/// For each call, the tokens of its prompt that an engine still has: the beginning that it shares with the last call
/// of its session, or with the call before it in the log.
pub(super) fn reused_tokens(workload: &TenantWorkload) -> Vec<usize> {
    let mut last_of_session: HashMap<&str, usize> = HashMap::new();
    let calls = &workload.calls;
    let each = calls.iter().enumerate().map(|(at, call)| {
        let session = call.session.as_deref();
        let of_session = session.and_then(|name| last_of_session.insert(name, at));
        let earlier = [of_session, at.checked_sub(1)].into_iter().flatten();
        let shared = earlier.map(|earlier| {
            let text = calls[earlier].prompt.iter().chain(&calls[earlier].output);
            shared_tokens(text, &call.prompt)
        });
        // The last token is computed in any case.
        let most = call.prompt.len().saturating_sub(1);
        shared.max().unwrap_or(0).min(most)
    });
    each.collect()
}

/// Seconds by which the prompt of a call makes the steps of `others` decoding requests longer, if the engine still
/// has so many `known` tokens of it.
pub(super) fn prompt_seconds(
    engine: &EngineModel,
    call: &RecordedCall,
    known: usize,
    others: usize,
) -> f64 {
    let tokens = call.prompt.len() - known;
    let beside = StepLoad::decoding(others, others, 0);
    if tokens == 0 {
        return 0.0;
    }
    let with = StepLoad {
        requests: others + 1,
        tokens: others + tokens,
        // A token attends to those before it: all known ones, and half of the others on average.
        kv_tokens: known + tokens / 2,
        queries: tokens as f64,
    };
    engine.step_seconds(with) - engine.step_seconds(beside)
}

fn shared_tokens<'a>(text: impl Iterator<Item = &'a Token>, prompt: &[Token]) -> usize {
    text.zip(prompt).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_goes_on_costs_its_new_tokens() -> anyhow::Result<()> {
        let engine = EngineModel::load("h100-8b")?;
        let call = |session: &str, prompt: Vec<Token>| RecordedCall {
            session: Some(session.into()),
            prompt,
            output: vec![7; 100],
            ..RecordedCall::default()
        };
        let first: Vec<Token> = (0..4000).collect();
        let next = [&first[..], &[7; 100], &[8; 900]].concat();
        let workload = TenantWorkload {
            calls: vec![
                call("a", first),
                call("b", (9000..9500).collect()),
                call("a", next),
                call("b", Vec::new()),
            ],
            ..TenantWorkload::default()
        };
        let reused = reused_tokens(&workload);
        assert_eq!(reused, [0, 0, 4100, 0]);
        let seconds = |call: usize, known| prompt_seconds(&engine, &workload.calls[call], known, 0);
        assert!(seconds(2, 0) > 4.0 * seconds(2, 4100));
        assert_eq!(seconds(3, 0), 0.0);
        // For other requests, the weights are read in any case.
        let beside = prompt_seconds(&engine, &workload.calls[1], 0, 15);
        assert!(beside > 0.0 && beside < 0.7 * seconds(1, 0), "{beside}");
        Ok(())
    }
}
