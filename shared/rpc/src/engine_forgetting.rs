//! The erasure of a tenant at the engines of all live workers.

use futures_util::future::join_all;
use refrain_protocol::error::code;
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::{ApiError, TenantId};
use serde::{Deserialize, Serialize};

use crate::scheduler::Scheduler;
use crate::worker::Workers;

/// The engines of a mesh: the scheduler knows which workers live.
#[derive(Clone, Copy)]
pub struct Engines<'a> {
    /// The scheduler.
    pub scheduler: &'a dyn Scheduler,
    /// The workers that it names.
    pub workers: &'a dyn Workers,
}

/// The erasure of a tenant at the engines.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct EnginesForgotten {
    /// The engine of each worker that reports to the scheduler. One that is away is not here.
    pub workers: Vec<EngineForgotten>,
    /// Why nobody knows which workers there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// The erasure of a tenant at one engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineForgotten {
    /// The name of its worker.
    pub worker: String,
    /// The outcome; nothing if there is a `trouble`.
    #[serde(flatten)]
    pub forgotten: TenantForgotten,
    /// Whether its engine is of a kind that cannot forget a single tenant.
    pub is_unable: bool,
    /// Why it is not done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

impl Engines<'_> {
    /// Has all engines forget what they computed for a tenant.
    pub async fn forget(&self, tenant: &str) -> EnginesForgotten {
        let order = ForgetTenant {
            tenant: TenantId::of(tenant),
        };
        let live = match self.scheduler.workers().await {
            Ok(live) => live,
            Err(error) => {
                return EnginesForgotten {
                    workers: Vec::new(),
                    trouble: Some(error.to_string()),
                };
            }
        };
        let told = live.into_iter().map(|report| {
            let worker = self.workers.at(&report.url);
            async move { EngineForgotten::of(report.worker.0, worker.forget_tenant(order).await) }
        });
        EnginesForgotten {
            workers: join_all(told).await,
            trouble: None,
        }
    }
}

impl EngineForgotten {
    fn of(worker: String, outcome: Result<TenantForgotten, ApiError>) -> Self {
        let error = outcome.as_ref().err();
        EngineForgotten {
            worker,
            is_unable: error.is_some_and(|error| error.has_code(code::UNSUPPORTED_BY_ENGINE)),
            trouble: error.map(ToString::to_string),
            forgotten: outcome.unwrap_or_default(),
        }
    }
}
