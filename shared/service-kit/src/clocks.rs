//! Whose clock is off: what the services of a mesh tell each other of the time.
//!
//! Calls inside the mesh say about once a second what the caller's clock shows ([`CLOCK_HEADER`]). Every gateway and every
//! worker calls the scheduler, so the scheduler sees all their clocks: the median of these and its own is the mesh's time, and
//! its answers tell it. Everybody else measures itself by that, and passes it on to those whom the scheduler does not hear,
//! such as the draft store. So the one is off that disagrees with most, the scheduler included. Where there is a tie, the
//! scheduler's own clock is nearest to right: a mesh of one gateway and no worker has no other judge.
//!
//! A service whose clock is off by more than namespaces are believed for is not ready, and says why
//! ([`Clocks::readiness`]). In one process there is one clock, and nothing of this happens.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::clock;
use crate::mesh::CLOCK_SKEW_S_MAX;
use crate::telemetry::Metrics;

/// With a request: what the caller's clock shows, the mesh's time as far as it knows, both in Unix milliseconds, and its name,
/// parted by `;`. With an answer of the scheduler: the mesh's time.
pub const CLOCK_HEADER: &str = "x-refrain-clock";

/// How often one service tells another.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// What was heard longer ago counts no more.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Clocks that a scheduler compares: more than there may be workers. Those that come later are not counted.
const PEERS_MAX: usize = 4_096;

/// A clock that is off by this is worth a line in the log. Below it lie processes that stood still for a moment, too.
const WARN_FROM: Duration = Duration::from_secs(30);

/// How often the same clock is worth one.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// An answer that took longer says nothing of the time.
const ROUND_TRIP_MAX: Duration = Duration::from_secs(5);

/// Longest name of a service.
const NAME_BYTES_MAX: usize = 128;

/// What a service knows of its own clock and of others'. Cheap to clone; one for the whole process.
#[derive(Clone)]
pub struct Clocks {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    skew_max: Duration,
    now_ms: Box<dyn Fn() -> u64 + Send + Sync>,
    known: Mutex<Known>,
}

/// When a service was told last. One for each that is called.
pub(crate) type Told = Arc<Mutex<Option<Instant>>>;

impl Default for Clocks {
    /// Of a service that hears of no other's clock.
    fn default() -> Self {
        Clocks::new("", false, CLOCK_SKEW_S_MAX)
    }
}

impl Clocks {
    /// Of the service of this name. `judges`: it is the scheduler. Its clock may be off by `skew_s_max`.
    pub fn new(name: &str, judges: bool, skew_s_max: u64) -> Self {
        Clocks::by(name, judges, skew_s_max, clock::unix_ms)
    }

