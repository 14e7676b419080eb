//! The worker over scripted engines: the output is that of the target model, whatever is drafted.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

mod adoption;
mod attached;
mod bench;
mod discovery;
mod drain;
mod external;
mod external_orders;
mod fake_stream;
mod fakes;
mod fallback;
mod forms;
mod goodput;
mod groups;
mod guard;
mod heartbeats;
mod introductions;
mod orders;
mod parking;
mod prediction;
mod primer;
mod statistics;
mod stream_orders;
mod streaming;
mod transfer;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bench::*;
use fakes::{FakeEngine, STOP, Target};
use futures_util::StreamExt;
use refrain_protocol::chunk::*;
use refrain_protocol::document::FinishReason;
use refrain_protocol::{DocumentId, ErrorKind, LeaseId, TokenId};
use refrain_rpc::Worker;
use tokio::sync::Semaphore;

#[tokio::test]
async fn drafts_change_the_number_of_steps_and_nothing_else() {
    for target in [repetitive as Target, erratic, stopping] {
        let bench = bench(FakeEngine::new(target), |_| {}).await;
        let prompts: Vec<Vec<TokenId>> = (0..12)
            .map(|n| (0..5 + 3 * n).map(|i| 1 + (i * (n + 1)) % 9).collect())
            .collect();
        // All requests at once, so that batches form and prompts are read beside decoding.
        let runs = prompts.iter().map(|prompt| {
            let mut request = chunk(&bench, prompt, 100);
            request.speculation = if prompt.len() % 2 == 0 {
                Speculation::Auto
            } else {
                Speculation::Off
            };
            let bench = &bench;
            async move {
                (
                    prompt,
                    request.speculation,
                    run_when_free(bench, request).await,
                )
            }
        });
        for (prompt, speculation, received) in futures_util::future::join_all(runs).await {
            assert_eq!(received.tokens, plainly(target, prompt, 100));
            let reason = if received.tokens.last() == Some(&STOP) {
                ChunkEndReason::Stop
            } else {
                ChunkEndReason::Length
            };
            assert_eq!(received.end.map(|end| end.reason), Some(reason));
            if speculation == Speculation::Off {
                assert_eq!(received.steps as usize, received.tokens.len());
            }
        }
    }
}

#[tokio::test]
async fn an_engine_that_reads_ahead_is_told_the_whole_prompt_with_its_first_piece() {
    let bench = bench(FakeEngine::new(erratic).reading_ahead(), |_| {}).await;
    let prompt: Vec<TokenId> = (1..=30).map(|token| token % 9 + 1).collect();
    let received = run(&bench, chunk(&bench, &prompt, 10)).await;
    assert_eq!(received.tokens, plainly(erratic, &prompt, 10));
    // Four pieces of 8 tokens at most, of which the engine found three each.
    assert_eq!(received.end.unwrap().cached_tokens, 12);
}

#[tokio::test]
async fn repetition_is_drafted_from_the_request_itself() {
    let bench = bench(FakeEngine::new(repetitive), |_| {}).await;
    let received = run(&bench, chunk(&bench, &[1, 2, 3], 200)).await;
    assert!(
        received.steps < 80,
        "{} steps for 200 tokens",
        received.steps
    );
    assert!(received.scopes.contains(&DraftScope::Request));
}

