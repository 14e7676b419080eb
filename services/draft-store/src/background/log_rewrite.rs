//! When the log is rewritten; see `log/journaled/rewrite.rs`.

/// At most one part in this many of what the store holds may be waste in the log.
const WASTE_SHARE: u64 = 8;

/// The sizes that decide whether a log is rewritten.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSizes {
    /// Bytes of the log on disk.
    pub(crate) log_bytes: u64,
    /// Bytes of its live records.
    pub(crate) live_bytes: u64,
    /// Bytes of an empty log on disk.
    pub(crate) empty_bytes: u64,
    /// Bytes on disk per byte of records in a fresh log, beyond those of an empty one.
    pub(crate) overhead: f64,
    /// Bytes that the store holds, in segments and in the log.
    pub(crate) held_bytes: u64,
}

/// Whether a log is to be rewritten: when it has `factor` times the size of a fresh one, or before that when its
/// waste is large beside all that the store holds. The second rule leaves room for the old log and the copy. A
/// rewrite must give back at least half of what it copies.
pub(crate) fn is_due(sizes: LogSizes, factor: u64, bytes_min: u64) -> bool {
    let fresh = sizes.live_bytes as f64 * sizes.overhead;
    let waste = sizes.log_bytes as f64 - sizes.empty_bytes as f64 - fresh;
    let outgrown = fresh * (factor - 1) as f64;
    let much = bytes_min.max(sizes.held_bytes / WASTE_SHARE) as f64;
    sizes.log_bytes > bytes_min && waste > outgrown.min(much.max(fresh / 2.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rewrite_is_due_when_the_log_outgrew_a_fresh_one() {
        let due = |log_bytes: u64, live_bytes, held_bytes| {
            let sizes = LogSizes {
                log_bytes: log_bytes + 500,
                live_bytes,
                empty_bytes: 500,
                overhead: 1.5,
                held_bytes,
            };
            is_due(sizes, 2, 1_000)
        };
        assert!(due(3_001, 1_000, 1_000_000));
        assert!(!due(3_000, 1_000, 1_000_000));
        assert!(!due(500, 0, 0), "small ones are left alone");
        assert!(due(501, 0, 0));
        // The store holds little besides the log: wasting half of the copy is enough.
        assert!(due(15_001, 10_000 * 2 / 3, 8_000));
        assert!(!due(14_000, 10_000 * 2 / 3, 8_000));
        assert!(
            !due(15_001, 10_000 * 2 / 3, 48_000),
            "an eighth of what is held"
        );
        assert!(due(16_100, 10_000 * 2 / 3, 48_000));
    }
}
