//! Groups of samples in a commit.

use crate::catalog::GroupUpdate;
use crate::record::DocumentKey;
use crate::writer::edit::Edit;

impl Edit<'_> {
    /// Adds an update of a document to its group, if that is registered.
    pub(in crate::writer) fn enrol(&mut self, key: DocumentKey, group: &str, update: GroupUpdate) {
        let tokens_max = self.group_tokens_max;
        let enrolment = self.catalog.groups.enrol(key, group, update, tokens_max);
        self.outcome.group_rejections.extend(enrolment.refused);
        if let Some(key) = enrolment.leaving {
            let sequence = self.next_sequence();
            self.catalog.groups.depart(key, sequence, true);
        }
        if enrolment.is_new {
            // Readers of the group may be past the document's earlier changes. So they get all of it as one change.
            self.catalog.settle(key);
        }
    }
}