#[tokio::test]
async fn drafts_follow_the_rules_of_the_tenant() {
    let bench = bench(FakeEngine::new(repetitive), |_| {}).await;
    let steps = async |speculation, drafts| {
        let mut request = chunk(&bench, &[1, 2, 3], 200);
        (request.speculation, request.drafts) = (speculation, drafts);
        let received = run(&bench, request).await;
        assert_eq!(received.tokens, plainly(repetitive, &[1, 2, 3], 200));
        received.steps
    };
    let none = DraftRules::default();
    for speculation in [Speculation::Suffix, Speculation::Auto] {
        let max_spec_tokens = |most| DraftRules {
            max_spec_tokens: Some(most),
            ..none
        };
        assert_eq!(steps(speculation, max_spec_tokens(0)).await, 200);
        let of_three = steps(speculation, max_spec_tokens(2)).await;
        assert!((67..200).contains(&of_three), "{of_three} steps");
        // No match is long enough for a token, and no token is certain enough.
        let short = DraftRules {
            alpha: Some(0.001),
            ..none
        };
        assert_eq!(steps(speculation, short).await, 200);
        let certain = DraftRules {
            min_token_prob: Some(1.0),
            ..none
        };
        assert_eq!(steps(speculation, certain).await, 200);
        assert!(steps(speculation, none).await < 67);
    }
}

#[tokio::test]
async fn the_second_request_drafts_from_the_first_and_credits_it() {
    let bench = bench(FakeEngine::new(stopping), |_| {}).await;
    let first = chunk(&bench, &[7, 8, 9], 100);
    let document: DocumentId = first.request.into();
    let first = run(&bench, first).await;
    assert_eq!(first.accepted, 0);
    let second = run(&bench, chunk(&bench, &[7, 8, 9], 100)).await;
    assert_eq!(second.tokens, first.tokens);
    assert!(second.accepted > 20, "{} accepted", second.accepted);
    assert!(second.scopes.contains(&DraftScope::Tenant));
    eventually("the first document is touched", || {
        bench
            .store
            .content()
            .touched()
            .any(|touched| touched == document)
    })
    .await;
}

#[tokio::test]
async fn a_step_is_recorded_while_the_next_one_runs() {
    let mut engine = FakeEngine::new(repetitive);
    engine.allowed = Some(Semaphore::new(3));
    let bench = bench(engine, |_| {}).await;
    let request = chunk(&bench, &[1, 2, 3], 100);
    let document: DocumentId = request.request.into();
    let mut stream = bench.worker.handle().chunk(request).await.unwrap();
    let mut received = Vec::new();
    let hear = |event, received: &mut Vec<TokenId>| {
        if let ChunkEvent::Step(step) = event {
            received.extend(step.tokens);
        }
    };
    for _ in 0..3 {
        hear(stream.next().await.unwrap().unwrap(), &mut received);
    }
    // The fourth step waits for a permit.
    let counted = "refrain_goodput_tokens_total{model=\"fake\"}";
    eventually("the third is counted", || {
        bench.figure(counted) == received.len() as f64
    })
    .await;
    eventually("the store has it", || {
        let documents = bench.store.documents();
        let stored = documents.get(&document);
        stored.is_some_and(|stored| stored.tokens == received)
    })
    .await;
    assert_eq!(bench.engine.steps.load(Ordering::Relaxed), 3);
    let allowed = bench.engine.allowed.as_ref().unwrap();
    allowed.add_permits(1000);
    while let Some(event) = stream.next().await {
        hear(event.unwrap(), &mut received);
    }
    assert_eq!(received, plainly(repetitive, &[1, 2, 3], 100));
    // A reader that has the end finds the last step counted.
    assert_eq!(bench.figure(counted), 100.0);
}

#[tokio::test]
async fn a_timeout_ends_the_output() {
    let bench = bench(FakeEngine::new(erratic), |_| {}).await;
    let mut request = chunk(&bench, &[1, 2, 7, 8], 100);
    request.prompt_len = 2;
    request.budget.time_left_ms = Some(0);
    let document: DocumentId = request.request.into();
    let received = run(&bench, request).await;
    assert_eq!(
        received.error.unwrap().code.as_deref(),
        Some("request_timeout")
    );
    let output = [vec![7, 8], received.tokens].concat();
    eventually("the store knows of its end", || {
        let documents = bench.store.documents();
        documents.get(&document).is_some_and(|stored| {
            (&stored.tokens, stored.finish) == (&output, Some(FinishReason::Cancelled))
        })
    })
    .await;
    let overdue = "refrain_worker_chunks_total{outcome=\"overdue\"}";
    eventually("it is counted", || bench.figure(overdue) == 1.0).await;
}

