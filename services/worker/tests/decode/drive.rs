//! Drive mode over a scripted engine: what comes out is the engine's own, whether it streams it or is made to judge drafts.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_protocol::chunk::*;
use refrain_protocol::document::FinishReason;
use refrain_protocol::{DocumentId, ErrorKind, LeaseId, TokenId};
use refrain_rpc::Worker;
use refrain_worker::{DriveMode, EngineKind, VerifyAbilities, VerifyMethod, WorkerConfig};

use crate::bench::*;
use crate::fake_stream::{FakeStream, kept_as_cancelled, listening, stored};
use crate::fakes::{STOP, Target};

const CHAIN: VerifyAbilities = VerifyAbilities {
    chain: true,
    fan_out: false,
};
const FAN_OUT: VerifyAbilities = VerifyAbilities {
    chain: false,
    fan_out: true,
};
const BOTH: VerifyAbilities = VerifyAbilities {
    chain: true,
    fan_out: true,
};

/// Streams a token every few milliseconds, and judges drafts in less than one.
fn engine(target: Target, verifies: VerifyAbilities) -> FakeStream {
    let mut engine = FakeStream::new(target);
    engine.abilities = verifies;
    engine.pause = Duration::from_millis(3);
    engine
}

fn drives(config: &mut WorkerConfig) {
    config.engine.kind = EngineKind::Vllm;
    config.engine.drive = DriveMode::Auto;
}

fn prompts() -> Vec<Vec<TokenId>> {
    (0..6).map(|n| vec![1, 2 + n % 2, 3]).collect()
}

#[tokio::test]
async fn the_output_is_the_engines_own() {
    for (target, verifies) in [
        (counting as Target, FAN_OUT),
        (counting, CHAIN),
        (repetitive, BOTH),
        (erratic, FAN_OUT),
    ] {
        for driven in [false, true] {
            let (engine, bench) = listening(engine(target, verifies), |config| {
                if driven {
                    drives(config);
                }
            })
            .await;
            let mut said = Vec::new();
            for prompt in prompts() {
                let request = chunk(&bench, &prompt, 120);
                let one = run(&bench, request.clone()).await;
                assert_eq!(one.tokens, plainly(target, &prompt, 120));
                assert_eq!(
                    one.end.as_ref().map(|end| end.reason),
                    Some(ChunkEndReason::Length)
                );
                eventually("the store has it", || {
                    stored(&bench, &request)
                        == Some((one.tokens.clone(), Some(FinishReason::Length)))
                })
                .await;
                said.push(one);
            }
            let calls = engine.judged.lock().unwrap().len();
            if !driven {
                assert_eq!(calls, 0);
                continue;
            }
            // How often a call pays is up to the clock; that the first draft is tried is not.
            if target as usize != erratic as Target as usize {
                assert!(calls > 0);
            }
            let accepted: u32 = said.iter().map(|said| said.accepted).sum();
            let figure = |source: &str, scope: &str| {
                bench.figure(&format!(
                    "refrain_spec_accepted_tokens_total{{model=\"fake\",scope=\"{scope}\",source=\"{source}\"}}"
                ))
            };
            let shown: f64 = ["request", "group", "tenant"]
                .map(|scope| figure("suffix", scope))
                .iter()
                .sum();
            assert_eq!(shown as u32, accepted);
        }
    }
}

#[tokio::test]
async fn an_end_token_that_the_request_does_not_know_ends_the_output_all_the_same() {
    let output = plainly(stopping, &[1, 2, 3], 100);
    for verifies in [FAN_OUT, CHAIN] {
        let (engine, bench) = listening(engine(stopping, verifies), drives).await;
        let has_judged_the_end = || {
            let judged = engine.judged.lock().unwrap();
            judged.iter().any(|call| call.draft.tokens.contains(&STOP))
        };
        let mut left = 200;
        while !has_judged_the_end() {
            assert!(left > 0, "no draft reached the end");
            left -= 1;
            let mut request = chunk(&bench, &[1, 2, 3], 100);
            request.sampling.stop_token_ids = Vec::new();
            // Whether calls pay on the whole is not asked.
            request.speculation = Speculation::Suffix;
            let said = run(&bench, request.clone()).await;
            assert_eq!(said.tokens, output);
            assert_eq!(said.end.map(|end| end.reason), Some(ChunkEndReason::Stop));
            eventually("the store has it", || {
                stored(&bench, &request) == Some((output.clone(), Some(FinishReason::Stop)))
            })
            .await;
        }
    }
}

