//! Tests of sealing and of mounted segments.

use super::*;
use crate::{IndexError, MountedSegment};

#[test]
fn sealed_documents_answer_for_themselves() {
    let mut index = index_of(&["q|abc", "xyz", "k|lm"]);
    index.seal(|other| other != key(1)).expect("room");
    assert!(index.is_sealed(key(0)) && !index.is_sealed(key(1)) && index.is_sealed(key(2)));
    let lens = [0, 1, 2, 3].map(|number| index.len_of(key(number)));
    assert_eq!(lens, [Some(3), Some(3), Some(2), None]);
    assert_eq!((index.documents(), index.tokens()), (3, 10));
    assert_eq!(
        index.open(key(0), &[]),
        Err(IndexError::DuplicateDocument(key(0)))
    );
    // A sealed document has no tip.
    assert!(index.tip(key(0)).is_none() && index.tip(key(1)).is_some());
    let (segment, stats) = index.segments().next().expect("one");
    assert_eq!((stats.documents, stats.tokens), (2, 7));
    let texts: Vec<_> = segment
        .iter()
        .map(|document| {
            (
                document.key,
                text(document.left_context),
                text(document.output),
            )
        })
        .collect();
    let text = |text: &str| text.to_owned();
    assert_eq!(
        texts,
        [
            (key(0), text("q"), text("abc")),
            (key(2), text("k"), text("lm"))
        ]
    );
}

#[test]
fn texts_are_compared_where_they_lie() {
    let mut index = index_of(&["q|abc", "r|abcd"]);
    index.shorten(key(1), 1).expect("longer");
    index.append(key(1), &tokens("bc")).expect("room");
    index.seal(|other| other == key(0)).expect("room");
    for number in [0, 1] {
        let matching = |from, text| index.matching_prefix(key(number), from, &tokens(text));
        assert_eq!((matching(0, "abx"), matching(1, "bcd")), (2, 2));
        assert_eq!((matching(0, ""), matching(1, "a")), (0, 0));
        assert_eq!((matching(3, "c"), matching(9, "c")), (0, 0));
    }
    assert_eq!(index.matching_prefix(key(2), 0, &tokens("abc")), 0);
}

#[test]
fn sizes_tell_where_everything_is() {
    let mut index = index_of(&["abcdef", "ghij", "klm", "no"]);
    index.seal(|other| other.0 < 3).expect("room");
    index.remove(&[key(1)]);
    let sizes = index.sizes();
    assert_eq!((sizes.live_documents, sizes.live_tokens), (1, 2));
    assert_eq!((sizes.segments, sizes.segment_documents), (1, 2));
    assert_eq!((sizes.segment_tokens, sizes.masked_tokens), (9, 4));
    assert_eq!(index.live_tokens(), 2);
    assert_eq!(sizes.live_bytes + sizes.segment_bytes, index.bytes());
    assert_eq!((index.documents(), index.tokens()), (3, 11));
}

/// In a segment, removal is exact at once, unlike in the live part.
#[test]
fn removed_sealed_documents_are_never_counted() {
    let mut index = index_of(&["abX", "abY", "abY"]);
    index.seal(|_| true).expect("room");
    index.remove(&[key(1)]);
    assert_eq!(show(&index, "ab"), "2:X1,Y1");
    index.remove(&[key(2), key(9)]);
    assert_eq!(show(&index, "ab"), "2:X1");
    index.remove(&[key(0)]);
    assert_eq!(show(&index, "ab"), "");
    assert_eq!((index.documents(), index.tokens()), (0, 0));
    // The keys can be used again.
    index.open(key(1), &tokens("ab")).expect("free");
    index.append(key(1), &tokens("Z")).expect("open");
    assert_eq!(show(&index, "ab"), "2:Z1");
    index.seal(|_| true).expect("room");
    assert_eq!(show(&index, "ab"), "2:Z1");
}

