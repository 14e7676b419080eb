//! The rules of the file of tenants for the requests of a tenant, beside limits.

use std::time::Duration;

use refrain_protocol::chunk::DraftRules;
use refrain_protocol::scheduling::{RequestClass, TenantWeight};

use super::file::{Isolation, StreamShaping, TenantEntry};
use super::stream_shape::StreamShape;

/// Percent of a tenant's tokens that may be urgent, where the file says nothing.
const URGENT_PERCENT_MAX: u8 = 25;

/// Milliseconds per token of a paced stream, where the file says nothing.
const STREAM_PACE_MS: u16 = 40;

/// The standing of a tenant's requests among those of others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantPolicy {
    /// Its share of the engines among the tenants that wait.
    pub weight: TenantWeight,
    /// The highest class of its requests.
    pub class_max: RequestClass,
    /// Percent of its tokens that may be urgent.
    pub urgent_percent_max: u8,
    /// How far its drafts and KV caches reach.
    pub isolation: Isolation,
    /// The shape of its answers' events.
    pub shape: Option<StreamShape>,
    /// Whether its answers are without metrics.
    pub hides_metrics: bool,
    /// How its drafts are made.
    pub drafts: DraftRules,
}

impl Default for TenantPolicy {
    fn default() -> Self {
        TenantPolicy {
            weight: TenantWeight::default(),
            class_max: RequestClass::default(),
            urgent_percent_max: URGENT_PERCENT_MAX,
            isolation: Isolation::default(),
            shape: None,
            hides_metrics: false,
            drafts: DraftRules::default(),
        }
    }
}

impl From<&TenantEntry> for TenantPolicy {
    fn from(entry: &TenantEntry) -> Self {
        TenantPolicy {
            weight: entry.weight,
            class_max: entry.class_max,
            urgent_percent_max: entry.urgent_percent_max.unwrap_or(URGENT_PERCENT_MAX),
            isolation: entry.isolation,
            shape: match entry.stream_shaping {
                StreamShaping::Off => None,
                StreamShaping::Size => Some(StreamShape::Size),
                StreamShaping::Pace => Some(StreamShape::Pace {
                    per_token: Duration::from_millis(
                        entry.stream_pace_ms.unwrap_or(STREAM_PACE_MS).into(),
                    ),
                }),
            },
            hides_metrics: entry.hides_metrics,
            drafts: DraftRules {
                alpha: entry.alpha,
                min_token_prob: entry.min_token_prob,
                max_spec_tokens: entry.max_spec_tokens,
            },
        }
    }
}

impl TenantPolicy {
    /// The class of a request that asks for this one.
    pub fn class(&self, asked: RequestClass) -> RequestClass {
        match self.class_max {
            RequestClass::Interactive => asked,
            RequestClass::Rollout => RequestClass::Rollout,
        }
    }
}
