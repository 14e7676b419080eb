//! The accounts of a gateway, for the way of a request: who calls, whether its limits let it in, and what it uses.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use refrain_protocol::{ApiError, TenantName};
use refrain_rpc::DraftStore;
use refrain_service_kit::actors::Actor;
use refrain_service_kit::config::Validate;
use refrain_service_kit::telemetry::Metrics;

use crate::metrics::{AccountMetrics, TokenSeries};
use crate::tenants::jwt::{JwtConfig, JwtVerifier};
use crate::tenants::key::{KeyConfig, key_faults};
use crate::tenants::{
    Caller, Callers, Directory, HeaderWords, Limiter, LimitsRedisConfig, Made, QuotaTicket,
    RedisCounts, StoreTenants, TenantsSource, UrgentShares, UrgentTicket, start_following,
};
use crate::usage::{OnErasure, Usage, UsageMeter, UsageService, UsageStart, UsageSubject};

/// The part of a gateway's configuration that is about accounts. The keys are those of the section `[gateway]`.
#[derive(Clone, Debug)]
pub struct AccountsConfig {
    /// API keys of the configuration.
    pub keys: Vec<KeyConfig>,
    /// Tenant of callers without a key.
    pub anonymous_tenant: Option<TenantName>,
    /// The file of tenants.
    pub tenants_file: Option<PathBuf>,
    /// Whether the draft store keeps the tenants.
    pub tenants_in_store: bool,
    /// The file with what the draft store said last.
    pub tenants_cache_file: Option<PathBuf>,
    /// The identity provider.
    pub jwt: Option<JwtConfig>,
    /// Directory of the usage journal.
    pub usage_dir: Option<PathBuf>,
    /// The share of each limit per minute that this gateway grants by itself.
    pub limit_share: f64,
    /// The Redis that counts for several gateways.
    pub limits_redis: Option<LimitsRedisConfig>,
}

impl Validate for AccountsConfig {
    fn faults(&self) -> Vec<String> {
        let rules = [
            (
                self.keys.is_empty()
                    && self.anonymous_tenant.is_none()
                    && self.tenants_file.is_none()
                    && !self.tenants_in_store
                    && self.jwt.is_none(),
                "keys: add at least one, name a tenants_file, set tenants_in_store or jwt, or set anonymous_tenant to \
                 serve callers without a key",
            ),
            (
                !(self.limit_share > 0.0 && self.limit_share <= 1.0),
                "limit_share: above 0, and at most 1",
            ),
            (
                self.tenants_in_store && self.tenants_file.is_some(),
                "tenants_in_store: not together with tenants_file",
            ),
            (
                self.tenants_cache_file.is_some() && !self.tenants_in_store,
                "tenants_cache_file: only with tenants_in_store",
            ),
        ];
        let broken = rules.into_iter().filter(|(is_broken, _)| *is_broken);
        let mut faults: Vec<_> = broken.map(|(_, fault)| fault.to_owned()).collect();
        faults.extend(key_faults(&self.keys));
        let of_jwt = self.jwt.iter().flat_map(Validate::faults);
        faults.extend(of_jwt.map(|fault| format!("jwt.{fault}")));
        let of_redis = self.limits_redis.iter().flat_map(LimitsRedisConfig::faults);
        faults.extend(of_redis.map(|fault| format!("limits_redis.{fault}")));
        faults
    }
}

/// The objects that accounts are given.
pub struct AccountsDeps {
    /// Keeps tenants and the usage of all gateways.
    pub store: Arc<dyn DraftStore>,
    /// The registry of the process.
    pub registry: Metrics,
    /// The metrics of accounts in that registry.
    pub metrics: Arc<AccountMetrics>,
    /// Most requests in flight.
    pub requests_max: usize,
    /// Called for each tenant whose usage was erased.
    pub on_erasure: OnErasure,
}

/// The accounts of a gateway.
pub struct Accounts {
    callers: Callers,
    limiter: Limiter,
    urgent_shares: UrgentShares,
    usage: Usage,
    source: TenantsSource,
    metrics: Arc<AccountMetrics>,
}

/// Runs accounts: it follows the tenants and keeps the usage.
pub struct AccountsService {
    accounts: Arc<Accounts>,
    /// Follows the tenants until it is dropped.
    _follower: Actor,
    usage: UsageService,
}

impl AccountsService {
    /// Reads the tenants and the journal of usage, and follows both from then on.
    ///
    /// # Errors
    /// Tenants, keys of an identity provider or a directory that cannot be used, or another gateway that uses it.
    pub async fn start(config: AccountsConfig, deps: AccountsDeps) -> anyhow::Result<Self> {
        let metrics = deps.metrics;
        let directory = Directory::new(&config.keys, config.anonymous_tenant);
        let directory = Arc::new(match &config.jwt {
            Some(_) => directory.beside_tokens(),
            None => directory,
        });
        let jwt = match config.jwt {
            Some(jwt) => Some(JwtVerifier::start(jwt, metrics.clone()).await?),
            None => None,
        };
        let redis = config.limits_redis;
        let redis = redis.map(|redis| RedisCounts::start(redis, &deps.registry));
        let redis = redis.transpose().context("limits_redis")?;
        let limiter = Limiter::with_redis(config.limit_share, redis, metrics.clone());
        let source = match config.tenants_file {
            Some(path) => TenantsSource::File(path),
            None if config.tenants_in_store => {
                TenantsSource::Store(Arc::new(StoreTenants::new(deps.store.clone())))
            }
            None => TenantsSource::None,
        };
        let follower = start_following(
            source.clone(),
            config.tenants_cache_file,
            directory.clone(),
            limiter.clone(),
            metrics.clone(),
        )
        .await?;
        let usage = UsageService::start(
            config.usage_dir.as_deref(),
            deps.requests_max,
            deps.store,
            limiter.budgets(),
            deps.on_erasure,
            &metrics,
        )?;
        Ok(AccountsService {
            accounts: Arc::new(Accounts {
                callers: Callers { directory, jwt },
                limiter,
                urgent_shares: UrgentShares::default(),
                usage: usage.usage(),
                source,
                metrics,
            }),
            _follower: follower,
            usage,
        })
    }

