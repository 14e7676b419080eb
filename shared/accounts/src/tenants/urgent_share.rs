//! The share of a tenant's tokens that may be urgent: a request is urgent with `priority: high` or a `tpot_ms`.
//!
//! Urgent requests take from others, so nobody can be urgent all day. Each tenant has an account of tokens. Every
//! request pays a percentage of its tokens in, and an urgent one takes all of its tokens out. Past that a request is
//! ordinary, and nothing else happens to it. So of T tokens at most the percentage of T is urgent, and what a full
//! account holds. The account does not fill by itself: who idles saves nothing up beyond a full one.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lru::LruCache;
use parking_lot::Mutex;

use super::limiter::Made;
use super::policy::TenantPolicy;

/// Tokens of a full account, from which a tenant begins.
const ACCOUNT_TOKENS_MAX: f64 = 65_536.0;

/// Most accounts that are kept. The least recently used one goes first, and its tenant begins anew.
const ACCOUNTS_MAX: NonZeroUsize = NonZeroUsize::new(16_384).unwrap();

type Accounts = LruCache<String, f64>;

/// The accounts of all tenants. Cheap to clone.
#[derive(Clone)]
pub(crate) struct UrgentShares {
    /// Tokens that are left. A full account is not here, so only tenants that were urgent are.
    accounts: Arc<Mutex<Accounts>>,
}

/// The tokens of a request in the account of its tenant. They are settled when it is dropped.
pub(crate) struct UrgentTicket {
    shares: UrgentShares,
    tenant: String,
    percent_max: u8,
    input_tokens: f64,
    /// Tokens that were taken out at the start, if the request is urgent.
    reserved_tokens: Option<f64>,
    made: Arc<Made>,
}

/// The balance after a request of so many tokens has ended.
fn settled(left: f64, percent_max: u8, tokens: f64, reserved_tokens: Option<f64>) -> f64 {
    let earned = tokens * f64::from(percent_max) / 100.0;
    let spent = reserved_tokens.map_or(0.0, |reserved| tokens - reserved);
    (left + earned - spent).min(ACCOUNT_TOKENS_MAX)
}

impl Default for UrgentShares {
    fn default() -> Self {
        UrgentShares {
            accounts: Arc::new(Mutex::new(LruCache::new(ACCOUNTS_MAX))),
        }
    }
}

impl UrgentShares {
    /// Begins a request with `input_tokens`, of which up to `output_tokens` are expected. It may be urgent if it
    /// `asks` and something is left.
    pub(crate) fn begin(
        &self,
        tenant: &str,
        policy: &TenantPolicy,
        asks: bool,
        (input_tokens, output_tokens): (u64, u64),
        made: Arc<Made>,
    ) -> UrgentTicket {
        let expected = (input_tokens + output_tokens) as f64;
        let mut accounts = self.accounts.lock();
        let left = accounts.get(tenant).copied().unwrap_or(ACCOUNT_TOKENS_MAX);
        let is_urgent = asks && policy.urgent_percent_max > 0 && left > 0.0;
        if is_urgent {
            accounts.put(tenant.to_owned(), left - expected);
        }
        UrgentTicket {
            shares: self.clone(),
            tenant: tenant.to_owned(),
            percent_max: policy.urgent_percent_max,
            input_tokens: input_tokens as f64,
            reserved_tokens: is_urgent.then_some(expected),
            made,
        }
    }
}

impl UrgentTicket {
    /// Whether the request may be urgent.
    pub(crate) fn is_urgent(&self) -> bool {
        self.reserved_tokens.is_some()
    }
}

impl Drop for UrgentTicket {
    fn drop(&mut self) {
        let tokens = match self.made.has_emitted() {
            true => self.input_tokens + self.made.output.load(Ordering::Relaxed) as f64,
            false => 0.0,
        };
        let mut accounts = self.shares.accounts.lock();
        let Some(left) = accounts.get_mut(&self.tenant) else {
            return;
        };
        *left = settled(*left, self.percent_max, tokens, self.reserved_tokens);
        if *left >= ACCOUNT_TOKENS_MAX {
            accounts.pop(&self.tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(urgent_percent_max: u8) -> TenantPolicy {
        TenantPolicy {
            urgent_percent_max,
            ..TenantPolicy::default()
        }
    }

    /// The tokens of urgent and of all requests, of which each asks to be urgent.
    fn run(shares: &UrgentShares, percent: u8, requests: u64, output_tokens: u64) -> [u64; 2] {
        let mut tokens = [0; 2];
        for _ in 0..requests {
            let made = Arc::new(Made::default());
            let policy = policy(percent);
            // Clients often allow more than they get.
            let expected = (100, 4 * output_tokens);
            let ticket = shares.begin("acme", &policy, true, expected, made.clone());
            made.add(output_tokens);
            tokens[0] += u64::from(ticket.is_urgent()) * (100 + output_tokens);
            tokens[1] += 100 + output_tokens;
        }
        tokens
    }

    #[test]
    fn a_tenant_that_is_always_urgent_is_so_for_its_share_and_one_account() {
        for (percent, output_tokens) in [(25, 400), (25, 4), (10, 1_900)] {
            let shares = UrgentShares::default();
            let [urgent, all] = run(&shares, percent, 20_000, output_tokens);
            let share = all * u64::from(percent) / 100;
            let most = share + ACCOUNT_TOKENS_MAX as u64 + 100 + 4 * output_tokens;
            assert!((share..=most).contains(&urgent), "{urgent} of {all}");
        }
        assert_eq!(run(&UrgentShares::default(), 0, 10, 50)[0], 0);
        let [urgent, all] = run(&UrgentShares::default(), 100, 5_000, 50);
        assert_eq!(urgent, all);
    }

    #[test]
    fn many_urgent_requests_at_once_share_one_account() {
        let shares = UrgentShares::default();
        let begin = || shares.begin("acme", &policy(25), true, (1_000, 1_000), Arc::default());
        let tickets: Vec<UrgentTicket> = (0..100).map(|_| begin()).collect();
        let urgent = tickets.iter().filter(|ticket| ticket.is_urgent()).count();
        assert_eq!(
            urgent, 33,
            "65,536 tokens are 32 requests and a part of one"
        );
        // Requests that made nothing give all of it back, and a full account is not kept.
        drop(tickets);
        assert!(shares.accounts.lock().is_empty());
    }

    #[test]
    fn the_account_of_one_tenant_says_nothing_about_another() {
        let shares = UrgentShares::default();
        run(&shares, 25, 1_000, 1_000);
        let begin = |tenant| shares.begin(tenant, &policy(25), true, (1, 1), Arc::default());
        assert!(!begin("acme").is_urgent());
        assert!(begin("bolt").is_urgent());
    }
}
