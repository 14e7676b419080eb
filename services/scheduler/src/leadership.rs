//! Which of several schedulers grants leases.
//!
//! One leads. The others keep their tables by the heartbeats of workers, which go to all of them, and one of them
//! takes over when the leader is gone. The leader keeps a record that only one can hold: a key in a bucket of
//! JetStream where there is a broker, or a Lease of Kubernetes.
//!
//! Two leaders at once would overcommit workers for a moment and no more: a worker takes no more chunks than it has
//! slots, and refuses a chunk of an older epoch than it has seen. A leader whose record may have been taken grants
//! nothing, so it needs no clock that others share.
//!
//! * `candidate` decides, by what was read and written, and when; it has no input or output.
//! * `record` reads and writes the record.

mod candidate;
mod record;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::ApiError;
use refrain_service_kit::random;

use self::candidate::{Candidate, Wish};
use self::record::LeaderRecord;
use crate::config::StandbyConfig;
use crate::dispatch::scheduler_unavailable;

/// A record is read or renewed so often while it lasts.
const ROUNDS_PER_LEASE: u32 = 4;

/// Whether this process leads. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Leadership(Arc<State>);

#[derive(Debug)]
struct State {
    start: Instant,
    /// Milliseconds after `start` until which it leads; [`FOREVER`] for a scheduler that is alone.
    until_ms: AtomicU64,
    /// The one that leads, as far as it is known.
    leader: Mutex<String>,
}

const FOREVER: u64 = u64::MAX;

impl Leadership {
    /// That of a scheduler that is alone.
    pub(crate) fn alone() -> Self {
        Leadership::until_ms(FOREVER)
    }

    fn until_ms(until_ms: u64) -> Self {
        Leadership(Arc::new(State {
            start: Instant::now(),
            until_ms: until_ms.into(),
            leader: Mutex::default(),
        }))
    }

    /// Whether this process may grant leases now.
    pub(crate) fn leads(&self) -> bool {
        let until_ms = self.0.until_ms.load(Ordering::Relaxed);
        until_ms == FOREVER || self.0.start.elapsed().as_millis() < u128::from(until_ms)
    }

    /// Fails unless this process leads.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        if self.leads() {
            return Ok(());
        }
        let leader = self.0.leader.lock();
        Err(scheduler_unavailable(&match leader.as_str() {
            "" => "no scheduler leads; try again".to_owned(),
            leader => format!("this scheduler stands by for {leader}"),
        }))
    }

    fn set(&self, until: Option<Instant>, leader: String) {
        let until = until.map_or(0, |until| {
            until.saturating_duration_since(self.0.start).as_millis() as u64
        });
        self.0.until_ms.store(until, Ordering::Relaxed);
        *self.0.leader.lock() = leader;
    }
}

/// Stands for election, and keeps the record while this process leads.
pub(crate) struct Election {
    record: Box<dyn LeaderRecord>,
    lease: Duration,
    me: String,
    leadership: Leadership,
    candidate: tokio::sync::Mutex<Candidate>,
}

impl Election {
    /// Creates it from a checked configuration.
    ///
    /// # Errors
    /// This process is in no Kubernetes cluster although the record is there.
    pub(crate) fn new(config: &StandbyConfig) -> anyhow::Result<Self> {
        let lease = Duration::from_millis(config.lease_ms);
        let record = record::open(config, lease / ROUNDS_PER_LEASE)?;
        // A process that was started anew does not know what the one before granted, so it is another one.
        let me = format!("{} {:08x}", config.id, random::u64()? as u32);
        Ok(Election::with(record, me, lease))
    }

    fn with(record: Box<dyn LeaderRecord>, me: String, lease: Duration) -> Self {
        Election {
            record,
            lease,
            candidate: Candidate::new(me.clone(), lease).into(),
            me,
            leadership: Leadership::until_ms(0),
        }
    }

    pub(crate) fn leadership(&self) -> Leadership {
        self.leadership.clone()
    }

    /// Stands for election again and again. `changed` is told whenever this process begins to lead, or leads no more.
    pub(crate) async fn run(&self, changed: impl Fn(bool)) {
        let mut led = self.leadership.leads();
        let mut trouble = None;
        loop {
            let result = self.round().await;
            let error = result.err().map(|error| format!("{error:#}"));
            if error != trouble {
                match &error {
                    Some(error) => tracing::warn!(
                        error,
                        "the record of the leading scheduler cannot be reached"
                    ),
                    None => tracing::info!("the record of the leading scheduler is reached again"),
                }
                trouble = error;
            }
            let leads = self.leadership.leads();
            if leads != led {
                let leader = self.leadership.0.leader.lock().clone();
                tracing::info!(leads, leader, "the leading scheduler has changed");
                changed(leads);
                led = leads;
            }
            tokio::time::sleep(self.lease / ROUNDS_PER_LEASE).await;
        }
    }

