//! The pull: one call by which a reader of drafts gets all news of its namespaces and groups.
//!
//! A scope is a namespace or a group of samples in one. A reader names all its scopes in one call, each with the
//! position up to which it has everything. The call waits until one of them has news.
//!
//! These types travel in bincode, so no field may be skipped in serialisation.

use serde::{Deserialize, Serialize};

use crate::document::{FeedCursor, FeedDelta};
use crate::{DocumentId, ErrorKind, SignedNamespace};

/// Asks for the news of some scopes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PullRequest {
    /// The namespaces. The scopes at the beginning are answered first where not all news fit.
    pub namespaces: Vec<NamespacePull>,
    /// Most tokens of the answer, which has at least one change if there is one.
    pub max_tokens: u32,
    /// Milliseconds to wait for news if there are none.
    pub wait_ms: u32,
}

/// The scopes of one namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NamespacePull {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The scopes.
    pub scopes: Vec<ScopePull>,
}

/// A scope with the reader's position.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopePull {
    /// The scope.
    pub scope: Scope,
    /// The position after which news are asked for.
    pub after: FeedCursor,
    /// Documents that the reader itself writes. The answer leaves out how they grow. A namespace says if they are
    /// removed; a group leaves that out as well.
    pub own: Vec<DocumentId>,
}

/// The part of a namespace that is read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Scope {
    /// All of it.
    Namespace,
    /// The documents of the group with this name.
    Group(String),
}

/// The answer to [`PullRequest`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PullReply {
    /// The news, in the order of the request. A scope that is missing has none, unless the answer `is_full`.
    pub deltas: Vec<ScopeDelta>,
    /// Whether there was no room for all news. The rest comes with the next call.
    pub is_full: bool,
}

/// The news of one scope of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScopeDelta {
    /// Position of the scope among all those of the request, from 0.
    pub scope: u32,
    /// The news.
    pub news: ScopeNews,
}

/// The news of a scope.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ScopeNews {
    /// Its changes.
    Changes {
        /// The changes.
        delta: FeedDelta,
        /// Milliseconds since the oldest of a group's newest tokens was emitted, by the clocks of its writer and of
        /// the store, each of which measured its own part. `None`: there are only older tokens, whose time is not
        /// known, or this is no group.
        age_ms: Option<u32>,
    },
    /// The store does not know the group, or no longer.
    Unregistered,
    /// The store refuses this scope, and answers for the others.
    Refused {
        /// The kind of the error.
        kind: ErrorKind,
        /// The reason in words.
        message: String,
    },
}
