//! The share of rollouts: interactive requests go first, except where rollouts would have less than their share.
//!
//! With many slots, rollouts keep a number of them. With so few that the share is less than one slot, that rule would
//! give rollouts all or nothing. There they get a share of the turns instead, which count while both classes wait.
//!
//! A tenant that calls everything interactive would be first for ever. So its interactive requests go before rollouts
//! of other tenants only while it is ahead of them by no more than a lead ([`ClassRules::interactive_lead`]). Past it
//! they take the turns of the tenant as its rollouts would. Its own rollouts always come after them.

use refrain_protocol::scheduling::RequestClass;

/// Both classes, in the order of [`index`].
pub(super) const CLASSES: [RequestClass; 2] = [RequestClass::Interactive, RequestClass::Rollout];

/// The place of a class in arrays of two.
pub(super) fn index(class: RequestClass) -> usize {
    match class {
        RequestClass::Interactive => 0,
        RequestClass::Rollout => 1,
    }
}

/// The rules between interactive requests and rollouts.
#[derive(Clone, Copy, Debug)]
pub(in crate::dispatch) struct ClassRules {
    /// The share of the slots that rollouts keep.
    pub(in crate::dispatch) rollout_share: f64,
    /// How much more a tenant may have been charged than one whose rollouts wait, while its interactive requests go
    /// before these. In parts of a token, see `cost`.
    pub(in crate::dispatch) interactive_lead: u64,
}

/// Slots that rollouts keep of all slots of a pool.
pub(super) fn kept_slots(rollout_share: f64, slots: u64) -> u64 {
    (rollout_share * slots as f64) as u64
}

/// The slots that were granted while both classes waited.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turns {
    all: u64,
    rollouts: u64,
}

impl Turns {
    /// Notes a grant. `both_wait` says that requests of both classes waited for the slot.
    pub(super) fn note(&mut self, class: RequestClass, both_wait: bool) {
        if !both_wait {
            // Nobody saves up turns while the other class is away.
            *self = Turns::default();
            return;
        }
        self.all += 1;
        self.rollouts += u64::from(class == RequestClass::Rollout);
    }

    /// The classes in the order in which they are served.
    pub(super) fn order(
        &self,
        rollout_share: f64,
        slots: u64,
        rollouts_running: u64,
    ) -> [RequestClass; 2] {
        let kept = kept_slots(rollout_share, slots);
        let rollouts_first = match kept {
            0 => (self.rollouts + 1) as f64 <= rollout_share * (self.all + 1) as f64,
            kept => rollouts_running < kept,
        };
        match rollouts_first {
            true => [RequestClass::Rollout, RequestClass::Interactive],
            false => CLASSES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rollouts_keep_slots_where_there_are_enough() {
        let first = |slots, running| Turns::default().order(0.25, slots, running)[0];
        assert_eq!(first(8, 1), RequestClass::Rollout);
        assert_eq!(first(8, 2), RequestClass::Interactive);
        assert_eq!(first(4, 0), RequestClass::Rollout);
        assert_eq!(
            Turns::default().order(0.0, 8, 0)[0],
            RequestClass::Interactive
        );
    }

    #[test]
    fn with_few_slots_rollouts_get_a_share_of_the_turns() {
        let mut turns = Turns::default();
        let mut served = Vec::new();
        for _ in 0..8 {
            let class = turns.order(0.25, 1, 0)[0];
            turns.note(class, true);
            served.push(index(class));
        }
        assert_eq!(served, [0, 0, 0, 1, 0, 0, 0, 1]);
        turns.note(RequestClass::Interactive, false);
        assert_eq!(turns.order(0.5, 1, 0)[0], RequestClass::Interactive);
    }
}
