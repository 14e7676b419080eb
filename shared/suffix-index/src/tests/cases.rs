//! Matches and continuations, case by case.

use super::*;
use crate::IndexError;

/// The matches of a context. Documents are written "left|output".
#[test]
fn table_of_matches() {
    let cases: &[(&str, &[&str], &str, &str)] = &[
        ("nothing is known", &[], "abc", ""),
        ("nothing matches", &["xyz"], "abc", ""),
        ("an empty context", &["abc"], "", ""),
        ("nothing follows the match", &["abc"], "bc", ""),
        (
            "the longest match, and no shorter one of the same places",
            &["abcd"],
            "xabc",
            "3:d1",
        ),
        (
            "distinct places, longest pattern first",
            &["abcX", "zbcY"],
            "abc",
            "3:X1 2:X1,Y1",
        ),
        (
            "counts, most frequent first, then by token",
            &["abX", "abY", "abX", "abW"],
            "ab",
            "2:X2,W1,Y1",
        ),
        ("overlapping occurrences", &["aaaa"], "a", "1:a3"),
        (
            "overlapping occurrences, longer",
            &["aaaa"],
            "aaa",
            "3:a1 2:a2 1:a3",
        ),
        ("a match never crosses documents", &["ab", "cd"], "b", ""),
        ("nor does a pattern", &["ab", "cd"], "bc", "1:d1"),
        ("left context is matched", &["ab|cd"], "ab", "2:c1"),
        ("left context is not offered", &["ab|cd"], "a", ""),
        (
            "a token offered from output, not from left context",
            &["ab|", "ac|ab"],
            "a",
            "1:b1",
        ),
        (
            "left context alone is no match",
            &["abc|", "bc|x"],
            "abc",
            "2:x1",
        ),
        (
            "identical documents count twice",
            &["abc", "abc"],
            "ab",
            "2:c2",
        ),
        ("a prefix of another document", &["abc", "ab"], "ab", "2:c1"),
        (
            "the longest of several documents, whatever stands around it",
            &["xxabcQ", "ybcR", "cS"],
            "zabc",
            "3:Q1 2:Q1,R1 1:Q1,R1,S1",
        ),
        (
            "a text that goes on differently, and does not go on",
            &["abab", "ab", "abb"],
            "ab",
            "2:a1,b1",
        ),
        ("a document of one token", &["a", "a"], "a", ""),
        ("an empty document", &["", "ab"], "a", "1:b1"),
        ("left context alone", &["ab|", "b|c"], "ab", "1:c1"),
        (
            "a suffix of another document",
            &["xab", "ab", "abc"],
            "ab",
            "2:c1",
        ),
    ];
    for (name, documents, context, expected) in cases {
        for (form, index) in forms_of(documents) {
            assert_eq!(show(&index, context), *expected, "{name}, {form}");
        }
    }
}

/// The order of appends to different documents does not matter.
#[test]
fn interleaved_appends_answer_as_sequential_ones() {
    let documents = ["abcab", "bcabc", "abcab", "cab"];
    let sequential = index_of(&documents);
    let mut interleaved = Index::new(IndexConfig::default());
    for number in 0..documents.len() {
        interleaved.open(key(number), &[]).expect("a new key");
    }
    for at in 0..5 {
        for (number, document) in documents.iter().enumerate() {
            if let Some(token) = tokens(document).get(at) {
                interleaved
                    .append(key(number), &[*token])
                    .expect("an open document");
            }
        }
    }
    for context in ["a", "ab", "abc", "bca", "cab", "ca", "bcab"] {
        assert_eq!(
            show(&interleaved, context),
            show(&sequential, context),
            "{context}"
        );
    }
}

/// A growing document is its own context: its earlier text is offered, and its own end is not.
#[test]
fn the_tip_of_a_document_offers_nothing_of_itself() {
    let index = index_of(&["abcd"]);
    assert_eq!(show_tip(&index, 0), "");
    let index = index_of(&["abcXab"]);
    assert_eq!(show_tip(&index, 0), "2:c1");
    // The earlier copy counts as the only occurrence, not as one of two.
    let index = index_of(&["abcXabc"]);
    assert_eq!(show_tip(&index, 0), "3:X1");
    // The ends of other documents do not count either.
    let index = index_of(&["abX", "ab", "ab"]);
    assert_eq!(show_tip(&index, 1), "2:X1");
}

#[test]
fn a_tip_sees_what_others_append_meanwhile() {
    let mut index = index_of(&["qr|", "qr|"]);
    index.append(key(0), &tokens("abc")).expect("open");
    // Both documents had the same text, and document 0 is ahead now, so the whole left context matches.
    assert_eq!(show_tip(&index, 1), "2:a1");
    index.append(key(1), &tokens("ab")).expect("open");
    assert_eq!(show_tip(&index, 1), "4:c1");
}

#[test]
fn a_cursor_survives_the_split_of_its_state() {
    let mut index = index_of(&["xabc"]);
    let cursor = index.start(&tokens("ab"));
    assert_eq!(cursor.len(), 2);
    // "ab" now ends at a position where "xab" does not. So the state is split, and the cursor means the shorter part.
    index.open(key(1), &[]).expect("a new key");
    index.append(key(1), &tokens("abd")).expect("open");
    assert_eq!(show_at(&index, cursor, &[]), "2:c1,d1");
    let mut moved = cursor;
    index.advance(&mut moved, Token::from(b'd'));
    assert_eq!(moved.len(), 3);
}