    /// Reads or writes the record until nothing is left to do for now.
    async fn round(&self) -> anyhow::Result<()> {
        let mut candidate = self.candidate.lock().await;
        let mut has_read = false;
        // A read may make a write sensible, which may find that somebody else was faster.
        loop {
            let result = match candidate.wish(Instant::now()) {
                Wish::Wait => break,
                Wish::Read if has_read => break,
                Wish::Read => {
                    has_read = true;
                    let read = self.record.read().await;
                    read.map(|found| candidate.read(found, Instant::now()))
                }
                Wish::Write { expected } => {
                    let sent = Instant::now();
                    let written = self.record.write(&self.me, expected.as_deref()).await;
                    written.map(|version| candidate.written(version, sent))
                }
            };
            self.leadership
                .set(candidate.leads_until(), candidate.leader());
            result?;
        }
        candidate.end_round();
        Ok(())
    }

    /// Gives the record back, so that another scheduler takes over at once.
    pub(crate) async fn resign(&self) {
        let mut candidate = self.candidate.lock().await;
        self.leadership.set(None, String::new());
        // If that fails, the record runs out by itself.
        let Some(version) = candidate.resign() else {
            return;
        };
        if let Ok(None) = self.record.write("", Some(&version)).await
            && let Ok(Some(entry)) = self.record.read().await
            && entry.holder == self.me
        {
            // A renewal had been under way.
            let _ = self.record.write("", Some(&entry.version)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::record::Entry;
    use super::*;

    /// A record in memory, which can be out of reach.
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<(Option<Entry>, bool)>>);

    #[async_trait]
    impl LeaderRecord for Shared {
        async fn read(&self) -> anyhow::Result<Option<Entry>> {
            let state = self.0.lock();
            anyhow::ensure!(!state.1, "out of reach");
            Ok(state.0.clone())
        }

        async fn write(
            &self,
            holder: &str,
            expected: Option<&str>,
        ) -> anyhow::Result<Option<String>> {
            let mut state = self.0.lock();
            anyhow::ensure!(!state.1, "out of reach");
            let version = state.0.as_ref().map(|entry| entry.version.clone());
            if version.as_deref() != expected {
                return Ok(None);
            }
            let next = version.map_or(0, |version| version.parse::<u64>().unwrap()) + 1;
            state.0 = Some(Entry {
                holder: holder.to_owned(),
                version: next.to_string(),
            });
            Ok(Some(next.to_string()))
        }
    }

    fn election(record: &Shared, name: &str) -> Arc<Election> {
        let lease = Duration::from_secs(2);
        Arc::new(Election::with(Box::new(record.clone()), name.into(), lease))
    }

    async fn until(what: &str, holds: impl Fn() -> bool) {
        let waited = tokio::time::timeout(Duration::from_secs(60), async {
            while !holds() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        waited.await.expect(what);
    }

    fn start(election: &Arc<Election>) -> tokio::task::JoinHandle<()> {
        let election = election.clone();
        tokio::spawn(async move { election.run(|_| ()).await })
    }

    #[tokio::test]
    async fn one_leads_and_another_follows_when_it_is_gone_or_resigns() {
        let record = Shared::default();
        let (one, other) = (election(&record, "one"), election(&record, "other"));
        let run = start(&one);
        until("the first leads", || one.leadership.leads()).await;
        let other_run = start(&other);
        until("the second knows of it", || {
            *other.leadership.0.leader.lock() == "one"
        })
        .await;
        let error = other.leadership.check().unwrap_err();
        assert!(error.message.contains("stands by for one"), "{error}");
        // As a process that is killed.
        run.abort();
        until("the second leads", || other.leadership.leads()).await;
        assert!(!one.leadership.leads());
        let run = start(&one);
        other_run.abort();
        let _ = other_run.await;
        other.resign().await;
        assert!(!other.leadership.leads());
        until("the first leads again", || one.leadership.leads()).await;
        run.abort();
    }

    #[tokio::test]
    async fn a_leader_that_cannot_renew_its_record_grants_nothing() {
        let record = Shared::default();
        let one = election(&record, "one");
        let run = start(&one);
        until("it leads", || one.leadership.leads()).await;
        record.0.lock().1 = true;
        until("it leads no more", || !one.leadership.leads()).await;
        record.0.lock().1 = false;
        until("it leads again", || one.leadership.leads()).await;
        run.abort();
        assert!(Leadership::alone().leads() && Leadership::alone().check().is_ok());
    }
}
