//! The streaming driver over a scripted engine.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt;
use refrain_protocol::chunk::*;
use refrain_protocol::document::FinishReason;
use refrain_protocol::{ErrorKind, LeaseId};
use refrain_rpc::Worker;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::bench::*;
use crate::continued;
use crate::fake_stream::{FakeStream, kept_as_cancelled, listening, stored};
use crate::fakes::{STOP, Target};

#[tokio::test]
async fn output_is_streamed_and_stored() {
    for (target, piece, hides_stop) in [
        (stopping as Target, 1, false),
        (stopping, 3, false),
        (stopping, 1, true),
        (erratic, 1, false),
        (erratic, 7, false),
    ] {
        let engine = FakeStream {
            piece,
            hides_stop,
            tells_cached_late: piece != 1,
            ..FakeStream::new(target)
        };
        let (_, bench) = listening(engine, |_| {}).await;
        let request = chunk(&bench, &[1, 2, 3], 50);
        let received = run(&bench, request.clone()).await;
        let mut expected = plainly(target, &[1, 2, 3], 50);
        let stops = expected.last() == Some(&STOP);
        if hides_stop {
            expected.pop();
        }
        assert_eq!(received.tokens, expected);
        let end = received.end.unwrap();
        let (reason, finish) = match stops {
            true => (ChunkEndReason::Stop, FinishReason::Stop),
            false => (ChunkEndReason::Length, FinishReason::Length),
        };
        assert_eq!((end.reason, end.cached_tokens), (reason, 2));
        assert!(
            received
                .sources
                .iter()
                .all(|source| *source == DraftSource::None)
        );
        eventually("the store has it", || {
            stored(&bench, &request) == Some((expected.clone(), Some(finish)))
        })
        .await;
        // Nothing is drafted here, so nothing is indexed.
        assert_eq!(bench.figure("refrain_replica_namespaces"), 0.0);
        let labels = "{model=\"fake\",scope=\"none\",source=\"none\"}";
        let emitted = bench.figure(&format!("refrain_spec_emitted_tokens_total{labels}"));
        assert_eq!(emitted as usize, expected.len());
    }
}

#[tokio::test]
async fn chunks_join_and_draw_fresh_noise() {
    let (engine, bench) = listening(FakeStream::telling_late(repetitive), |_| {}).await;
    let mut request = chunk(&bench, &[4, 5, 6], 45);
    request.chunk_tokens = Some(20);
    let mut seeds = Vec::new();
    loop {
        let received = run(&bench, request.clone()).await;
        seeds.push(engine.last_asked().engine_seed());
        request.tokens.extend(&received.tokens);
        request.max_new_tokens -= received.tokens.len() as u32;
        request.lease = LeaseId(request.lease.0 + 1_000_000);
        request.epoch += 1;
        let end = received.end.unwrap();
        let found = end.cached_tokens as usize + received.tokens.len();
        assert_eq!(found + 1, request.tokens.len());
        match end.reason {
            ChunkEndReason::ChunkLimit => assert_eq!(received.tokens.len(), 20),
            ChunkEndReason::Length => break,
            other => panic!("{other:?}"),
        }
    }
    let output = plainly(repetitive, &[4, 5, 6], 45);
    assert_eq!(request.tokens[3..], output);
    seeds.dedup();
    assert_eq!(seeds.len(), 3);
    eventually("the store has the whole output", || {
        stored(&bench, &request) == Some((output.clone(), Some(FinishReason::Length)))
    })
    .await;
}

#[tokio::test]
async fn a_full_context_of_the_engine_ends_the_output() {
    let engine = FakeStream {
        context: 13,
        ..FakeStream::new(repetitive)
    };
    let (_, bench) = listening(engine, |_| {}).await;
    let mut request = chunk(&bench, &[4, 5, 6], 45);
    request.chunk_tokens = Some(20);
    let received = run(&bench, request).await;
    assert_eq!(received.tokens.len(), 10);
    assert_eq!(received.end.unwrap().reason, ChunkEndReason::Length);
}