#[tokio::test]
async fn chunks_join_without_a_seam() {
    let bench = bench(FakeEngine::new(repetitive), |_| {}).await;
    let prompt = vec![4, 5, 6];
    let mut request = chunk(&bench, &prompt, 90);
    request.chunk_tokens = Some(20);
    let mut chunks = 0;
    loop {
        let received = run(&bench, request.clone()).await;
        chunks += 1;
        request.tokens.extend(&received.tokens);
        request.max_new_tokens -= received.tokens.len() as u32;
        request.lease = LeaseId(request.lease.0 + 1_000_000);
        request.epoch += 1;
        match received.end.unwrap().reason {
            ChunkEndReason::ChunkLimit => assert!(received.tokens.len() >= 20),
            ChunkEndReason::Length => break,
            other => panic!("{other:?}"),
        }
    }
    let output = plainly(repetitive, &prompt, 90);
    assert_eq!(request.tokens[3..], output);
    assert!(chunks > 2);
    let document = request.request.into();
    eventually("the store has the whole output", || {
        bench
            .store
            .documents()
            .get(&document)
            .is_some_and(|stored| {
                stored.tokens == output && stored.finish == Some(FinishReason::Length)
            })
    })
    .await;
}

#[tokio::test]
async fn a_lost_session_is_opened_again() {
    let bench = bench(FakeEngine::new(erratic), |_| {}).await;
    bench.engine.amnesia.store(2, Ordering::Relaxed);
    let mut request = chunk(&bench, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 50);
    request.speculation = Speculation::Off;
    let received = run(&bench, request).await;
    assert_eq!(
        received.tokens,
        plainly(erratic, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 50)
    );
}

#[tokio::test]
async fn a_failed_step_fails_its_requests_and_the_worker_goes_on() {
    let bench = bench(FakeEngine::new(erratic), |_| {}).await;
    bench.engine.failures.store(1, Ordering::Relaxed);
    let received = run(&bench, chunk(&bench, &[1], 10)).await;
    assert_eq!(
        received.error.map(|error| error.kind),
        Some(ErrorKind::Upstream)
    );
    let received = run(&bench, chunk(&bench, &[1], 10)).await;
    assert_eq!(received.tokens.len(), 10);
}

#[tokio::test]
async fn a_panic_of_the_decode_loop_fails_its_chunks_and_the_worker_goes_on() {
    let bench = bench(FakeEngine::new(erratic), |_| {}).await;
    let whole = run(&bench, chunk(&bench, &[1], 10)).await.tokens;
    bench.engine.panics.store(1, Ordering::Relaxed);
    let (first, second) = tokio::join!(
        run(&bench, chunk(&bench, &[1], 10)),
        run(&bench, chunk(&bench, &[2], 10)),
    );
    let lost = [first, second];
    let kinds = lost.map(|received| received.error.map(|error| error.kind));
    assert!(kinds.contains(&Some(ErrorKind::Upstream)), "{kinds:?}");
    // The slots of lost chunks are free.
    let received = run(&bench, chunk(&bench, &[1], 10)).await;
    assert_eq!(received.tokens, whole);
    bench.worker.drain().await;
}

#[tokio::test]
async fn a_chunk_ends_when_its_reader_leaves_and_its_output_is_stored() {
    let mut engine = FakeEngine::new(erratic);
    engine.step_time = Duration::from_millis(1);
    let bench = bench(engine, |_| {}).await;
    let request = chunk(&bench, &[1], 1900);
    let document: DocumentId = request.request.into();
    let mut stream = bench.worker.handle().chunk(request).await.unwrap();
    stream.next().await.unwrap().unwrap();
    drop(stream);
    eventually("the session is closed", || {
        bench.engine.closed.load(Ordering::Relaxed) == 1
    })
    .await;
    let steps = bench.engine.steps.load(Ordering::Relaxed);
    eventually("the partial output is stored", || {
        bench
            .store
            .documents()
            .get(&document)
            .is_some_and(|stored| {
                stored.finish == Some(FinishReason::Cancelled) && !stored.tokens.is_empty()
            })
    })
    .await;
    assert_eq!(
        bench.engine.steps.load(Ordering::Relaxed),
        steps,
        "decoding went on"
    );
    eventually("the lease is off the heartbeat", || {
        bench
            .scheduler
            .last
            .lock()
            .unwrap()
            .as_ref()
            .is_some_and(|heartbeat| heartbeat.running.is_empty())
    })
    .await;
}

