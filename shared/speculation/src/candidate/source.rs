//! The origin of a draft.

/// The maker of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// A suffix index.
    Suffix,
    /// An EAGLE-3 head.
    Eagle3,
    /// The output that the client predicted.
    Prediction,
    /// The form that the output must have, which forces tokens.
    Grammar,
    /// No draft: a plain decoding step.
    None,
}

/// The text that a draft was read from, most local first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// The request's own prompt and output so far.
    Request,
    /// The other samples of the request's group.
    Group,
    /// The whole namespace of the tenant.
    Tenant,
}

impl Scope {
    /// All of them, most local first.
    pub const ALL: [Scope; 3] = [Scope::Request, Scope::Group, Scope::Tenant];
}
