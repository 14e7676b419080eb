//! Decides whether a draft, and how much of it, is worth a call of its own to an engine that generates by itself.
//!
//! Such an engine streams tokens at a steady pace. To verify a draft, the caller ends the stream, makes a call that
//! checks the draft as a part of a prompt, and starts a new stream after the accepted tokens. The call brings the
//! accepted tokens and the target's own token at once. But it has a price that decoding has not: a fixed part, and a
//! part for each prompt and token that it carries. The new stream is also silent for a while before its first token.
//! So a call pays if the stream would have needed longer for the expected tokens than all of that takes.
//!
//! This module has no constants: the caller measures the pace of streams and the price of calls.

/// A draft that could be verified in one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallOffer<'a> {
    /// The path probability of each node of the draft, parents first and never above their parents': see
    /// [`path_probabilities`](refrain_speculation::statistics::AcceptanceStatistics::path_probabilities).
    pub(super) tree: &'a [f32],
    /// The node that ends the output if it is accepted, if there is one. No stream is needed after it.
    pub(super) ends_with: Option<u32>,
    /// Most nodes.
    pub(super) nodes_max: u32,
}

/// The pace of the engine's streams.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StreamPace {
    /// Seconds per token.
    pub(super) token_s: f64,
    /// Seconds that a stream is silent before its first token, beyond `token_s`.
    pub(super) restart_s: f64,
    /// Whether there is a stream now. If not, one must be started anyway, with or without a call before it.
    pub(super) is_streaming: bool,
}

/// The best call for a draft.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CallWorth {
    /// The nodes that it verifies, ascending. They are a tree.
    pub(super) nodes: Vec<u32>,
    /// Expected number of accepted draft tokens.
    pub(super) expected: f32,
    /// Seconds that it is expected to save; at most 0 if it does not pay.
    pub(super) saved_s: f64,
}

impl CallWorth {
    /// Whether the call is expected to be quicker than the stream.
    pub(super) fn pays(&self) -> bool {
        self.saved_s > 0.0
    }
}

/// Chooses the part of a draft whose call saves most time. If no call saves time, it chooses the part with the
/// highest ratio of the stream's seconds to the call's. `call_s(nodes)` is the seconds of a call with so many nodes.
/// `None` without a node.
///
/// Probabilities never rise along a path, so the most probable nodes are a tree. Every number of them is tried, since
/// a call with a high fixed price pays only for long drafts.
pub(super) fn best_call(
    offer: &CallOffer<'_>,
    pace: &StreamPace,
    call_s: impl Fn(u32) -> f64,
) -> Option<CallWorth> {
    let mut order: Vec<u32> = (0..offer.tree.len() as u32).collect();
    // The sort is stable, so parents stay before children that are equally probable.
    order.sort_by(|a, b| offer.tree[*b as usize].total_cmp(&offer.tree[*a as usize]));
    order.truncate(offer.nodes_max as usize);
    let mut best: Option<(Weighed, usize)> = None;
    let mut expected = 0.0f64;
    let mut restarts = if pace.is_streaming { 1.0 } else { 0.0 };
    for (at, node) in order.iter().enumerate() {
        let chance = f64::from(offer.tree[*node as usize]);
        expected += chance;
        if offer.ends_with == Some(*node) {
            restarts -= chance;
        }
        let weighed = Weighed {
            expected,
            stream_s: (1.0 + expected) * pace.token_s,
            call_s: call_s(at as u32 + 1) + restarts * pace.restart_s,
        };
        if best
            .as_ref()
            .is_none_or(|(other, _)| weighed.is_better(other))
        {
            best = Some((weighed, at + 1));
        }
    }
    let (weighed, count) = best?;
    order.truncate(count);
    order.sort_unstable();
    Some(CallWorth {
        nodes: order,
        expected: weighed.expected as f32,
        saved_s: weighed.saved_s(),
    })
}

/// A part of a draft.
#[derive(Clone, Copy, Debug)]
struct Weighed {
    expected: f64,
    /// Seconds that the stream would take for its tokens.
    stream_s: f64,
    /// Seconds that a call takes for them.
    call_s: f64,
}

impl Weighed {
    fn saved_s(&self) -> f64 {
        self.stream_s - self.call_s
    }

