//! Counts what tenants and keys use, and refuses what is past their limits.
//!
//! A request counts when its head arrives. Its tokens are reserved once its prompt is known, and settled when it
//! ends, also when its client leaves: prompt tokens as they are, output tokens as far as they were made. A request
//! that made nothing gives its tokens back.
//!
//! With a Redis, several gateways count together there. This gateway then copies what is left, for headers and for
//! the times when Redis does not answer: it goes on from there by itself, with its share.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

use super::budget::{BudgetTicket, Budgets};
use super::directory::Caller;
use super::file::LimitsEntry;
use super::limit_usage::{
    OUTPUT_RESERVED_MAX, PER_MINUTE, PerMinute, Refusal, Reserved, Subject, Usage, subjects,
};
use super::redis_counts::{Answer, Place, RedisCounts};
use crate::metrics::AccountMetrics;

/// Time after which a request may be tried again that was one too many at once.
const IN_FLIGHT_RETRY: Duration = Duration::from_secs(1);

/// The limits and their use. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Limiter {
    shared: Arc<Shared>,
}

struct Shared {
    /// Only tenants and keys with limits are here. The file of tenants bounds their number.
    usages: Mutex<HashMap<Subject, Usage>>,
    /// The share of each limit per minute that this gateway grants by itself.
    share: f64,
    budgets: Arc<Budgets>,
    /// The counts of several gateways together.
    redis: Option<RedisCounts>,
    metrics: Arc<AccountMetrics>,
}

/// A limit per minute as a caller may see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LimitState {
    pub(super) limit: u64,
    pub(super) left: u64,
    pub(super) until_full: Duration,
}

/// The part of a request in the limits of its caller. It settles when it is dropped.
pub struct QuotaTicket {
    limiter: Limiter,
    tenant: String,
    /// The subjects with limits.
    subjects: Vec<(Subject, LimitsEntry)>,
    /// Whether it counts among the requests in flight of this gateway.
    has_begun: bool,
    reserved: Option<Reserved>,
    /// Its place in Redis.
    place: Option<Place>,
    made: Arc<Made>,
    budget: Arc<BudgetTicket>,
}

/// The output of a request so far.
#[derive(Default)]
pub struct Made {
    /// Output tokens that count. Tokens of a prompt that is scored do not.
    pub(super) output: AtomicU64,
    has_emitted: AtomicBool,
}

impl Made {
    /// Counts output tokens of a step, which may have been scored ones only.
    pub fn add(&self, output: u64) {
        self.output.fetch_add(output, Ordering::Relaxed);
        self.has_emitted.store(true, Ordering::Relaxed);
    }

    /// Whether there was a step.
    pub(super) fn has_emitted(&self) -> bool {
        self.has_emitted.load(Ordering::Relaxed)
    }
}

impl Limiter {
    /// Limits that this gateway counts by itself.
    #[cfg(test)]
    pub(crate) fn new(share: f64, metrics: Arc<AccountMetrics>) -> Self {
        Limiter::with_redis(share, None, metrics)
    }

    /// Creates limits of which nothing is used. `redis` counts for several gateways. This one grants `share` of each
    /// limit per minute by itself.
    pub(crate) fn with_redis(
        share: f64,
        redis: Option<RedisCounts>,
        metrics: Arc<AccountMetrics>,
    ) -> Self {
        Limiter {
            shared: Arc::new(Shared {
                usages: Mutex::default(),
                share,
                redis,
                budgets: Arc::new(Budgets::new(metrics.clone())),
                metrics,
            }),
        }
    }

    /// The budgets per day and month.
    pub(crate) fn budgets(&self) -> &Arc<Budgets> {
        &self.shared.budgets
    }

