//! Proposals: the formulas by hand, traps, and Algorithm 1 done naively over the naive index.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use refrain_speculation::draft::{
    Candidate, Expansion, Lookup, ProposeParams, Scope, Source, propose, propose_valued,
};
use refrain_speculation::statistics::AcceptanceStatistics;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, Token};

fn tokens(text: &str) -> Vec<Token> {
    text.bytes().map(Token::from).collect()
}

fn index_of(documents: &[&str]) -> Index {
    let mut index = Index::new(IndexConfig::default());
    for (number, document) in documents.iter().enumerate() {
        index
            .open(DocumentKey(number as u128), &[])
            .expect("a new key");
        index
            .append(DocumentKey(number as u128), &tokens(document))
            .expect("open");
    }
    index
}

fn lookup<'a>(scope: Scope, index: &'a Index, context: &'a [Token]) -> Lookup<'a> {
    Lookup {
        source: Source::Suffix,
        scope,
        index,
        cursor: index.start(context),
        context,
    }
}

fn propose_one(index: &Index, context: &str, params: &ProposeParams) -> Option<Candidate> {
    propose(
        &[lookup(Scope::Tenant, index, &tokens(context))],
        params,
        usize::MAX,
    )
}

/// Each node as path and D, in order.
fn show(candidate: &Candidate) -> String {
    let nodes = candidate.tree.nodes();
    let path = |mut at: usize| {
        let mut path = vec![nodes[at].token as u8 as char];
        while let Some(parent) = nodes[at].parent {
            at = parent as usize;
            path.insert(0, nodes[at].token as u8 as char);
        }
        path.into_iter().collect::<String>()
    };
    let nodes = (0..nodes.len()).map(|at| format!("{}={:.3}", path(at), nodes[at].probability));
    nodes.collect::<Vec<_>>().join(" ")
}

/// Counts after "pq": a 4 (ab 3, ac 1), d 2. n = 6, so the first level is shrunk by 6/7:
/// D(a) = 6/7 * 4/6 = 4/7, D(d) = 6/7 * 2/6 = 2/7, D(ab) = 4/7 * 3/4 = 3/7, D(ac) = 4/7 * 1/4 = 1/7.
const BRANCHES: [&str; 6] = ["pqab", "pqab", "pqab", "pqac", "pqd", "pqd"];

#[test]
fn formulas_by_hand() {
    let index = index_of(&BRANCHES);
    let mut params = ProposeParams {
        alpha: 2.0,
        ..ProposeParams::default()
    };
    let found = propose_one(&index, "pq", &params).expect("a match");
    assert_eq!(show(&found), "a=0.571 ab=0.429 d=0.286 ac=0.143");
    assert!(
        (found.score - 17.0 / 7.0).abs() < 1e-6,
        "1 + 4/7 + 3/7 + 2/7 + 1/7, not {}",
        found.score
    );
    let sum = found
        .tree
        .nodes()
        .iter()
        .fold(1.0, |sum, node| sum + node.probability);
    assert_eq!(
        (found.match_len, found.scope, found.score),
        (2, Scope::Tenant, sum)
    );

    params.expansion = Expansion::Linear;
    let found = propose_one(&index, "pq", &params).expect("a match");
    assert_eq!(show(&found), "a=0.571 ab=0.429");
    assert!((found.score - 2.0).abs() < 1e-6);
}