    fn is_better(&self, other: &Weighed) -> bool {
        if self.saved_s() > 0.0 || other.saved_s() > 0.0 {
            return self.saved_s() > other.saved_s();
        }
        // Neither call pays, so both take more than 0 seconds.
        self.stream_s * other.call_s > other.stream_s * self.call_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: StreamPace = StreamPace {
        token_s: 0.002,
        restart_s: 0.010,
        is_streaming: true,
    };

    fn chain(chance: f32, len: usize) -> Vec<f32> {
        (1..=len as i32).map(|depth| chance.powi(depth)).collect()
    }

    fn offer(tree: &[f32]) -> CallOffer<'_> {
        CallOffer {
            tree,
            ends_with: None,
            nodes_max: 64,
        }
    }

    fn priced(fixed: f64, per_node: f64) -> impl Fn(u32) -> f64 {
        move |nodes| fixed + per_node * f64::from(nodes)
    }

    #[test]
    fn long_sure_drafts_pay_and_short_or_doubtful_ones_do_not() {
        let call = || priced(0.008, 0.0002);
        let sure = chain(0.998, 32);
        let worth = best_call(&offer(&sure), &PACE, call()).unwrap();
        assert!(worth.pays());
        assert_eq!(worth.nodes.len(), 32);
        let by_hand = (1.0 + f64::from(worth.expected)) * 0.002 - (0.008 + 32.0 * 0.0002) - 0.010;
        assert!((worth.saved_s - by_hand).abs() < 1e-9);
        for tree in [chain(0.998, 4), chain(0.6, 32), chain(0.01, 1)] {
            let worth = best_call(&offer(&tree), &PACE, call()).unwrap();
            assert!(!worth.pays(), "{worth:?}");
        }
        assert_eq!(best_call(&offer(&[]), &PACE, call()), None);
    }

    #[test]
    fn what_makes_a_call_dearer_makes_it_shorter_or_not_made() {
        let tree = chain(0.9, 64);
        let nodes = |per_node: f64| {
            let worth = best_call(&offer(&tree), &PACE, priced(0.0, per_node)).unwrap();
            (worth.pays(), worth.nodes.len())
        };
        let (cheap, dear) = (nodes(0.0001), nodes(0.0003));
        assert!(cheap.0 && dear.0 && cheap.1 > dear.1, "{cheap:?} {dear:?}");
        assert!(!nodes(0.004).0);
    }

    #[test]
    fn a_stream_that_must_be_started_anyway_or_never_again_is_not_charged() {
        let tree = chain(0.99, 8);
        let call = || priced(0.012, 0.0);
        assert!(!best_call(&offer(&tree), &PACE, call()).unwrap().pays());
        let between = StreamPace {
            is_streaming: false,
            ..PACE
        };
        assert!(best_call(&offer(&tree), &between, call()).unwrap().pays());
        let last = CallOffer {
            ends_with: Some(7),
            ..offer(&tree)
        };
        assert!(best_call(&last, &PACE, call()).unwrap().pays());
    }

    #[test]
    fn what_is_chosen_is_a_tree_and_the_best_of_all_sizes() {
        // Two children of the root, each with a child.
        let tree = [0.6, 0.3, 0.5, 0.25];
        let parents = [None, None, Some(0), Some(1)];
        for fixed in [0.0, 0.001, 0.004, 0.02] {
            for per_node in [0.0, 0.0004, 0.001, 0.003] {
                let pace = StreamPace {
                    restart_s: 0.0,
                    ..PACE
                };
                let worth = best_call(&offer(&tree), &pace, priced(fixed, per_node)).unwrap();
                for node in &worth.nodes {
                    let parent: Option<u32> = parents[*node as usize];
                    assert!(parent.is_none_or(|parent| worth.nodes.contains(&parent)));
                }
                let most = [0.6, 1.1, 1.4, 1.65]
                    .iter()
                    .enumerate()
                    .map(|(at, sum)| (1.0 + sum) * 0.002 - fixed - per_node * (at + 1) as f64)
                    .fold(f64::NEG_INFINITY, f64::max);
                if most > 1e-9 {
                    assert!((worth.saved_s - most).abs() < 1e-8, "{worth:?} {most}");
                } else {
                    assert!(worth.saved_s < 1e-8);
                }
            }
        }
        let few = CallOffer {
            nodes_max: 2,
            ..offer(&tree)
        };
        let worth = best_call(&few, &PACE, priced(0.0, 0.0)).unwrap();
        assert_eq!(worth.nodes, [0, 2]);
    }
}
