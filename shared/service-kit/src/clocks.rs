//! Comparison of the clocks of a mesh, which finds the service whose clock is off.
//!
//! About once a second, calls inside the mesh carry the time of the caller's clock ([`CLOCK_HEADER`]). Every gateway
//! and every worker calls the scheduler, so the scheduler sees all their clocks. The median of these and its own is
//! the mesh time, which its responses carry. All other services compare their clocks with the mesh time. They also
//! pass it on to services that do not call the scheduler, such as the draft store.
//!
//! So the clock that disagrees with most others counts as off, even if it is the scheduler's. In a tie the
//! scheduler's clock decides: a mesh of one gateway and no worker has no other judge.
//!
//! A service is not ready while its clock is off by more than `mesh.clock_skew_s_max`, and its readiness says so
//! ([`Clocks::readiness`]). Services in one process share one clock, so none of this happens there.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::clock::{self, millis};
use crate::telemetry::Metrics;

/// Header that carries clocks. In a request: the caller's time, the mesh time as far as the caller knows it, and the
/// caller's name, separated by `;`. In a response of the scheduler: the mesh time. Times are Unix milliseconds.
pub const CLOCK_HEADER: &str = "x-refrain-clock";

/// Default of `mesh.clock_skew_s_max`, in seconds. A clock that nobody adjusts is off by a few minutes after months,
/// and a clock in the wrong time zone is off by hours.
pub(crate) const CLOCK_SKEW_S_MAX: u64 = 3_600;

/// How often one service sends its clock to another.
const SEND_EVERY: Duration = Duration::from_secs(1);

/// A reading older than this no longer counts.
const READING_AGE_MAX: Duration = Duration::from_secs(60);

/// Maximum number of clocks that a scheduler compares, which is more than it may have workers. Further clocks are not
/// counted.
const PEERS_MAX: usize = 4_096;

/// Skew from which a clock is worth a line in the log. A process that was suspended for a moment may show a smaller
/// one.
const WARN_FROM: Duration = Duration::from_secs(30);

/// Pause between two lines in the log about one clock.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// A response that took longer does not tell the time.
const ROUND_TRIP_MAX: Duration = Duration::from_secs(5);

/// Longest name of a service, bytes.
const NAME_BYTES_MAX: usize = 128;

/// A service's knowledge of its own clock and of others. Cheap to clone; a process has one.
#[derive(Clone)]
pub struct Clocks {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    skew_max: Duration,
    now_ms: Box<dyn Fn() -> u64 + Send + Sync>,
    readings: Mutex<Readings>,
}

/// When the clock was last sent to a service. There is one for each service that is called.
pub(crate) type LastSent = Arc<Mutex<Option<Instant>>>;

impl Default for Clocks {
    /// The clocks of a service that learns nothing of other clocks.
    fn default() -> Self {
        Clocks::new("", false, CLOCK_SKEW_S_MAX)
    }
}

impl Clocks {
    /// Creates the clocks of the service `name`, whose own clock may be off by `skew_s_max` seconds. The scheduler is
    /// the one that compares all clocks (`is_judge`).
    pub fn new(name: &str, is_judge: bool, skew_s_max: u64) -> Self {
        Clocks::with_clock(name, is_judge, skew_s_max, clock::unix_ms)
    }

