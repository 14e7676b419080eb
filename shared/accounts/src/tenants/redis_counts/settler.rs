//! Brings settlements to Redis, and renews the places of requests in flight.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus::IntGauge;
use redis::{Pipeline, Value};
use refrain_service_kit::actors::Inbox;
use tokio::sync::Mutex;
use tokio::time::{MissedTickBehavior, interval};

use super::link::{Away, Link};
use super::places::{PlaceCall, Places};
use super::script::{Act, Amounts};

/// Most settlements that are sent together. Redis answers in order, so checks wait until it has carried them out.
/// Each takes some 20 us.
const BATCH_MAX: usize = 8;
/// The same where many wait, because Redis is far away or was away: an eighth of them, up to this number.
const BATCH_MAX_OF_MANY: usize = 64;

/// Most places that one command renews.
const RENEWED_MAX: usize = 512;

/// The amounts that a request has to settle.
pub(super) struct Settlement {
    pub(super) call: Arc<PlaceCall>,
    pub(super) amounts: Amounts,
}

/// Works until `settlements` has no more senders. It sends again whatever Redis has not taken: a settlement finds its
/// place only once. `taken` are the settlements that are being sent, which outlive a panic.
pub(super) async fn settle_all(
    link: Arc<Link>,
    places: Arc<Places>,
    mut settlements: Inbox<Settlement>,
    taken: Arc<Mutex<Vec<Settlement>>>,
    waiting: IntGauge,
    place_ms: u64,
) {
    let mut renewal = interval(Duration::from_millis(place_ms / 3));
    renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut batch = taken.lock().await;
    loop {
        let batch_max = (settlements.len() / 8).clamp(BATCH_MAX, BATCH_MAX_OF_MANY);
        let is_settling = tokio::select! {
            biased;
            // Those that were being settled before a panic.
            () = std::future::ready(()), if !batch.is_empty() => true,
            received = settlements.recv_many(&mut batch, batch_max) => match received {
                0 => return,
                _ => true,
            },
            _ = renewal.tick() => false,
        };
        // It is harmless that a renewal fails: there is another one before the places expire, or once there is a
        // connection.
        let mut renews = !is_settling;
        loop {
            if renews {
                let _ = renew(&link, &places, place_ms).await;
            }
            if batch.is_empty() || settle(&link, &batch, place_ms).await.is_ok() {
                break;
            }
            link.connected().await;
            renews = true;
        }
        batch.clear();
        waiting.set(settlements.len() as i64);
    }
}

async fn settle(link: &Link, batch: &[Settlement], place_ms: u64) -> Result<Vec<Value>, Away> {
    let made = |script: &str| {
        let mut commands = Pipeline::with_capacity(batch.len());
        for Settlement { call, amounts } in batch {
            let command = call.command(["EVALSHA", script], Act::Settle, place_ms, amounts);
            commands.add_command(command).ignore();
        }
        commands
    };
    link.run_all(made).await
}

/// Renews the places of all requests in flight, makes those again that Redis has lost, and removes those that dead
/// gateways left.
async fn renew(link: &Link, places: &Places, place_ms: u64) -> Result<(), Away> {
    let mut of_key: HashMap<&str, Vec<&str>> = HashMap::new();
    let calls = places.all();
    for call in &calls {
        for key in call.places_keys() {
            of_key.entry(key).or_default().push(&call.name);
        }
    }
    if of_key.is_empty() {
        return Ok(());
    }
    let time = link.run_all(|_| {
        let mut time = Pipeline::new();
        time.cmd("TIME");
        time
    });
    let time = time.await?;
    let Some(Ok((s, us))) = time.first().map(redis::from_redis_value_ref::<(u64, u64)>) else {
        return Err(Away::Unknown);
    };
    let now_ms = s * 1_000 + us / 1_000;
    let until_ms = now_ms + place_ms;
    for (key, names) in of_key {
        for names in names.chunks(RENEWED_MAX) {
            link.run_all(|_| {
                let mut commands = Pipeline::new();
                let add = commands.cmd("ZADD").arg(key);
                for name in names {
                    add.arg(until_ms).arg(name);
                }
                commands.cmd("PEXPIRE").arg(key).arg(place_ms + 1_000);
                let expired = commands.cmd("ZREMRANGEBYSCORE").arg(key);
                expired.arg("-inf").arg(now_ms);
                commands
            })
            .await?;
        }
    }
    Ok(())
}
