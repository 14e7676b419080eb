//! Whether the files of the log may hold what the store has removed.
//!
//! A removed record stays in the files until they are rewritten. So an erasure has them rewritten, also when it hits
//! no document: one that it would have hit may have been evicted before. Only while nothing at all was removed since
//! the files were written there is nothing to clear, and the erasure leaves them alone.
//!
//! This is known for as long as the log is open. After a restart the files may hold anything.

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remains {
    in_log: bool,
    /// The same of the copy that a rewrite makes.
    in_copy: bool,
}

impl Remains {
    /// Those of a log that was opened. `is_new` says that nothing was ever in it.
    pub(crate) fn of_opened(is_new: bool) -> Self {
        Remains {
            in_log: !is_new,
            in_copy: !is_new,
        }
    }

    /// Something was removed.
    pub(crate) fn note_removal(&mut self) {
        (self.in_log, self.in_copy) = (true, true);
    }

    /// A copy begins, which gets nothing that was removed so far.
    pub(crate) fn begin_copy(&mut self) {
        self.in_copy = false;
    }

    /// The copy has taken the place of the log, and the files of the log are deleted.
    pub(crate) fn end_copy(&mut self) {
        self.in_log = self.in_copy;
    }

    /// Whether the files may hold something that was removed.
    pub(crate) fn are_in_log(self) -> bool {
        self.in_log
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_copy_without_removals_in_between_clears_the_log() {
        let mut remains = Remains::of_opened(true);
        assert!(!remains.are_in_log());
        remains.note_removal();
        assert!(remains.are_in_log());
        remains.begin_copy();
        assert!(remains.are_in_log(), "until the old files are gone");
        remains.end_copy();
        assert!(!remains.are_in_log());
        remains.begin_copy();
        remains.note_removal();
        remains.end_copy();
        assert!(remains.are_in_log(), "the copy may have it");
    }

    #[test]
    fn a_log_of_an_earlier_opening_may_hold_anything() {
        let mut remains = Remains::of_opened(false);
        assert!(remains.are_in_log());
        // The report of a rewrite that began before the opening.
        remains.end_copy();
        assert!(remains.are_in_log());
    }
}
