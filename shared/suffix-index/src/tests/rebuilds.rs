//! Tests of removal, shortening and rebuilds.

use super::*;
use crate::IndexError;

#[test]
fn removed_documents_are_never_offered() {
    let mut index = index_of(&["abX", "abY", "abY"]);
    index.remove(&[key(0)]);
    assert_eq!(show(&index, "ab"), "2:Y2");
    assert_eq!(index.len_of(key(0)), None);
    assert_eq!(
        (index.documents(), index.tokens(), index.sizes().dead_tokens),
        (2, 6, 3)
    );
    // Until a rebuild, a removed occurrence still counts where another one is left.
    index.remove(&[key(1)]);
    assert_eq!(show(&index, "ab"), "2:Y2");
    index.rebuild().expect("room");
    assert_eq!(show(&index, "ab"), "2:Y1");
    index.remove(&[key(2)]);
    assert_eq!(show(&index, "ab"), "");
    assert_eq!(index.documents(), 0);
}

#[test]
fn a_key_can_be_used_again_after_removal() {
    let mut index = index_of(&["abX"]);
    index.remove(&[key(0)]);
    index.open(key(0), &tokens("ab")).expect("the key is free");
    index.append(key(0), &tokens("Z")).expect("open");
    assert_eq!(show(&index, "ab"), "2:Z1");
}

#[test]
fn a_cut_off_tail_is_never_offered() {
    let mut index = index_of(&["q|abcd", "xbc"]);
    index.shorten(key(0), 2).expect("shorter");
    assert_eq!(
        (index.len_of(key(0)), index.sizes().dead_tokens),
        (Some(2), 2)
    );
    // "c" follows "b" only in the other document, and the cut-off occurrence still counts.
    assert_eq!(show(&index, "ab"), "1:c2");
    assert_eq!(show(&index, "abc"), "");
    // Tokens after the cut continue the text before it.
    index.append(key(0), &tokens("eab")).expect("open");
    assert_eq!(show(&index, "qab"), "3:e1 1:c2,e1");
    assert_eq!(show_tip(&index, 0), "2:e1 1:c2,e1");
    assert_eq!(longest_chain(&index, "q"), "abeab");
    index.rebuild().expect("room");
    assert_eq!(
        (show(&index, "qab").as_str(), index.sizes().dead_tokens),
        ("3:e1 1:c1,e1", 0)
    );
}

#[test]
fn enough_dead_text_calls_for_a_rebuild() {
    let mut index = index_of(&["abcdefgh", "ij", "kl"]);
    index.remove(&[key(1)]);
    assert!(!index.needs_rebuild());
    index.shorten(key(0), 5).expect("shorter");
    assert!(index.needs_rebuild());
    let (states, cursor) = (index.live.automaton.len(), index.start(&tokens("abc")));
    index.rebuild().expect("room");
    assert!(!index.needs_rebuild() && index.live.automaton.len() < states);
    // Cursors from before the rebuild find nothing.
    assert!(!index.is_current(&cursor));
    assert_eq!(show_at(&index, cursor, &[]), "");
}

/// The index changes in every way between the three steps of a rebuild.
#[test]
fn a_rebuild_catches_up_with_changes_in_between() {
    let mut index = index_of(&["abcX", "abcY", "abcZ", "l|abcV", "abcU"]);
    index.remove(&[key(4)]);
    let rebuild = index.begin_rebuild();
    let rebuilt = std::thread::spawn(move || rebuild.run())
        .join()
        .expect("no panic")
        .expect("room");

    index.append(key(0), &tokens("XX")).expect("open");
    index.remove(&[key(1)]);
    index.shorten(key(2), 3).expect("shorter");
    index.append(key(2), &tokens("WW")).expect("open");
    index.remove(&[key(3)]);
    index.open(key(3), &tokens("k")).expect("free");
    index.append(key(3), &tokens("abcT")).expect("open");
    index.open(key(9), &[]).expect("free");
    index.append(key(9), &tokens("abcS")).expect("open");

    index.finish_rebuild(rebuilt).expect("the same generation");
    let expected = index_of(&["abcXXX", "abcWW", "k|abcT", "abcS"]);
    for context in ["abc", "kabc", "labc", "X", "W"] {
        assert_eq!(show(&index, context), show(&expected, context), "{context}");
    }
    assert_eq!(index.tokens(), expected.tokens());
    assert_eq!(index.len_of(key(2)), Some(5));
}

#[test]
fn a_rebuild_that_was_overtaken_is_refused() {
    let mut index = index_of(&["abc"]);
    let late = index.begin_rebuild().run().expect("room");
    index.rebuild().expect("room");
    assert_eq!(
        index.finish_rebuild(late).err(),
        Some(IndexError::OutdatedRebuild)
    );
    assert_eq!(show(&index, "ab"), "2:c1");
}
