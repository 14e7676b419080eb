//! Counts what tenants and keys use, and refuses what is past their limits.
//!
//! A request counts when its head arrives. Its tokens are reserved once its prompt is known, and settled when it
//! ends, also when its client leaves: prompt tokens as they are, output tokens as far as they were made. A request
//! that made nothing gives its tokens back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

use super::bucket::Bucket;
use super::budget::{BudgetTicket, Budgets};
use super::directory::Caller;
use super::file::LimitsEntry;
use crate::metrics::GatewayMetrics;

/// Output tokens that are reserved for each choice, or its limit if that is less. Clients often allow far more than
/// they get. A longer output is a debt, and the tenant waits until it is paid.
const OUTPUT_RESERVED_MAX: u64 = 1_024;

/// Time after which a request may be tried again that was one too many at once.
const IN_FLIGHT_RETRY: Duration = Duration::from_secs(1);

/// The limits per minute, in the order of [`Usage::buckets`].
pub(super) const PER_MINUTE: [(PerMinute, &str); 4] = [
    (PerMinute::Requests, "requests_per_minute"),
    (PerMinute::Tokens, "tokens_per_minute"),
    (PerMinute::InputTokens, "input_tokens_per_minute"),
    (PerMinute::OutputTokens, "output_tokens_per_minute"),
];

/// The amounts that are limited per minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PerMinute {
    Requests,
    Tokens,
    InputTokens,
    OutputTokens,
}

/// A tenant, or a key by its id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Tenant(String),
    Key(String),
}

/// The use of a tenant or key.
#[derive(Default)]
struct Usage {
    in_flight: u64,
    /// Those of [`PER_MINUTE`]; `None` where there is no limit.
    buckets: [Option<Bucket>; PER_MINUTE.len()],
}

/// The limits and their use. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Limiter {
    shared: Arc<Shared>,
}

struct Shared {
    /// Only tenants and keys with limits are here. The file of tenants bounds their number.
    usages: Mutex<HashMap<Subject, Usage>>,
    /// The share of each limit per minute that this gateway grants.
    share: f64,
    budgets: Arc<Budgets>,
    metrics: Arc<GatewayMetrics>,
}

/// A limit per minute as a caller may see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LimitState {
    pub(super) limit: u64,
    pub(super) left: u64,
    pub(super) until_full: Duration,
}

/// The part of a request in the limits of its caller. It settles when it is dropped.
pub(crate) struct QuotaTicket {
    limiter: Limiter,
    /// The subjects with limits.
    subjects: Vec<(Subject, LimitsEntry)>,
    reserved: Option<Reserved>,
    made: Arc<Made>,
    budget: Arc<BudgetTicket>,
}

/// The output of a request so far.
#[derive(Default)]
pub(crate) struct Made {
    /// Output tokens that count. Tokens of a prompt that is scored do not.
    pub(super) output: AtomicU64,
    has_emitted: AtomicBool,
}

impl Made {
    /// Counts output tokens of a step, which may have been scored ones only.
    pub(crate) fn add(&self, output: u64) {
        self.output.fetch_add(output, Ordering::Relaxed);
        self.has_emitted.store(true, Ordering::Relaxed);
    }

    /// Whether there was a step.
    pub(super) fn has_emitted(&self) -> bool {
        self.has_emitted.load(Ordering::Relaxed)
    }
}

#[derive(Clone, Copy)]
struct Reserved {
    input: u64,
    output: u64,
}

impl PerMinute {
    fn limit(self, of: &LimitsEntry) -> Option<u64> {
        match self {
            PerMinute::Requests => of.requests_per_minute,
            PerMinute::Tokens => of.tokens_per_minute,
            PerMinute::InputTokens => of.input_tokens_per_minute,
            PerMinute::OutputTokens => of.output_tokens_per_minute,
        }
    }

    /// The amount of a request's tokens that counts here.
    fn of_tokens(self, input: f64, output: f64) -> f64 {
        match self {
            PerMinute::Requests => 0.0,
            PerMinute::Tokens => input + output,
            PerMinute::InputTokens => input,
            PerMinute::OutputTokens => output,
        }
    }
}