#[tokio::test]
async fn what_was_drafted_from_is_credited_and_the_first_token_is_always_streamed() {
    let (engine, bench) = listening(engine(counting, FAN_OUT), drives).await;
    let first = chunk(&bench, &[1, 2, 3], 100);
    let document: DocumentId = first.request.into();
    run(&bench, first).await;
    for _ in 0..3 {
        let said = run(&bench, chunk(&bench, &[1, 2, 3], 100)).await;
        assert_eq!(said.sources[0], DraftSource::None);
    }
    assert!(!engine.judged.lock().unwrap().is_empty());
    eventually("the first document is touched", || {
        bench.store.touched.lock().unwrap().contains(&document)
    })
    .await;
}

#[tokio::test]
async fn outputs_end_inside_drafts_where_they_should() {
    // A stop id that is drafted, a limit that is, and the limit of a chunk.
    let (engine, bench) = listening(engine(stopping, FAN_OUT), drives).await;
    for _ in 0..4 {
        let said = run(&bench, chunk(&bench, &[1, 2, 3], 100)).await;
        assert_eq!(said.tokens, plainly(stopping, &[1, 2, 3], 100));
        assert_eq!(said.tokens.last(), Some(&STOP));
        assert_eq!(said.end.map(|end| end.reason), Some(ChunkEndReason::Stop));
    }
    for limit in [5, 17, 30] {
        let request = chunk(&bench, &[1, 2, 3], limit);
        let said = run(&bench, request.clone()).await;
        assert_eq!(said.tokens, plainly(stopping, &[1, 2, 3], limit as usize));
        assert_eq!(said.end.map(|end| end.reason), Some(ChunkEndReason::Length));
    }
    let mut request = chunk(&bench, &[1, 2, 3], 100);
    request.chunk_tokens = Some(8);
    let mut output: Vec<TokenId> = Vec::new();
    loop {
        let said = run(&bench, request.clone()).await;
        output.extend(&said.tokens);
        request.tokens.extend(&said.tokens);
        request.max_new_tokens -= said.tokens.len() as u32;
        request.lease = LeaseId(request.lease.0 + 1_000_000);
        request.epoch += 1;
        match said.end.unwrap().reason {
            ChunkEndReason::ChunkLimit => assert!(said.tokens.len() >= 8),
            ChunkEndReason::Stop => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(output, plainly(stopping, &[1, 2, 3], 100));
    assert!(!engine.judged.lock().unwrap().is_empty());
}

#[tokio::test]
async fn chains_that_leave_a_place_open_and_calls_that_fail_change_nothing() {
    let (engine, bench) = listening(engine(counting, BOTH), drives).await;
    engine.blind_chains.store(u32::MAX, Ordering::SeqCst);
    for _ in 0..6 {
        let said = run(&bench, chunk(&bench, &[1, 2, 3], 120)).await;
        assert_eq!(said.tokens, plainly(counting, &[1, 2, 3], 120));
    }
    let of = |method| {
        let judged = engine.judged.lock().unwrap();
        judged.iter().filter(|call| call.method == method).count()
    };
    assert!(of(VerifyMethod::Chain) >= 1 && of(VerifyMethod::FanOut) >= 1);
    let unknown =
        bench.figure("refrain_drive_calls_total{model=\"fake\",outcome=\"unknown\",way=\"chain\"}");
    assert_eq!(unknown as usize, of(VerifyMethod::Chain));

    for kind in [
        ErrorKind::InvalidRequest,
        ErrorKind::Upstream,
        ErrorKind::Timeout,
    ] {
        *engine.refusal.lock().unwrap() = kind;
        engine.call_refusals.store(u32::MAX, Ordering::SeqCst);
        let said = run(&bench, chunk(&bench, &[1, 2, 3], 120)).await;
        assert_eq!(said.tokens, plainly(counting, &[1, 2, 3], 120));
        assert_eq!(said.error, None);
    }
    assert!(
        bench
            .figure("refrain_drive_calls_total{model=\"fake\",outcome=\"failed\",way=\"fan_out\"}")
            >= 1.0
    );
    bench.worker.handle().readiness().unwrap();
}

/// Verify calls are never answered, and waited for as long as a request has time.
async fn unanswered() -> (Arc<FakeStream>, Bench<FakeStream>) {
    let mut engine = engine(counting, FAN_OUT);
    engine.judging = Duration::from_secs(3600);
    listening(engine, |config| {
        drives(config);
        config.engine.call_ms_max = 3_600_000;
    })
    .await
}

#[tokio::test]
async fn a_reader_that_leaves_during_a_call_frees_the_engine() {
    let (engine, bench) = unanswered().await;
    let first = chunk(&bench, &[1, 2, 3], 40);
    let reading = {
        let stream = bench.worker.handle().chunk(first).await.unwrap();
        tokio::spawn(read(stream))
    };
    // Nothing is remembered yet, so nothing is judged.
    let said = reading.await.unwrap();
    assert_eq!(said.tokens.len(), 40);
    let request = chunk(&bench, &[1, 2, 3], 100);
    let stream = bench.worker.handle().chunk(request.clone()).await.unwrap();
    let reading = tokio::spawn(read(stream));
    eventually("a draft is being judged", || {
        !engine.judged.lock().unwrap().is_empty()
    })
    .await;
    // The stream was given up for the call.
    assert_eq!(engine.at_work.load(Ordering::SeqCst), 1);
    reading.abort();
    engine.becomes_free().await;
    kept_as_cancelled(&bench, &request, 1).await;
}

#[tokio::test]
async fn a_call_without_an_answer_is_given_up_and_the_stream_goes_on() {
    let mut engine = engine(counting, FAN_OUT);
    engine.judging = Duration::from_secs(3600);
    let (engine, bench) = listening(engine, |config| {
        drives(config);
        config.engine.call_ms_max = 20;
    })
    .await;
    for _ in 0..2 {
        let said = run(&bench, chunk(&bench, &[1, 2, 3], 60)).await;
        assert_eq!(said.tokens, plainly(counting, &[1, 2, 3], 60));
    }
    assert!(!engine.judged.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_call_is_waited_for_no_longer_than_the_request_has_time() {
    let (engine, bench) = unanswered().await;
    run(&bench, chunk(&bench, &[1, 2, 3], 40)).await;
    // A machine that is busy may need more time to come to the call.
    for tries in 0.. {
        let mut request = chunk(&bench, &[1, 2, 3], 1_000);
        request.budget.time_left_ms = Some(100 << tries);
        let error = run(&bench, request).await.error.unwrap();
        assert_eq!(error.code.as_deref(), Some("request_timeout"));
        engine.becomes_free().await;
        if !engine.judged.lock().unwrap().is_empty() {
            break;
        }
    }
    assert_eq!(bench.figure("refrain_worker_engine_failures_total"), 0.0);
}

#[tokio::test]
async fn drafts_come_from_the_prediction_and_from_the_group_as_well() {
    let (engine, bench) = listening(engine(counting, FAN_OUT), drives).await;
    let mut request = chunk(&bench, &[1, 2, 3], 100);
    request.prediction = plainly(counting, &[1, 2, 3], 100);
    let said = run(&bench, request).await;
    assert_eq!(said.tokens, plainly(counting, &[1, 2, 3], 100));
    assert!(said.sources.contains(&DraftSource::Prediction));
    assert!(!engine.judged.lock().unwrap().is_empty());
}
