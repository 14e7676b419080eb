//! The order of a tenant's waiting rollouts, as pure functions of what is known about their lengths and drafts.
//!
//! A rollout ends with its slowest request, so the longest outputs should start first. Lengths are unknown, but the
//! samples of one prompt resemble each other (Seer, arXiv 2511.14617, Algorithm 2). So one *probe* of each group goes
//! first, and the others of the group are ordered by what the finished ones had.
//!
//! That order can lose against plain arrival, for three reasons, and `auto` has an answer to each:
//!
//! * Probes by the fewest tokens first make all probes progress equally, so none of them ends early, and each change
//!   of turns reads a context again. In `auto`, a request that has started goes before one that has not.
//! * An estimate is the longest of the outputs that happened to finish first. Where a long member hides in a group
//!   that looks short, it would start last of all. So `auto` divides the estimate by the number of the member: each
//!   group has some members early, and a long group has more of them.
//! * Where the samples of a prompt do not resemble each other, the order is noise altogether. So `auto` asks for
//!   lengths when [`Evidence`] says that they pay.
//!
//! Members of a group that run one after the other also have each other's outputs to draft from, which those that run
//! at once lack. Where drafts gain by that, `auto` divides by the number of the member as well: the first members of
//! all groups go first, then the second ones, and so on. This needs no estimate of lengths. Where neither pays,
//! `auto` goes by arrival.

mod correlation;
mod evidence;
mod references;
mod windows;

pub(crate) use self::evidence::{Evidence, Pays};
pub(crate) use self::windows::Windows;

use crate::config::OrderPolicy;

/// The rank of a waiting rollout in its tenant's line. The smallest goes first; equal ranks go by arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// The start of the window in which the request arrived, see [`Windows`].
    window_ms: u64,
    tier: u8,
    value: u32,
}

/// The known output lengths of a group, tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupLengths {
    /// The longest finished output.
    pub(crate) finished_max: Option<u32>,
    /// The longest output so far of those that go on.
    pub(crate) running_max: u32,
}

/// The facts about a waiting rollout.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Facts {
    /// Output tokens so far.
    pub(crate) generated_tokens: u32,
    /// Maximum number of output tokens.
    pub(crate) max_new_tokens: u32,
    /// The length of earlier outputs to the same prompt, or the true length for [`OrderPolicy::Oracle`].
    pub(crate) expected_tokens: Option<u32>,
    /// It is the one request of its group that finds out how long its outputs are.
    pub(crate) is_probe: bool,
    /// `None` for a request without a group.
    pub(crate) group: Option<GroupLengths>,
    /// Members of its group that arrived before it.
    pub(crate) number: u32,
}

impl Facts {
    /// The estimate of the whole output. `None` if the limit is all that is known.
    pub(crate) fn estimate(&self, policy: OrderPolicy) -> Option<u32> {
        let finished = self.group.and_then(|group| group.finished_max);
        let known = match policy {
            OrderPolicy::Arrival | OrderPolicy::Context => finished,
            OrderPolicy::History | OrderPolicy::Auto => finished.max(self.expected_tokens),
            OrderPolicy::Oracle => return self.expected_tokens,
        };
        let running = self.group.map_or(0, |group| group.running_max);
        Some(
            known?
                .max(running)
                .max(self.generated_tokens)
                .min(self.max_new_tokens),
        )
    }

    /// Whether a member of its group has finished, so that its drafts can come from that output.
    pub(crate) fn has_reference(&self) -> bool {
        self.group.is_some_and(|group| group.finished_max.is_some())
    }

    /// The claim of a request that has not started to go first, in tokens: its estimate, divided by its number in the
    /// group. Without trust in estimates all groups count alike. Earlier outputs to the same prompt are an estimate
    /// that no finish distorts, so it is divided for the sake of drafts only.
    fn claim(&self, pays: Pays, estimate: u32) -> u32 {
        let whole = if pays.lengths { estimate } else { u32::MAX };
        match pays.references || self.expected_tokens.is_none() {
            true => whole / self.number.saturating_add(1),
            false => whole,
        }
    }
}

/// Ranks a rollout that arrived in the window. Only `auto` asks what pays.
pub(crate) fn rank(policy: OrderPolicy, pays: Pays, window_ms: u64, facts: &Facts) -> Rank {
    let known = facts.estimate(policy);
    let estimate = known.unwrap_or(facts.max_new_tokens);
    let is_probe = facts.is_probe && known.is_none();
    let (tier, value) = match policy {
        OrderPolicy::Arrival => return Rank::default(),
        OrderPolicy::Context | OrderPolicy::History if is_probe => (0, facts.generated_tokens),
        OrderPolicy::Context | OrderPolicy::History => (1, u32::MAX - estimate),
        OrderPolicy::Auto if pays == Pays::default() => return Rank::default(),
        OrderPolicy::Auto if facts.generated_tokens > 0 => (0, 0),
        OrderPolicy::Auto if is_probe => (1, 0),
        OrderPolicy::Auto => (2, u32::MAX - half_octave(facts.claim(pays, estimate))),
        OrderPolicy::Oracle => (0, u32::MAX - estimate),
    };
    Rank {
        window_ms,
        tier,
        value,
    }
}

