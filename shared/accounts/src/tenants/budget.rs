//! Budgets of tokens per day and month of the calendar in UTC, for tenants and keys.
//!
//! A budget holds over all gateways: each adds what it has counted, what the others have told the draft store, and
//! what its running requests have reserved. The counts of this gateway are those of its usage journal, so they
//! survive a restart.
//!
//! Nobody with a budget is served before a replica of the store has told what others have counted for it: a
//! gateway that has just started, perhaps without its journal, would give spent tokens again. A replica that has lost
//! its disk does not know the counts of gateways that are gone, until the next replica tells them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use refrain_protocol::error::code;
use refrain_protocol::usage::{Period, PeriodTokens, Spender, SpentTokens, hour_of};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock::unix_s;
use tokio::sync::watch;
use tokio::time::Instant;

use super::directory::Caller;
use super::file::LimitsEntry;
use super::limit_usage::{Reserved, name_in_errors};
use crate::metrics::AccountMetrics;

/// How long a request waits until the store has told what others have counted for its budgets. The store is asked at
/// once, so it waits for one call. Connections bound the number of requests that wait.
const READING_WAIT: Duration = Duration::from_secs(5);

/// Time after which a request may be tried again that waited for too long.
const READING_RETRY_MS: u64 = 1_000;

/// The code of a request that waited for too long, and the limit that refused it.
pub const USAGE_UNKNOWN: &str = "usage_unknown";

/// The tokens that a tenant or key has spent.
#[derive(Debug, Default)]
struct Account {
    /// Tokens that this gateway has counted.
    own: PeriodTokens,
    /// Tokens that running requests have reserved, and not counted yet.
    reserved: u64,
    /// Tokens that other gateways have counted.
    others: HashMap<u128, PeriodTokens>,
    /// Whether it has a budget, so that others have to be asked.
    has_budget: bool,
    /// Whether the store has told once what others have counted.
    is_read: bool,
}

/// A budget that is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spent {
    name: &'static str,
    budget: u64,
    /// Tokens that were counted or reserved.
    tokens: u64,
}

/// All accounts. A plain state: the time is an argument.
#[derive(Debug, Default)]
struct Tally {
    accounts: HashMap<Arc<Spender>, Account>,
}

/// The budgets of a gateway.
pub(crate) struct Budgets {
    tally: Mutex<Tally>,
    /// Whether somebody asks the store. Otherwise budgets count from the start of the process.
    are_shared: AtomicBool,
    /// Changes when a request waits for a reading.
    wanted: watch::Sender<()>,
    /// The number of readings of the store.
    readings: watch::Sender<u64>,
    began: Instant,
    metrics: Arc<AccountMetrics>,
}

/// The part of a request in the budgets of its caller. Its reservation comes back when it is dropped.
pub(crate) struct BudgetTicket {
    budgets: Arc<Budgets>,
    spenders: Vec<(Arc<Spender>, LimitsEntry)>,
    /// Reserved tokens that were not counted yet. It changes under the lock of the tally only.
    reserved: AtomicU64,
}

impl Account {
    fn spent(&self, limits: &LimitsEntry, more: u64, hour: u32) -> Option<Spent> {
        let (day, month) = (Period::Day.number(hour), Period::Month.number(hour));
        let sum = |of: &dyn Fn(PeriodTokens) -> u64| {
            let others = self.others.values().map(|tokens| of(*tokens));
            let counted = others.fold(of(self.own), u64::saturating_add);
            counted.saturating_add(self.reserved)
        };
        let budgets = [
            (
                "tokens_per_day",
                limits.tokens_per_day,
                sum(&|tokens| tokens.of_day(day)),
            ),
            (
                "tokens_per_month",
                limits.tokens_per_month,
                sum(&|tokens| tokens.of_month(month)),
            ),
        ];
        budgets.into_iter().find_map(|(name, budget, tokens)| {
            let budget = budget?;
            // A request that has reserved nothing yet needs one token at least.
            let is_spent = tokens.saturating_add(more.max(1)) > budget;
            is_spent.then_some(Spent {
                name,
                budget,
                tokens,
            })
        })
    }
}

impl Tally {
    fn account(&mut self, spender: &Arc<Spender>) -> &mut Account {
        self.accounts.entry(spender.clone()).or_default()
    }

