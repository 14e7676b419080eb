//! The chunks of scripted workers.

use std::collections::VecDeque;

use refrain_protocol::chunk::{
    ChunkEnd, ChunkEndReason, ChunkEvent, ChunkRequest, DraftScope, DraftSource, ParkedContext,
    StepMessage,
};
use refrain_protocol::engine::TokenLogprob;
use refrain_protocol::prefix::PrefixHasher;
use refrain_protocol::{ApiError, TokenId, WorkerId};
use refrain_tokenization::testing::IM_END;

use crate::mesh::{Mishap, Script};

/// The request for a chunk with everything that the worker parked, which is what the chunk before had and emitted.
pub(crate) fn resumed(
    script: &Script,
    request: ChunkRequest,
    parked: ParkedContext,
    last: &ChunkRequest,
) -> ChunkRequest {
    assert!(request.tokens.is_empty() && request.prediction.is_empty());
    assert_eq!(parked.epoch, last.epoch);
    let output = parked.tokens as usize - last.prompt_len as usize;
    let prompt = &last.tokens[..last.prompt_len as usize];
    let tokens = [prompt, &script.reply[..output]].concat();
    let mut hasher = PrefixHasher::new(&request.namespace.namespace.id());
    hasher.extend(&tokens);
    assert_eq!(parked.hash, hasher.whole());
    ChunkRequest {
        tokens,
        sampling: last.sampling.clone(),
        prediction: last.prediction.clone(),
        ..request
    }
}

/// The events of one chunk.
pub(crate) fn events(
    script: &Script,
    request: &ChunkRequest,
    mishap: Option<&Mishap>,
) -> VecDeque<Result<ChunkEvent, ApiError>> {
    let done = request.tokens.len() - request.prompt_len as usize;
    assert_eq!(
        &request.tokens[request.prompt_len as usize..],
        &script.reply[..done],
        "continued from elsewhere"
    );
    let left = &script.reply[done..];
    let room = left.len().min(request.max_new_tokens as usize);
    let chunk = request
        .chunk_tokens
        .map_or(room, |most| room.min(most as usize));
    let mut events = VecDeque::new();
    for (sequence, tokens) in left[..chunk].chunks(script.step_tokens).enumerate() {
        let logprob = |token: &TokenId| {
            let most = request.sampling.top_logprobs.unwrap_or(0);
            let top = (0..most)
                .map(|rank| (*token + rank, -1.0 - rank as f32))
                .collect();
            TokenLogprob { logprob: -1.0, top }
        };
        match mishap {
            Some(Mishap::Lose(at) | Mishap::Hang(at)) if *at == sequence => return events,
            Some(Mishap::Fail(at, kind)) if *at == sequence => {
                events.push_back(Err(ApiError::new(*kind, "failed by script")));
                return events;
            }
            Some(Mishap::FailForm(at)) if *at == sequence => {
                let error = ApiError::invalid("sampling.form", "too complex");
                events.push_back(Err(error.with_code("output_form")));
                return events;
            }
            Some(Mishap::Drain(at)) if *at == sequence => {
                events.push_back(Ok(ChunkEvent::End(end(ChunkEndReason::Draining))));
                return events;
            }
            Some(Mishap::GiveWay(at)) if *at == sequence => {
                events.push_back(Ok(ChunkEvent::End(end(ChunkEndReason::GaveWay))));
                return events;
            }
            Some(Mishap::Transfer(at)) if *at == sequence => {
                events.push_back(Ok(ChunkEvent::End(ChunkEnd {
                    next_worker: Some(WorkerId("w1".into())),
                    ..end(ChunkEndReason::Transfer)
                })));
                return events;
            }
            Some(Mishap::Abort(at)) if *at == sequence => {
                events.push_back(Ok(ChunkEvent::End(end(ChunkEndReason::Aborted))));
                return events;
            }
            Some(Mishap::Skip(at)) if *at == sequence => continue,
            _ => {}
        }
        events.push_back(Ok(ChunkEvent::Step(StepMessage {
            sequence: sequence as u64,
            tokens: tokens.to_vec(),
            logprobs: request
                .sampling
                .top_logprobs
                .map(|_| tokens.iter().map(logprob).collect()),
            weight_version: script.version_at(sequence),
            source: DraftSource::Suffix,
            merged: None,
            forced: None,
            scope: DraftScope::Tenant,
            drafted: 4,
            accepted: tokens.len() as u32 - 1,
        })));
    }
    if matches!(mishap, Some(Mishap::Lose(at)) if *at == chunk.div_ceil(script.step_tokens)) {
        return events;
    }
    let reason = if left.get(..chunk).is_some_and(|sent| sent.contains(&IM_END)) {
        ChunkEndReason::Stop
    } else if chunk == request.max_new_tokens as usize || chunk == left.len() {
        ChunkEndReason::Length
    } else {
        ChunkEndReason::ChunkLimit
    };
    events.push_back(Ok(ChunkEvent::End(end(reason))));
    events
}

pub(crate) fn end(reason: ChunkEndReason) -> ChunkEnd {
    ChunkEnd {
        next_worker: None,
        reason,
        cached_tokens: 3,
        prefill_s: 0.25,
        decode_s: 0.5,
        decode_tokens: 9,
    }
}