    /// Counts a request whose head has arrived. A caller without limits costs nothing.
    ///
    /// # Errors
    /// `Overloaded` past a limit on requests, while tokens of earlier ones are a debt, or when a budget is spent, and
    /// `Unavailable` while nobody knows what is spent of a budget.
    pub(crate) async fn begin(
        &self,
        caller: &Caller,
        now: Instant,
    ) -> Result<QuotaTicket, ApiError> {
        let budget = self.shared.budgets.begin(caller).await?;
        let mut ticket = QuotaTicket {
            limiter: self.clone(),
            tenant: caller.tenant.to_string(),
            subjects: subjects(caller),
            has_begun: false,
            reserved: None,
            place: None,
            made: Arc::default(),
            budget: Arc::new(budget),
        };
        if ticket.subjects.is_empty() {
            return Ok(ticket);
        }
        let redis = self.shared.redis.as_ref();
        ticket.place = redis.map(|redis| redis.place(&ticket.subjects));
        if let Some(place) = &mut ticket.place
            && let Ok(answer) = place.begin().await
        {
            self.copy(&caller.tenant, &ticket.subjects, &answer, 1)?;
        } else {
            let amount = PerMinute::of_one_request;
            let refusal = Usage::begin_refusal;
            self.count(&caller.tenant, &ticket.subjects, refusal, amount, 1, now)?;
        }
        ticket.has_begun = true;
        Ok(ticket)
    }

    /// Checks the present limits by what this gateway has counted, and counts `amount` and `begun` requests.
    ///
    /// # Errors
    /// The first refusal. Nothing is counted then.
    fn count(
        &self,
        tenant: &str,
        subjects: &[(Subject, LimitsEntry)],
        refusal: impl Fn(&mut Usage, &LimitsEntry, Instant) -> Option<Refusal>,
        amount: impl Fn(PerMinute) -> f64,
        begun: u64,
        now: Instant,
    ) -> Result<(), ApiError> {
        let mut usages = self.shared.usages.lock();
        for (subject, limits) in subjects {
            let usage = usages.entry(subject.clone()).or_default();
            usage.follow(limits, self.shared.share, now);
            if let Some(refusal) = refusal(usage, limits, now) {
                return Err(self.refused(tenant, subject, limits, refusal));
            }
        }
        for (subject, _) in subjects {
            if let Some(usage) = usages.get_mut(subject) {
                usage.in_flight += begun;
                usage.take(&amount, now);
            }
        }
        Ok(())
    }

    /// Copies what Redis says is left, and counts `begun` requests in flight here unless it refuses.
    ///
    /// # Errors
    /// The refusal in the answer.
    fn copy(
        &self,
        tenant: &str,
        subjects: &[(Subject, LimitsEntry)],
        answer: &Answer,
        begun: u64,
    ) -> Result<(), ApiError> {
        let now = Instant::now();
        let begun = if answer.refusal.is_some() { 0 } else { begun };
        let mut usages = self.shared.usages.lock();
        for ((subject, limits), left) in subjects.iter().zip(&answer.left) {
            let usage = usages.entry(subject.clone()).or_default();
            usage.copy(limits, left, now);
            usage.in_flight += begun;
        }
        drop(usages);
        let refusal = answer.refusal;
        let refused = refusal.and_then(|(at, refusal)| Some((subjects.get(at)?, refusal)));
        refused.map_or(Ok(()), |((subject, limits), refusal)| {
            Err(self.refused(tenant, subject, limits, refusal))
        })
    }

    fn refused(
        &self,
        tenant: &str,
        subject: &Subject,
        limits: &LimitsEntry,
        refusal: Refusal,
    ) -> ApiError {
        let (limit, message, wait) = match refusal {
            Refusal::InFlight(in_flight) => {
                let message = format!(
                    "{in_flight} requests of {} are in flight, which is the limit; wait for some to end",
                    subject.name(),
                );
                ("requests_in_flight_max", message, IN_FLIGHT_RETRY)
            }
            Refusal::PerMinute { at, wait } => {
                let (of, name) = PER_MINUTE[at];
                let message = format!(
                    "{} has reached its limit of {} {} per minute; try again in {:.1} s",
                    subject.name(),
                    of.limit(limits).unwrap_or(0),
                    name.trim_end_matches("_per_minute").replace('_', " "),
                    wait.as_secs_f64(),
                );
                (name, message, wait)
            }
        };
        self.shared.metrics.rejected(tenant, limit);
        let wait_ms = wait.as_millis().max(1) as u64;
        ApiError::new(ErrorKind::Overloaded, message)
            .with_code(code::RATE_LIMIT_EXCEEDED)
            .with_retry_after_ms(wait_ms)
    }