    /// Whether the store has told what others have counted for the budgets of these. It is asked about them from now
    /// on.
    fn are_read(&mut self, spenders: &[(Arc<Spender>, LimitsEntry)]) -> bool {
        let mut are_read = true;
        for (spender, _) in spenders.iter().filter(|(_, limits)| limits.has_budget()) {
            let account = self.account(spender);
            account.has_budget = true;
            are_read &= account.is_read;
        }
        are_read
    }

    /// The first budget that `more` tokens would exceed.
    fn refusal<'a>(
        &mut self,
        spenders: &'a [(Arc<Spender>, LimitsEntry)],
        more: u64,
        hour: u32,
    ) -> Option<(&'a Spender, Spent)> {
        spenders.iter().find_map(|(spender, limits)| {
            if !limits.has_budget() {
                return None;
            }
            let account = self.account(spender);
            Some((&**spender, account.spent(limits, more, hour)?))
        })
    }

    /// Forgets accounts of earlier months.
    fn forget_before(&mut self, month: u32) {
        self.accounts.retain(|_, account| {
            account.others.retain(|_, tokens| tokens.month() >= month);
            account.reserved > 0
                || account.has_budget
                || account.own.month() >= month
                || !account.others.is_empty()
        });
    }
}

impl Budgets {
    /// Budgets of which nothing is spent.
    pub(crate) fn new(metrics: Arc<AccountMetrics>) -> Self {
        Budgets {
            tally: Mutex::default(),
            are_shared: AtomicBool::new(false),
            wanted: watch::Sender::default(),
            readings: watch::Sender::default(),
            began: Instant::now(),
            metrics,
        }
    }

    /// Announces that the store will be asked what other gateways have counted.
    pub(crate) fn share(&self) {
        self.are_shared.store(true, Ordering::Relaxed);
    }

    /// Changes whenever the store should be asked at once.
    pub(crate) fn wanted(&self) -> watch::Receiver<()> {
        self.wanted.subscribe()
    }

    /// Whether tenants with budgets can be served. After `patience` the gateway counts as ready without: a store that
    /// is away must not keep out those who have none.
    ///
    /// # Errors
    /// The reason, if the store has told nothing yet.
    pub(crate) fn readiness(&self, patience: Duration) -> Result<(), String> {
        let is_read = *self.readings.borrow() > 0 || !self.are_shared.load(Ordering::Relaxed);
        match is_read || self.began.elapsed() >= patience {
            true => Ok(()),
            false => Err("the draft store has not told yet what is spent of budgets".to_owned()),
        }
    }

    /// Counts tokens of an earlier run of this gateway.
    pub(crate) fn restore(&self, tenant: &str, key: &str, hour: u32, tokens: u64) {
        let mut tally = self.tally.lock();
        for spender in spenders_of(tenant, key) {
            tally.account(&spender).own.add(hour, tokens);
        }
    }

    /// Counts tokens of an earlier run of which only the month is known.
    pub(crate) fn restore_month(&self, tenant: &str, key: &str, month: u32, tokens: u64) {
        let mut tally = self.tally.lock();
        for spender in spenders_of(tenant, key) {
            tally.account(&spender).own.add_to_month(month, tokens);
        }
    }

    /// Begins a request whose head has arrived. One with a budget waits until it is known what others have counted.
    ///
    /// # Errors
    /// `Overloaded` with the code `insufficient_quota` when a budget is spent, and `Unavailable` with the code
    /// [`USAGE_UNKNOWN`] while the store does not tell.
    pub(super) async fn begin(self: &Arc<Self>, caller: &Caller) -> Result<BudgetTicket, ApiError> {
        let of_tenant = Spender {
            tenant: caller.tenant.to_string(),
            key: None,
        };
        let of_key = caller.key.as_ref().map(|key| {
            let spender = Spender {
                tenant: caller.tenant.to_string(),
                key: Some(key.id.clone()),
            };
            (Arc::new(spender), key.limits)
        });
        let of_tenant = std::iter::once((Arc::new(of_tenant), caller.tenant_limits));
        let ticket = BudgetTicket {
            budgets: self.clone(),
            spenders: of_tenant.chain(of_key).collect(),
            reserved: AtomicU64::new(0),
        };
        // Most callers have no budget, and need not wait for the tally here.
        if !ticket.has_budget() {
            return Ok(ticket);
        }
        self.until_read(&ticket.spenders).await?;
        let hour = hour_of(unix_s());
        let refusal = self.tally.lock().refusal(&ticket.spenders, 0, hour);
        match refusal {
            Some((spender, spent)) => Err(self.refused(spender, spent, None)),
            None => Ok(ticket),
        }
    }