#[tokio::test]
async fn the_engine_stops_when_the_reader_leaves() {
    // The engine alone would work for minutes.
    let engine = FakeStream {
        pause: Duration::from_millis(200),
        ..FakeStream::new(erratic)
    };
    let (engine, bench) = listening(engine, |_| {}).await;
    let request = chunk(&bench, &[1, 2, 3], 1000);
    let mut stream = bench.worker.handle().chunk(request.clone()).await.unwrap();
    for _ in 0..3 {
        stream.next().await.unwrap().unwrap();
    }
    assert_eq!(engine.at_work.load(Ordering::SeqCst), 1);
    drop(stream);
    engine.becomes_free().await;
    kept_as_cancelled(&bench, &request, 3).await;
    assert_eq!(bench.figure("refrain_worker_chunks_running"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_ends_with_the_runtime_of_its_reader() {
    let engine = FakeStream {
        pause: Duration::from_millis(2),
        ..FakeStream::new(erratic)
    };
    let (engine, bench) = listening(engine, |_| {}).await;
    let request = chunk(&bench, &[1, 2, 3], 100_000);
    let (handle, asked) = (bench.worker.handle(), request.clone());
    let of_a_listener = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let stream = runtime.block_on(async {
            let mut stream = handle.chunk(asked).await.unwrap();
            for _ in 0..3 {
                stream.next().await.unwrap().unwrap();
            }
            stream
        });
        drop(runtime);
        drop(stream);
    });
    of_a_listener.await.unwrap();
    engine.becomes_free().await;
    kept_as_cancelled(&bench, &request, 3).await;
    eventually("its place is free", || {
        bench.figure("refrain_worker_chunks_running") == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_cut_ends_the_chunk_and_shortens_its_output() {
    let engine = FakeStream {
        pause: Duration::from_millis(2),
        ..FakeStream::new(erratic)
    };
    let (engine, bench) = listening(engine, |_| {}).await;
    let running = chunk(&bench, &[1, 2, 3], 1000);
    let mut stream = bench.worker.handle().chunk(running.clone()).await.unwrap();
    for _ in 0..5 {
        stream.next().await.unwrap().unwrap();
    }
    let ended = chunk(&bench, &[3, 2, 1], 10);
    run(&bench, ended.clone()).await;
    for request in [&running, &ended] {
        let cut = ChunkCut {
            lease: request.lease,
            output_len: 4,
            aborted: false,
        };
        bench.worker.handle().cut(cut).await.unwrap();
    }
    for (request, prompt) in [(running, [1, 2, 3]), (ended, [3, 2, 1])] {
        let kept = plainly(erratic, &prompt, 4);
        eventually("what the reader kept is kept", || {
            stored(&bench, &request) == Some((kept.clone(), Some(FinishReason::Stop)))
        })
        .await;
    }
    engine.becomes_free().await;
    // A cut of an unknown lease is not an error.
    let unknown = ChunkCut {
        lease: LeaseId(u128::MAX),
        output_len: 1,
        aborted: false,
    };
    bench.worker.handle().cut(unknown).await.unwrap();
}

#[tokio::test]
async fn opening_a_stream_is_retried_and_a_broken_stream_is_not() {
    let (engine, bench) = listening(FakeStream::new(erratic), |config| {
        config.engine.retry_backoff_ms = 1;
    })
    .await;
    engine.refusals.store(2, Ordering::SeqCst);
    let received = run(&bench, chunk(&bench, &[1], 10)).await;
    assert_eq!(received.tokens, plainly(erratic, &[1], 10));
    assert_eq!(engine.asked.lock().unwrap().len(), 3);
    assert_eq!(bench.figure("refrain_worker_engine_retries_total"), 2.0);
    assert_eq!(received.retries, 2);

    engine.refusals.store(3, Ordering::SeqCst);
    let received = run(&bench, chunk(&bench, &[1], 10)).await;
    assert_eq!(received.error.unwrap().kind, ErrorKind::Unavailable);

    // The budget of the request limits the attempts, even below the limit of the worker.
    engine.refusals.store(2, Ordering::SeqCst);
    let mut tried_before = chunk(&bench, &[1], 10);
    tried_before.budget.attempts = 2;
    let asked = engine.asked.lock().unwrap().len();
    let received = run(&bench, tried_before).await;
    assert_eq!(received.error.unwrap().kind, ErrorKind::Unavailable);
    assert_eq!(received.retries, 1);
    assert_eq!(engine.asked.lock().unwrap().len(), asked + 2);

    // A request that the engine refuses is an error of the client, and is not repeated.
    *engine.refusal.lock().unwrap() = ErrorKind::InvalidRequest;
    engine.refusals.store(1, Ordering::SeqCst);
    let asked = engine.asked.lock().unwrap().len();
    let received = run(&bench, chunk(&bench, &[1], 10)).await;
    assert_eq!(received.error.unwrap().kind, ErrorKind::InvalidRequest);
    assert_eq!(engine.asked.lock().unwrap().len(), asked + 1);

    engine.breaks.store(1, Ordering::SeqCst);
    let request = chunk(&bench, &[1], 10);
    let received = run(&bench, request.clone()).await;
    assert_eq!(received.tokens, plainly(erratic, &[1], 3));
    assert_eq!(received.error.unwrap().kind, ErrorKind::Upstream);
    // The next lease continues the output.
    let mut next = request;
    next.tokens.extend(&received.tokens);
    next.max_new_tokens = 7;
    next.epoch += 1;
    next.lease = LeaseId(next.lease.0 + 1_000_000);
    let received = run(&bench, next.clone()).await;
    assert_eq!(received.tokens, plainly(erratic, &next.tokens, 7));
    let output = plainly(erratic, &[1], 10);
    eventually("the store has both parts", || {
        stored(&bench, &next) == Some((output.clone(), Some(FinishReason::Length)))
    })
    .await;
}

#[tokio::test]
async fn a_lack_of_sockets_does_not_count_as_a_failure_of_the_engine() {
    let engine = FakeStream {
        refusal_code: Some("out_of_descriptors"),
        ..FakeStream::new(erratic)
    };
    let (engine, bench) = listening(engine, |config| {
        config.engine.breaker_failures_max = 2;
        config.engine.breaker_open_ms = 3_600_000;
    })
    .await;
    engine.refusals.store(5, Ordering::SeqCst);
    for _ in 0..5 {
        let received = run(&bench, chunk(&bench, &[1], 5)).await;
        let code = received.error.unwrap().code;
        assert_eq!(code.as_deref(), Some("out_of_descriptors"));
    }
    // A socket is free again, and the circuit breaker is closed.
    let received = run(&bench, chunk(&bench, &[1], 5)).await;
    assert_eq!(received.tokens, plainly(erratic, &[1], 5));
    let figure = |limit: &str| {
        bench.figure(&format!(
            "refrain_worker_rejections_total{{limit=\"{limit}\"}}"
        ))
    };
    assert_eq!((figure("descriptors"), figure("breaker")), (5.0, 0.0));
    assert_eq!(bench.figure("refrain_worker_engine_failures_total"), 0.0);
}

/// A breaker that stays open for the whole test.
const HOUR_MS: u64 = 3_600 * 1_000;

#[tokio::test]
async fn the_breaker_opens_after_consecutive_failures() {
    let (engine, bench) = listening(FakeStream::new(erratic), |config| {
        config.engine.attempts_max = 1;
        config.engine.breaker_failures_max = 2;
        config.engine.breaker_open_ms = HOUR_MS;
    })
    .await;
    // Only consecutive failures count: an engine that refuses a request or is full in between works.
    for kind in [
        ErrorKind::Upstream,
        ErrorKind::InvalidRequest,
        ErrorKind::Upstream,
        ErrorKind::Overloaded,
        ErrorKind::Upstream,
        ErrorKind::Unavailable,
    ] {
        *engine.refusal.lock().unwrap() = kind;
        engine.refusals.store(1, Ordering::SeqCst);
        let error = run(&bench, chunk(&bench, &[1], 5)).await.error.unwrap();
        assert_eq!(error.kind, kind);
    }
    let received = run(&bench, chunk(&bench, &[1], 5)).await;
    let error = received.error.unwrap();
    assert_eq!(error.code.as_deref(), Some("engine_breaker_open"));
    assert!(error.retry_after_ms.is_some_and(|wait| wait <= HOUR_MS + 1));
    assert_eq!(engine.asked.lock().unwrap().len(), 6);
    assert_eq!(
        bench.figure("refrain_worker_rejections_total{limit=\"breaker\"}"),
        1.0
    );
    let open = "refrain_worker_engine_breaker_open{model=\"fake\"}";
    assert_eq!(bench.figure(open), 1.0);
}

#[tokio::test]
async fn a_chunk_reports_its_own_error_when_the_breaker_opens_meanwhile() {
    let (engine, bench) = listening(FakeStream::new(erratic), |config| {
        config.engine.breaker_failures_max = 1;
        config.engine.breaker_open_ms = HOUR_MS;
        config.engine.retry_backoff_ms = 3_000;
    })
    .await;
    // A chunk fails once and pauses; meanwhile another chunk opens the breaker.
    *engine.refusal.lock().unwrap() = ErrorKind::Overloaded;
    engine.refusals.store(1, Ordering::SeqCst);
    let waits = run(&bench, chunk(&bench, &[1], 5));
    let opens = async {
        eventually("the first one has failed once", || {
            engine.asked.lock().unwrap().len() == 1
        })
        .await;
        *engine.refusal.lock().unwrap() = ErrorKind::Timeout;
        engine.refusals.store(1, Ordering::SeqCst);
        run(&bench, chunk(&bench, &[2], 5)).await
    };
    let (waited, opened) = tokio::join!(waits, opens);
    assert_eq!(opened.error.unwrap().kind, ErrorKind::Timeout);
    assert_eq!(waited.error.unwrap().kind, ErrorKind::Overloaded);
    assert_eq!(engine.asked.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn a_slow_engine_times_out() {
    let engine = FakeStream {
        pause: Duration::from_secs(60),
        ..FakeStream::new(erratic)
    };
    let (engine, bench) = listening(engine, |config| {
        config.engine.first_token_ms_max = 50;
    })
    .await;
    let received = run(&bench, chunk(&bench, &[1], 5)).await;
    let error = received.error.unwrap();
    assert_eq!(
        (error.kind, error.code.as_deref()),
        (ErrorKind::Timeout, Some("engine_timeout"))
    );
    engine.becomes_free().await;
}

#[tokio::test]
async fn a_request_deadline_does_not_count_as_a_failure_of_the_engine() {
    let engine = FakeStream {
        pause: Duration::from_secs(60),
        ..FakeStream::new(erratic)
    };
    let (_, bench) = listening(engine, |config| {
        config.engine.breaker_failures_max = 1;
    })
    .await;
    for _ in 0..2 {
        let mut request = chunk(&bench, &[1], 5);
        request.budget.time_left_ms = Some(50);
        let error = run(&bench, request).await.error.unwrap();
        assert_eq!(
            (error.kind, error.code.as_deref()),
            (ErrorKind::Timeout, Some("request_timeout"))
        );
    }
    assert_eq!(bench.figure("refrain_worker_engine_failures_total"), 0.0);
}

#[tokio::test]
async fn a_timeout_ends_the_output() {
    let engine = FakeStream {
        pause: Duration::from_secs(60),
        ..FakeStream::new(erratic)
    };
    let (_, bench) = listening(engine, |_| {}).await;
    // The output ends with its earlier tokens.
    let mut request = chunk(&bench, &[1, 7, 8], 5);
    request.prompt_len = 1;
    request.budget.time_left_ms = Some(10);
    let received = run(&bench, request.clone()).await;
    assert_eq!(
        received.error.unwrap().code.as_deref(),
        Some("request_timeout")
    );
    eventually("the store has it", || {
        stored(&bench, &request) == Some((vec![7, 8], Some(FinishReason::Cancelled)))
    })
    .await;
    let overdue = "refrain_worker_chunks_total{outcome=\"overdue\"}";
    eventually("it is counted", || bench.figure(overdue) == 1.0).await;
}

#[tokio::test]
async fn attempts_after_the_first_token_do_not_draw_on_the_budget() {
    let (engine, bench) = listening(FakeStream::new(erratic), |config| {
        config.engine.retry_backoff_ms = 1;
        config.engine.attempts_max = 3;
    })
    .await;
    engine.refusals.store(2, Ordering::SeqCst);
    let mut request = chunk(&bench, &[1, 7], 5);
    request.prompt_len = 1;
    request.budget.attempts = 1;
    let received = run(&bench, request).await;
    assert_eq!(received.tokens, plainly(erratic, &[1, 7], 5));
    assert_eq!(received.retries, 0);
    assert_eq!(bench.figure("refrain_worker_engine_retries_total"), 2.0);
}

#[tokio::test]
async fn a_stalled_reader_loses_its_slot_before_the_first_token_too() {
    let (engine, bench) = listening(FakeStream::new(erratic), |config| {
        config.engine.retry_backoff_ms = 1;
        config.event_queue = 1;
        config.reader_stall_ms_max = 10;
    })
    .await;
    engine.refusals.store(u32::MAX, Ordering::SeqCst);
    // The reader takes no event about the retries.
    let _unread = bench
        .worker
        .handle()
        .chunk(chunk(&bench, &[1], 5))
        .await
        .unwrap();
    let stalled = "refrain_worker_rejections_total{limit=\"reader_stall_ms_max\"}";
    eventually("it is given up", || bench.figure(stalled) == 1.0).await;
}

#[tokio::test]
async fn unsupported_parameters_are_refused() {
    let (engine, bench) = listening(FakeStream::new(erratic), |_| {}).await;
    let mut request = chunk(&bench, &[1], 5);
    request.sampling.min_p = 0.5;
    let error = bench.worker.handle().chunk(request).await.err().unwrap();
    assert_eq!(
        (error.kind, error.param.as_deref()),
        (ErrorKind::InvalidRequest, Some("min_p"))
    );
    assert!(engine.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_slow_reader_slows_the_engine_down_and_loses_nothing() {
    let (_, bench) = listening(FakeStream::new(erratic), |config| config.event_queue = 2).await;
    let mut stream = bench
        .worker
        .handle()
        .chunk(chunk(&bench, &[1], 40))
        .await
        .unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = stream.next().await {
        tokio::time::sleep(Duration::from_millis(1)).await;
        if let ChunkEvent::Step(step) = event.unwrap() {
            tokens.extend(step.tokens);
        }
    }
    assert_eq!(tokens, plainly(erratic, &[1], 40));

    let (engine, bench) = listening(FakeStream::new(erratic), |config| {
        config.event_queue = 1;
        config.reader_stall_ms_max = 3_000;
    })
    .await;
    let request = chunk(&bench, &[1], 40);
    let unread = bench.worker.handle().chunk(request.clone()).await.unwrap();
    let stalls = "refrain_worker_chunks_total{outcome=\"gave_way\"}";
    eventually("a reader that stands still is left", || {
        engine.at_work.load(Ordering::SeqCst) == 0 && bench.figure(stalls) == 1.0
    })
    .await;
    // The reader finds the earlier tokens, and the request continues after them.
    let received = read(unread).await;
    assert_eq!(received.end.unwrap().reason, ChunkEndReason::GaveWay);
    let rest = run(&bench, continued(&request, &received.tokens, 1)).await;
    let all = [received.tokens, rest.tokens].concat();
    assert_eq!(all, plainly(erratic, &[1], 40));
    let stalled = bench.figure("refrain_worker_rejections_total{limit=\"reader_stall_ms_max\"}");
    assert_eq!(stalled, 1.0);
}

#[tokio::test]
async fn a_chunk_gives_way_and_its_request_continues_under_another_lease() {
    let engine = FakeStream {
        pause: Duration::from_millis(1),
        ..FakeStream::new(erratic)
    };
    let (_, bench) = listening(engine, |_| {}).await;
    let request = chunk(&bench, &[1], 900);
    *bench.scheduler.give_way.lock().unwrap() = vec![request.lease];
    let received = run(&bench, request.clone()).await;
    assert_eq!(received.end.unwrap().reason, ChunkEndReason::GaveWay);
    assert!(received.tokens.len() < 900);
    let rest = run(&bench, continued(&request, &received.tokens, 1)).await;
    let all = [received.tokens, rest.tokens].concat();
    assert_eq!(all, plainly(erratic, &[1], 900));
}

#[tokio::test]
async fn the_time_of_a_slow_reader_does_not_count_as_the_engines() {
    const IDLE_MS_MAX: u64 = 4_000;
    // The worker waits a little for each piece.
    let engine = FakeStream {
        pause: Duration::from_millis(5),
        ..FakeStream::new(erratic)
    };
    let (engine, bench) = listening(engine, |config| {
        config.event_queue = 1;
        config.engine.idle_ms_max = IDLE_MS_MAX;
        config.reader_stall_ms_max = 300_000;
    })
    .await;
    let asked = chunk(&bench, &[1], 8);
    let stream = bench.worker.handle().chunk(asked).await.unwrap();
    // The beginning, a token in the queue, and a token without room there.
    eventually("the reader is waited for", || {
        engine.taken.load(Ordering::SeqCst) == 3
    })
    .await;
    tokio::time::sleep(Duration::from_millis(IDLE_MS_MAX + 50)).await;
    let received = read(stream).await;
    assert!(received.error.is_none(), "{:?}", received.error);
    assert_eq!(received.tokens, plainly(erratic, &[1], 8));
    assert_eq!(bench.figure("refrain_worker_engine_failures_total"), 0.0);
}

#[tokio::test]
async fn interrupts_end_a_chunk_whose_stream_is_always_ready() {
    const TOKENS: usize = 100_000;
    for is_taken_over in [true, false] {
        let mut engine = FakeStream {
            at_hand: true,
            context: 2 * TOKENS,
            ..FakeStream::new(erratic)
        };
        engine.capabilities.max_context = 2 * TOKENS as u32;
        let (engine, bench) = listening(engine, |config| {
            config.event_queue = TOKENS + 16;
        })
        .await;
        let old = chunk(&bench, &[1, 2], TOKENS as u32);
        let stream = bench.worker.handle().chunk(old.clone()).await.unwrap();
        eventually("it runs", || engine.taken.load(Ordering::SeqCst) > 5).await;
        if is_taken_over {
            let mut new = old.clone();
            new.lease = LeaseId(old.lease.0 + 1_000_000);
            new.epoch += 1;
            new.max_new_tokens = 3;
            assert_eq!(run(&bench, new).await.tokens.len(), 3);
        } else {
            let cut = ChunkCut {
                lease: old.lease,
                output_len: 4,
                aborted: false,
            };
            bench.worker.handle().cut(cut).await.unwrap();
        }
        let received = read(stream).await;
        assert!(received.tokens.len() < TOKENS, "it went on to its end");
        let conflict = is_taken_over.then_some(ErrorKind::Conflict);
        assert_eq!(received.error.map(|error| error.kind), conflict);
        engine.becomes_free().await;
        if !is_taken_over {
            let kept = Some((plainly(erratic, &[1, 2], 4), Some(FinishReason::Stop)));
            eventually("what the reader kept is kept", || {
                stored(&bench, &old) == kept
            })
            .await;
        }
    }
}

#[tokio::test]
async fn a_newer_lease_takes_a_request_over() {
    let engine = FakeStream {
        pause: Duration::from_millis(5),
        ..FakeStream::new(erratic)
    };
    let (engine, bench) = listening(engine, |_| {}).await;
    let old = chunk(&bench, &[1, 2], 500);
    let mut stream = bench.worker.handle().chunk(old.clone()).await.unwrap();
    stream.next().await.unwrap().unwrap();
    let mut new = old.clone();
    new.lease = LeaseId(old.lease.0 + 1_000_000);
    new.epoch += 1;
    new.max_new_tokens = 3;
    let received = run(&bench, new).await;
    assert_eq!(received.tokens, plainly(erratic, &[1, 2], 3));
    let mut last = None;
    while let Some(event) = stream.next().await {
        last = event.err();
    }
    assert_eq!(last.unwrap().kind, ErrorKind::Conflict);
    engine.becomes_free().await;
}

#[tokio::test]
async fn a_drain_evacuates_running_chunks() {
    let engine = FakeStream {
        pause: Duration::from_millis(5),
        ..FakeStream::new(erratic)
    };
    let (engine, bench) = listening(engine, |config| config.evacuate_after_ms = 20).await;
    let stream = bench
        .worker
        .handle()
        .chunk(chunk(&bench, &[1, 2], 500))
        .await
        .unwrap();
    let reading = tokio::spawn(read(stream));
    bench.worker.drain().await;
    let received = reading.await.unwrap();
    assert_eq!(received.end.unwrap().reason, ChunkEndReason::Draining);
    assert_eq!(
        received.tokens,
        plainly(erratic, &[1, 2], received.tokens.len())
    );
    assert_eq!(engine.at_work.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn the_load_of_the_engine_is_shown() {
    let (_, bench) = listening(FakeStream::new(erratic), |_| {}).await;
    eventually("load is shown", || {
        bench.figure("refrain_engine_requests{model=\"fake\",state=\"waiting\"}") == 1.0
            && bench.figure("refrain_engine_kv_usage_ratio{model=\"fake\"}") == 0.25
    })
    .await;
}

#[tokio::test]
async fn the_engines_own_metrics_are_passed_on_unchanged() {
    let (_, bench) = listening(FakeStream::new(erratic), |config| {
        config.listen = Some("127.0.0.1:0".parse().unwrap());
        config.advertise_url = "http://127.0.0.1".into();
    })
    .await;
    let addr = bench.worker.addr().unwrap();
    let mut connection = TcpStream::connect(addr).await.unwrap();
    let asks = b"GET /engine_metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    connection.write_all(asks).await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.ends_with("\r\n\r\nfake:requests 3\n"), "{answer}");
}
