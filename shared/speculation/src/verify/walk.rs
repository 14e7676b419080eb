//! The lossless acceptance rule for drafts that are certain tokens.

use refrain_suffix_index::Token;

use crate::candidate::DraftTree;

/// The outcome of the verification of one tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walk {
    /// Indices of the accepted nodes, from the root down.
    pub accepted: Vec<u32>,
    /// Their tokens, then the target's own token. The list is empty only if the first draw is not known.
    pub emitted: Vec<Token>,
}

/// Draws the target's token at each node once. The walk descends while the token is a child of the node, and ends
/// with the first token that is not.
///
/// Drafts decide only how many tokens one forward pass emits. Each emitted token is the target's own draw after those
/// before it, so the output is that of plain decoding, for greedy decoding and for any sampling. (A draft is a point
/// mass, which the rule of Leviathan et al., arXiv 2211.17192, accepts with exactly the probability that the target
/// gives it.)
///
/// `target(node, path)` is the token that the target draws after the context and `path`, which leads to `node`. At
/// the root there is no node. The walk stops before a draw that is not known, and keeps the emitted tokens, since no
/// draw depends on a later one. It may emit nothing.
pub fn walk(
    tree: &DraftTree,
    mut target: impl FnMut(Option<u32>, &[Token]) -> Option<Token>,
) -> Walk {
    let mut walk = Walk::default();
    let mut at = None;
    while let Some(token) = target(at, &walk.emitted) {
        walk.emitted.push(token);
        let Some(child) = tree.child(at, token) else {
            break;
        };
        walk.accepted.push(child);
        at = Some(child);
    }
    walk
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candidate::Scope;
    use crate::testing::drafted_once;

    /// 5 and 6 under the root, 7 and 8 under the 5.
    fn tree() -> DraftTree {
        let nodes = [(5, None), (6, None), (7, Some(0)), (8, Some(0))];
        drafted_once(Scope::Tenant, 4, &nodes).tree
    }

    /// The walk of a target that has drawn under the root, then under each node. `None`, or an end of the list, is a
    /// draw that is not known.
    fn walk_drawn(drawn: &[Option<Token>]) -> Walk {
        let place = |at: Option<u32>| at.map_or(0, |node| node as usize + 1);
        walk(&tree(), |at, _| drawn.get(place(at)).copied().flatten())
    }

    #[test]
    fn draws_that_are_known_are_walked_and_others_end_the_walk() {
        type Case<'a> = (&'a [Option<Token>], &'a [u32], &'a [Token]);
        let cases: [Case<'_>; 7] = [
            (
                &[Some(5), Some(8), None, None, Some(9)],
                &[0, 3],
                &[5, 8, 9],
            ),
            (&[Some(6), Some(8), Some(1), None, None], &[1], &[6, 1]),
            (&[Some(4), Some(8), Some(1), None, None], &[], &[4]),
            // The target's own last token is not known.
            (&[Some(5), Some(7), None, None, Some(9)], &[0, 2], &[5, 7]),
            (&[Some(5)], &[0], &[5]),
            (&[None, Some(8), None, None, Some(9)], &[], &[]),
            (&[], &[], &[]),
        ];
        for (drawn, accepted, emitted) in cases {
            let walk = walk_drawn(drawn);
            assert_eq!((&*walk.accepted, &*walk.emitted), (accepted, emitted));
        }
    }

    #[test]
    fn a_target_is_told_the_path_to_the_node() {
        let mut told = Vec::new();
        let target = |node, path: &[Token]| {
            told.push((node, path.to_vec()));
            Some([5, 7, 1][path.len().min(2)])
        };
        let walked = walk(&tree(), target);
        assert_eq!(
            (&*walked.accepted, &*walked.emitted),
            (&[0, 2][..], &[5, 7, 1][..])
        );
        let expected = [(None, vec![]), (Some(0), vec![5]), (Some(2), vec![5, 7])];
        assert_eq!(told, expected);
    }
}