/// The step of a length on a scale of half octaves. Smaller differences are within the spread of a group.
fn half_octave(tokens: u32) -> u32 {
    (2.0 * f64::from(tokens.max(1)).log2()).round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTHS: Pays = Pays {
        lengths: true,
        references: false,
    };
    const REFERENCES: Pays = Pays {
        lengths: false,
        references: true,
    };

    /// The order in which the policy serves requests, by name.
    fn ordered(policy: OrderPolicy, requests: &[(&'static str, Facts)]) -> String {
        ordered_where(policy, LENGTHS, requests)
    }

    fn ordered_where(
        policy: OrderPolicy,
        pays: Pays,
        requests: &[(&'static str, Facts)],
    ) -> String {
        let mut names: Vec<_> = requests.to_vec();
        names.sort_by_key(|(_, facts)| rank(policy, pays, 0, facts));
        let names: Vec<_> = names.into_iter().map(|(name, _)| name).collect();
        names.join(" ")
    }

    fn facts(generated_tokens: u32, is_probe: bool, finished_max: Option<u32>) -> Facts {
        Facts {
            generated_tokens,
            max_new_tokens: 1_000,
            expected_tokens: None,
            is_probe,
            group: Some(GroupLengths {
                finished_max,
                running_max: 0,
            }),
            number: 0,
        }
    }

    fn nth(number: u32, finished_max: Option<u32>) -> Facts {
        Facts {
            number,
            ..facts(0, number == 0, finished_max)
        }
    }

    #[test]
    fn context_has_probes_by_fewest_tokens_and_the_rest_by_longest_estimate() {
        let requests = [
            ("short", facts(0, false, Some(50))),
            ("unknown", facts(0, false, None)),
            ("long", facts(10, false, Some(700))),
            ("old-probe", facts(400, true, None)),
            ("new-probe", facts(0, true, None)),
        ];
        assert_eq!(
            ordered(OrderPolicy::Context, &requests),
            "new-probe old-probe unknown long short"
        );
        assert_eq!(
            ordered(OrderPolicy::Arrival, &requests),
            "short unknown long old-probe new-probe"
        );
    }

    #[test]
    fn a_longer_running_member_raises_a_known_estimate_only() {
        let of = |finished_max, running_max| {
            let group = Some(GroupLengths {
                finished_max,
                running_max,
            });
            let facts = Facts {
                group,
                ..facts(0, false, None)
            };
            facts.estimate(OrderPolicy::Context)
        };
        assert_eq!(of(Some(100), 300), Some(300));
        assert_eq!(of(Some(400), 300), Some(400));
        assert_eq!(of(None, 300), None);
        assert_eq!(of(Some(5_000), 0), Some(1_000));
    }

    #[test]
    fn history_needs_no_probe_where_a_length_is_expected() {
        let expected = |tokens, is_probe| Facts {
            expected_tokens: Some(tokens),
            ..facts(0, is_probe, None)
        };
        let requests = [
            ("short", expected(80, true)),
            ("long", expected(600, false)),
            ("probe", facts(0, true, None)),
        ];
        assert_eq!(ordered(OrderPolicy::History, &requests), "probe long short");
        assert_eq!(ordered(OrderPolicy::Oracle, &requests), "probe long short");
    }

    #[test]
    fn auto_lets_started_requests_go_on_and_ignores_small_differences() {
        let requests = [
            ("rest-500", facts(0, false, Some(500))),
            ("rest-520", facts(0, false, Some(520))),
            ("rest-100", facts(0, false, Some(100))),
            ("probe", facts(0, true, None)),
            ("started-short", facts(10, false, Some(50))),
            ("rest-unknown", facts(0, false, None)),
            ("started-probe", facts(900, true, None)),
        ];
        assert_eq!(
            ordered(OrderPolicy::Auto, &requests),
            "started-short started-probe probe rest-unknown rest-500 rest-520 rest-100"
        );
    }

    #[test]
    fn auto_takes_more_members_of_long_groups_and_some_of_each() {
        let requests = [
            ("long-1", nth(1, Some(800))),
            ("long-2", nth(2, Some(800))),
            ("long-7", nth(7, Some(800))),
            ("short-1", nth(1, Some(200))),
            ("short-3", nth(3, Some(200))),
            ("unknown-1", nth(1, None)),
            ("probe", nth(0, None)),
        ];
        assert_eq!(
            ordered(OrderPolicy::Auto, &requests),
            "probe unknown-1 long-1 long-2 long-7 short-1 short-3"
        );
        // Where only drafts gain, lengths are not asked.
        assert_eq!(
            ordered_where(OrderPolicy::Auto, REFERENCES, &requests),
            "probe long-1 short-1 unknown-1 long-2 short-3 long-7"
        );
        // By arrival otherwise. No other policy asks what pays.
        let plain = ordered_where(OrderPolicy::Auto, Pays::default(), &requests);
        assert_eq!(plain, ordered(OrderPolicy::Arrival, &requests));
        let context = ordered_where(OrderPolicy::Context, Pays::default(), &requests);
        assert_eq!(context, ordered(OrderPolicy::Context, &requests));
    }

    #[test]
    fn earlier_outputs_are_divided_for_drafts_only() {
        let expected = |number, tokens| Facts {
            expected_tokens: Some(tokens),
            ..nth(number, None)
        };
        let requests = [
            ("short-1", expected(1, 300)),
            ("long-5", expected(5, 900)),
            ("long-0", expected(0, 900)),
        ];
        assert_eq!(
            ordered(OrderPolicy::Auto, &requests),
            "long-5 long-0 short-1"
        );
        let both = Pays {
            lengths: true,
            references: true,
        };
        assert_eq!(
            ordered_where(OrderPolicy::Auto, both, &requests),
            "long-0 short-1 long-5"
        );
    }

    #[test]
    fn an_earlier_window_goes_first() {
        let long = facts(0, false, Some(900));
        let short = facts(0, false, Some(9));
        for policy in [OrderPolicy::Context, OrderPolicy::Auto] {
            assert!(rank(policy, LENGTHS, 1, &short) < rank(policy, LENGTHS, 2, &long));
        }
    }
}