#[tokio::test]
async fn a_cut_shortens_the_document() {
    let mut engine = FakeEngine::new(stopping);
    engine.step_time = Duration::from_millis(1);
    let bench = bench(engine, |_| {}).await;
    let request = chunk(&bench, &[1, 2, 3], 1000);
    let (document, lease): (DocumentId, _) = (request.request.into(), request.lease);
    let mut stream = bench.worker.handle().chunk(request).await.unwrap();
    for _ in 0..5 {
        stream.next().await.unwrap().unwrap();
    }
    bench
        .worker
        .handle()
        .cut(ChunkCut {
            lease,
            output_len: 2,
            aborted: false,
        })
        .await
        .unwrap();
    eventually("the document has two tokens", || {
        bench
            .store
            .documents()
            .get(&document)
            .is_some_and(|stored| {
                stored.tokens == [103, 104] && stored.finish == Some(FinishReason::Stop)
            })
    })
    .await;
}

#[tokio::test]
async fn an_aborted_output_is_stored_as_a_partial_one() {
    let mut engine = FakeEngine::new(stopping);
    engine.step_time = Duration::from_millis(1);
    let bench = bench(engine, |_| {}).await;
    // One is aborted while it runs, the other one after its stop id, which its caller had not read yet.
    for has_ended in [false, true] {
        let request = chunk(&bench, &[1, 2, 3], 1000);
        let (document, lease): (DocumentId, _) = (request.request.into(), request.lease);
        let mut stream = bench.worker.handle().chunk(request).await.unwrap();
        for _ in 0..5 {
            stream.next().await.unwrap().unwrap();
        }
        if has_ended {
            while let Some(event) = stream.next().await {
                event.unwrap();
            }
        }
        let cut = ChunkCut {
            lease,
            output_len: 5,
            aborted: true,
        };
        bench.worker.handle().cut(cut).await.unwrap();
        eventually("the document has five tokens and is partial", || {
            let documents = bench.store.documents();
            documents.get(&document).is_some_and(|stored| {
                stored.tokens == [103, 104, 105, 106, 107]
                    && stored.finish == Some(FinishReason::Cancelled)
            })
        })
        .await;
    }
}

#[tokio::test]
async fn a_cut_after_the_end_still_shortens_the_document() {
    let bench = bench(FakeEngine::new(stopping), |_| {}).await;
    let request = chunk(&bench, &[1, 2, 3], 1000);
    let (document, lease): (DocumentId, _) = (request.request.into(), request.lease);
    let received = run(&bench, request).await;
    assert_eq!(
        received.end.map(|end| end.reason),
        Some(ChunkEndReason::Stop)
    );
    let cut = ChunkCut {
        lease,
        output_len: 4,
        aborted: false,
    };
    bench.worker.handle().cut(cut).await.unwrap();
    eventually("the document has four tokens", || {
        let documents = bench.store.documents();
        documents
            .get(&document)
            .is_some_and(|stored| stored.tokens == [103, 104, 105, 106])
    })
    .await;
}

#[tokio::test]
async fn a_document_has_the_version_of_the_weights() {
    let bench = bench(FakeEngine::new(stopping), |_| {}).await;
    let request = chunk(&bench, &[1, 2, 3], 5);
    let document: DocumentId = request.request.into();
    run(&bench, request).await;
    eventually("the head has the version", || {
        let documents = bench.store.documents();
        documents
            .get(&document)
            .is_some_and(|stored| stored.head.weight_version == 3)
    })
    .await;
}