#[test]
fn a_sealed_document_that_changes_is_live_again() {
    let mut index = index_of(&["q|abc", "abd"]);
    index.seal(|_| true).expect("room");
    index.append(key(0), &tokens("ab")).expect("there");
    assert!(!index.is_sealed(key(0)));
    assert_eq!(show(&index, "qab"), "3:c1 2:c1,d1");
    assert_eq!(show_tip(&index, 0), "2:c1");
    assert_eq!(index.len_of(key(0)), Some(5));

    index.shorten(key(1), 3).expect("as long");
    assert!(index.is_sealed(key(1)), "nothing changed");
    index.shorten(key(1), 1).expect("shorter");
    assert!(!index.is_sealed(key(1)));
    assert_eq!(show(&index, "ab"), "2:c1");
    index.append(key(1), &tokens("e")).expect("there");
    assert_eq!(show(&index, "a"), "1:b2,e1");
    index.seal(|_| true).expect("room");
    assert_eq!(
        index.shorten(key(1), 3),
        Err(IndexError::BeyondEnd {
            key: key(1),
            wanted: 3,
            len: 2
        })
    );
    assert_eq!(
        index.append(key(7), &[]),
        Err(IndexError::UnknownDocument(key(7)))
    );
    assert_eq!(
        index.shorten(key(7), 0),
        Err(IndexError::UnknownDocument(key(7)))
    );
}

/// The index changes in every way between the three steps of a seal.
#[test]
fn a_seal_catches_up_with_changes_in_between() {
    let mut index = index_of(&["abcX", "abcY", "abcZ", "l|abcV", "abcU", "abcR", "abcQ"]);
    let begun = index.begin_seal(|other| other != key(6));
    let sealed = std::thread::spawn(move || begun.run())
        .join()
        .expect("no panic")
        .expect("room");
    index.append(key(0), &tokens("XX")).expect("open");
    index.remove(&[key(1)]);
    index.shorten(key(2), 3).expect("shorter");
    index.append(key(2), &tokens("Z")).expect("the same again");
    index.shorten(key(3), 3).expect("shorter");
    index.append(key(3), &tokens("WW")).expect("open");
    index.remove(&[key(4)]);
    index.open(key(4), &tokens("k")).expect("free");
    index.append(key(4), &tokens("abcT")).expect("open");
    index.append(key(6), &tokens("Q")).expect("open");

    assert_eq!(sealed.segment.as_ref().expect("some").documents(), 6);
    let retired = index.finish_rebuild(sealed).expect("the same generation");
    drop(retired);
    let is_sealed = [0, 2, 3, 4, 5, 6].map(|number| index.is_sealed(key(number)));
    assert_eq!(is_sealed, [false, true, false, false, true, false]);
    let expected = index_of(&["abcXXX", "abcZ", "l|abcWW", "k|abcT", "abcR", "abcQQ"]);
    for context in ["abc", "kabc", "labc", "X", "W", "Z", "Q"] {
        assert_eq!(show(&index, context), show(&expected, context), "{context}");
    }
    assert_eq!(index.tokens(), expected.tokens());
    assert_eq!(index.sizes().dead_tokens, 0);
}

#[test]
fn a_seal_that_was_overtaken_is_refused() {
    let mut index = index_of(&["abc"]);
    let late = index.begin_seal(|_| true).run().expect("room");
    index.seal(|_| true).expect("room");
    assert_eq!(
        index.finish_rebuild(late).err(),
        Some(IndexError::OutdatedRebuild)
    );
    assert_eq!(
        (index.documents(), show(&index, "ab").as_str()),
        (1, "2:c1")
    );
}

#[test]
fn old_cursors_find_nothing_after_a_seal_but_the_context_does() {
    let mut index = index_of(&["abcabc"]);
    let cursor = index.start(&tokens("ab"));
    index.seal(|_| true).expect("room");
    assert!(!index.is_current(&cursor));
    assert_eq!(show_at(&index, cursor, &[]), "");
    assert_eq!(show_at(&index, cursor, &tokens("ab")), "2:c2");
}

/// A document that the index already has stays as it is.
#[test]
fn a_mounted_segment_adds_only_new_documents() {
    let mut other = index_of(&["abX", "abY", "abZ"]);
    other.seal(|_| true).expect("room");
    let segment = other.segments().next().expect("one").0.clone();
    let mut index = index_of(&["abc"]);
    index.mount(segment.clone(), [key(2)]);
    assert_eq!(show(&index, "ab"), "2:Y1,c1");
    index.mount(segment, []);
    assert_eq!(show(&index, "ab"), "2:Y1,Z1,c1");
    assert_eq!((index.documents(), index.tokens()), (3, 9));
}

