//! The use of a tenant or key under its limits. Pure: the time is a parameter.

use std::fmt;
use std::time::{Duration, Instant};

use super::bucket::Bucket;
use super::directory::Caller;
use super::file::LimitsEntry;

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
pub(super) enum Subject {
    Tenant(String),
    Key(String),
}

/// The use of a tenant or key.
#[derive(Default)]
pub(super) struct Usage {
    pub(super) in_flight: u64,
    /// Those of [`PER_MINUTE`]; `None` where there is no limit.
    pub(super) buckets: [Option<Bucket>; PER_MINUTE.len()],
}

/// Why a request has to wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Refusal {
    /// So many requests are in flight, and no more may be.
    InFlight(u64),
    /// The limit of [`PER_MINUTE`] at `at` is spent, and there is room after `wait`.
    PerMinute { at: usize, wait: Duration },
}

impl PerMinute {
    pub(super) fn limit(self, of: &LimitsEntry) -> Option<u64> {
        match self {
            PerMinute::Requests => of.requests_per_minute,
            PerMinute::Tokens => of.tokens_per_minute,
            PerMinute::InputTokens => of.input_tokens_per_minute,
            PerMinute::OutputTokens => of.output_tokens_per_minute,
        }
    }

    /// The amount that a request counts here when it begins.
    pub(super) fn of_one_request(self) -> f64 {
        f64::from(u8::from(self == PerMinute::Requests))
    }

    /// The amount of a request's tokens that counts here.
    pub(super) fn of_tokens(self, input: f64, output: f64) -> f64 {
        match self {
            PerMinute::Requests => 0.0,
            PerMinute::Tokens => input + output,
            PerMinute::InputTokens => input,
            PerMinute::OutputTokens => output,
        }
    }
}

impl Subject {
    /// Its name in errors.
    pub(super) fn name(&self) -> String {
        name_in_errors(match self {
            Subject::Tenant(_) => None,
            Subject::Key(id) => Some(id),
        })
    }
}

/// The name of a tenant, or of its key with this id, in errors.
pub(super) fn name_in_errors(key: Option<&str>) -> String {
    key.map_or_else(
        || "your organization".to_owned(),
        |id| format!("the API key {id}"),
    )
}

/// Whether there is a limit that is counted here. Budgets per day and month are not.
fn has_any(limits: &LimitsEntry) -> bool {
    let mut per_minute = PER_MINUTE.iter();
    limits.requests_in_flight_max.is_some() || per_minute.any(|(of, _)| of.limit(limits).is_some())
}

/// The tenant and the key of a caller, as far as they have limits.
pub(super) fn subjects(caller: &Caller) -> Vec<(Subject, LimitsEntry)> {
    let (tenant, limits) = (&caller.tenant, caller.tenant_limits);
    let of_tenant = has_any(&limits).then(|| (Subject::Tenant(tenant.to_string()), limits));
    let key = caller.key.as_ref().filter(|key| has_any(&key.limits));
    let of_key = key.map(|key| (Subject::Key(key.id.clone()), key.limits));
    of_tenant.into_iter().chain(of_key).collect()
}

/// Output tokens that are reserved for each choice, or its limit if that is less. Clients often allow far more than
/// they get. A longer output is a debt, and the tenant waits until it is paid.
pub(super) const OUTPUT_RESERVED_MAX: u64 = 1_024;

/// The tokens that a request reserves for its prompts and its outputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserved {
    pub(super) input: u64,
    pub(super) output: u64,
}

impl Reserved {
    /// All of them.
    pub(super) fn tokens(self) -> u64 {
        self.input.saturating_add(self.output)
    }
}

impl fmt::Display for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "it reserves {}, of which {} are its prompt and {} its output; a smaller max_tokens reserves less, and \
             without one it is {OUTPUT_RESERVED_MAX} for each choice",
            self.tokens(),
            self.input,
            self.output
        )
    }
}

impl Usage {
    /// Takes the present limits over, of which `share` is granted.
    pub(super) fn follow(&mut self, limits: &LimitsEntry, share: f64, now: Instant) {
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

    /// Takes over what is left of the whole limits, as somebody else counts them.
    pub(super) fn copy(
        &mut self,
        limits: &LimitsEntry,
        left: &[Option<f64>; PER_MINUTE.len()],
        now: Instant,
    ) {
        for ((bucket, (of, _)), left) in self.buckets.iter_mut().zip(PER_MINUTE).zip(left) {
            let limit = of.limit(limits).zip(*left);
            *bucket = limit.map(|(limit, left)| Bucket::at_level(limit as f64, left, now));
        }
    }

    /// Why a request may not begin, if it may not.
    pub(super) fn begin_refusal(&mut self, limits: &LimitsEntry, now: Instant) -> Option<Refusal> {
        let most = limits.requests_in_flight_max;
        if most.is_some_and(|most| self.in_flight >= most) {
            return Some(Refusal::InFlight(self.in_flight));
        }
        // The smallest amount of tokens shows whether there is a debt.
        self.refusal(|of| of.of_one_request().max(f64::EPSILON), now)
    }

    /// The first limit per minute that `amount` is past.
    pub(super) fn refusal(
        &mut self,
        amount: impl Fn(PerMinute) -> f64,
        now: Instant,
    ) -> Option<Refusal> {
        let mut buckets = self.buckets.iter_mut().zip(PER_MINUTE).enumerate();
        buckets.find_map(|(at, (bucket, (of, _)))| {
            let amount = Some(amount(of)).filter(|amount| *amount > 0.0)?;
            let wait = bucket.as_mut()?.wait(amount, now);
            (!wait.is_zero()).then_some(Refusal::PerMinute { at, wait })
        })
    }

    pub(super) fn take(&mut self, amount: impl Fn(PerMinute) -> f64, now: Instant) {
        for (bucket, (of, _)) in self.buckets.iter_mut().zip(PER_MINUTE) {
            if let Some(bucket) = bucket {
                bucket.take(amount(of), now);
            }
        }
    }

    /// Whether nothing is in flight, and all limits are full again.
    pub(super) fn is_idle(&mut self, now: Instant) -> bool {
        let mut buckets = self.buckets.iter_mut().flatten();
        self.in_flight == 0 && buckets.all(|bucket| bucket.until_full(now).is_zero())
    }
}