#[tokio::test]
async fn a_continued_output_reaches_a_store_that_never_had_its_beginning() {
    let bench = bench(FakeEngine::new(repetitive), |_| {}).await;
    let prompt = [4, 5, 6];
    let before = plainly(repetitive, &prompt, 30);
    let mut request = chunk(&bench, &prompt, 20);
    request.tokens.extend(&before);
    request.epoch = 9;
    let document: DocumentId = request.request.into();
    let received = run(&bench, request).await;
    let whole = plainly(repetitive, &prompt, 50);
    assert_eq!([before, received.tokens].concat(), whole);
    eventually("the store has the whole output", || {
        let documents = bench.store.documents();
        documents
            .get(&document)
            .is_some_and(|stored| stored.tokens == whole)
    })
    .await;
}

#[tokio::test]
async fn a_full_worker_waits_a_moment_for_a_slot() {
    let mut engine = FakeEngine::new(erratic);
    engine.step_time = Duration::from_millis(1);
    let bench = bench(engine, |config| {
        config.running_max = 1;
        config.slot_wait_ms = 300_000;
    })
    .await;
    let first = bench
        .worker
        .handle()
        .chunk(chunk(&bench, &[1], 40))
        .await
        .unwrap();
    let second = run(&bench, chunk(&bench, &[2], 5));
    let (first, second) = futures_util::join!(read(first), second);
    assert_eq!((first.tokens.len(), second.tokens.len()), (40, 5));
}

/// The continuation of a request after its last chunk, under another lease.
pub(crate) fn continued(request: &ChunkRequest, received: &[u32], nth: u64) -> ChunkRequest {
    let mut next = request.clone();
    next.lease = LeaseId(request.lease.0 + u128::from(nth) * 1_000_000);
    next.epoch += nth;
    next.tokens.extend(received);
    next.max_new_tokens -= received.len() as u32;
    next
}

#[tokio::test]
async fn a_stalled_reader_loses_its_slot_and_none_of_its_output() {
    let bench = bench(FakeEngine::new(erratic), |config| {
        config.event_queue = 1;
        // A reader that reads takes far less time, also on a busy machine.
        config.reader_stall_ms_max = 3_000;
        config.running_max = 1;
        config.slot_wait_ms = 300_000;
    })
    .await;
    let request = chunk(&bench, &[1], 40);
    let stream = bench.worker.handle().chunk(request.clone()).await.unwrap();
    // The worker has one slot.
    let other = run(&bench, chunk(&bench, &[2], 5)).await;
    assert_eq!(other.tokens.len(), 5);
    let received = read(stream).await;
    assert_eq!(received.end.unwrap().reason, ChunkEndReason::GaveWay);
    assert!(!received.tokens.is_empty() && received.tokens.len() < 40);
    let rest = run(&bench, continued(&request, &received.tokens, 1)).await;
    assert_eq!(rest.end.unwrap().reason, ChunkEndReason::Length);
    let all = [received.tokens, rest.tokens].concat();
    assert_eq!(all, plainly(erratic, &[1], 40));
    let stalled = bench.figure("refrain_worker_rejections_total{limit=\"reader_stall_ms_max\"}");
    assert_eq!(stalled, 1.0);
    // The store has one output, and no end of a chunk counts as its end.
    let document: DocumentId = request.request.into();
    eventually("it is stored", || {
        let documents = bench.store.documents();
        documents.get(&document).is_some_and(|stored| {
            stored.finish == Some(FinishReason::Length) && stored.tokens == all
        })
    })
    .await;
}

