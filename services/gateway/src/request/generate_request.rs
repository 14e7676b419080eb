//! A request with the standing of its caller.

use std::ops::Deref;
use std::sync::Arc;

use refrain_protocol::chunk::{DraftRules, Urgency};
use refrain_protocol::scheduling::{RequestClass, TenantWeight};

use super::{EndUser, ParsedRequest};
use crate::stream_shape::StreamShape;
use crate::tenants::Caller;

/// A request that can be carried out: what its body says, and the standing of its caller. Only
/// [`ParsedRequest::admit`] creates one, so none is without the standing, and nobody can change it.
#[derive(Debug)]
pub(crate) struct GenerateRequest {
    parsed: ParsedRequest,
    /// Whether somebody waits for each token.
    pub(crate) class: RequestClass,
    /// The weight of the tenant.
    pub(crate) weight: TenantWeight,
    /// The name that the tenant has in the namespace: with the part of it that drafts and KV caches stay in.
    pub(crate) scope: String,
    /// The shape of the answer's events, if it must not tell what steps brought.
    pub(crate) shape: Option<StreamShape>,
    /// The answer has no metrics, and nothing in its usage that tells what was known before.
    pub(crate) hides_metrics: bool,
    /// How its drafts are made, where the tenant has rules of its own.
    pub(crate) drafts: DraftRules,
    pub(crate) urgency: Urgency,
}

impl ParsedRequest {
    /// Gives the request the standing of its caller. It is urgent only if it asks for that and `may_be_urgent`.
    pub(crate) fn admit(self, caller: &Caller, may_be_urgent: bool) -> Arc<GenerateRequest> {
        let policy = &caller.policy;
        let end_user = self.end_user.map(EndUser::hex);
        Arc::new(GenerateRequest {
            class: policy.class(self.asked_class),
            weight: policy.weight,
            scope: caller.scope(end_user.as_deref()),
            shape: policy.shape,
            hides_metrics: policy.hides_metrics,
            drafts: policy.drafts,
            urgency: match may_be_urgent {
                true => self.asked_urgency,
                false => self.asked_urgency.ordinary(),
            },
            parsed: self,
        })
    }
}

impl Deref for GenerateRequest {
    type Target = ParsedRequest;

    fn deref(&self) -> &ParsedRequest {
        &self.parsed
    }
}