    /// Waits until the store has told what others have counted for these.
    async fn until_read(&self, spenders: &[(Arc<Spender>, LimitsEntry)]) -> Result<(), ApiError> {
        let mut readings = self.readings.subscribe();
        let are_read = || self.tally.lock().are_read(spenders);
        if are_read() || !self.are_shared.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.wanted.send_replace(());
        let read = async { while !are_read() && readings.changed().await.is_ok() {} };
        let read = tokio::time::timeout(READING_WAIT, read).await;
        read.map_err(|_| {
            if let Some((spender, _)) = spenders.first() {
                self.metrics.rejected(&spender.tenant, USAGE_UNKNOWN);
            }
            let message = "this gateway does not know yet what is spent of your budget, since the draft store does \
                           not answer; try again";
            ApiError::new(ErrorKind::Unavailable, message)
                .with_code(USAGE_UNKNOWN)
                .with_retry_after_ms(READING_RETRY_MS)
        })
    }

    /// The error of a request, with what it wants to reserve if that is known.
    fn refused(&self, spender: &Spender, spent: Spent, wanted: Option<Reserved>) -> ApiError {
        self.metrics.rejected(&spender.tenant, spent.name);
        let name = name_in_errors(spender.key.as_deref());
        let Spent { budget, tokens, .. } = spent;
        let (period, next) = match spent.name {
            "tokens_per_day" => ("day", "the day ends at midnight UTC"),
            _ => ("month", "the month ends at midnight UTC"),
        };
        let left = budget.saturating_sub(tokens);
        let wanted = wanted.map_or_else(String::new, |wanted| {
            format!(", which is too few for this request: {wanted}")
        });
        let message = format!(
            "{name} may use {budget} tokens per {period}, and {left} are left{wanted}; {next}"
        );
        ApiError::new(ErrorKind::Overloaded, message).with_code(code::INSUFFICIENT_QUOTA)
    }

    /// Those with a budget, of whom other gateways are asked.
    pub(crate) fn spenders(&self) -> Vec<Spender> {
        let tally = self.tally.lock();
        let all = tally.accounts.iter();
        let with_budget = all.filter(|(_, account)| account.has_budget);
        with_budget
            .map(|(spender, _)| (**spender).clone())
            .collect()
    }

    /// Takes over what other gateways have counted in a day and a month.
    pub(crate) fn learn(
        &self,
        spenders: &[Spender],
        spent: &[Vec<SpentTokens>],
        (day, month): (u32, u32),
    ) {
        let mut tally = self.tally.lock();
        tally.forget_before(month);
        for (spender, spent) in spenders.iter().zip(spent) {
            let account = tally.account(&Arc::new(spender.clone()));
            account.is_read = true;
            for of in spent {
                let tokens = PeriodTokens::of((day, of.day_tokens), (month, of.month_tokens));
                let known = account.others.entry(of.gateway).or_default();
                *known = known.merge(tokens);
            }
        }
        drop(tally);
        self.readings.send_modify(|readings| *readings += 1);
    }
}

/// A tenant and its key, if the row has one.
fn spenders_of(tenant: &str, key: &str) -> impl Iterator<Item = Arc<Spender>> {
    let spender = |key: Option<&str>| {
        Arc::new(Spender {
            tenant: tenant.to_owned(),
            key: key.map(str::to_owned),
        })
    };
    let of_key = (!key.is_empty()).then(|| spender(Some(key)));
    std::iter::once(spender(None)).chain(of_key)
}

impl BudgetTicket {
    fn has_budget(&self) -> bool {
        self.spenders.iter().any(|(_, limits)| limits.has_budget())
    }

    /// Reserves the tokens of a request.
    ///
    /// # Errors
    /// `Overloaded` with the code `insufficient_quota` when they exceed what is left of a budget.
    pub(super) fn reserve(&self, wanted: Reserved) -> Result<(), ApiError> {
        let tokens = wanted.tokens();
        let mut tally = self.budgets.tally.lock();
        if let Some((spender, spent)) = tally.refusal(&self.spenders, tokens, hour_of(unix_s())) {
            drop(tally);
            return Err(self.budgets.refused(spender, spent, Some(wanted)));
        }
        for (spender, _) in &self.spenders {
            let account = tally.account(spender);
            account.reserved = account.reserved.saturating_add(tokens);
        }
        self.reserved.fetch_add(tokens, Ordering::Relaxed);
        Ok(())
    }