#[test]
fn drafts_read_on_to_the_end_of_the_text() {
    let long: String = (0..500)
        .map(|at| (b'b' + (at * at % 23) as u8) as char)
        .collect();
    for (form, index) in forms_of(&[&format!("A{long}"), "qq"]) {
        assert_eq!(longest_chain(&index, "A"), long, "{form}");
    }
}

#[test]
fn origins_name_document_and_output_position() {
    let at = |number, position| {
        Some(Origin {
            document: key(number),
            position,
        })
    };
    for (form, index) in forms_of(&["zz|abcd", "zz|bcX"]) {
        assert_eq!(offered(&index, "ab"), [('c', at(0, 2))], "{form}");
        let both = [('X', at(1, 2)), ('d', at(0, 3))];
        assert_eq!(offered(&index, "Qbc"), both, "{form}");
    }
}

#[test]
fn patterns_are_capped() {
    let config = IndexConfig {
        pattern_tokens_max: 3,
        ..IndexConfig::default()
    };
    let mut index = Index::new(config);
    index.open(key(0), &[]).expect("a new key");
    index.append(key(0), &tokens("abcdeabcde")).expect("open");
    assert_eq!(index.tip(key(0)).expect("open").len(), 3);
    let cursor = index.start(&tokens("abcd"));
    assert_eq!(
        (cursor.len(), show_at(&index, cursor, &[])),
        (3, "3:e2".to_owned())
    );
    assert_eq!(show_at(&index, cursor.at_most(1), &[]), "1:e2");
    assert_eq!(show_at(&index, cursor.at_most(0), &[]), "");
}

#[test]
fn wide_fans_are_found_and_listed() {
    let mut index = Index::new(IndexConfig::default());
    index.open(key(0), &[]).expect("a new key");
    for token in 1..200 {
        index.append(key(0), &[0, token]).expect("open");
        index.append(key(0), &[0, token % 7 + 1]).expect("open");
    }
    let mut search = index.search(index.start(&[0]), &[0], SearchLimits::EXACT);
    let found = search.next_match().expect("a match");
    let mut all = Vec::new();
    assert_eq!(search.continuations(&found.node, &mut all), 398);
    assert_eq!(all.len(), 199);
    let mut some = Vec::new();
    let frequent = |count, total| u64::from(count) * 20 >= total;
    assert_eq!(
        search.continuations_where(&found.node, frequent, &mut some),
        398
    );
    assert_eq!(
        some.iter().map(|next| next.token).collect::<Vec<_>>(),
        [2, 3, 4, 1, 5, 6, 7]
    );
    assert_eq!(index.start(&[0, 150]).len(), 2);
}

#[test]
fn a_wide_fan_survives_the_split_of_its_state() {
    let mut index = Index::new(IndexConfig::default());
    index.open(key(0), &[]).expect("a new key");
    for token in 100..140 {
        index.append(key(0), &[7, 0, token]).expect("open");
    }
    // So far, every 0 followed a 7.
    index.open(key(1), &[]).expect("a new key");
    index.append(key(1), &[8, 0, 120, 0, 99]).expect("open");
    let expected = [
        (&[7, 0, 120][..], 3),
        (&[9, 0, 121], 2),
        (&[8, 0, 120], 3),
        (&[7, 0, 99], 2),
    ];
    for (context, len) in expected {
        assert_eq!(index.start(context).len(), len, "{context:?}");
    }
    let mut search = index.search(index.start(&[7, 0]), &[7, 0], SearchLimits::EXACT);
    let mut fans = Vec::new();
    while let Some(found) = search.next_match() {
        fans.push((found.len, continuations(&mut search, &found.node).0.len()));
    }
    assert_eq!(fans, [(2, 40), (1, 41)]);
}

#[test]
fn refusals_name_the_document_and_change_nothing() {
    let mut index = index_of(&["abc"]);
    assert_eq!(
        index.open(key(0), &[]),
        Err(IndexError::DuplicateDocument(key(0)))
    );
    assert_eq!(
        index.append(key(7), &[1]),
        Err(IndexError::UnknownDocument(key(7)))
    );
    assert_eq!(
        index.shorten(key(0), 4),
        Err(IndexError::BeyondEnd {
            key: key(0),
            wanted: 4,
            len: 3
        })
    );
    index.remove(&[key(7)]);
    assert_eq!(index.tip(key(7)), None);
    assert_eq!(
        (index.documents(), index.tokens(), index.len_of(key(0))),
        (1, 3, Some(3))
    );
    assert_eq!(
        IndexError::UnknownDocument(key(7)).to_string(),
        "document 00000000000000000000000000000007 is not in the index"
    );
}

/// Cursors of another index find nothing.
#[test]
fn foreign_cursors_start_over() {
    let one = index_of(&["abcabc"]);
    let other = index_of(&["xyzxyz"]);
    for mut cursor in [one.start(&tokens("ab")), crate::Cursor::default()] {
        assert!(!other.is_current(&cursor));
        assert_eq!(show_at(&other, cursor, &[]), "");
        other.advance(&mut cursor, Token::from(b'x'));
        assert!(other.is_current(&cursor));
        assert_eq!(show_at(&other, cursor, &[]), "1:y2");
    }
}
