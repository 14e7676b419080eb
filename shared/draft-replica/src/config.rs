//! Limits of the replica beside an engine, and of the upload to the draft store.
//!
//! An operator sets what depends on the deployment: memory, and how often outputs are sent. The other values are
//! constants in effect: they are not read from the configuration, and only tests in the same process change them.

use serde::Deserialize;

/// Limits of the replica of the drafts.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct ReplicaConfig {
    /// Most namespaces; the least recently used one is evicted first.
    pub namespaces_max: usize,
    /// Most tokens of all namespaces together; the least recently used namespace is evicted first.
    pub tokens_max: u64,
    /// Most tokens of one namespace; its oldest documents are evicted first.
    pub namespace_tokens_max: u64,
    /// Most bytes of all namespaces, live parts and segments together.
    ///
    /// The least recently used namespace is evicted first; of the last one left, the oldest documents. Removed
    /// documents that are not merged away yet do not count. They take up to a third more, and a merge takes the size
    /// of its inputs once more while it runs.
    pub bytes_max: u64,
    /// Most groups of samples with a tree of their own; the least recently used idle one is evicted first. While
    /// requests of all groups run, a request of a further group drafts without one. 0: no group has a tree.
    pub groups_max: usize,
    /// Most tokens of one group's tree; the oldest outputs that do not run here are evicted first. A token takes
    /// about 85 bytes. The default has room for 16 samples of 65,536 tokens.
    pub group_tokens_max: u64,
    /// Most tokens of all groups' trees together; the least recently used idle group is evicted first. While all
    /// groups run, further tokens are in their namespaces alone.
    pub groups_tokens_max: u64,
    /// Pause after an answer of the store before it is asked for further news, milliseconds. News that come meanwhile
    /// come together.
    pub pull_interval_ms: u64,

    /// Tokens of ended outputs in the live part of a namespace that are worth a segment. Fewer would make many small
    /// segments, which have to be merged again and again.
    #[serde(skip)]
    pub seal_tokens: u64,
    /// Most tokens in all live parts together. Above that the fullest is sealed, however small. Outputs that still
    /// run stay live, and so do those that changed within `seal_after_ms`.
    #[serde(skip)]
    pub live_tokens_max: u64,
    /// Shortest time between two seals of a namespace for want of live capacity, milliseconds. An output that neither
    /// grew nor ended for so long counts as ended.
    #[serde(skip)]
    pub seal_after_ms: u64,
    /// Pause between two looks for something to evict, seal, merge or rebuild, milliseconds.
    #[serde(skip)]
    pub upkeep_ms: u64,
    /// Time that a group's tree is kept after its last request, milliseconds.
    #[serde(skip)]
    pub group_ttl_ms: u64,
    /// Longest that one call for news waits in the store, milliseconds.
    #[serde(skip)]
    pub pull_wait_ms: u32,
    /// Most tokens fetched with one call.
    #[serde(skip)]
    pub pull_tokens: u32,
    /// Shortest pause until a namespace that was left out in part is checked again for whether it fits, milliseconds.
    /// The pause doubles each time that the namespace did not stay.
    #[serde(skip)]
    pub take_over_again_ms: u64,
}

/// Limits of the upload to the draft store.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct UploaderConfig {
    /// Pause between two uploads, milliseconds.
    pub interval_ms: u64,
    /// Pause between two uploads while outputs of groups grow, milliseconds, if it is the shorter one. Samples of a
    /// group draft from each other wherever they run.
    pub group_interval_ms: u64,
    /// Most tokens held while the store cannot be reached. For further ones the oldest finished outputs are dropped.
    pub pending_tokens_max: usize,

    /// Intervals between two uploads of outputs that still grow. Uploads in between carry only outputs that have
    /// ended, that grew by many tokens, or that belong to a group, whose samples draft from each other wherever they
    /// run.
    #[serde(skip)]
    pub growing_every: u32,
}

/// Bytes reckoned for a live token: three times what one takes, so that live outputs alone never cause an eviction.
const LIVE_TOKEN_BYTES: u64 = 256;

impl Default for ReplicaConfig {
    fn default() -> Self {
        ReplicaConfig {
            namespaces_max: 64,
            tokens_max: 16_000_000,
            namespace_tokens_max: 4_000_000,
            bytes_max: 2 << 30,
            groups_max: 256,
            group_tokens_max: 1 << 20,
            groups_tokens_max: 1 << 22,
            pull_interval_ms: 50,
            seal_tokens: 262_144,
            live_tokens_max: 1_048_576,
            seal_after_ms: 10_000,
            upkeep_ms: 100,
            group_ttl_ms: 600_000,
            pull_wait_ms: 10_000,
            pull_tokens: 65_536,
            take_over_again_ms: 60_000,
        }
    }
}

impl Default for UploaderConfig {
    fn default() -> Self {
        UploaderConfig {
            interval_ms: 250,
            group_interval_ms: 100,
            pending_tokens_max: 4_000_000,
            growing_every: 2,
        }
    }
}

impl ReplicaConfig {
    /// Passes each check to `check`, with the message for the case that it fails.
    pub fn check(&self, check: &mut impl FnMut(bool, &str)) {
        check(
            self.namespaces_max >= 1,
            "replica.namespaces_max: must be at least 1",
        );
        check(
            self.pull_interval_ms >= 1,
            "replica.pull_interval_ms: must be at least 1",
        );
        check(
            self.groups_tokens_max >= self.group_tokens_max,
            "replica.groups_tokens_max: must be at least replica.group_tokens_max",
        );
        let bytes_min = self.live_tokens_max.saturating_mul(LIVE_TOKEN_BYTES);
        check(
            self.bytes_max >= bytes_min,
            &format!(
                "replica.bytes_max: must be at least {bytes_min}, so that live outputs alone evict nothing"
            ),
        );
    }
}

impl UploaderConfig {
    /// Passes each check to `check`, with the message for the case that it fails.
    pub fn check(&self, check: &mut impl FnMut(bool, &str)) {
        check(
            self.interval_ms >= 1,
            "uploader.interval_ms: must be at least 1",
        );
        check(
            self.group_interval_ms >= 1,
            "uploader.group_interval_ms: must be at least 1",
        );
    }
}