#[tokio::test]
async fn a_chunk_gives_way_and_its_request_continues_under_another_lease() {
    let mut engine = FakeEngine::new(erratic);
    engine.step_time = Duration::from_millis(1);
    let bench = bench(engine, |_| {}).await;
    let request = chunk(&bench, &[1], 900);
    *bench.scheduler.give_way.lock().unwrap() = vec![request.lease];
    let mut received = Vec::new();
    for nth in 0.. {
        let next = continued(&request, &received, nth);
        let chunk = run(&bench, next).await;
        received.extend(chunk.tokens);
        if chunk.end.unwrap().reason != ChunkEndReason::GaveWay {
            break;
        }
        assert_eq!(nth, 0, "only the first lease was to give way");
        assert!(received.len() < 900);
    }
    assert_eq!(received, plainly(erratic, &[1], 900));
    assert_eq!(
        bench.figure("refrain_worker_chunks_total{outcome=\"gave_way\"}"),
        1.0
    );
}

#[tokio::test]
async fn a_newer_lease_takes_over_and_an_older_one_is_refused() {
    let mut engine = FakeEngine::new(erratic);
    engine.step_time = Duration::from_millis(1);
    let bench = bench(engine, |_| {}).await;
    let request = chunk(&bench, &[1], 500);
    let old = bench.worker.handle().chunk(request.clone()).await.unwrap();
    let mut newer = request.clone();
    newer.lease = LeaseId(request.lease.0 + 1_000_000);
    newer.epoch = 2;
    let new = bench.worker.handle().chunk(newer).await.unwrap();
    assert_eq!(
        read(old).await.error.map(|error| error.kind),
        Some(ErrorKind::Conflict)
    );
    let refused = bench.worker.handle().chunk(request).await.err().unwrap();
    assert_eq!(refused.kind, ErrorKind::Conflict);
    assert_eq!(read(new).await.tokens.len(), 500);
}

#[tokio::test]
async fn a_slow_reader_delays_no_other_request() {
    let bench = bench(FakeEngine::new(erratic), |config| config.event_queue = 2).await;
    let slow = bench
        .worker
        .handle()
        .chunk(chunk(&bench, &[1], 300))
        .await
        .unwrap();
    let quick = run(&bench, chunk(&bench, &[2], 300)).await;
    assert_eq!(quick.tokens.len(), 300);
    assert_eq!(read(slow).await.tokens, plainly(erratic, &[1], 300));
}

#[tokio::test]
async fn a_drain_evacuates_running_chunks() {
    let mut engine = FakeEngine::new(erratic);
    engine.step_time = Duration::from_millis(2);
    let bench = bench(engine, |config| config.evacuate_after_ms = 50).await;
    let stream = bench
        .worker
        .handle()
        .chunk(chunk(&bench, &[1], 1900))
        .await
        .unwrap();
    let handle = bench.worker.handle();
    let reader = tokio::spawn(read(stream));
    bench.worker.drain().await;
    let received = reader.await.unwrap();
    assert_eq!(
        received.end.map(|end| end.reason),
        Some(ChunkEndReason::Draining)
    );
    assert_eq!(
        received.tokens,
        plainly(erratic, &[1], received.tokens.len())
    );
    assert!(handle.readiness().is_err());
}

#[tokio::test]
async fn foreign_and_impossible_requests_are_refused() {
    let bench = bench(FakeEngine::new(erratic), |_| {}).await;
    let refused = async |request| {
        bench
            .worker
            .handle()
            .chunk(request)
            .await
            .err()
            .map(|error| error.kind)
    };
    let mut forged = chunk(&bench, &[1], 5);
    Arc::make_mut(&mut forged.namespace.namespace).tenant = "other".into();
    assert_eq!(refused(forged).await, Some(ErrorKind::Unauthorized));
    assert_eq!(
        refused(chunk(&bench, &[], 5)).await,
        Some(ErrorKind::InvalidRequest)
    );
    assert_eq!(
        refused(chunk(&bench, &[1], 0)).await,
        Some(ErrorKind::InvalidRequest)
    );
    assert_eq!(
        refused(chunk(&bench, &[1; 2000], 5)).await,
        Some(ErrorKind::InvalidRequest)
    );
}
