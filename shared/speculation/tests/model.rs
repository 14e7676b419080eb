//! Against the naive truth: Algorithm 1 as it is printed, over an index that scans everything; and plain
//! decoding, which no draft may change.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use proptest::prelude::*;
use refrain_speculation::draft::{
    Candidate, DraftNode, DraftTree, Expansion, Lookup, Origin, ProposeParams, Scope, Source,
    propose, propose_valued,
};
use refrain_speculation::statistics::AcceptanceStatistics;
use refrain_speculation::verify::walk;
use refrain_suffix_index::oracle::Oracle;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, Token};

/// A node of a naive tree: token, parent, D, path from the root.
type NaiveNode = (Token, Option<u32>, f32, Vec<Token>);

/// Children of a node that are likely enough, in the crate's order: frequent first, then by token.
fn naive_children(
    oracle: &Oracle,
    pattern: &[Token],
    (parent, d, path): (Option<u32>, f32, &[Token]),
    min_token_prob: f32,
) -> Vec<NaiveNode> {
    let counts = oracle.continuations_of(pattern, path);
    let total: u32 = counts.values().sum();
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|&(token, count)| (std::cmp::Reverse(count), token));
    let child = |(token, count): (Token, u32)| {
        let d = d * (count as f32 / total as f32);
        (token, parent, d, [path, &[token]].concat())
    };
    let mut children: Vec<_> = counts.into_iter().map(child).collect();
    children.retain(|child| child.2 >= min_token_prob);
    children
}

/// The most probable child of a leaf or inner node that is not in the tree yet, over and over; for chains, of the
/// last depth alone. The first of equals is taken: parents as they came in.
fn naive_expand(
    oracle: &Oracle,
    pattern: &[Token],
    params: &ProposeParams,
    depth_max: usize,
    room: usize,
) -> Vec<NaiveNode> {
    let total: u32 = oracle.continuations(pattern).values().sum();
    let shrink = match params.shrinks {
        true => total as f32 / (total as f32 + 1.0),
        false => 1.0,
    };
    let root = (None, shrink, &[][..]);
    let paths = match params.expansion {
        Expansion::Tree => return naive_tree(oracle, pattern, params, depth_max, root),
        Expansion::Linear => 1,
        Expansion::Paths(paths) => paths.max(1),
    };
    let nodes_max = (depth_max * paths).min(params.max_spec_tokens).min(room);
    let mut tree: Vec<NaiveNode> = Vec::new();
    let mut children = naive_children(oracle, pattern, root, params.min_token_prob);
    for _ in 0..depth_max {
        // Stable: among equals the first.
        children.sort_by(|one, other| other.2.total_cmp(&one.2));
        children.truncate(paths.min(nodes_max - tree.len()));
        let parents = tree.len() as u32..;
        let last = std::mem::take(&mut children);
        for (parent, node) in parents.zip(&last) {
            let parent = (Some(parent), node.2, &node.3[..]);
            children.extend(naive_children(
                oracle,
                pattern,
                parent,
                params.min_token_prob,
            ));
        }
        tree.extend(last);
    }
    tree
}

fn naive_tree(
    oracle: &Oracle,
    pattern: &[Token],
    params: &ProposeParams,
    nodes_max: usize,
    root: (Option<u32>, f32, &[Token]),
) -> Vec<NaiveNode> {
    let mut tree: Vec<NaiveNode> = Vec::new();
    let mut open = naive_children(oracle, pattern, root, params.min_token_prob);
    while tree.len() < nodes_max && !open.is_empty() {
        let best = (1..open.len()).fold(
            0,
            |best, at| {
                if open[at].2 > open[best].2 { at } else { best }
            },
        );
        let node = open.remove(best);
        let parent = (Some(tree.len() as u32), node.2, &node.3[..]);
        open.extend(naive_children(
            oracle,
            pattern,
            parent,
            params.min_token_prob,
        ));
        tree.push(node);
    }
    tree
}

type NaiveCandidate = (f32, Scope, Vec<(Token, Option<u32>, f32)>);

/// MAX_SPEC of a pattern.
fn naive_max_spec(params: &ProposeParams, len: usize, room: usize) -> usize {
    let wanted = (params.alpha.max(0.0) * len as f32 + params.offset).max(0.0);
    let capped = match params.match_plus_draft_cap {
        Some(cap) => (cap as usize).saturating_sub(len),
        None => usize::MAX,
    };
    let limits = [wanted as usize, capped, params.max_spec_tokens, room];
    limits.into_iter().min().unwrap_or(0)
}

