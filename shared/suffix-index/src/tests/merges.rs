//! Tests of merging, and of the merge policy.

use proptest::prelude::*;

use super::*;
use crate::{IndexError, MergePolicy, SegmentStats};

fn sizes(tokens: &[u64]) -> Vec<SegmentStats> {
    tokens
        .iter()
        .map(|&tokens| SegmentStats {
            tokens,
            documents: tokens as usize,
            ..SegmentStats::default()
        })
        .collect()
}

const POLICY: MergePolicy = MergePolicy {
    segments_max: 3,
    masked_share_max: 0.25,
};

#[test]
fn the_policy_merges_small_segments() {
    let cases: &[(&[u64], Option<&[usize]>)] = &[
        (&[], None),
        (&[5, 5, 5], None),
        // Equal segments are merged all at once: the largest is not larger than the others together.
        (&[5, 5, 5, 5], Some(&[0, 1, 2, 3])),
        // Each segment is larger than all smaller ones together, so only the smallest two are merged.
        (&[1000, 1, 100, 10], Some(&[1, 3])),
        (&[1000, 30, 20, 10], Some(&[1, 2, 3])),
        (&[20, 10, 1000, 30], Some(&[0, 1, 3])),
        (&[1000, 100, 10, 1, 0], Some(&[2, 3, 4])),
    ];
    for (tokens, expected) in cases {
        let plan = POLICY.plan(&sizes(tokens));
        assert_eq!(plan.as_deref(), *expected, "{tokens:?}");
    }
}

#[test]
fn the_policy_rewrites_mostly_masked_segments() {
    let masked_segment = |tokens, masked_tokens, documents, masked_documents| SegmentStats {
        tokens,
        masked_tokens,
        documents,
        masked_documents,
    };
    let whole = masked_segment(100, 0, 10, 0);
    assert_eq!(POLICY.plan(&[whole, masked_segment(100, 25, 10, 2)]), None);
    assert_eq!(
        POLICY.plan(&[whole, masked_segment(100, 26, 10, 2)]),
        Some(vec![1])
    );
    // A segment of masked documents goes even if they were empty.
    assert_eq!(
        POLICY.plan(&[masked_segment(0, 0, 3, 3), whole]),
        Some(vec![0])
    );
}

proptest! {
    /// For any sequence of seals, the number of segments stays within the limit, each plan makes progress, and a
    /// token is rewritten a logarithmic number of times.
    #[test]
    fn segments_stay_few_and_rewrites_rare(
        seals in prop::collection::vec(1u64..100, 1..300),
        segments_max in 1usize..5,
    ) {
        let policy = MergePolicy { segments_max, ..POLICY };
        let mut segments: Vec<u64> = Vec::new();
        let mut rewritten = 0;
        for &seal in &seals {
            segments.push(seal);
            while let Some(plan) = policy.plan(&sizes(&segments)) {
                prop_assert!(plan.len() > 1 && plan.is_sorted());
                let merged = plan.iter().map(|&at| segments[at]).sum();
                rewritten += merged;
                for &at in plan.iter().rev() {
                    segments.remove(at);
                }
                segments.push(merged);
            }
            prop_assert!(segments.len() <= segments_max);
        }
        let total: u64 = seals.iter().sum();
        prop_assert_eq!(segments.iter().sum::<u64>(), total);
        // With three segments or more there is about one rewrite per doubling. With fewer there is no room for tiers.
        if segments_max >= 3 {
            let root = (total as f64).powf(1.0 / (segments_max as f64 - 1.0));
            prop_assert!(rewritten as f64 <= total as f64 * (4.0 + 4.0 * root), "{rewritten} of {total}");
        }
    }
}

#[test]
fn merging_frees_space_and_loses_nothing() {
    let documents = ["abX", "abY", "cdX", "cdY", "abX", "cdZ"];
    let mut index = index_of(&documents);
    for number in 0..documents.len() {
        index.seal(|other| other == key(number)).expect("room");
    }
    index.remove(&[key(0), key(3)]);
    let before = [show(&index, "ab"), show(&index, "cd")];
    assert_eq!(before, ["2:X1,Y1", "2:X1,Z1"]);
    index.merge().expect("room");
    assert!(index.segments().len() <= 3);
    assert_eq!([show(&index, "ab"), show(&index, "cd")], before);
    assert_eq!((index.documents(), index.tokens()), (4, 12));
    // A segment without remaining documents gets no successor.
    index.remove(&[1, 2, 4, 5].map(key));
    index.merge().expect("room");
    assert_eq!(index.sizes().segments, 0);
    assert_eq!(index.plan_merge(), None);
}

/// The index changes between the three steps of a merge.
#[test]
fn a_merge_catches_up_with_changes_in_between() {
    let mut index = index_of(&["abX", "abY", "abZ", "abW", "abV"]);
    for number in 0..4 {
        index.seal(|other| other == key(number)).expect("room");
    }
    index.remove(&[key(0)]);
    let merge = index.begin_merge(&[0, 1, 2]);
    let merged = std::thread::spawn(move || merge.run())
        .join()
        .expect("no panic")
        .expect("room");
    assert_eq!(merged.inputs().len(), 3);
    assert_eq!(merged.segment().expect("some").documents(), 2);
    // One document is removed, one is taken back to the live part, one is sealed, and a key is used again.
    index.remove(&[key(1)]);
    index.shorten(key(2), 2).expect("shorter");
    index.open(key(0), &[]).expect("free");
    index.append(key(0), &tokens("abU")).expect("open");
    index.seal(|other| other == key(4)).expect("room");
    index.finish_merge(merged).expect("its inputs are there");
    assert_eq!(show(&index, "ab"), "2:U1,V1,W1");
    assert_eq!(index.segments().len(), 3);
    assert_eq!((index.documents(), index.tokens()), (4, 11));
}

#[test]
fn a_merge_that_was_overtaken_is_refused() {
    let mut index = index_of(&["abX", "abY", "abZ"]);
    for number in 0..3 {
        index.seal(|other| other == key(number)).expect("room");
    }
    let late = index.begin_merge(&[0, 1]).run().expect("room");
    let quick = index.begin_merge(&[1, 2, 7]).run().expect("room");
    index.finish_merge(quick).expect("first");
    assert_eq!(
        index.finish_merge(late).err(),
        Some(IndexError::OutdatedMerge)
    );
    assert_eq!(show(&index, "ab"), "2:X1,Y1,Z1");
}
