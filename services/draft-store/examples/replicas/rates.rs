//! Documents a second, and the lag between replicas.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use refrain_protocol::document::{Acknowledgement, FeedCursor, FeedEvent};
use refrain_rpc::testing::ScopeReader;
use refrain_service_kit::mesh::MeshConfig;

use crate::brokers::Brokers;
use crate::replica::{Replica, config, feed};

/// Documents a second at which the lag is measured, and for how long.
const RATE_PER_S: u64 = 2_000;
const RATE_SECONDS: u64 = 5;

/// Messages of the brokers alone that wait for their acknowledgement.
const IN_FLIGHT: usize = 256;

fn show(what: &str, documents: u64, took: Duration) {
    println!(
        "{what:<62} {:>8.0} documents/s",
        documents as f64 / took.as_secs_f64()
    );
}

/// A store that is no replica.
pub(crate) async fn without_brokers(documents: u64) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let mesh = MeshConfig::generate()?;
    let alone = Replica::start(config(dir.path(), "alone", None), &mesh).await?;
    let took = alone.fill(0..documents, Acknowledgement::Local).await?;
    show("no feed", documents, took);
    alone.stop().await;
    Ok(())
}

/// Two replicas, and the brokers without them.
pub(crate) async fn with_brokers(brokers: &Brokers, documents: u64) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let mesh = MeshConfig::generate()?;
    let r = format!("R{}", brokers.copies);
    let of = |name| config(dir.path(), name, Some(feed(brokers, Vec::new())));
    let a = Replica::start(of("a"), &mesh).await?;
    let b = Replica::start(of("b"), &mesh).await?;

    let started = Instant::now();
    let took = a.fill(0..documents, Acknowledgement::Local).await?;
    show(&format!("{r}, local: acknowledged"), documents, took);
    while a.metric("refrain_draft_store_outbox_entries")? > 0.0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let sent = started.elapsed();
    show(&format!("{r}, local: in the stream"), documents, sent);
    b.until(documents).await?;
    let arrived = started.elapsed();
    show(
        &format!("{r}, local: at the other replica"),
        documents,
        arrived,
    );

    let replicated = documents..2 * documents;
    let took = a.fill(replicated, Acknowledgement::Replicated).await?;
    show(&format!("{r}, replicated: acknowledged"), documents, took);
    b.until(2 * documents).await?;

    let context = brokers.context().await?;
    let mut stream = context.get_stream("refrain-0").await?;
    let state = &stream.info().await?.state;
    // Messages with one document each, whatever the store has sent.
    let bytes = (state.bytes / (2 * documents).max(1)) as usize;
    let took = alone(brokers, bytes, documents).await?;
    show(
        &format!("{r}, async-nats alone, {bytes} bytes, {IN_FLIGHT} in flight"),
        documents,
        took,
    );

    let mut lags = lags(&a, &b, 2 * documents).await?;
    lags.sort_unstable();
    let at = |share: f64| lags[((lags.len() - 1) as f64 * share) as usize];
    println!(
        "{r}, lag at {RATE_PER_S} documents/s: p50 {:.1?}, p99 {:.1?}, most {:.1?}",
        at(0.5),
        at(0.99),
        at(1.0)
    );
    a.stop().await;
    b.stop().await;
    Ok(())
}

/// Publishes messages without a store.
async fn alone(brokers: &Brokers, bytes: usize, messages: u64) -> anyhow::Result<Duration> {
    let context = brokers.context().await?;
    context.create_stream(brokers.stream("alone")).await?;
    let payload: Arc<[u8]> = (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect();
    let started = Instant::now();
    let sends = futures_util::stream::iter(0..messages).map(|_| {
        let (context, payload) = (context.clone(), payload.clone());
        async move {
            context
                .publish("alone", payload.to_vec().into())
                .await?
                .await
        }
    });
    let mut sends = sends.buffer_unordered(IN_FLIGHT);
    while let Some(sent) = sends.next().await {
        sent?;
    }
    let took = started.elapsed();
    context.delete_stream("alone").await?;
    Ok(took)
}

/// Appends documents at a steady rate, one per call. Returns the time from each call to its arrival at the other
/// replica, as a follower there sees it.
async fn lags(a: &Arc<Replica>, b: &Replica, first: u64) -> anyhow::Result<Vec<Duration>> {
    let total = RATE_PER_S * RATE_SECONDS;
    let mut after = FeedCursor::default();
    let follow = async |after: FeedCursor, wait_ms| {
        let reader = ScopeReader {
            after,
            wait_ms,
            ..ScopeReader::new(b.signed.clone())
        };
        reader.read(&b.handle()).await
    };
    loop {
        let reply = follow(after, 0).await?;
        after = reply.cursor;
        if reply.caught_up {
            break;
        }
    }
    let begun = tokio::time::Instant::now();
    let due = move |number: u64| begun + Duration::from_secs_f64(number as f64 / RATE_PER_S as f64);
    let writer = {
        let a = a.clone();
        tokio::spawn(async move {
            let mut calls = tokio::task::JoinSet::new();
            for number in 0..total {
                tokio::time::sleep_until(due(number)).await;
                let (a, number) = (a.clone(), first + number);
                calls.spawn(
                    async move { a.append(number..number + 1, Acknowledgement::Local).await },
                );
            }
            while let Some(call) = calls.join_next().await {
                call??;
            }
            anyhow::Ok(())
        })
    };
    let mut lags = Vec::new();
    while (lags.len() as u64) < total {
        let reply = follow(after, 1_000).await?;
        after = reply.cursor;
        let now = tokio::time::Instant::now();
        for event in reply.events {
            if let FeedEvent::Update(update) = event {
                let number = update.document.0 as u64;
                lags.push(now.saturating_duration_since(due(number - first)));
            }
        }
    }
    writer.await??;
    Ok(lags)
}