impl Usage {
    /// Takes the present limits over.
    fn follow(&mut self, limits: &LimitsEntry, share: f64, now: Instant) {
        for (bucket, (of, _)) in self.buckets.iter_mut().zip(PER_MINUTE) {
            let per_minute = of.limit(limits).map(|limit| limit as f64 * share);
            match (&mut *bucket, per_minute) {
                (_, None) => *bucket = None,
                (None, Some(per_minute)) => *bucket = Some(Bucket::new(per_minute, now)),
                (Some(bucket), Some(per_minute)) if bucket.per_minute() != per_minute => {
                    bucket.resize(per_minute, now);
                }
                (Some(_), Some(_)) => {}
            }
        }
    }

    /// The first limit per minute that `amount` is past, and how long it takes until there is room.
    fn refusal(
        &mut self,
        amount: impl Fn(PerMinute) -> f64,
        now: Instant,
    ) -> Option<(usize, Duration)> {
        let mut buckets = self.buckets.iter_mut().zip(PER_MINUTE).enumerate();
        buckets.find_map(|(at, (bucket, (of, _)))| {
            let amount = Some(amount(of)).filter(|amount| *amount > 0.0)?;
            let wait = bucket.as_mut()?.wait(amount, now);
            (!wait.is_zero()).then_some((at, wait))
        })
    }

    fn take(&mut self, amount: impl Fn(PerMinute) -> f64, now: Instant) {
        for (bucket, (of, _)) in self.buckets.iter_mut().zip(PER_MINUTE) {
            if let Some(bucket) = bucket {
                bucket.take(amount(of), now);
            }
        }
    }
}

fn subjects(caller: &Caller) -> Vec<(Subject, LimitsEntry)> {
    let of_tenant = (Subject::Tenant(caller.tenant.clone()), caller.tenant_limits);
    let key = caller.key.as_ref();
    let of_key = key.map(|key| (Subject::Key(key.id.clone()), key.limits));
    let all = std::iter::once(of_tenant).chain(of_key);
    all.filter(|(_, limits)| !limits.is_empty()).collect()
}

impl Limiter {
    /// Creates limits of which nothing is used. This gateway grants `share` of each limit per minute.
    pub(crate) fn new(share: f64, metrics: Arc<GatewayMetrics>) -> Self {
        Limiter {
            shared: Arc::new(Shared {
                usages: Mutex::default(),
                share,
                budgets: Arc::new(Budgets::new(metrics.clone())),
                metrics,
            }),
        }
    }

    /// The budgets per day and month.
    pub(crate) fn budgets(&self) -> &Arc<Budgets> {
        &self.shared.budgets
    }

    fn usages(&self) -> MutexGuard<'_, HashMap<Subject, Usage>> {
        let usages = self.shared.usages.lock();
        usages.unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request whose head has arrived.
    ///
    /// # Errors
    /// `Overloaded` past a limit on requests, while tokens of earlier ones are a debt, or when a budget is spent.
    pub(crate) fn begin(&self, caller: &Caller, now: Instant) -> Result<QuotaTicket, ApiError> {
        let budget = self.shared.budgets.begin(caller)?;
        let subjects = subjects(caller);
        let mut usages = self.usages();
        // A request counts as one, and the smallest amount of tokens shows whether there is a debt.
        let least = |of| match of {
            PerMinute::Requests => 1.0,
            _ => f64::EPSILON,
        };
        for (subject, limits) in &subjects {
            let usage = usages.entry(subject.clone()).or_default();
            usage.follow(limits, self.shared.share, now);
            let most = limits.requests_in_flight_max;
            if most.is_some_and(|most| usage.in_flight >= most) {
                let message = format!(
                    "{} requests of {} are in flight, which is the limit; wait for some to end",
                    usage.in_flight,
                    subject.name(),
                );
                let name = "requests_in_flight_max";
                return Err(self.refused(name, message, IN_FLIGHT_RETRY));
            }
            if let Some((at, wait)) = usage.refusal(least, now) {
                return Err(self.refused_per_minute(at, subject, limits, wait));
            }
        }
        for (subject, _) in &subjects {
            let usage = usages.entry(subject.clone()).or_default();
            usage.in_flight += 1;
            let one = |of| f64::from(u8::from(of == PerMinute::Requests));
            usage.take(one, now);
        }
        drop(usages);
        Ok(QuotaTicket {
            limiter: self.clone(),
            subjects,
            reserved: None,
            made: Arc::default(),
            budget: Arc::new(budget),
        })
    }

    fn refused_per_minute(
        &self,
        at: usize,
        subject: &Subject,
        limits: &LimitsEntry,
        wait: Duration,
    ) -> ApiError {
        let (of, name) = PER_MINUTE[at];
        let limit = of.limit(limits).unwrap_or(0);
        let message = format!(
            "{} has reached its limit of {limit} {} per minute; try again in {:.1} s",
            subject.name(),
            name.trim_end_matches("_per_minute").replace('_', " "),
            wait.as_secs_f64(),
        );
        self.refused(name, message, wait)
    }