    /// As [`Clocks::new`], with another clock than the system's.
    pub(crate) fn with_clock(
        name: &str,
        is_judge: bool,
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
            shared: Arc::new(Shared {
                name,
                skew_max: Duration::from_secs(skew_s_max),
                now_ms: Box::new(now_ms),
                readings: Mutex::new(Readings {
                    peers: is_judge.then(HashMap::new),
                    mesh: None,
                    warned: None,
                }),
            }),
        }
    }

    /// Registers the skew as a metric.
    ///
    /// # Errors
    /// The name is taken.
    pub fn register(&self, metrics: &Metrics) -> anyhow::Result<()> {
        let clocks = self.clone();
        metrics.computed_gauge(
            "refrain_clock_skew_seconds",
            "Seconds by which this service's clock is ahead of the mesh time; 0 while the mesh time is unknown.",
            move || clocks.skew_ms() as f64 / 1_000.0,
        )
    }

    /// Milliseconds by which this service's clock is ahead of the mesh time; 0 while the mesh time is unknown.
    pub fn skew_ms(&self) -> i64 {
        self.shared
            .readings
            .lock()
            .mesh_ahead_ms(Instant::now())
            .unwrap_or(0)
            .saturating_neg()
    }

    /// Checks whether the service's clock is right enough for its work.
    ///
    /// # Errors
    /// The reason why it is not, as a sentence for the operator.
    pub fn readiness(&self) -> Result<(), String> {
        let skew_ms = self.skew_ms();
        if skew_ms.unsigned_abs() <= millis(self.shared.skew_max) {
            return Ok(());
        }
        Err(format!(
            "this service's clock is {} the mesh time, and mesh.clock_skew_s_max is {}; set the clock",
            ahead_or_behind(skew_ms),
            self.shared.skew_max.as_secs()
        ))
    }

    /// The header for a request to a service, if it is time to send one.
    pub(crate) fn request_header(&self, last_sent: &LastSent) -> Option<String> {
        let now = Instant::now();
        let mut last_sent = last_sent.lock();
        if last_sent.is_some_and(|sent| now.saturating_duration_since(sent) < SEND_EVERY) {
            return None;
        }
        *last_sent = Some(now);
        let own_ms = self.now_ms();
        let mesh_ms = self
            .shared
            .readings
            .lock()
            .mesh_ahead_ms(now)
            .map(|ahead_ms| own_ms.saturating_add_signed(ahead_ms).to_string())
            .unwrap_or_default();
        Some(format!("{own_ms};{mesh_ms};{}", self.shared.name))
    }

    /// Takes the header of a request. Returns the header of the response, if this service is the judge.
    pub(crate) fn read_request_header(&self, header: &str, from: Option<IpAddr>) -> Option<String> {
        let mut parts = header.splitn(3, ';');
        let peer_ms: u64 = parts.next()?.parse().ok()?;
        let mesh_ms: Option<u64> = parts.next()?.parse().ok();
        let name = parts.next()?;
        let now = Instant::now();
        let own_ms = self.now_ms();
        let mut readings = self.shared.readings.lock();
        let readings = &mut *readings;
        let Some(peers) = &mut readings.peers else {
            if let Some(mesh_ms) = mesh_ms {
                readings.mesh = Some((ahead_ms(mesh_ms, own_ms), now));
                self.warn_of_own(readings, now);
            }
            return None;
        };
        let key = (name.to_owned(), from);
        let is_known = peers.contains_key(&key);
        if !is_known && peers.len() >= PEERS_MAX {
            peers.retain(|_, peer| peer.is_fresh(now));
        }
        if is_known || peers.len() < PEERS_MAX {
            let peer = peers.entry(key.clone()).or_insert(Peer {
                ahead_ms: 0,
                received: now,
                warned: None,
            });
            peer.ahead_ms = ahead_ms(peer_ms, own_ms);
            peer.received = now;
        }
        let mesh_ahead_ms = readings.mesh_ahead_ms(now)?;
        self.warn_of_own(readings, now);
        if let Some(peer) = readings
            .peers
            .as_mut()
            .and_then(|peers| peers.get_mut(&key))
        {
            let skew_ms = peer.ahead_ms.saturating_sub(mesh_ahead_ms);
            if self.is_worth_a_line(skew_ms, &mut peer.warned, now) {
                let address = from.map(tracing::field::display);
                let differs = ahead_or_behind(skew_ms);
                tracing::warn!(
                    service = name,
                    address,
                    differs,
                    "the clock of a service is off"
                );
            }
        }
        Some(own_ms.saturating_add_signed(mesh_ahead_ms).to_string())
    }

    /// Takes the header of the response to a request that was sent at `sent`.
    pub(crate) fn read_response_header(&self, header: &str, sent: Instant) {
        let round_trip = sent.elapsed();
        let Ok(mesh_ms) = header.parse::<u64>() else {
            return;
        };
        if round_trip > ROUND_TRIP_MAX {
            return;
        }
        let mesh_ms = mesh_ms.saturating_add(millis(round_trip / 2));
        let own_ms = self.now_ms();
        let now = Instant::now();
        let mut readings = self.shared.readings.lock();
        if readings.peers.is_none() {
            readings.mesh = Some((ahead_ms(mesh_ms, own_ms), now));
            self.warn_of_own(&mut readings, now);
        }
    }

    fn warn_of_own(&self, readings: &mut Readings, now: Instant) {
        let skew_ms = readings.mesh_ahead_ms(now).unwrap_or(0).saturating_neg();
        if self.is_worth_a_line(skew_ms, &mut readings.warned, now) {
            let service = &*self.shared.name;
            let differs = ahead_or_behind(skew_ms);
            tracing::warn!(service, differs, "this service's own clock is off");
        }
    }

    fn is_worth_a_line(&self, skew_ms: i64, warned: &mut Option<Instant>, now: Instant) -> bool {
        let from = WARN_FROM.min(self.shared.skew_max);
        if skew_ms.unsigned_abs() < millis(from)
            || warned.is_some_and(|at| now.saturating_duration_since(at) < WARN_EVERY)
        {
            return false;
        }
        *warned = Some(now);
        true
    }

    fn now_ms(&self) -> u64 {
        (self.shared.now_ms)()
    }
}

/// The last readings of clocks. Instants are arguments.
struct Readings {
    /// Other clocks by name and address. Only the judge has them.
    peers: Option<HashMap<(String, Option<IpAddr>), Peer>>,
    /// Milliseconds by which the mesh time is ahead of the own clock, and when this was received.
    mesh: Option<(i64, Instant)>,
    /// When the log last warned about the own clock.
    warned: Option<Instant>,
}

/// The clock of another service.
struct Peer {
    /// Milliseconds by which it is ahead of the own clock.
    ahead_ms: i64,
    received: Instant,
    warned: Option<Instant>,
}

impl Peer {
    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.received) < READING_AGE_MAX
    }
}

impl Readings {
    /// Milliseconds by which the mesh time is ahead of the own clock; `None` without a fresh reading.
    fn mesh_ahead_ms(&self, now: Instant) -> Option<i64> {
        let Some(peers) = &self.peers else {
            let (ahead_ms, received) = self.mesh?;
            return (now.saturating_duration_since(received) < READING_AGE_MAX).then_some(ahead_ms);
        };
        let fresh = peers.values().filter(|peer| peer.is_fresh(now));
        median_near_zero(fresh.map(|peer| peer.ahead_ms).chain([0]).collect())
    }
}

/// The median; if there are two middle values, the one nearer to 0.
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

#[cfg(test)]
mod tests;
