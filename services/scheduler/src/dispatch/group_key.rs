//! The key of a group: the samples of one prompt, by the name that the tenant gave them.

use refrain_protocol::scheduling::LeaseRequest;

/// A group of a tenant in a pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupKey {
    model: String,
    tokenizer: String,
    tenant: String,
    group: String,
}

impl GroupKey {
    pub(super) fn new(model: &str, tokenizer: &str, tenant: &str, group: &str) -> Self {
        GroupKey {
            model: model.to_owned(),
            tokenizer: tokenizer.to_owned(),
            tenant: tenant.to_owned(),
            group: group.to_owned(),
        }
    }

    /// The group of a request, if it has one.
    pub(super) fn of_request(request: &LeaseRequest) -> Option<Self> {
        let namespace = &request.namespace.namespace;
        Some(GroupKey::new(
            &namespace.model,
            &namespace.tokenizer,
            &namespace.tenant,
            request.group.as_ref()?,
        ))
    }
}