#[test]
fn draft_size_follows_the_pattern_and_the_room() {
    let index = index_of(&BRANCHES);
    let with = |alpha, offset, max_spec_tokens, room| {
        let params = ProposeParams {
            alpha,
            offset,
            max_spec_tokens,
            ..ProposeParams::default()
        };
        propose(
            &[lookup(Scope::Tenant, &index, &tokens("pq"))],
            &params,
            room,
        )
        .map_or(0, |found| found.tree.len())
    };
    // The longest pattern, "pq", has 2 tokens.
    assert_eq!(with(1.0, 0.0, 32, 99), 2);
    assert_eq!(with(0.5, 0.0, 32, 99), 1);
    assert_eq!(with(1.5, 0.0, 32, 99), 3);
    assert_eq!(with(1.0, 2.0, 32, 99), 4);
    assert_eq!(with(0.4, 0.0, 32, 99), 0);
    assert_eq!(with(2.0, 0.0, 3, 99), 3);
    assert_eq!(with(2.0, 0.0, 32, 1), 1);
    assert_eq!(with(2.0, 0.0, 32, 0), 0);
    assert_eq!(with(f32::NAN, 0.0, 32, 99), 0);
    assert_eq!(with(-1.0, 3.0, 32, 99), 3);
    assert_eq!(with(f32::INFINITY, 0.0, usize::MAX, usize::MAX), 4);
}

#[test]
fn unlikely_nodes_are_left_out() {
    let index = index_of(&BRANCHES);
    let with = |min_token_prob| {
        let params = ProposeParams {
            alpha: 4.0,
            min_token_prob,
            ..ProposeParams::default()
        };
        propose_one(&index, "pq", &params).map_or(String::new(), |found| show(&found))
    };
    assert_eq!(with(0.3), "a=0.571 ab=0.429");
    assert_eq!(with(0.5), "a=0.571");
    assert_eq!(with(0.7), "");
    assert_eq!(with(f32::NAN), "");
}

/// Beams by hand, on the counts above: of "pq", D(a) = 4/7, D(d) = 2/7, D(ab) = 3/7, D(ac) = 1/7.
#[test]
fn paths_are_the_most_probable_of_each_depth() {
    let index = index_of(&BRANCHES);
    let with = |paths, alpha, room| {
        let params = ProposeParams {
            expansion: Expansion::Paths(paths),
            alpha,
            ..ProposeParams::default()
        };
        let lookup = lookup(Scope::Tenant, &index, &[112, 113]);
        propose(&[lookup], &params, room).map_or(String::new(), |found| show(&found))
    };
    assert_eq!(with(1, 1.0, 9), "a=0.571 ab=0.429");
    assert_eq!(with(0, 1.0, 9), "a=0.571 ab=0.429");
    // Two of the two children, then the best two of all grandchildren.
    assert_eq!(with(2, 1.0, 9), "a=0.571 d=0.286 ab=0.429 ac=0.143");
    // MAX_SPEC is the length of a path, not the number of nodes.
    assert_eq!(with(4, 0.5, 9), "a=0.571 d=0.286");
    // The room is the number of nodes.
    assert_eq!(with(2, 1.0, 3), "a=0.571 d=0.286 ab=0.429");
}

/// The rule of indexes of limited depth: what a long match takes is not left for the draft.
#[test]
fn match_and_draft_can_be_capped_together() {
    let index = index_of(&["abcdefghijkl", "zdQ"]);
    let with = |cap| {
        let params = ProposeParams {
            match_plus_draft_cap: cap,
            ..ProposeParams::default()
        };
        propose_one(&index, "abcd", &params).map(|found| (found.match_len, found.tree.len()))
    };
    assert_eq!(with(None), Some((4, 4)));
    assert_eq!(with(Some(8)), Some((4, 4)));
    // "bcd" stands at the same places and may draft more; longer and shorter patterns may draft less.
    assert_eq!(with(Some(6)), Some((3, 3)));
    assert_eq!(with(Some(5)), Some((3, 2)));
    assert_eq!(with(Some(1)), None);
    assert_eq!(with(Some(0)), None);
}