#[test]
fn many_mounted_segments_add_only_new_documents() {
    let sealed = |texts: &[&str], first: usize| {
        let mut other = Index::new(IndexConfig::default());
        for (number, text) in (first..).zip(texts) {
            other.open(key(number), &[]).expect("new");
            other.append(key(number), &tokens(text)).expect("room");
        }
        other.seal(|_| true).expect("room");
        other.segments().next().expect("one").0.clone()
    };
    let mut index = index_of(&["abc", "abd"]);
    index.seal(|other| other == key(1)).expect("room");
    let (one, two) = (
        sealed(&["abV", "abW", "abX"], 0),
        sealed(&["abY", "abZ"], 3),
    );
    let two = MountedSegment::without(two, [key(4)]);
    index.mount_all(vec![MountedSegment::without(one, []), two]);
    assert_eq!(show(&index, "ab"), "2:X1,Y1,c1,d1");
    assert_eq!((index.documents(), index.tokens()), (4, 12));
}

/// A running request does not match its own end, whether the other documents are live or sealed.
#[test]
fn a_context_does_not_find_itself() {
    let mut index = index_of(&["abcX", "qqabc"]);
    index.seal(|other| other == key(0)).expect("room");
    let tip = index.tip(key(1)).expect("live");
    assert_eq!(show_at(&index, tip, &tokens("qqabc")), "3:X1");
    // It does not match when it is sealed either, because nothing follows its end.
    index.seal(|_| true).expect("room");
    assert_eq!(show(&index, "qqabc"), "3:X1");
}

/// A draft stays in the document of the occurrence that it continues.
#[test]
fn drafts_never_cross_documents() {
    for (form, index) in forms_of(&["ab", "abcd", "cdef"]) {
        assert_eq!(longest_chain(&index, "a"), "bcd", "{form}");
    }
}

/// The token id of the separator ends matches inside a document, and is stored unchanged.
#[test]
fn the_highest_token_id_separates() {
    let mut index = Index::new(IndexConfig::default());
    index.open(key(0), &[]).expect("free");
    let output = [1, 2, Token::MAX, 3, 4, 1, 2, 5];
    index.append(key(0), &output).expect("open");
    index.seal(|_| true).expect("room");
    let (segment, _) = index.segments().next().expect("one");
    assert_eq!(segment.get(key(0)).expect("there").output, output);
    let offers = |context: &[Token]| {
        let mut search = index.search(Cursor::default(), context, SearchLimits::EXACT);
        search
            .next_match()
            .map(|found| (found.len, continuations(&mut search, &found.node).0))
    };
    assert_eq!(offers(&[9, 1, 2]), Some((2, vec![(5, 1)])));
    assert_eq!(offers(&[2, Token::MAX, 3]), Some((1, vec![(4, 1)])));
    assert_eq!(offers(&[2, Token::MAX]), None);
}

#[test]
fn search_words_leave_masked_documents_out_and_move_nothing() {
    let mut index = index_of(&["q|abc", "xab", "k|lab"]);
    index.seal(|_| true).expect("room");
    let whole = index.mounted()[0].clone();
    index.remove(&[key(1)]);
    let masked = index.mounted()[0].clone();
    assert!(whole.is_same(&whole.clone()) && !whole.is_same(&masked));
    let [before, after] = [&whole, &masked].map(MountedSegment::search_words);
    assert_eq!((before.text_len, after.text_len), (15, 15));
    let (text, ends) = after.words.split_at(after.text_len);
    let gone: Vec<usize> = (0..15).filter(|&at| before.words[at] != text[at]).collect();
    assert_eq!(gone.len(), 3);
    assert!(gone.iter().all(|&at| text[at] == u32::MAX));
    // Each end is one of the segment's, in its order, and lies in a document that is left.
    let kept = before.words[before.text_len..].iter();
    let kept: Vec<u32> = kept
        .copied()
        .filter(|end| !gone.contains(&(*end as usize)))
        .collect();
    assert_eq!(ends, kept);
}

#[test]
fn live_documents_are_copied_with_their_left_contexts() {
    let mut index = index_of(&["q|abc", "xyz", "k|lm"]);
    index.shorten(key(0), 1).expect("longer");
    index.append(key(0), &tokens("de")).expect("room");
    let segment = index
        .copy_live(|other| other != key(1))
        .build()
        .expect("small");
    let copied: Vec<_> = segment
        .iter()
        .map(|document| (text(document.left_context), text(document.output)))
        .collect();
    let expected = [("q", "ade"), ("k", "lm")].map(|(left, output)| (left.into(), output.into()));
    assert_eq!(copied, expected);
}
