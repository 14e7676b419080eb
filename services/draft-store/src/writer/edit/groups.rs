//! Groups of samples in a commit.

use crate::record::DocumentKey;
use crate::writer::edit::Edit;
use crate::writer::requests::GroupRegistration;

impl Edit<'_> {
    /// Adds a document to its group, if that is registered.
    pub(in crate::writer) fn enrol(
        &mut self,
        key: DocumentKey,
        group: &str,
        weight_version: u64,
        len: u32,
    ) {
        let tokens_max = self.limits.group_tokens_max;
        let groups = self.catalog.groups_mut();
        let enrolment = groups.enrol(key, group, weight_version, len, tokens_max);
        self.outcome.group_rejections += u64::from(enrolment.is_full);
        self.leave_groups(enrolment.leaving);
    }

    /// Registers a group.
    pub(in crate::writer) fn register_group(&mut self, registration: GroupRegistration) {
        let sequence = self.next_sequence();
        let leaving = self.catalog.groups_mut().register(
            registration.group,
            sequence,
            self.now_ms.saturating_add(registration.ttl_ms),
            registration.weight_version,
        );
        self.leave_groups(leaving);
    }

    fn leave_groups(&mut self, leaving: Vec<DocumentKey>) {
        for key in leaving {
            let sequence = self.next_sequence();
            self.catalog.groups_mut().depart(key, sequence, true);
        }
    }
}
