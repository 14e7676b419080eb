//! The origin of a draft. The names are metric labels.

/// The maker of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// A suffix index.
    Suffix,
    /// An EAGLE-3 head.
    Eagle3,
    /// The output that the client predicted.
    Prediction,
    /// No draft: a plain decoding step.
    None,
}

impl Source {
    /// All of them.
    pub const ALL: [Source; 4] = [
        Source::Suffix,
        Source::Eagle3,
        Source::Prediction,
        Source::None,
    ];

    /// The label.
    pub fn as_str(self) -> &'static str {
        match self {
            Source::Suffix => "suffix",
            Source::Eagle3 => "eagle3",
            Source::Prediction => "prediction",
            Source::None => "none",
        }
    }
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

    /// The label.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Request => "request",
            Scope::Group => "group",
            Scope::Tenant => "tenant",
        }
    }
}
