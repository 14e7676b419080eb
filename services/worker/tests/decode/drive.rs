//! Drive mode over a scripted engine: verify calls never change the output.

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

/// An engine that streams a token every few milliseconds, and judges drafts in less than one.
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
async fn verify_calls_do_not_change_the_output() {
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
            let mut received = Vec::new();
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
                received.push(one);
            }
            let calls = engine.judged.lock().unwrap().len();
            if !driven {
                assert_eq!(calls, 0);
                continue;
            }
            // The clock decides how often calls pay, but the first draft is always tried.
            if target as usize != erratic as Target as usize {
                assert!(calls > 0);
            }
            let accepted: u32 = received.iter().map(|received| received.accepted).sum();
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
async fn an_end_token_of_the_engine_ends_the_output() {
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
            // The guard does not concern requests that ask for suffix drafts.
            request.speculation = Speculation::Suffix;
            let received = run(&bench, request.clone()).await;
            assert_eq!(received.tokens, output);
            assert_eq!(
                received.end.map(|end| end.reason),
                Some(ChunkEndReason::Stop)
            );
            eventually("the store has it", || {
                stored(&bench, &request) == Some((output.clone(), Some(FinishReason::Stop)))
            })
            .await;
        }
    }
}

#[tokio::test]
async fn sources_of_drafts_are_credited_and_the_first_token_is_always_streamed() {
    let (engine, bench) = listening(engine(counting, FAN_OUT), drives).await;
    let first = chunk(&bench, &[1, 2, 3], 100);
    let document: DocumentId = first.request.into();
    run(&bench, first).await;
    for _ in 0..3 {
        let received = run(&bench, chunk(&bench, &[1, 2, 3], 100)).await;
        assert_eq!(received.sources[0], DraftSource::None);
    }
    assert!(!engine.judged.lock().unwrap().is_empty());
    eventually("the first document is touched", || {
        bench.store.touched.lock().unwrap().contains(&document)
    })
    .await;
}

#[tokio::test]
async fn outputs_end_inside_drafts_at_stop_ids_and_limits() {
    // A drafted stop id, a limit inside a draft, and the limit of a chunk.
    let (engine, bench) = listening(engine(stopping, FAN_OUT), drives).await;
    for _ in 0..4 {
        let received = run(&bench, chunk(&bench, &[1, 2, 3], 100)).await;
        assert_eq!(received.tokens, plainly(stopping, &[1, 2, 3], 100));
        assert_eq!(received.tokens.last(), Some(&STOP));
        assert_eq!(
            received.end.map(|end| end.reason),
            Some(ChunkEndReason::Stop)
        );
    }
    for limit in [5, 17, 30] {
        let request = chunk(&bench, &[1, 2, 3], limit);
        let received = run(&bench, request.clone()).await;
        assert_eq!(
            received.tokens,
            plainly(stopping, &[1, 2, 3], limit as usize)
        );
        assert_eq!(
            received.end.map(|end| end.reason),
            Some(ChunkEndReason::Length)
        );
    }
    let mut request = chunk(&bench, &[1, 2, 3], 100);
    request.chunk_tokens = Some(8);
    let mut output: Vec<TokenId> = Vec::new();
    loop {
        let received = run(&bench, request.clone()).await;
        output.extend(&received.tokens);
        request.tokens.extend(&received.tokens);
        request.max_new_tokens -= received.tokens.len() as u32;
        request.lease = LeaseId(request.lease.0 + 1_000_000);
        request.epoch += 1;
        match received.end.unwrap().reason {
            ChunkEndReason::ChunkLimit => assert!(received.tokens.len() >= 8),
            ChunkEndReason::Stop => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(output, plainly(stopping, &[1, 2, 3], 100));
    assert!(!engine.judged.lock().unwrap().is_empty());
}

#[tokio::test]
async fn open_positions_and_failed_calls_change_nothing() {
    let (engine, bench) = listening(engine(counting, BOTH), drives).await;
    engine.blind_chains.store(u32::MAX, Ordering::SeqCst);
    for _ in 0..6 {
        let received = run(&bench, chunk(&bench, &[1, 2, 3], 120)).await;
        assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 120));
    }
    let of = |method| {
        let judged = engine.judged.lock().unwrap();
        judged.iter().filter(|call| call.method == method).count()
    };
    assert!(of(VerifyMethod::Chain) >= 1 && of(VerifyMethod::FanOut) >= 1);
    let unknown = bench
        .figure("refrain_drive_calls_total{method=\"chain\",model=\"fake\",outcome=\"unknown\"}");
    assert_eq!(unknown as usize, of(VerifyMethod::Chain));

    for kind in [
        ErrorKind::InvalidRequest,
        ErrorKind::Upstream,
        ErrorKind::Timeout,
    ] {
        *engine.refusal.lock().unwrap() = kind;
        engine.call_refusals.store(u32::MAX, Ordering::SeqCst);
        let received = run(&bench, chunk(&bench, &[1, 2, 3], 120)).await;
        assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 120));
        assert_eq!(received.error, None);
    }
    assert!(
        bench.figure(
            "refrain_drive_calls_total{method=\"fan_out\",model=\"fake\",outcome=\"failed\"}"
        ) >= 1.0
    );
    bench.worker.handle().readiness().unwrap();
}

/// An engine that never answers verify calls, and a worker that waits for them until the request times out.
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
    // Nothing is remembered yet, so no draft is verified.
    let received = reading.await.unwrap();
    assert_eq!(received.tokens.len(), 40);
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
async fn a_call_without_a_response_times_out_and_the_stream_continues() {
    let mut engine = engine(counting, FAN_OUT);
    engine.judging = Duration::from_secs(3600);
    let (engine, bench) = listening(engine, |config| {
        drives(config);
        config.engine.call_ms_max = 20;
    })
    .await;
    for _ in 0..2 {
        let received = run(&bench, chunk(&bench, &[1, 2, 3], 60)).await;
        assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 60));
    }
    assert!(!engine.judged.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_call_ends_with_the_deadline_of_its_request() {
    let (engine, bench) = unanswered().await;
    run(&bench, chunk(&bench, &[1, 2, 3], 40)).await;
    // A busy machine may need more time until the call is made.
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
    let received = run(&bench, request).await;
    assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 100));
    assert!(received.sources.contains(&DraftSource::Prediction));
    assert!(!engine.judged.lock().unwrap().is_empty());
}