    /// The state of a limit of a caller: of the tenant's and the key's the one with less left.
    pub(super) fn state(&self, caller: &Caller, of: PerMinute, now: Instant) -> Option<LimitState> {
        let at = PER_MINUTE.iter().position(|(one, _)| *one == of)?;
        let subjects = subjects(caller);
        if subjects.is_empty() {
            return None;
        }
        let mut usages = self.shared.usages.lock();
        let states = subjects.into_iter().filter_map(|(subject, limits)| {
            let limit = of.limit(&limits)?;
            let bucket = usages.get_mut(&subject)?.buckets[at].as_mut()?;
            Some(LimitState {
                limit,
                left: bucket.left(now) as u64,
                until_full: bucket.until_full(now),
            })
        });
        states.min_by_key(|state| state.left)
    }

    /// Forgets those of whom nothing is in flight. They begin with full limits, as they would after a minute.
    pub(crate) fn forget_idle(&self, now: Instant) {
        self.shared
            .usages
            .lock()
            .retain(|_, usage| !usage.is_idle(now));
    }
}

impl QuotaTicket {
    /// Reserves the tokens of a request whose prompts have `input` tokens, and whose choices may have `output_max`
    /// each. Returns the tokens of both that were reserved.
    ///
    /// # Errors
    /// `Overloaded` past a limit on tokens, or what is left of a budget.
    pub async fn reserve(
        &mut self,
        input: u64,
        output_max: impl Iterator<Item = u64>,
        now: Instant,
    ) -> Result<(u64, u64), ApiError> {
        let output: u64 = output_max.map(|most| most.min(OUTPUT_RESERVED_MAX)).sum();
        let reserved = Reserved { input, output };
        self.budget.reserve(reserved)?;
        if self.subjects.is_empty() {
            return Ok((input, output));
        }
        let amount = |of: PerMinute| of.of_tokens(input as f64, output as f64);
        if let Some(place) = &mut self.place
            && let Ok(answer) = place.reserve(amount).await
        {
            self.limiter
                .copy(&self.tenant, &self.subjects, &answer, 0)?;
        } else {
            let refusal = |usage: &mut Usage, _: &LimitsEntry, now| usage.refusal(amount, now);
            self.limiter
                .count(&self.tenant, &self.subjects, refusal, amount, 0, now)?;
        }
        self.reserved = Some(reserved);
        Ok((input, output))
    }

    /// The part of the request in the budgets of its caller.
    pub(crate) fn budget(&self) -> Arc<BudgetTicket> {
        self.budget.clone()
    }

    /// The counter of the output.
    pub(crate) fn made(&self) -> Arc<Made> {
        self.made.clone()
    }

    fn settle(&mut self, now: Instant) {
        let made = self.made.output.load(Ordering::Relaxed);
        let has_emitted = self.made.has_emitted();
        let settled = self.reserved.map(|Reserved { input, output }| {
            let kept_input = if has_emitted { 0.0 } else { -(input as f64) };
            (kept_input, made as f64 - output as f64)
        });
        let (input, output) = settled.unwrap_or_default();
        let amount = |of: PerMinute| of.of_tokens(input, output);
        // Redis settles the tokens that it has taken when the place is dropped.
        if let Some(place) = self.place.as_mut().filter(|place| place.has_reserved()) {
            place.settle(amount);
        }
        let mut usages = self.limiter.shared.usages.lock();
        for (subject, _) in &self.subjects {
            let Some(usage) = usages.get_mut(subject) else {
                continue;
            };
            usage.in_flight = usage.in_flight.saturating_sub(u64::from(self.has_begun));
            usage.take(amount, now);
        }
    }
}