    /// The accounts.
    pub fn accounts(&self) -> Arc<Accounts> {
        self.accounts.clone()
    }

    /// Writes and sends the usage that is left. No request runs any more.
    pub async fn close(self) {
        self.usage.close().await;
    }
}

/// A request that its limits have let in, with its tokens in them.
pub struct AccountedRequest {
    /// Public name of its model.
    pub model: String,
    /// Tokens of its prompts.
    pub input_tokens: u64,
    /// Choices of each prompt.
    pub choices_per_prompt: usize,
    /// Choices of all prompts.
    pub choices: usize,
    /// Whether it asks to be urgent.
    pub asks_urgency: bool,
    /// Its limits.
    pub quota: QuotaTicket,
    /// Tokens of prompts and outputs that are reserved in its limits.
    pub reserved: (u64, u64),
    /// The metrics that show its tokens.
    pub tokens: Arc<TokenSeries>,
}

/// The account of a request while it runs. When it is dropped, the request is settled in all limits.
pub struct RequestAccount {
    quota: QuotaTicket,
    urgent: UrgentTicket,
    meter: Arc<UsageMeter>,
}

impl RequestAccount {
    /// Whether the request may be urgent.
    pub fn is_urgent(&self) -> bool {
        self.urgent.is_urgent()
    }

    /// The counter of the output, for limits.
    pub fn made(&self) -> Arc<Made> {
        self.quota.made()
    }

    /// The counts of the request, for bills and budgets.
    pub fn meter(&self) -> &Arc<UsageMeter> {
        &self.meter
    }
}

impl Accounts {
    /// Whether accounts are ready to let requests in. If any has a budget, they wait for at most `usage_wait` after
    /// the start to learn what other gateways have counted.
    ///
    /// # Errors
    /// What is awaited.
    pub fn readiness(&self, usage_wait: Duration) -> Result<(), String> {
        let known = self.callers.directory.check_known();
        known.map_err(|error| error.message)?;
        match self.callers.directory.has_budgets() {
            true => self.limiter.budgets().readiness(usage_wait),
            false => Ok(()),
        }
    }

    /// The metrics, which count refusals by limit.
    pub fn metrics(&self) -> &Arc<AccountMetrics> {
        &self.metrics
    }

    /// The place of the tenants, for operators.
    pub fn source(&self) -> &TenantsSource {
        &self.source
    }

    /// Finds the caller by the headers `Authorization` and `x-api-key`, at a time in Unix seconds.
    ///
    /// # Errors
    /// `Unauthorized` for a wrong key or token, `Forbidden` for a token of an unknown tenant, `Unavailable` if nobody
    /// knows yet.
    pub async fn caller(
        &self,
        authorization: Option<&str>,
        api_key: Option<&str>,
        now: i64,
    ) -> Result<Caller, ApiError> {
        self.callers.caller(authorization, api_key, now).await
    }

    /// The caller that everybody is on a listener of this tenant.
    ///
    /// # Errors
    /// `Forbidden` for a tenant that nobody has added, or `Unavailable` if nobody knows yet.
    pub fn caller_of_listener(&self, tenant: &TenantName) -> Result<Caller, ApiError> {
        self.callers.directory.caller_of_listener(tenant)
    }

    /// Counts a request whose head has arrived. A caller without limits costs nothing.
    ///
    /// # Errors
    /// `Overloaded` past a limit on requests, while tokens of earlier ones are a debt, or when a budget is spent, and
    /// `Unavailable` while nobody knows what is spent of a budget.
    pub async fn begin(&self, caller: &Caller, now: Instant) -> Result<QuotaTicket, ApiError> {
        self.limiter.begin(caller, now).await
    }

    /// Opens the account of a request that all limits have let in.
    ///
    /// # Errors
    /// `Unavailable` where its usage cannot be written down.
    pub async fn open(
        &self,
        caller: &Caller,
        request: AccountedRequest,
    ) -> Result<RequestAccount, ApiError> {
        let quota = request.quota;
        let urgent = self.urgent_shares.begin(
            &caller.tenant,
            &caller.policy,
            request.asks_urgency,
            request.reserved,
            quota.made(),
        );
        if request.asks_urgency && !urgent.is_urgent() {
            self.metrics.families.urgency_declined.inc();
        }
        let key = caller.key.as_ref();
        let meter = self.usage.begin(UsageStart {
            subject: UsageSubject {
                tenant: caller.tenant.to_string(),
                key: key.map_or_else(String::new, |key| key.id.clone()),
                model: request.model,
            },
            input_tokens: request.input_tokens,
            choices_per_prompt: request.choices_per_prompt,
            choices: request.choices,
            budget: quota.budget(),
            shown: request.tokens,
        });
        Ok(RequestAccount {
            meter: Arc::new(meter.await?),
            quota,
            urgent,
        })
    }

    /// The headers that tell a caller what is left of its limits, with their names.
    pub fn limit_headers(
        &self,
        caller: &Caller,
        words: HeaderWords,
    ) -> impl Iterator<Item = (String, String)> {
        self.limiter.headers(caller, words)
    }
}