    /// The same with a clock of its own.
    pub(crate) fn by(
        name: &str,
        judges: bool,
        skew_s_max: u64,
        now_ms: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Self {
        let readable = |byte: char| byte.is_ascii_graphic() && byte != ';';
        let name = name
            .chars()
            .take(NAME_BYTES_MAX)
            .map(|byte| if readable(byte) { byte } else { '_' })
            .collect();
        Clocks {
            inner: Arc::new(Inner {
                name,
                skew_max: Duration::from_secs(skew_s_max),
                now_ms: Box::new(now_ms),
                known: Mutex::new(Known {
                    judged: judges.then(HashMap::new),
                    told: None,
                    warned: None,
                }),
            }),
        }
    }

    /// Shows the skew among the service's figures.
    ///
    /// # Errors
    /// The name is taken.
    pub fn register(&self, metrics: &Metrics) -> anyhow::Result<()> {
        let clocks = self.clone();
        metrics.asked_gauge(
            "refrain_clock_skew_seconds",
            "How far this service's clock is ahead of the mesh's time, as far as it was told.",
            move || clocks.skew_ms() as f64 / 1_000.0,
        )
    }

    /// How far this service's clock is ahead of the mesh's time, milliseconds; 0 where nothing was heard of late.
    pub fn skew_ms(&self) -> i64 {
        self.known()
            .mesh_ahead_ms(Instant::now())
            .unwrap_or(0)
            .saturating_neg()
    }

    /// # Errors
    /// Why the service cannot do its work: its clock is off by more than others believe.
    pub fn readiness(&self) -> Result<(), String> {
        let skew_ms = self.skew_ms();
        if skew_ms.unsigned_abs() <= millis(self.inner.skew_max) {
            return Ok(());
        }
        Err(format!(
            "this service's clock is {} the mesh's time, and mesh.clock_skew_s_max is {}; set the clock",
            ahead_or_behind(skew_ms),
            self.inner.skew_max.as_secs()
        ))
    }

    /// What a call to a service says, if it is time to.
    pub(crate) fn call(&self, told: &Told) -> Option<String> {
        let now = Instant::now();
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_some_and(|told| now.saturating_duration_since(told) < TELL_EVERY) {
            return None;
        }
        *told = Some(now);
        let own_ms = self.now_ms();
        let mesh_ms = self
            .known()
            .mesh_ahead_ms(now)
            .map(|ahead_ms| own_ms.saturating_add_signed(ahead_ms).to_string())
            .unwrap_or_default();
        Some(format!("{own_ms};{mesh_ms};{}", self.inner.name))
    }

    /// A call said this. Returns what the answer says, if this service judges.
    pub(crate) fn heard(&self, said: &str, from: Option<IpAddr>) -> Option<String> {
        let mut parts = said.splitn(3, ';');
        let peer_ms: u64 = parts.next()?.parse().ok()?;
        let mesh_ms: Option<u64> = parts.next()?.parse().ok();
        let name = parts.next()?;
        let now = Instant::now();
        let own_ms = self.now_ms();
        let mut known = self.known();
        let known = &mut *known;
        let Some(judged) = &mut known.judged else {
            if let Some(mesh_ms) = mesh_ms {
                known.told = Some((ahead_ms(mesh_ms, own_ms), now));
                self.warn_of_own(known, now);
            }
            return None;
        };
        let key = (name.to_owned(), from);
        let is_known = judged.contains_key(&key);
        if !is_known && judged.len() >= PEERS_MAX {
            judged.retain(|_, peer| peer.is_fresh(now));
        }
        if is_known || judged.len() < PEERS_MAX {
            let peer = judged.entry(key.clone()).or_insert(Peer {
                ahead_ms: 0,
                heard: now,
                warned: None,
            });
            peer.ahead_ms = ahead_ms(peer_ms, own_ms);
            peer.heard = now;
        }
        let mesh_ahead_ms = known.mesh_ahead_ms(now)?;
        self.warn_of_own(known, now);
        if let Some(peer) = known
            .judged
            .as_mut()
            .and_then(|judged| judged.get_mut(&key))
        {
            let skew_ms = peer.ahead_ms.saturating_sub(mesh_ahead_ms);
            if self.is_worth_a_line(skew_ms, &mut peer.warned, now) {
                let address = from.map(tracing::field::display);
                let differs = ahead_or_behind(skew_ms);
                tracing::warn!(service = name, address, differs, "a service's clock is off");
            }
        }
        Some(own_ms.saturating_add_signed(mesh_ahead_ms).to_string())
    }

    /// The answer to a call that was sent then said this.
    pub(crate) fn answered(&self, said: &str, sent: Instant) {
        let round_trip = sent.elapsed();
        let Ok(mesh_ms) = said.parse::<u64>() else {
            return;
        };
        if round_trip > ROUND_TRIP_MAX {
            return;
        }
        let mesh_ms = mesh_ms.saturating_add(millis(round_trip / 2));
        let own_ms = self.now_ms();
        let now = Instant::now();
        let mut known = self.known();
        if known.judged.is_none() {
            known.told = Some((ahead_ms(mesh_ms, own_ms), now));
            self.warn_of_own(&mut known, now);
        }
    }

    fn warn_of_own(&self, known: &mut Known, now: Instant) {
        let skew_ms = known.mesh_ahead_ms(now).unwrap_or(0).saturating_neg();
        if self.is_worth_a_line(skew_ms, &mut known.warned, now) {
            let service = &*self.inner.name;
            let differs = ahead_or_behind(skew_ms);
            tracing::warn!(service, differs, "this service's own clock is off");
        }
    }

    fn is_worth_a_line(&self, skew_ms: i64, warned: &mut Option<Instant>, now: Instant) -> bool {
        let from = WARN_FROM.min(self.inner.skew_max);
        if skew_ms.unsigned_abs() < millis(from)
            || warned.is_some_and(|at| now.saturating_duration_since(at) < WARN_EVERY)
        {
            return false;
        }
        *warned = Some(now);
        true
    }

    fn now_ms(&self) -> u64 {
        (self.inner.now_ms)()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.inner
            .known
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was heard of clocks. Instants are handed in.
struct Known {
    /// Other clocks by name and address: the scheduler's.
    judged: Option<HashMap<(String, Option<IpAddr>), Peer>>,
    /// How far the mesh's time is ahead of the own clock, milliseconds, as it was said last, and when.
    told: Option<(i64, Instant)>,
    /// When the own clock was last worth a line in the log.
    warned: Option<Instant>,
}

struct Peer {
    /// Its clock less the own one.
    ahead_ms: i64,
    heard: Instant,
    warned: Option<Instant>,
}

impl Peer {
    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.heard) < REMEMBERED
    }
}

impl Known {
    /// How far the mesh's time is ahead of the own clock; `None` if nothing was heard of late.
    fn mesh_ahead_ms(&self, now: Instant) -> Option<i64> {
        let Some(judged) = &self.judged else {
            let (ahead_ms, told) = self.told?;
            return (now.saturating_duration_since(told) < REMEMBERED).then_some(ahead_ms);
        };
        let fresh = judged.values().filter(|peer| peer.is_fresh(now));
        median_near_zero(fresh.map(|peer| peer.ahead_ms).chain([0]).collect())
    }
}

/// The middle one; of two middle ones, that nearer to 0.
fn median_near_zero(mut values: Vec<i64>) -> Option<i64> {
    values.sort_unstable();
    let upper = values.len() / 2;
    let lower = values.len().checked_sub(1)? / 2;
    let middle = [values.get(lower)?, values.get(upper)?];
    middle
        .into_iter()
        .copied()
        .min_by_key(|value| value.unsigned_abs())
}

fn ahead_ms(other_ms: u64, own_ms: u64) -> i64 {
    let ahead = i128::from(other_ms) - i128::from(own_ms);
    i64::try_from(ahead).unwrap_or(if ahead < 0 { i64::MIN } else { i64::MAX })
}

fn ahead_or_behind(skew_ms: i64) -> String {
    let side = if skew_ms < 0 { "behind" } else { "ahead of" };
    format!("{} s {side}", skew_ms.unsigned_abs() / 1_000)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