fn naive_propose(
    sources: &[(Scope, &Oracle)],
    context: &[Token],
    params: &ProposeParams,
    room: usize,
) -> Option<NaiveCandidate> {
    let mut best: Option<NaiveCandidate> = None;
    for (scope, oracle) in sources {
        let longest = context.len().min(params.max_pattern as usize);
        for len in (params.min_match_len.max(1) as usize..=longest).rev() {
            let pattern = &context[context.len() - len..];
            let depth_max = naive_max_spec(params, len, room);
            let tree = naive_expand(oracle, pattern, params, depth_max, room);
            let score = tree.iter().fold(1.0, |sum, node| sum + node.2);
            if !tree.is_empty() && best.as_ref().is_none_or(|best| score > best.0) {
                best = Some((
                    score,
                    *scope,
                    tree.into_iter()
                        .map(|node| (node.0, node.1, node.2))
                        .collect(),
                ));
            }
        }
    }
    best
}

fn some_tokens(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Token>> {
    prop::collection::vec(0u32..3, len)
}

fn some_documents() -> impl Strategy<Value = Vec<Vec<Token>>> {
    prop::collection::vec(some_tokens(0..12), 0..4)
}

fn some_params() -> impl Strategy<Value = ProposeParams> {
    (
        prop_oneof![
            2 => Just(Expansion::Linear),
            2 => Just(Expansion::Tree),
            1 => (0usize..4).prop_map(Expansion::Paths),
        ],
        prop_oneof![Just(0.0f32), Just(0.5), Just(1.0), Just(2.5)],
        prop_oneof![Just(-1.0f32), Just(0.0), Just(1.0), Just(3.0)],
        1usize..10,
        prop_oneof![Just(0.0f32), Just(0.1), Just(0.3)],
        0u32..3,
        1u32..8,
        prop_oneof![2 => Just(None), 1 => (0u32..8).prop_map(Some)],
        any::<bool>(),
    )
        .prop_map(
            |(
                expansion,
                alpha,
                offset,
                max_spec_tokens,
                min_token_prob,
                min_match_len,
                max_pattern,
                match_plus_draft_cap,
                shrinks,
            )| {
                ProposeParams {
                    expansion,
                    alpha,
                    offset,
                    max_spec_tokens,
                    min_token_prob,
                    min_match_len,
                    max_pattern,
                    match_plus_draft_cap,
                    shrinks,
                    max_fan_out: usize::MAX,
                    samples_max: usize::MAX,
                    price: None,
                }
            },
        )
}

/// The same documents in an index and in the oracle. `seals` says after how many documents something is sealed, and
/// which bit of the documents' numbers are sealed then.
fn both(documents: &[Vec<Token>], seals: &[(usize, u32)]) -> (Index, Oracle) {
    let (mut index, mut oracle) = (Index::new(IndexConfig::default()), Oracle::default());
    for (number, document) in documents.iter().enumerate() {
        let key = DocumentKey(number as u128);
        let (left, output) = document.split_at(document.len() / 4);
        index.open(key, left).expect("a new key");
        index.append(key, output).expect("open");
        oracle.open(key, left);
        oracle.append(key, output);
        for (_, bits) in seals.iter().filter(|(after, _)| *after == number) {
            index.seal(|key| bits >> key.0 & 1 == 1).expect("room");
        }
    }
    for key in oracle.keys() {
        oracle.set_sealed(key, index.is_sealed(key));
    }
    (index, oracle)
}

fn some_seals() -> impl Strategy<Value = Vec<(usize, u32)>> {
    prop::collection::vec((0usize..4, 0u32..16), 0..4)
}

fn any_tree() -> impl Strategy<Value = DraftTree> {
    prop::collection::vec((0u32..3, prop::option::of(0u32..8)), 0..16).prop_map(|nodes| {
        let origin = Origin {
            source: Source::Eagle3,
            scope: Scope::Request,
            place: None,
        };
        let candidate =
            |nodes: &[DraftNode]| Candidate::new(nodes.to_vec(), 1, Source::Eagle3, Scope::Request);
        let mut fitting: Vec<DraftNode> = Vec::new();
        for (token, parent) in nodes {
            fitting.push(DraftNode {
                token,
                parent,
                probability: 0.5,
                count: 0,
                match_len: 1,
                witnesses: None,
                origin,
            });
            // Those that do not fit are left out.
            if candidate(&fitting).is_none() {
                fitting.pop();
            }
        }
        candidate(&fitting).map_or_else(DraftTree::default, |candidate| candidate.tree)
    })
}

/// A made-up model: the next token is a function of everything before it.
fn model(salt: u64, text: &[Token]) -> Token {
    let hash = text.iter().fold(salt, |hash, &token| {
        (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    });
    (hash >> 61) as Token % 3
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6 * ProptestConfig::default().cases))]

    #[test]
    fn proposals_are_those_of_the_printed_algorithm(
        local in some_documents(),
        global in some_documents(),
        (local_seals, global_seals) in (some_seals(), some_seals()),
        context in some_tokens(0..10),
        params in some_params(),
        room in 0usize..12,
    ) {
        let ((local, local_oracle), (global, global_oracle)) = (both(&local, &local_seals), both(&global, &global_seals));
        let lookups = [
            Lookup { source: Source::Suffix, scope: Scope::Tenant, index: &global, cursor: global.start(&context), context: &context },
            Lookup { source: Source::Suffix, scope: Scope::Group, index: &local, cursor: local.start(&context), context: &context },
        ];
        let found = propose(&lookups, &params, room);
        let sources = [(Scope::Group, &local_oracle), (Scope::Tenant, &global_oracle)];
        let expected = naive_propose(&sources, &context, &params, room);
        let found = found.map(|found| {
            let nodes = found.tree.nodes();
            assert_eq!(found.score, nodes.iter().fold(1.0, |sum, node| sum + node.probability));
            let nodes = nodes.iter().map(|node| (node.token, node.parent, node.probability));
            (found.score, found.scope, nodes.collect())
        });
        prop_assert_eq!(found, expected);
    }

    /// A tree of several matches is a tree within the room, whose nodes are not likelier than their parents, nor
    /// siblings together than one.
    #[test]
    fn merged_drafts_are_trees_within_the_room(
        local in some_documents(),
        global in some_documents(),
        (local_seals, global_seals) in (some_seals(), some_seals()),
        context in some_tokens(0..10),
        params in some_params(),
        price in 0.0f32..1.0,
        emitted in some_tokens(0..4),
        room in 0usize..12,
    ) {
        let ((local, _), (global, _)) = (both(&local, &local_seals), both(&global, &global_seals));
        let lookups = [
            Lookup { source: Source::Suffix, scope: Scope::Tenant, index: &global, cursor: global.start(&context), context: &context },
            Lookup { source: Source::Suffix, scope: Scope::Group, index: &local, cursor: local.start(&context), context: &context },
        ];
        let params = ProposeParams { price: Some(price), ..params };
        let mut statistics = AcceptanceStatistics::default();
        for _ in 0..3 {
            let Some(found) = propose_valued(&lookups, &params, Some(&statistics), room) else {
                break;
            };
            let nodes = found.tree.nodes();
            prop_assert!(nodes.len() <= room.min(params.max_spec_tokens));
            let again = Candidate::new(nodes.to_vec(), found.match_len, found.source, found.scope);
            let again = again.map(|again| Candidate { after: found.after, ..again });
            prop_assert_eq!(again.as_ref(), Some(&found));
            prop_assert_eq!(found.after, context.last().copied());
            let above = |node: &DraftNode| node.parent.map_or(1.0, |parent| nodes[parent as usize].probability);
            for node in nodes {
                prop_assert!(node.probability > 0.0 && node.probability <= above(node));
                let siblings = nodes.iter().filter(|other| other.parent == node.parent);
                let sum: f32 = siblings.map(|other| other.probability).sum();
                // Each wrong guess more keeps a little.
                prop_assert!(sum <= 1.2 * above(node), "{}", sum / above(node));
            }
            statistics.observe(&found, &emitted);
        }
    }

    /// Output with drafts is output without, whatever is drafted.
    #[test]
    fn drafts_never_change_the_output(trees in prop::collection::vec(any_tree(), 1..8), salt in any::<u64>()) {
        let mut text = Vec::new();
        for tree in &trees {
            let walk = walk(tree, |_, path| Some(model(salt, &[text.as_slice(), path].concat())));
            // The accepted nodes are a path from the root, and as long as the target allows.
            prop_assert_eq!(walk.emitted.len(), walk.accepted.len() + 1);
            let mut parent = None;
            for (&node, &token) in walk.accepted.iter().zip(&walk.emitted) {
                let node_there = tree.nodes()[node as usize];
                prop_assert_eq!((node_there.parent, node_there.token), (parent, token));
                parent = Some(node);
            }
            prop_assert_eq!(tree.child(parent, *walk.emitted.last().expect("never empty")), None);
            text.extend(walk.emitted);
        }
        let mut plain = Vec::new();
        while plain.len() < text.len() {
            plain.push(model(salt, &plain));
        }
        prop_assert_eq!(text, plain);
    }
}
