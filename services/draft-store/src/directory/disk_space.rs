//! Free space on the disk. It is checked before each commit of new documents: sled does not open on a full disk, and
//! evictions and erasures need to write as well.

use std::path::Path;

/// At most one part in this many of a disk is kept free, so that a small disk is usable.
const RESERVE_SHARE: u64 = 20;

/// Bytes that opening a log may write. sled writes a snapshot at each open, and begins new pieces of its file of half
/// a megabyte each.
const OPEN_BYTES_MIN: u64 = 4 << 20;

/// A catalogue that is built again may be larger than the one before it, by up to one part in this many of the log.
const OPEN_SHARE: u64 = 16;

/// Bytes that must be free so that a log can be opened.
fn open_bytes(log_bytes: u64) -> u64 {
    // Once for the open, and once for accepted writes that sled has not written yet.
    2 * OPEN_BYTES_MIN + log_bytes / OPEN_SHARE
}

/// Free and total bytes of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskSpace {
    pub(crate) free_bytes: u64,
    all_bytes: u64,
}

impl DiskSpace {
    /// The disk of a directory. `None` if the system does not tell.
    pub(crate) fn of(dir: &Path) -> Option<DiskSpace> {
        let stat = rustix::fs::statvfs(dir).ok()?;
        Some(DiskSpace {
            free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
            all_bytes: stat.f_blocks.saturating_mul(stat.f_frsize),
        })
    }

    /// Whether a job may write this many bytes. It may use the reserve, except for what opening a log takes.
    pub(crate) fn has_room_for(self, bytes: u64, reserve_bytes: u64) -> bool {
        self.free_bytes > bytes.saturating_add(OPEN_BYTES_MIN.min(reserve_bytes))
    }

    /// Whether nothing more may be stored.
    ///
    /// `reserve_bytes` are to stay free, or less on a small disk, but always enough to open a log of `log_bytes`
    /// again.
    pub(crate) fn is_used_up(self, reserve_bytes: u64, log_bytes: u64) -> bool {
        let wanted = reserve_bytes.min(self.all_bytes / RESERVE_SHARE);
        // A reserve of 0 is the operator's own risk.
        let least = if reserve_bytes == 0 {
            0
        } else {
            open_bytes(log_bytes)
        };
        self.free_bytes < wanted.max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_disk_is_used_down_to_its_last_twentieth() {
        let room = |free_bytes, all_bytes| DiskSpace {
            free_bytes,
            all_bytes,
        };
        const GB: u64 = 1 << 30;
        let reserve = GB / 4;
        assert!(room(reserve - 1, 100 * GB).is_used_up(reserve, 0));
        assert!(!room(reserve, 100 * GB).is_used_up(reserve, 0));
        assert!(!room(GB / 20, GB).is_used_up(reserve, 0));
        assert!(room(GB / 20 - 1, GB).is_used_up(reserve, 0));
        assert!(!room(0, GB).is_used_up(0, GB));
    }

    #[test]
    fn the_reserve_is_always_enough_to_open_the_log() {
        let small = DiskSpace {
            free_bytes: 8 << 20,
            all_bytes: 40 << 20,
        };
        assert!(!small.is_used_up(256 << 20, 0));
        assert!(small.is_used_up(256 << 20, 8 << 20));
    }
}
