//! Values that the store runs with, that no operator needs to set, and that tests change.

/// Limits and intervals with one good value.
///
/// They are not read from the configuration file. Tests in this process set them to reach a limit soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreTuning {
    /// How long appends are gathered for one commit, in milliseconds. One `fdatasync` serves all of them.
    pub commit_interval_ms: u64,
    /// Most updates or documents in one call. Beyond it the call gets 413.
    pub updates_max: usize,
    /// Most namespaces and groups of one pull. Beyond it the pull gets 413.
    pub pull_scopes_max: usize,
    /// Bytes of news in the answer to one pull. The rest comes with the next one.
    pub pull_bytes_max: usize,
    /// Most documents that one commit removes, so that no commit takes long.
    pub eviction_step: usize,
    /// Removals remembered per namespace. A follower that is further behind starts over.
    pub tombstones_max: usize,
    /// Groups of samples registered at once. Beyond it further ones get 429.
    pub groups_max: usize,
    /// Tenants that gateways may keep here. Beyond it further ones get 413.
    pub tenant_records_max: usize,
    /// Tokens in the log of one group. Beyond it, further text of its documents is in the namespace alone.
    pub group_tokens_max: u64,
    /// Exports in progress at once. Beyond it further ones get 429.
    pub exports_max: usize,
    /// An export that nobody asks for during this time is dropped, in seconds.
    pub export_idle_s: u64,
    /// A touched document has its time of use written again once the stored one is older than this, in seconds.
    pub use_interval_s: u64,
    /// After this time even a small namespace is sealed, in seconds.
    pub seal_age_s: u64,
    /// Tokens in the log, over all namespaces. Beyond it everything that has ended is sealed.
    pub unsealed_tokens_max: u64,
    /// Segments that a namespace may have before they are merged, without those too large to be merged.
    pub segments_max: usize,
    /// Most tokens of a segment made by merging. Building one takes about 35 bytes of memory per token.
    pub segment_tokens_max: u64,
    /// A log smaller than this, in bytes, is never rewritten.
    pub rewrite_bytes_min: u64,
    /// How often budgets, ages and times of use are checked, in milliseconds.
    pub tick_ms: u64,
}

impl Default for StoreTuning {
    fn default() -> Self {
        StoreTuning {
            // Shorter gains little latency beside the fdatasync itself; longer delays followers.
            commit_interval_ms: 5,
            updates_max: 4_096,
            pull_scopes_max: 1_024,
            pull_bytes_max: 16 << 20,
            eviction_step: 256,
            tombstones_max: 65_536,
            groups_max: 65_536,
            tenant_records_max: 65_536,
            group_tokens_max: 4 << 20,
            exports_max: 4,
            export_idle_s: 300,
            use_interval_s: 300,
            seal_age_s: 24 * 3_600,
            unsealed_tokens_max: 16 << 20,
            segments_max: 8,
            segment_tokens_max: 16 << 20,
            rewrite_bytes_min: 64 << 20,
            tick_ms: 1_000,
        }
    }
}