impl Drop for QuotaTicket {
    fn drop(&mut self) {
        if !self.subjects.is_empty() {
            self.settle(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenants::LimitsRedisConfig;
    use crate::tenants::policy::TenantPolicy;
    use crate::tenants::rate_headers::HeaderWords;
    use futures_util::FutureExt as _;
    use refrain_service_kit::telemetry::Metrics;

    fn limiter(share: f64) -> (Limiter, Arc<AccountMetrics>) {
        let metrics = Arc::new(AccountMetrics::new(&Metrics::new().unwrap()).unwrap());
        (Limiter::new(share, metrics.clone()), metrics)
    }

    fn caller(limits: LimitsEntry) -> Caller {
        Caller {
            tenant: "acme".parse().unwrap(),
            tenant_limits: limits,
            policy: TenantPolicy::default(),
            key: None,
            fixed_key: None,
        }
    }

    fn left(limiter: &Limiter, caller: &Caller, of: PerMinute) -> u64 {
        limiter.state(caller, of, Instant::now()).unwrap().left
    }

    #[tokio::test]
    async fn requests_past_a_limit_are_told_when_to_come_back() {
        let (limiter, metrics) = limiter(1.0);
        let acme = caller(LimitsEntry {
            requests_per_minute: Some(2),
            ..LimitsEntry::default()
        });
        let now = Instant::now();
        drop(limiter.begin(&acme, now).await.unwrap());
        drop(limiter.begin(&acme, now).await.unwrap());
        let error = limiter.begin(&acme, now).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Overloaded);
        assert_eq!(error.code.as_deref(), Some("rate_limit_exceeded"));
        let wait_ms = error.retry_after_ms.unwrap();
        assert!((29_000..=30_000).contains(&wait_ms), "{wait_ms}");
        assert!(
            error.message.contains("2 requests per minute"),
            "{}",
            error.message
        );
        let rejected = metrics
            .rejections()
            .with_label_values(&["acme", "requests_per_minute"]);
        assert_eq!(rejected.get(), 1);
        // Somebody else is not concerned, and after half a minute there is room for one.
        let other = Caller {
            tenant: "bolt".parse().unwrap(),
            ..acme.clone()
        };
        assert!(limiter.begin(&other, now).await.is_ok());
        let later = now + Duration::from_millis(wait_ms + 1);
        assert!(limiter.begin(&acme, later).await.is_ok());
        assert!(limiter.begin(&acme, later).await.is_err());
    }

    #[tokio::test]
    async fn tokens_are_reserved_and_settled_for_what_was_made() {
        let (limiter, _) = limiter(1.0);
        let acme = caller(LimitsEntry {
            tokens_per_minute: Some(6_000),
            output_tokens_per_minute: Some(3_000),
            ..LimitsEntry::default()
        });
        let now = Instant::now();
        let mut ticket = limiter.begin(&acme, now).await.unwrap();
        // 8,192 are allowed, and 1,024 reserved.
        ticket
            .reserve(1_000, [8_192, 10].into_iter(), now)
            .await
            .unwrap();
        assert_eq!(
            left(&limiter, &acme, PerMinute::Tokens),
            6_000 - 1_000 - 1_034
        );
        assert_eq!(
            left(&limiter, &acme, PerMinute::OutputTokens),
            3_000 - 1_034
        );
        ticket.made().add(34);
        drop(ticket);
        let near = |of, expected: u64| {
            let left = left(&limiter, &acme, of);
            assert!(
                (expected..expected + 200).contains(&left),
                "{left} for {expected}"
            );
        };
        near(PerMinute::Tokens, 6_000 - 1_034);
        near(PerMinute::OutputTokens, 3_000 - 34);
        // A request that made nothing costs nothing.
        let mut failed = limiter.begin(&acme, now).await.unwrap();
        failed
            .reserve(4_000, std::iter::once(16), now)
            .await
            .unwrap();
        drop(failed);
        near(PerMinute::Tokens, 6_000 - 1_034);
        // A longer output than was reserved is a debt, which holds the next request up before its body is read.
        let mut long = limiter.begin(&acme, now).await.unwrap();
        long.reserve(10, std::iter::once(100_000), now)
            .await
            .unwrap();
        long.made().add(5_000);
        drop(long);
        let error = limiter.begin(&acme, now).await.err().unwrap();
        assert!(
            error.message.contains("tokens per minute"),
            "{}",
            error.message
        );
    }

    #[tokio::test]
    async fn a_share_of_the_limits_and_changed_limits_hold_at_once() {
        let (limiter, _) = limiter(0.5);
        let limited = |requests_per_minute| {
            caller(LimitsEntry {
                requests_per_minute: Some(requests_per_minute),
                ..LimitsEntry::default()
            })
        };
        let now = Instant::now();
        let begin = async |limit| limiter.begin(&limited(limit), now).await.map(drop);
        assert!(begin(4).await.is_ok() && begin(4).await.is_ok() && begin(4).await.is_err());
        // A larger limit takes over that all of it is used.
        assert!(begin(400).await.is_err());
        limiter.forget_idle(now);
        assert_eq!(limiter.shared.usages.lock().len(), 1);
        limiter.forget_idle(now + Duration::from_secs(61));
        assert!(limiter.shared.usages.lock().is_empty());
        assert!(begin(400).await.is_ok());
    }

    #[tokio::test]
    async fn a_share_below_one_request_per_minute_still_lets_requests_through() {
        let (limiter, _) = limiter(0.5);
        let acme = caller(LimitsEntry {
            requests_per_minute: Some(1),
            ..LimitsEntry::default()
        });
        let now = Instant::now();
        let mut ticket = limiter.begin(&acme, now).await.unwrap();
        ticket.reserve(10, std::iter::once(10), now).await.unwrap();
        drop(ticket);
        assert!(limiter.begin(&acme, now).await.is_err());
        assert!(
            limiter
                .begin(&acme, now + Duration::from_secs(121))
                .await
                .is_ok()
        );
    }

    #[tokio::test]
    async fn requests_at_once_are_limited_until_they_end() {
        let (limiter, _) = limiter(1.0);
        let acme = caller(LimitsEntry {
            requests_in_flight_max: Some(2),
            ..LimitsEntry::default()
        });
        let now = Instant::now();
        let first = limiter.begin(&acme, now).await.unwrap();
        let second = limiter.begin(&acme, now).await.unwrap();
        assert!(limiter.begin(&acme, now).await.is_err());
        drop(first);
        let third = limiter.begin(&acme, now).await.unwrap();
        assert!(limiter.begin(&acme, now).await.is_err());
        drop((second, third));
        assert!(limiter.begin(&acme, now).await.is_ok());
    }

    #[tokio::test]
    async fn a_caller_without_limits_takes_no_lock_and_nothing_is_stored() {
        let metrics = Metrics::new().unwrap();
        let unreachable = LimitsRedisConfig {
            url: "redis://127.0.0.1:1".into(),
            ..LimitsRedisConfig::default()
        };
        let redis = RedisCounts::start(unreachable, &metrics).unwrap();
        let families = Arc::new(AccountMetrics::new(&metrics).unwrap());
        let limiter = Limiter::with_redis(1.0, Some(redis), families);
        let free = caller(LimitsEntry::default());
        let now = Instant::now();
        {
            // A second lock of this thread would never be granted.
            let usages = limiter.shared.usages.lock();
            let begun = limiter.begin(&free, now).now_or_never();
            let mut ticket = begun.unwrap().unwrap();
            let reserved = ticket.reserve(1_000, std::iter::once(10), now);
            reserved.now_or_never().unwrap().unwrap();
            ticket.made().add(10);
            assert_eq!(limiter.headers(&free, HeaderWords::OpenAi).next(), None);
            drop(ticket);
            assert!(usages.is_empty());
        }
        let text = String::from_utf8(metrics.render()).unwrap();
        assert!(
            text.contains("refrain_gateway_limits_redis_fallbacks_total 0"),
            "{text}"
        );
        // A caller with limits does ask Redis.
        let acme = caller(LimitsEntry {
            requests_per_minute: Some(2),
            ..LimitsEntry::default()
        });
        assert!(limiter.begin(&acme, now).await.is_ok());
        assert_eq!(limiter.shared.usages.lock().len(), 1);
        let text = String::from_utf8(metrics.render()).unwrap();
        assert!(
            text.contains("refrain_gateway_limits_redis_fallbacks_total 1"),
            "{text}"
        );
    }
}