    /// Counts tokens that were used.
    pub(crate) fn spend(&self, tokens: u64) {
        if tokens == 0 {
            return;
        }
        let hour = hour_of(unix_s());
        let mut tally = self.budgets.tally.lock();
        let from_reserved = self.reserved.load(Ordering::Relaxed).min(tokens);
        self.reserved.fetch_sub(from_reserved, Ordering::Relaxed);
        for (spender, _) in &self.spenders {
            let account = tally.account(spender);
            account.own.add(hour, tokens);
            account.reserved = account.reserved.saturating_sub(from_reserved);
        }
    }
}

impl Drop for BudgetTicket {
    fn drop(&mut self) {
        let left = self.reserved.load(Ordering::Relaxed);
        if left == 0 {
            return;
        }
        let mut tally = self.budgets.tally.lock();
        for (spender, _) in &self.spenders {
            let account = tally.account(spender);
            account.reserved = account.reserved.saturating_sub(left);
        }
    }
}

#[cfg(test)]
mod tests {
    use refrain_service_kit::telemetry::Metrics;

    use super::*;

    fn budgets() -> Arc<Budgets> {
        let metrics = AccountMetrics::new(&Metrics::new().unwrap()).unwrap();
        Arc::new(Budgets::new(metrics.into()))
    }

    fn limits(tokens_per_day: Option<u64>, tokens_per_month: Option<u64>) -> LimitsEntry {
        LimitsEntry {
            tokens_per_day,
            tokens_per_month,
            ..LimitsEntry::default()
        }
    }

    fn caller(limits: LimitsEntry) -> Caller {
        Caller {
            tenant: "acme".parse().unwrap(),
            tenant_limits: limits,
            policy: Default::default(),
            fixed_key: None,
            key: None,
        }
    }

    fn acme() -> Spender {
        Spender {
            tenant: "acme".into(),
            key: None,
        }
    }

    /// Returns what a request without a prompt reserves.
    fn wants(output: u64) -> Reserved {
        Reserved { input: 0, output }
    }

