//! Tests of the cost of the automaton, in steps instead of seconds.

use super::*;
use crate::live_part::WorkCounts;

fn work_of(count_cap: u16, text: &[Token]) -> (WorkCounts, Index) {
    let mut index = Index::new(IndexConfig {
        count_cap,
        ..IndexConfig::default()
    });
    index.open(key(0), &[]).expect("a new key");
    index.append(key(0), text).expect("open");
    (index.live.automaton.work, index)
}

#[test]
fn one_token_repeated_costs_the_cap_and_no_more() {
    const LEN: usize = 20_000;
    let (work, index) = work_of(16, &vec![7; LEN]);
    assert_eq!(work.tokens, LEN as u64);
    assert!(work.climbs <= 17 * LEN as u64, "{work:?}");
    assert!(work.links <= 2 * LEN as u64, "{work:?}");
    assert_eq!(work.clones, 0);
    // A cursor follows it without a walk down twenty thousand suffixes on each use.
    let tip = index.tip(key(0)).expect("open");
    assert_eq!(index.live.automaton.state(tip.point.state).len, 64);
    let mut search = index.search(tip, &[], SearchLimits::EXACT);
    let found = search.next_match().expect("a match");
    assert_eq!(
        (found.len, continuations(&mut search, &found.node).0),
        (64, vec![(7, 16)])
    );
}

#[test]
fn periods_cost_no_more() {
    let text: Vec<Token> = (0..20_000).map(|at| at % 5).collect();
    let (work, _) = work_of(16, &text);
    assert!(work.climbs <= 17 * text.len() as u64, "{work:?}");
}

#[test]
fn random_text_costs_a_few_steps_per_token() {
    for (alphabet, climbs_max) in [(2, 20), (10, 10), (1000, 4)] {
        let text = random(20_000, alphabet, 0);
        let (work, index) = work_of(1024, &text);
        assert!(
            work.climbs <= climbs_max * text.len() as u64,
            "{alphabet}: {work:?}"
        );
        assert!(work.links <= 6 * text.len() as u64, "{alphabet}: {work:?}");
        assert!(index.live.automaton.len() <= 2 * text.len(), "{alphabet}");
    }
}

/// For any text, a state is climbed at most `count_cap` times, and once more as the end of a climb.
#[test]
fn identical_documents_cost_no_more_than_the_cap_allows() {
    let text = random(500, 4, 0);
    let mut index = Index::new(IndexConfig {
        count_cap: 8,
        ..IndexConfig::default()
    });
    for number in 0..200 {
        index.open(key(number), &[]).expect("a new key");
        index.append(key(number), &text).expect("open");
    }
    let work = index.live.automaton.work;
    assert!(index.live.automaton.len() <= 1000);
    assert!(
        work.climbs <= 8 * index.live.automaton.len() as u64 + work.tokens,
        "{work:?}"
    );
}

#[test]
fn memory_of_plain_text_is_bounded_per_token() {
    let (_, index) = work_of(1024, &random(50_000, 5000, 0));
    // Vectors grow by doubling, so this allows twice the 32 bytes of a state and the bytes of its edges.
    assert!(index.bytes() < 160 * 50_000, "{} bytes", index.bytes());
}