/// Sealed or not, the same is proposed, from the same places.
#[test]
fn sealing_changes_no_proposal() {
    let documents = ["pqabcd", "pqabce", "xpqabcd", "qabzz", "pqd", "pqd"];
    let propose_from = |index: &Index, context: &str, expansion| {
        let params = ProposeParams {
            expansion,
            alpha: 2.0,
            min_token_prob: 0.0,
            ..ProposeParams::default()
        };
        propose_one(index, context, &params).map(|found| {
            let origins: Vec<_> = found
                .tree
                .nodes()
                .iter()
                .map(|node| node.origin.place)
                .collect();
            assert!(origins.iter().all(Option::is_some));
            (show(&found), found.score, found.match_len)
        })
    };
    let live = index_of(&documents);
    for sealed in 1..64u32 {
        let mut index = index_of(&documents);
        index.seal(|key| sealed >> key.0 & 1 == 1).expect("room");
        index.seal(|key| key.0 % 2 == 0).expect("room");
        for context in ["pq", "q", "xpqab", "qab", "Xab", "nothing", ""] {
            for expansion in [Expansion::Linear, Expansion::Tree, Expansion::Paths(2)] {
                assert_eq!(
                    propose_from(&index, context, expansion),
                    propose_from(&live, context, expansion),
                    "{context}, {sealed:b} sealed"
                );
            }
        }
    }
}

/// A sealed document is credited like a live one, at the offset in its output.
#[test]
fn sealed_origins_lead_to_the_documents() {
    let mut index = index_of(&["zzabc", "abcdef"]);
    index.seal(|_| true).expect("room");
    let found = propose_one(&index, "Xabc", &ProposeParams::default()).expect("a match");
    let places = found
        .tree
        .nodes()
        .iter()
        .filter_map(|node| node.origin.place);
    let places: Vec<_> = places
        .map(|place| (place.document.0, place.position))
        .collect();
    assert_eq!(places, [(1, 3), (1, 4), (1, 5)]);
    // A document that was removed while a proposal was used cannot be credited.
    index.remove(&[DocumentKey(1)]);
    assert!(propose_one(&index, "Xabc", &ProposeParams::default()).is_none());
}

/// A single copy must not beat what was seen hundreds of times.
#[test]
fn a_single_copy_is_worth_half() {
    let mut documents = vec!["xyzS"];
    documents.extend([["zA"; 500].as_slice(), &["zB"; 20]].concat());
    let index = index_of(&documents);
    let params = ProposeParams {
        alpha: 0.0,
        offset: 1.0,
        ..ProposeParams::default()
    };
    let found = propose_one(&index, "xyz", &params).expect("a match");
    assert_eq!((show(&found).as_str(), found.match_len), ("A=0.958", 1));
    // The doubt is about the place, not about every token after it: a long single copy stays valuable.
    let index = index_of(&["abcdefghijkl"]);
    let found = propose_one(&index, "abcdef", &ProposeParams::default()).expect("a match");
    assert_eq!(found.tree.tokens().collect::<Vec<_>>(), tokens("ghijkl"));
    assert_eq!(found.score, 4.0);
}

#[test]
fn ties_go_to_the_most_local_and_to_the_longer_pattern() {
    let index = index_of(&["abcX"]);
    let params = ProposeParams {
        alpha: 0.0,
        offset: 1.0,
        ..ProposeParams::default()
    };
    let context = tokens("abc");
    let at = |scope| lookup(scope, &index, &context);
    for order in [
        [Scope::Tenant, Scope::Request, Scope::Group],
        [Scope::Group, Scope::Tenant, Scope::Request],
        [Scope::Request, Scope::Group, Scope::Tenant],
    ] {
        let found = propose(&order.map(at), &params, 9).expect("a match");
        assert_eq!(found.scope, Scope::Request);
        assert_eq!(found.tree.nodes()[0].origin.scope, Scope::Request);
    }
    // "bc" and "c" give the same score; the longer one is named.
    let index = index_of(&["bcX", "cX", "bcX"]);
    let params = ProposeParams {
        max_pattern: 3,
        min_token_prob: 0.0,
        ..params
    };
    assert_eq!(
        propose_one(&index, "bc", &params)
            .expect("a match")
            .match_len,
        1,
        "3 of 3 beat 2 of 2"
    );
    let index = index_of(&["bcX", "cY"]);
    assert_eq!(
        propose_one(&index, "bc", &params)
            .expect("a match")
            .match_len,
        2
    );
    // Better beats local.
    let (local, global) = (index_of(&["cX"]), index_of(&["bcX", "bcX"]));
    let context = tokens("bc");
    let lookups = [
        lookup(Scope::Request, &local, &context),
        lookup(Scope::Tenant, &global, &context),
    ];
    assert_eq!(
        propose(&lookups, &params, 9).expect("a match").scope,
        Scope::Tenant
    );
}

