//! The order of a tenant's waiting rollouts, as pure functions of what is known about their lengths.
//!
//! A rollout ends with its slowest request, so the longest outputs should start first. Lengths are unknown, but the
//! samples of one prompt resemble each other (Seer, arXiv 2511.14617, Algorithm 2). So one *probe* of each group goes
//! first, and the others of the group are ordered by what the finished ones had.
//!
//! That order can lose against plain arrival, for three reasons, and `auto` has an answer to each:
//!
//! * Probes by the fewest tokens first make all probes progress equally, so none of them ends early, and each change
//!   of turns reads a context again. In `auto`, a request that has started goes before one that has not.
//! * Estimates within the spread of a group order by noise. `auto` compares them in steps of half an octave.
//! * Where the samples of a prompt do not resemble each other, the order is noise altogether. So `auto` goes by
//!   arrival until [`Evidence`] says that an order by lengths pays.

mod correlation;
mod evidence;
mod windows;

pub(crate) use self::evidence::Evidence;
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
    /// Most output tokens.
    pub(crate) max_new_tokens: u32,
    /// The length of earlier outputs to the same prompt, or the true length for [`OrderPolicy::Oracle`].
    pub(crate) expected_tokens: Option<u32>,
    /// It is the one request of its group that finds out how long its outputs are.
    pub(crate) is_probe: bool,
    /// `None` for a request without a group.
    pub(crate) group: Option<GroupLengths>,
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
}

/// Ranks a rollout that arrived in the window.
pub(crate) fn rank(policy: OrderPolicy, window_ms: u64, facts: &Facts) -> Rank {
    let known = facts.estimate(policy);
    let estimate = known.unwrap_or(facts.max_new_tokens);
    let is_probe = facts.is_probe && known.is_none();
    let (tier, value) = match policy {
        OrderPolicy::Arrival => return Rank::default(),
        OrderPolicy::Context | OrderPolicy::History if is_probe => (0, facts.generated_tokens),
        OrderPolicy::Context | OrderPolicy::History => (1, u32::MAX - estimate),
        OrderPolicy::Auto if facts.generated_tokens > 0 => (0, 0),
        OrderPolicy::Auto if is_probe => (1, 0),
        OrderPolicy::Auto => (2, u32::MAX - half_octave(estimate)),
        OrderPolicy::Oracle => (0, u32::MAX - estimate),
    };
    Rank {
        window_ms,
        tier,
        value,
    }
}

/// The step of a length on a scale of half octaves.
fn half_octave(tokens: u32) -> u32 {
    (2.0 * f64::from(tokens.max(1)).log2()).round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order in which the policy serves requests, by name.
    fn ordered(policy: OrderPolicy, requests: &[(&'static str, Facts)]) -> String {
        let mut names: Vec<_> = requests.to_vec();
        names.sort_by_key(|(_, facts)| rank(policy, 0, facts));
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
    fn an_earlier_window_goes_first() {
        let long = facts(0, false, Some(900));
        let short = facts(0, false, Some(9));
        for policy in [OrderPolicy::Context, OrderPolicy::Auto] {
            assert!(rank(policy, 1, &short) < rank(policy, 2, &long));
        }
    }
}
