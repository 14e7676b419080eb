//! Measures replicas of the draft store, and the brokers between them:
//!
//! ```text
//! cargo run --release -p refrain-draft-store --example replicas -- [rates|join] [documents]
//! ```
//!
//! `rates` stores documents of 1,024 tokens, and shows how many a second are acknowledged at each level, with one
//! broker and with three. It also shows a store without a feed, and the brokers alone, with messages of the same
//! size. It also shows the lag at 2,000 documents a second.
//!
//! `join` shows how long a new replica takes, by files and by texts.
//!
//! It starts the brokers itself: `target/tools/usr/sbin/nats-server`, which `tests/run` unpacks, or an installed one.

mod brokers;
mod join;
mod rates;
mod replica;

use refrain_service_kit::telemetry::install_crypto_provider;

use crate::brokers::Brokers;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    install_crypto_provider();
    let mut arguments = std::env::args().skip(1);
    let part = arguments.next().unwrap_or_else(|| "all".into());
    let documents = arguments.next().map(|text| text.parse::<u64>());
    let documents = documents.transpose()?;
    if part != "join" {
        let documents = documents.unwrap_or(40_000);
        rates::without_brokers(documents).await?;
        for copies in [1, 3] {
            let brokers = Brokers::start(copies).await?;
            rates::with_brokers(&brokers, documents).await?;
        }
    }
    if part != "rates" {
        let brokers = Brokers::start(1).await?;
        join::measure(&brokers, documents.unwrap_or(100_000)).await?;
    }
    Ok(())
}
