//! How much room the disk has. It is asked before each commit of new documents: sled does not open on a full disk, and
//! evicting and erasing write as well.

use std::path::Path;

/// Of a small disk less is kept free: one part in so many.
const RESERVE_SHARE: u64 = 20;

/// What is left of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) free_bytes: u64,
    all_bytes: u64,
}

impl Room {
    /// Of the disk that a directory is on; `None` where the system does not tell.
    pub(crate) fn of(dir: &Path) -> Option<Room> {
        let told = rustix::fs::statvfs(dir).ok()?;
        Some(Room {
            free_bytes: told.f_bavail.saturating_mul(told.f_frsize),
            all_bytes: told.f_blocks.saturating_mul(told.f_frsize),
        })
    }

    /// Whether no more may be stored, where `reserve_bytes` are to stay free.
    pub(crate) fn is_used_up(self, reserve_bytes: u64) -> bool {
        self.free_bytes < reserve_bytes.min(self.all_bytes / RESERVE_SHARE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_disk_is_used_to_its_last_twentieth() {
        let room = |free_bytes, all_bytes| Room {
            free_bytes,
            all_bytes,
        };
        assert!(room(99, 1_000_000).is_used_up(100));
        assert!(!room(100, 1_000_000).is_used_up(100));
        assert!(!room(50, 1_000).is_used_up(100));
        assert!(room(49, 1_000).is_used_up(100));
        assert!(!room(0, 1_000).is_used_up(0));
    }
}
