//! Counts in Redis what several gateways grant together.
//!
//! One call of a script (`script.lua`) checks and takes for the tenant and the key at once, by the clock of Redis. A
//! request makes two calls, when its head has arrived and when its prompt is known. Its settlement goes to Redis
//! after its end, from a queue: `settler` sends it again until Redis has taken it, and Redis takes it once.
//!
//! A call waits for `timeout_ms` at most. Then `link` gives the connection up, and requests do not wait any more
//! until there is a new one. Calls that fail meanwhile are counted by this gateway alone.

mod config;
mod link;
mod places;
mod script;
mod settler;

use std::sync::Arc;

use refrain_service_kit::actors::{self, Inbox};
use refrain_service_kit::random;
use refrain_service_kit::telemetry::Metrics;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

pub use self::config::LimitsRedisConfig;
pub(super) use self::link::Away;
use self::link::Link;
use self::places::{PlaceCall, Places};
pub(super) use self::script::Answer;
use self::script::{Act, Amounts, CountedSubject, amounts};
use self::settler::{Settlement, settle_all};
use super::file::LimitsEntry;
use super::limit_usage::{PerMinute, Subject};

/// Most settlements that wait for Redis. The tokens of further ones stay as they were reserved.
const SETTLEMENTS_MAX: usize = 65_536;

/// Bytes of the random name of a gateway.
const NAME_BYTES: usize = 8;

refrain_service_kit::metric_families! {
    /// Metrics of gateways that count in Redis.
    struct RedisFamilies {
        /// Whether Redis counts the limits now. If it does not, each gateway grants its own share.
        is_up: IntGauge = "refrain_gateway_limits_redis_up",
        /// Decisions on limits that this gateway made alone, because Redis did not answer.
        fallbacks: IntCounter = "refrain_gateway_limits_redis_fallbacks_total",
        /// Settlements that wait for Redis.
        settlements: IntGauge = "refrain_gateway_limits_redis_settlements",
        /// Settlements that were dropped because too many wait for Redis.
        settlements_lost: IntCounter = "refrain_gateway_limits_redis_settlements_lost_total",
    }
}

/// The counts in Redis. Cheap to clone.
#[derive(Clone)]
pub(crate) struct RedisCounts {
    shared: Arc<Shared>,
}

struct Shared {
    link: Arc<Link>,
    places: Arc<Places>,
    settlements: mpsc::Sender<Settlement>,
    prefix: String,
    place_ms: u64,
    families: RedisFamilies,
}

/// A request in the counts of Redis. It settles when it is dropped.
pub(super) struct Place {
    counts: RedisCounts,
    call: Arc<PlaceCall>,
    /// Whether Redis may have the place.
    is_sent: bool,
    /// Whether Redis has taken the tokens.
    has_reserved: bool,
    settlement: Amounts,
}

impl RedisCounts {
    /// Begins to connect. It has to be called on a runtime, which then has the tasks.
    ///
    /// # Errors
    /// The configuration has faults, or another gateway of the process has the metrics.
    pub(crate) fn start(config: LimitsRedisConfig, metrics: &Metrics) -> anyhow::Result<Self> {
        let families = RedisFamilies::register(metrics.registry())?;
        let place_ms = config.places_expire_ms;
        let prefix = config.prefix.clone();
        let link = Arc::new(Link::start(config, families.is_up.clone())?);
        let gateway = hex::encode(random::bytes::<NAME_BYTES>()?);
        let places = Arc::new(Places::new(gateway));
        let (of_actor, waiting) = ((link.clone(), places.clone()), families.settlements.clone());
        let taken = Arc::default();
        let settle = move |inbox: Inbox<Settlement>| {
            let (link, places) = of_actor.clone();
            let (taken, waiting) = (Arc::clone(&taken), waiting.clone());
            settle_all(link, places, inbox, taken, waiting, place_ms)
        };
        let name = "settlements of limits";
        let (settlements, actor) = actors::start_with(name, SETTLEMENTS_MAX, settle);
        // It ends with the last sender.
        actor.detached();
        Ok(RedisCounts {
            shared: Arc::new(Shared {
                link,
                places,
                settlements,
                prefix,
                place_ms,
                families,
            }),
        })
    }

    /// The place of a request that counts for these subjects. Redis does not have it yet.
    pub(super) fn place(&self, subjects: &[(Subject, LimitsEntry)]) -> Place {
        let prefix = &self.shared.prefix;
        let counted = subjects
            .iter()
            .map(|(subject, limits)| CountedSubject::new(prefix, subject, *limits));
        Place {
            call: self.shared.places.add(counted.collect()),
            counts: self.clone(),
            is_sent: false,
            has_reserved: false,
            settlement: Amounts::default(),
        }
    }
}

impl Place {
    /// Counts a request whose head has arrived, unless a limit is reached.
    ///
    /// # Errors
    /// Redis does not answer.
    pub(super) async fn begin(&mut self) -> Result<Answer, Away> {
        let one = amounts(PerMinute::of_one_request);
        self.run(Act::Begin, &one).await
    }

    /// Takes tokens, unless a limit is reached.
    ///
    /// # Errors
    /// Redis does not answer.
    pub(super) async fn reserve(
        &mut self,
        amount: impl Fn(PerMinute) -> f64,
    ) -> Result<Answer, Away> {
        let answer = self.run(Act::Reserve, &amounts(amount)).await?;
        self.has_reserved = answer.refusal.is_none();
        Ok(answer)
    }

    /// Whether Redis has taken the tokens of the request.
    pub(super) fn has_reserved(&self) -> bool {
        self.has_reserved
    }

    /// Sets what is to be taken besides at the end, or given back if it is negative.
    pub(super) fn settle(&mut self, amount: impl Fn(PerMinute) -> f64) {
        self.settlement = amounts(amount);
    }

    async fn run(&mut self, act: Act, amounts: &Amounts) -> Result<Answer, Away> {
        let Shared {
            link,
            place_ms,
            families,
            ..
        } = &*self.counts.shared;
        let call = &self.call;
        // If the caller leaves while this waits, the place is given back.
        let was_sent = std::mem::replace(&mut self.is_sent, true);
        let answer = link
            .run(|script| call.command(script, act, *place_ms, amounts))
            .await;
        let parsed = answer.and_then(|value| {
            let bytes: Vec<u8> = redis::from_redis_value(value).map_err(|_| Away::Unknown)?;
            script::parse(&bytes, call.subject_count()).map_err(|_| Away::Unknown)
        });
        let is_absent = match &parsed {
            Ok(answer) => answer.refusal.is_some(),
            Err(away) => *away == Away::NotSent,
        };
        if is_absent {
            self.is_sent = was_sent;
        }
        if parsed.is_err() {
            families.fallbacks.inc();
        }
        parsed
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let shared = &self.counts.shared;
        shared.places.end(&self.call);
        if !self.is_sent {
            return;
        }
        let settlement = Settlement {
            call: self.call.clone(),
            amounts: self.settlement,
        };
        match shared.settlements.try_send(settlement) {
            Ok(()) | Err(TrySendError::Closed(_)) => {}
            Err(TrySendError::Full(_)) => shared.families.settlements_lost.inc(),
        }
        let waiting = shared.settlements.max_capacity() - shared.settlements.capacity();
        shared.families.settlements.set(waiting as i64);
    }
}

#[cfg(test)]
mod tests;