#[test]
fn pattern_lengths_are_limited_on_both_ends() {
    let index = index_of(&["abcdefgh"]);
    let with = |min_match_len, max_pattern| {
        let params = ProposeParams {
            min_match_len,
            max_pattern,
            ..ProposeParams::default()
        };
        propose_one(&index, "abcd", &params).map(|found| (found.match_len, found.tree.len()))
    };
    assert_eq!(with(1, 64), Some((4, 4)));
    assert_eq!(with(1, 2), Some((2, 2)));
    assert_eq!(with(4, 64), Some((4, 4)));
    assert_eq!(with(5, 64), None);
    assert_eq!(with(3, 2), None);
    assert_eq!(with(0, 0), None);
}

#[test]
fn nodes_that_anything_follows_are_not_expanded() {
    let fan: String = ('A'..='Z').map(|next| format!("x,{next}")).collect();
    let index = index_of(&[&fan]);
    let with = |context, max_fan_out| {
        let params = ProposeParams {
            max_fan_out,
            min_token_prob: 0.0,
            alpha: 9.0,
            ..ProposeParams::default()
        };
        propose_one(&index, context, &params).map(|found| found.tree.nodes().len())
    };
    assert_eq!(with(",", 25), None);
    assert!(with(",", 26) > Some(8));
    // As an inner node it ends its path.
    assert_eq!(with("x", 25), Some(1));
}

/// A running request in its own index: its newest occurrence is neither a match nor in the sum.
#[test]
fn a_context_does_not_draft_from_itself() {
    let once = index_of(&["abcdef"]);
    let tip = |index: &Index| {
        let cursor = index.tip(DocumentKey(0)).expect("open");
        let found = Lookup {
            source: Source::Suffix,
            scope: Scope::Request,
            index,
            cursor,
            context: &[],
        };
        propose(&[found], &ProposeParams::default(), 32).map(|found| show(&found))
    };
    assert_eq!(tip(&once), None);
    // One earlier copy is one of one, shrunk: 1/2, and not half of that.
    assert_eq!(
        tip(&index_of(&["abcdefabc"])).as_deref(),
        Some("d=0.500 de=0.500 def=0.500")
    );
}

#[test]
fn one_token_repeated_drafts_itself() {
    let index = index_of(&["aaaaaaaaaaaaaaaaaaaa"]);
    let cursor = index.tip(DocumentKey(0)).expect("open");
    let found = Lookup {
        source: Source::Suffix,
        scope: Scope::Request,
        index: &index,
        cursor,
        context: &[],
    };
    let found = propose(&[found], &ProposeParams::default(), 32).expect("a match");
    assert!(found.tree.tokens().all(|token| token == Token::from(b'a')));
    // Long patterns have few tokens left to copy, short ones little budget; the middle has most of both.
    assert_eq!((found.match_len, found.tree.len()), (10, 10));
}

#[test]
fn origins_lead_to_the_documents() {
    let index = index_of(&["zzabc", "abcdef"]);
    let found = propose_one(&index, "Xabc", &ProposeParams::default()).expect("a match");
    let places: Vec<_> = found
        .tree
        .nodes()
        .iter()
        .filter_map(|node| node.origin.place)
        .collect();
    let places: Vec<_> = places
        .iter()
        .map(|place| (place.document.0, place.position))
        .collect();
    assert_eq!(places, [(1, 3), (1, 4), (1, 5)]);
}

