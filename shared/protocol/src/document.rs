//! What the draft store keeps and how it travels. These types cross in bincode: no field is ever skipped.

use serde::{Deserialize, Serialize};

use crate::{DocumentId, SignedNamespace, TokenId};

/// Most prompt tokens kept before an output: they are matched, but never drafted.
pub const LEFT_CONTEXT_TOKENS: usize = 16;

/// What is known of a document when it starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentHead {
    /// The client's session.
    pub session: Option<String>,
    /// Its group of samples.
    pub group: Option<String>,
    /// Which of the request's choices.
    pub choice: u32,
    /// Version of the weights that wrote it.
    pub weight_version: u64,
    /// Unix milliseconds.
    pub created_ms: u64,
    /// The last prompt tokens, at most [`LEFT_CONTEXT_TOKENS`].
    pub left_context: Vec<TokenId>,
}

/// Why a document ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// A stop id or a stop string. A stop id is kept as the last token.
    Stop,
    /// A length limit.
    Length,
    /// The client went away; the document is partial.
    Cancelled,
    /// The engine or the worker failed; the document is partial.
    Failed,
}

/// A piece of a document's output. Repeats and overlaps are harmless: the store takes what is new.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentUpdate {
    /// Which document.
    pub document: DocumentId,
    /// A higher epoch may shorten: the text is cut to `prev_len` before `tokens` are added. A lower one is
    /// ignored. Starts at the request's fencing epoch.
    pub epoch: u64,
    /// Output tokens before this piece.
    pub prev_len: u32,
    /// The output tokens that follow.
    pub tokens: Vec<TokenId>,
    /// Sent with every update: a store that lost the beginning can place the rest.
    pub head: DocumentHead,
    /// Present in the last update.
    pub finish: Option<FinishReason>,
}

/// Updates of one namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AppendRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// In order.
    pub updates: Vec<DocumentUpdate>,
}

/// Durable once it is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppendReply {
    /// For each update, the output length that the store now has. Less than `prev_len + tokens.len()` means
    /// that a piece before it is missing: send again from there. More means that it has gone on already.
    pub lengths: Vec<u32>,
}

/// A place in a namespace's feed of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FeedCursor {
    /// Changes when the store was rebuilt and old positions mean nothing.
    pub generation: u64,
    /// Position of the last change seen; 0 before the first.
    pub sequence: u64,
}

/// Asks for what changed in a namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FollowRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// Changes after this.
    pub after: FeedCursor,
    /// Most tokens to send (at least one change is sent).
    pub max_tokens: u32,
    /// If there is nothing new, wait this long for it.
    pub wait_ms: u32,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FeedEvent {
    /// A document grew, or was shortened by a higher epoch.
    Update(DocumentUpdate),
    /// A document is gone: evicted or erased. It must not be drafted from any more.
    Remove(DocumentId),
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FollowReply {
    /// The cursor's generation is not the store's: forget everything of this namespace first.
    pub reset: bool,
    /// In order.
    pub events: Vec<FeedEvent>,
    /// Where to go on.
    pub cursor: FeedCursor,
    /// Whether that is the end of the feed for now.
    pub caught_up: bool,
}

impl FollowReply {
    /// Tokens in it.
    pub fn tokens(&self) -> u32 {
        let tokens: usize = self
            .events
            .iter()
            .map(|event| match event {
                FeedEvent::Update(update) => update.tokens.len(),
                FeedEvent::Remove(_) => 0,
            })
            .sum();
        u32::try_from(tokens).unwrap_or(u32::MAX)
    }
}

/// Documents whose drafts were accepted: most recently used from now on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TouchRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// Which; unknown ones are ignored.
    pub documents: Vec<DocumentId>,
}

/// Makes a group of samples known. Its log holds the documents of the group that are appended from then on;
/// they are documents of the namespace like all others, and stay when the group ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegisterGroupRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// As in [`DocumentHead::group`].
    pub group: String,
    /// The log ends this long after the last registration.
    pub ttl_ms: u64,
    /// Documents of older weights are not in the log, and leave it when newer weights come.
    pub weight_version: u64,
}

/// A place in a group's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupCursor {
    /// Which group.
    pub group: String,
    /// What was seen of it.
    pub after: FeedCursor,
}

/// Asks for what changed in some groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FetchGroupsRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// Which, and from where on.
    pub groups: Vec<GroupCursor>,
    /// Most tokens to send (at least one change is sent).
    pub max_tokens: u32,
}

/// What changed in a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupLog {
    /// Whether the group is registered; if not there is nothing in `log`.
    pub is_registered: bool,
    /// As with a namespace's feed.
    pub log: FollowReply,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FetchGroupsReply {
    /// One for each group that was asked for, in that order.
    pub groups: Vec<GroupLog>,
}

/// The store in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStats {
    /// Documents kept.
    pub documents: u64,
    /// Their output tokens.
    pub tokens: u64,
    /// Their bytes as stored, before the database's own overhead.
    pub logical_bytes: u64,
    /// What the log of unsealed documents takes on disk.
    pub log_bytes: u64,
    /// What sealed segments take on disk.
    pub segment_bytes: u64,
    /// What the whole data directory takes on disk.
    pub disk_bytes: u64,
    /// Namespaces that have documents.
    pub namespaces: u64,
    /// Documents evicted since start.
    pub evicted_documents: u64,
}