    fn refused(&self, limit: &str, message: String, wait: Duration) -> ApiError {
        self.shared.metrics.rejected(limit);
        let wait_ms = wait.as_millis().max(1) as u64;
        ApiError::new(ErrorKind::Overloaded, message)
            .with_code(code::RATE_LIMIT_EXCEEDED)
            .with_retry_after_ms(wait_ms)
    }

    /// The state of a limit of a caller: of the tenant's and the key's the one with less left.
    pub(super) fn state(&self, caller: &Caller, of: PerMinute, now: Instant) -> Option<LimitState> {
        let at = PER_MINUTE.iter().position(|(one, _)| *one == of)?;
        let mut usages = self.usages();
        let states = subjects(caller)
            .into_iter()
            .filter_map(|(subject, limits)| {
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
        self.usages().retain(|_, usage| {
            let mut buckets = usage.buckets.iter_mut().flatten();
            usage.in_flight > 0 || buckets.any(|bucket| !bucket.until_full(now).is_zero())
        });
    }
}

impl Subject {
    fn name(&self) -> String {
        match self {
            Subject::Tenant(_) => "your organization".to_owned(),
            Subject::Key(id) => format!("the API key {id}"),
        }
    }
}

impl QuotaTicket {
    /// Reserves the tokens of a request whose prompts have `input` tokens, and whose choices may have `output_max`
    /// each. Returns the tokens of both that were reserved.
    ///
    /// # Errors
    /// `Overloaded` past a limit on tokens, or what is left of a budget.
    pub(crate) fn reserve(
        &mut self,
        input: u64,
        output_max: impl Iterator<Item = u64>,
        now: Instant,
    ) -> Result<(u64, u64), ApiError> {
        let output: u64 = output_max.map(|most| most.min(OUTPUT_RESERVED_MAX)).sum();
        self.budget.reserve(input.saturating_add(output))?;
        let amount = |of: PerMinute| of.of_tokens(input as f64, output as f64);
        let mut usages = self.limiter.usages();
        for (subject, limits) in &self.subjects {
            let usage = usages.entry(subject.clone()).or_default();
            usage.follow(limits, self.limiter.shared.share, now);
            if let Some((at, wait)) = usage.refusal(amount, now) {
                let refused = self.limiter.refused_per_minute(at, subject, limits, wait);
                return Err(refused);
            }
        }
        for (subject, _) in &self.subjects {
            if let Some(usage) = usages.get_mut(subject) {
                usage.take(amount, now);
            }
        }
        drop(usages);
        self.reserved = Some(Reserved { input, output });
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

    fn settle(&self, now: Instant) {
        let made = self.made.output.load(Ordering::Relaxed);
        let has_emitted = self.made.has_emitted();
        let mut usages = self.limiter.usages();
        for (subject, _) in &self.subjects {
            let Some(usage) = usages.get_mut(subject) else {
                continue;
            };
            usage.in_flight = usage.in_flight.saturating_sub(1);
            if let Some(Reserved { input, output }) = self.reserved {
                let kept_input = if has_emitted { 0.0 } else { -(input as f64) };
                let more_output = made as f64 - output as f64;
                usage.take(|of| of.of_tokens(kept_input, more_output), now);
            }
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
    use crate::tenants::policy::TenantPolicy;
    use refrain_service_kit::telemetry::Metrics;

    fn limiter(share: f64) -> (Limiter, Arc<GatewayMetrics>) {
        let metrics = Arc::new(GatewayMetrics::new(&Metrics::new().unwrap()).unwrap());
        (Limiter::new(share, metrics.clone()), metrics)
    }

    fn caller(limits: LimitsEntry) -> Caller {
        Caller {
            tenant: "acme".into(),
            tenant_limits: limits,
            policy: TenantPolicy::default(),
            key: None,
            fixed_key: None,
        }
    }

    fn left(limiter: &Limiter, caller: &Caller, of: PerMinute) -> u64 {
        limiter.state(caller, of, Instant::now()).unwrap().left
    }

    #[test]
    fn requests_past_a_limit_are_told_when_to_come_back() {
        let (limiter, metrics) = limiter(1.0);
        let acme = caller(LimitsEntry {
            requests_per_minute: Some(2),
            ..LimitsEntry::default()
        });
        let now = Instant::now();
        drop(limiter.begin(&acme, now).unwrap());
        drop(limiter.begin(&acme, now).unwrap());
        let error = limiter.begin(&acme, now).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Overloaded);
        assert_eq!(error.code.as_deref(), Some("rate_limit_exceeded"));
        let wait_ms = error.retry_after_ms.unwrap();
        assert!((29_000..=30_000).contains(&wait_ms), "{wait_ms}");
        assert!(
            error.message.contains("2 requests per minute"),
            "{}",
            error.message
        );
        let rejections = &metrics.families.rejections;
        let counted = rejections.with_label_values(&["requests_per_minute"]);
        assert_eq!(counted.get(), 1);
        // Somebody else is not concerned, and after half a minute there is room for one.
        let other = Caller {
            tenant: "bolt".into(),
            ..acme.clone()
        };
        assert!(limiter.begin(&other, now).is_ok());
        let later = now + Duration::from_millis(wait_ms + 1);
        assert!(limiter.begin(&acme, later).is_ok());
        assert!(limiter.begin(&acme, later).is_err());
    }

    #[test]
    fn tokens_are_reserved_and_settled_for_what_was_made() {
        let (limiter, _) = limiter(1.0);
        let acme = caller(LimitsEntry {
            tokens_per_minute: Some(6_000),
            output_tokens_per_minute: Some(3_000),
            ..LimitsEntry::default()
        });
        let now = Instant::now();
        let mut ticket = limiter.begin(&acme, now).unwrap();
        // 8,192 are allowed, and 1,024 reserved.
        ticket.reserve(1_000, [8_192, 10].into_iter(), now).unwrap();
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
        let mut failed = limiter.begin(&acme, now).unwrap();
        failed.reserve(4_000, std::iter::once(16), now).unwrap();
        drop(failed);
        near(PerMinute::Tokens, 6_000 - 1_034);
        // A longer output than was reserved is a debt, which holds the next request up before its body is read.
        let mut long = limiter.begin(&acme, now).unwrap();
        long.reserve(10, std::iter::once(100_000), now).unwrap();
        long.made().add(5_000);
        drop(long);
        let error = limiter.begin(&acme, now).err().unwrap();
        assert!(
            error.message.contains("tokens per minute"),
            "{}",
            error.message
        );
    }

    #[test]
    fn a_share_of_the_limits_and_changed_limits_hold_at_once() {
        let (limiter, _) = limiter(0.5);
        let limited = |requests_per_minute| {
            caller(LimitsEntry {
                requests_per_minute: Some(requests_per_minute),
                ..LimitsEntry::default()
            })
        };
        let now = Instant::now();
        let begin = |limit| limiter.begin(&limited(limit), now).map(drop);
        assert!(begin(4).is_ok() && begin(4).is_ok() && begin(4).is_err());
        // A larger limit takes over that all of it is used.
        assert!(begin(400).is_err());
        limiter.forget_idle(now);
        assert_eq!(limiter.usages().len(), 1);
        limiter.forget_idle(now + Duration::from_secs(61));
        assert!(limiter.usages().is_empty());
        assert!(begin(400).is_ok());
    }

    #[test]
    fn a_share_below_one_request_per_minute_still_lets_requests_through() {
        let (limiter, _) = limiter(0.5);
        let acme = caller(LimitsEntry {
            requests_per_minute: Some(1),
            ..LimitsEntry::default()
        });
        let now = Instant::now();
        let mut ticket = limiter.begin(&acme, now).unwrap();
        ticket.reserve(10, std::iter::once(10), now).unwrap();
        drop(ticket);
        assert!(limiter.begin(&acme, now).is_err());
        assert!(limiter.begin(&acme, now + Duration::from_secs(121)).is_ok());
    }

    #[test]
    fn requests_at_once_are_limited_until_they_end() {
        let (limiter, _) = limiter(1.0);
        let acme = caller(LimitsEntry {
            requests_in_flight_max: Some(2),
            ..LimitsEntry::default()
        });
        let now = Instant::now();
        let first = limiter.begin(&acme, now).unwrap();
        let second = limiter.begin(&acme, now).unwrap();
        assert!(limiter.begin(&acme, now).is_err());
        drop(first);
        let third = limiter.begin(&acme, now).unwrap();
        assert!(limiter.begin(&acme, now).is_err());
        drop((second, third));
        assert!(limiter.begin(&acme, now).is_ok());
    }
}