/// After "xyz" came a once; after "yz", "xyz" included, b three times and a twice.
const SHORTER_AND_LONGER: [&str; 5] = ["xyzab", "wyzb", "wyzb", "wyzb", "wyza"];

fn priced(price: f32) -> ProposeParams {
    ProposeParams {
        alpha: 4.0,
        min_token_prob: 0.01,
        price: Some(price),
        ..ProposeParams::default()
    }
}

fn propose_with(
    index: &Index,
    params: &ProposeParams,
    statistics: Option<&AcceptanceStatistics>,
    room: usize,
) -> Option<Candidate> {
    let context = tokens("xyz");
    propose_valued(
        &[lookup(Scope::Tenant, index, &context)],
        params,
        statistics,
        room,
    )
}

/// With nothing learnt a node is worth its share. After "xyz", a and ab have 1/2 each. After "yz", n = 5: b has
/// 5/6 * 3/5 = 1/2, a and ab have 5/6 * 2/5 = 1/3.
#[test]
fn other_matches_are_laid_over_the_best_one() {
    let index = index_of(&SHORTER_AND_LONGER);
    let found = propose_with(&index, &priced(0.3), None, 32).expect("a match");
    // Less the price, the longest match is worth 0.2 twice, the other one 0.2 and 1/30 twice. The first is kept
    // whole. b is what comes if a is wrong: half of its own share. Both have a, so 0.6 of 1/3 of the doubt goes.
    assert_eq!(found.match_len, 3);
    assert_eq!(show(&found), "a=0.600 ab=0.600 b=0.250");
    let of = |at: usize| found.tree.nodes()[at].match_len;
    assert_eq!((of(0), of(1), of(2)), (3, 3, 2));
    assert!((found.score - 2.45).abs() < 1e-6, "{}", found.score);
    // With little room only the best draft is left.
    let found = propose_with(&index, &priced(0.3), None, 2).expect("a match");
    assert_eq!(show(&found), "a=0.600 ab=0.600");
}

#[test]
fn a_chain_is_the_best_one_and_no_price_means_algorithm_1() {
    let index = index_of(&SHORTER_AND_LONGER);
    let chain = ProposeParams {
        expansion: Expansion::Linear,
        ..priced(0.3)
    };
    let found = propose_with(&index, &chain, None, 32).expect("a match");
    // The longest match is sure enough that no other is read.
    assert_eq!(show(&found), "a=0.500 ab=0.500");
    let found = propose_with(&index, &chain, None, 1).expect("a match");
    assert_eq!(show(&found), "a=0.500");
    assert_eq!(propose_with(&index, &chain, None, 0), None);
    let unpriced = ProposeParams {
        price: None,
        ..priced(0.3)
    };
    let found = propose_with(&index, &unpriced, None, 32);
    assert_eq!(found, propose_one(&index, "xyz", &unpriced));
}

/// A match whose drafts have always failed gives way to another.
#[test]
fn the_best_match_is_the_one_of_which_most_is_learnt_to_be_right() {
    let index = index_of(&SHORTER_AND_LONGER);
    let chain = ProposeParams {
        expansion: Expansion::Linear,
        ..priced(0.3)
    };
    let first = propose_with(&index, &chain, None, 32).expect("a match");
    assert_eq!(first.match_len, 3);
    let mut statistics = AcceptanceStatistics::default();
    for _ in 0..50 {
        statistics.observe(&first, &tokens("?"));
    }
    let found = propose_with(&index, &chain, Some(&statistics), 32).expect("a match");
    assert_eq!((found.match_len, show(&found)), (2, "b=0.500".to_owned()));
    // It is still proposed where nothing pays, so that the router sees when it begins to.
    let dear = ProposeParams {
        expansion: Expansion::Linear,
        ..priced(0.9)
    };
    assert!(propose_with(&index, &dear, Some(&statistics), 32).is_some());
}
