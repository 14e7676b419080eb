//! How much is remembered beside an engine, in which form, and how it goes to the store.

use serde::Deserialize;

/// The copy of the drafts of the namespaces that are served here.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfig {
    /// Most namespaces; the one unused longest goes first.
    pub namespaces_max: usize,
    /// Most tokens of all namespaces; the one unused longest goes first.
    pub tokens_max: u64,
    /// Most tokens of one namespace; the oldest documents go first.
    pub namespace_tokens_max: u64,
    /// Most bytes of all namespaces, live parts and segments: the namespace unused longest goes first, of the last one
    /// the oldest documents. What was removed and is not merged away yet is not counted: it takes up to a third
    /// more, and a merge takes its inputs' size once more while it runs.
    pub bytes_max: u64,
    /// Tokens of ended outputs in the live part of a namespace that are worth a segment.
    pub seal_tokens: u64,
    /// Most tokens in all live parts together; past it the fullest is sealed, however small. What still runs stays
    /// live, and so does what came within `seal_after_ms`.
    pub live_tokens_max: u64,
    /// A namespace is not sealed for want of live room more often than this, milliseconds. An output that neither grew
    /// nor ended for so long counts as ended.
    pub seal_after_ms: u64,
    /// How often namespaces are looked at for what there is to evict, seal, merge and rebuild, milliseconds. One such
    /// job runs at a time.
    pub upkeep_ms: u64,
    /// Most groups of samples with a tree of their own; the one unused longest goes first. A request of one more,
    /// while requests of all of them run, drafts without. 0: none has one.
    pub groups_max: usize,
    /// Most tokens of one group's tree; the oldest outputs that ended go first.
    pub group_tokens_max: u64,
    /// How long a group's tree is kept after its last request, milliseconds.
    pub group_ttl_ms: u64,
    /// How long one look for news in the store may wait, milliseconds.
    pub follow_wait_ms: u32,
    /// How often at most a namespace in use that was left out in part, for want of room, is looked at for whether all of it
    /// fits by now, milliseconds; then it is taken over anew. Twice as seldom each time that it did not stay, up to 64 times.
    pub take_over_again_ms: u64,
    /// Most tokens fetched at once.
    pub follow_tokens: u32,
    /// Longest that a step waits for drafts from the store's index, where a namespace is not all here, microseconds.
    /// 0: the store is never asked.
    pub lookup_wait_us_max: u64,
    /// The same as a share of a step.
    pub lookup_step_share_max: f64,
}

/// What is sent to the draft store.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HarvestConfig {
    /// How often, milliseconds.
    pub interval_ms: u64,
    /// What there is of outputs that still grow is sent as well once so many intervals have passed since it last was. Between,
    /// only what has ended, what is of a group, whose samples draft from each other wherever they run, and what has grown by
    /// many tokens.
    pub growing_every: u32,
    /// Most tokens of one message.
    pub batch_tokens: usize,
    /// Most tokens held while the store is away; then the oldest finished outputs are dropped.
    pub pending_tokens_max: usize,
}

/// Three times what a live token takes.
const LIVE_TOKEN_BYTES: u64 = 256;

impl Default for MemoryConfig {
    fn default() -> Self {
        MemoryConfig {
            namespaces_max: 64,
            tokens_max: 16_000_000,
            namespace_tokens_max: 4_000_000,
            bytes_max: 2 << 30,
            seal_tokens: 262_144,
            live_tokens_max: 1_048_576,
            seal_after_ms: 10_000,
            upkeep_ms: 100,
            groups_max: 256,
            group_tokens_max: 65_536,
            group_ttl_ms: 600_000,
            follow_wait_ms: 10_000,
            take_over_again_ms: 60_000,
            follow_tokens: 65_536,
            lookup_wait_us_max: 2_000,
            lookup_step_share_max: 0.03,
        }
    }
}

impl Default for HarvestConfig {
    fn default() -> Self {
        HarvestConfig {
            interval_ms: 250,
            growing_every: 2,
            batch_tokens: 65_536,
            pending_tokens_max: 4_000_000,
        }
    }
}

impl MemoryConfig {
    /// Tells of each limit whether it makes sense, and what is wrong if not.
    pub fn check(&self, check: &mut impl FnMut(bool, &str)) {
        check(
            self.namespaces_max >= 1,
            "memory.namespaces_max: at least 1",
        );
        check(
            self.bytes_max / LIVE_TOKEN_BYTES >= self.live_tokens_max,
            "memory.bytes_max: at least 256 for each of live_tokens_max, so that what is live drives nothing out",
        );
        check(self.seal_tokens >= 1, "memory.seal_tokens: at least 1");
        check(
            self.live_tokens_max >= 1,
            "memory.live_tokens_max: at least 1",
        );
        check(self.upkeep_ms >= 1, "memory.upkeep_ms: at least 1");
        check(
            self.group_tokens_max >= 1,
            "memory.group_tokens_max: at least 1; groups_max = 0 turns the trees of groups off",
        );
        check(
            (0.0..=1.0).contains(&self.lookup_step_share_max),
            "memory.lookup_step_share_max: between 0 and 1",
        );
        check(self.follow_tokens >= 1, "memory.follow_tokens: at least 1");
        check(
            self.follow_wait_ms >= 1,
            "memory.follow_wait_ms: at least 1",
        );
    }
}

impl HarvestConfig {
    /// Tells of each limit whether it makes sense, and what is wrong if not.
    pub fn check(&self, check: &mut impl FnMut(bool, &str)) {
        check(self.interval_ms >= 1, "harvest.interval_ms: at least 1");
        check(self.growing_every >= 1, "harvest.growing_every: at least 1");
        check(self.batch_tokens >= 1, "harvest.batch_tokens: at least 1");
    }
}