    #[tokio::test]
    async fn a_spent_budget_is_an_error_that_no_client_retries() {
        let budgets = budgets();
        let caller = caller(limits(Some(100), None));
        let ticket = budgets.begin(&caller).await.unwrap();
        ticket.reserve(wants(60)).unwrap();
        ticket.spend(100);
        drop(ticket);
        let error = budgets.begin(&caller).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Overloaded);
        assert_eq!(error.code.as_deref(), Some("insufficient_quota"));
        assert_eq!(error.retry_after_ms, None);
        assert!(
            error.message.contains("100 tokens per day"),
            "{}",
            error.message
        );
        let rejected = budgets
            .metrics
            .rejections()
            .with_label_values(&["acme", "tokens_per_day"]);
        assert_eq!(rejected.get(), 1);
        // Others are not concerned, and neither is one without a budget.
        let without = Caller {
            tenant_limits: LimitsEntry::default(),
            policy: Default::default(),
            fixed_key: None,
            ..caller.clone()
        };
        assert!(budgets.begin(&without).await.is_ok());
        let other = Caller {
            tenant: "bolt".parse().unwrap(),
            ..caller
        };
        assert!(budgets.begin(&other).await.is_ok());
    }

    #[tokio::test]
    async fn what_running_requests_have_reserved_counts_until_they_end() {
        let budgets = budgets();
        let caller = caller(limits(None, Some(100)));
        let first = budgets.begin(&caller).await.unwrap();
        first.reserve(wants(60)).unwrap();
        let second = budgets.begin(&caller).await.unwrap();
        assert!(second.reserve(wants(41)).is_err());
        second.reserve(wants(40)).unwrap();
        assert!(budgets.begin(&caller).await.is_err());
        // Counted tokens take the place of reserved ones.
        first.spend(50);
        second.spend(45);
        assert_eq!(budgets.tally.lock().accounts[&acme()].reserved, 10);
        drop((first, second));
        assert_eq!(budgets.tally.lock().accounts[&acme()].reserved, 0);
        let third = budgets.begin(&caller).await.unwrap();
        assert!(third.reserve(wants(6)).is_err());
        assert!(third.reserve(wants(5)).is_ok());
    }

    #[tokio::test]
    async fn tokens_of_other_gateways_and_of_an_earlier_run_count() {
        let budgets = budgets();
        let caller = caller(limits(Some(100), Some(1_000)));
        let hour = hour_of(unix_s());
        let periods = (Period::Day.number(hour), Period::Month.number(hour));
        budgets.restore("acme", "k", hour, 30);
        budgets.restore_month("acme", "k", periods.1, 500);
        assert!(budgets.begin(&caller).await.is_ok());
        assert_eq!(budgets.spenders(), [acme()]);
        let spent = |gateway, day_tokens| SpentTokens {
            gateway,
            day_tokens,
            month_tokens: day_tokens,
        };
        // Two replicas answer, and one of them is behind.
        budgets.learn(&[acme()], &[vec![spent(1, 40), spent(2, 29)]], periods);
        budgets.learn(&[acme()], &[vec![spent(1, 20)]], periods);
        assert!(
            budgets
                .begin(&caller)
                .await
                .unwrap()
                .reserve(wants(1))
                .is_ok()
        );
        budgets.learn(&[acme()], &[vec![spent(1, 41)]], periods);
        assert!(budgets.begin(&caller).await.is_err());
        // A new day begins, and the month goes on.
        let mut tally = budgets.tally.lock();
        let tomorrow = hour - hour % 24 + 24;
        let is_same_month = Period::Month.number(tomorrow) == periods.1;
        let account = tally.account(&Arc::new(acme()));
        assert_eq!(account.spent(&limits(Some(1), None), 1, tomorrow), None);
        let month = account.spent(&limits(None, Some(600)), 1, tomorrow);
        assert_eq!(month.is_some(), is_same_month);
    }

    #[test]
    fn accounts_of_earlier_months_are_forgotten() {
        let mut tally = Tally::default();
        let hour = 24 * 365 * 50;
        tally.account(&Arc::new(acme())).own.add(hour, 5);
        let month = Period::Month.number(hour);
        tally.forget_before(month);
        assert_eq!(tally.accounts.len(), 1);
        tally.forget_before(month + 1);
        assert_eq!(tally.accounts.len(), 0);
    }

    #[tokio::test]
    async fn a_refusal_names_what_the_request_reserves_and_how_to_reserve_less() {
        let budgets = budgets();
        let ticket = budgets
            .begin(&caller(limits(Some(500), None)))
            .await
            .unwrap();
        let wanted = Reserved {
            input: 83,
            output: 1_024,
        };
        let message = ticket.reserve(wanted).unwrap_err().message;
        for part in ["500 are left", "1107", "83", "1024", "max_tokens"] {
            assert!(message.contains(part), "{part} is not in: {message}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_with_a_budget_is_served_before_the_first_reading() {
        let budgets = budgets();
        let (with, without) = (
            caller(limits(Some(100), None)),
            caller(LimitsEntry::default()),
        );
        let patience = Duration::from_secs(10);
        // A gateway that asks nobody counts from its start.
        assert!(budgets.begin(&with).await.is_ok() && budgets.readiness(patience).is_ok());
        budgets.share();
        let mut wanted = budgets.wanted();
        assert!(budgets.readiness(patience).is_err());
        assert!(budgets.begin(&without).await.is_ok());
        // The time is paused, so a wait is over once nothing else can happen.
        let error = budgets.begin(&with).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert_eq!(error.code.as_deref(), Some(USAGE_UNKNOWN));
        assert!(error.retry_after_ms.is_some());
        let rejected = budgets
            .metrics
            .rejections()
            .with_label_values(&["acme", USAGE_UNKNOWN]);
        assert_eq!(rejected.get(), 1);
        assert!(wanted.has_changed().unwrap(), "the store is asked at once");
        wanted.mark_unchanged();
        // Those who wait go on with what the store tells.
        let hour = hour_of(unix_s());
        let periods = (Period::Day.number(hour), Period::Month.number(hour));
        let spent = SpentTokens {
            gateway: 1,
            day_tokens: 100,
            month_tokens: 100,
        };
        let tell = async {
            wanted.changed().await.unwrap();
            budgets.learn(&budgets.spenders(), &[vec![spent]], periods);
        };
        let (refused, ()) = tokio::join!(budgets.begin(&with), tell);
        let code = refused.err().unwrap().code;
        assert_eq!(code.as_deref(), Some("insufficient_quota"));
        assert!(budgets.readiness(patience).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_stays_away_keeps_nobody_out_who_has_no_budget() {
        let budgets = budgets();
        budgets.share();
        let patience = Duration::from_secs(10);
        assert!(budgets.readiness(patience).is_err());
        tokio::time::advance(patience).await;
        assert!(budgets.readiness(patience).is_ok());
        assert!(
            budgets
                .begin(&caller(limits(Some(100), None)))
                .await
                .is_err()
        );
    }
}
