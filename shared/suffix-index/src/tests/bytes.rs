//! Tests of the bytes of segments, sound and damaged.

use proptest::prelude::*;

use super::*;
use crate::{SegmentBuilder, SegmentError, SegmentWords};

fn segment_of(documents: &[(u128, &[Token], &[Token])]) -> Segment {
    let mut builder = SegmentBuilder::new();
    for (key, left, output) in documents {
        builder.add(
            DocumentKey(*key),
            left.iter().copied(),
            output.iter().copied(),
        );
    }
    builder.build().expect("distinct keys")
}

fn sample() -> Segment {
    let long = random(300, 5, 1);
    segment_of(&[
        (u128::MAX - 5, &[1, 2], &long),
        (7, &[], &[1, 2, 3, 1, 2, 3]),
        (1 << 70, &[3; 16], &[]),
        (9, &[], &[200_019, 0, Token::MAX - 1]),
    ])
}

/// Reads everything of a segment, to see that nothing panics.
fn use_up(segment: Segment) -> usize {
    let texts = segment
        .iter()
        .map(|document| document.output.len() + document.left_context.len())
        .sum::<usize>();
    let mut index = Index::new(IndexConfig::default());
    index.mount(Arc::new(segment), [DocumentKey(7)]);
    let mut found = 0;
    for context in [
        random(40, 5, 1),
        vec![1, 2, 3],
        vec![0, 0, 0],
        vec![200_019],
    ] {
        for samples_max in [2, usize::MAX] {
            let limits = SearchLimits {
                samples_max,
                ..SearchLimits::EXACT
            };
            let mut search = index.search(Cursor::default(), &context, limits);
            while let Some(found_here) = search.next_match() {
                let (_, next) = continuations(&mut search, &found_here.node);
                for next in next {
                    found += usize::from(index.origin(next.sighting).is_some());
                    continuations(&mut search, &next.node);
                }
            }
        }
    }
    texts + found
}

#[test]
fn bytes_hold_everything() {
    let segment = sample();
    assert_eq!(segment.len_bytes(), segment.to_bytes().len() as u64);
    let reopened = Segment::open(segment.to_bytes()).expect("its own bytes");
    assert!(segment.iter().eq(reopened.iter()));
    assert_eq!(segment.to_bytes(), reopened.to_bytes());
    assert_eq!((reopened.documents(), reopened.tokens()), (4, 327));
    assert_eq!(
        reopened.get(DocumentKey(9)).expect("there").output[0],
        200_019
    );
    assert!(reopened.get(DocumentKey(8)).is_none());
    assert!(use_up(reopened) > 327);
}

#[test]
fn words_that_come_in_pieces_are_a_segment_once_all_are_there() {
    let segment = sample();
    let bytes = segment.to_bytes();
    let words: Vec<u32> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .collect();
    let mut arriving = SegmentWords::with_capacity(words.len());
    for piece in words.chunks(100) {
        arriving.extend(piece);
    }
    let opened = Segment::open_words(arriving).expect("its own words");
    assert_eq!(opened.to_bytes(), bytes);
    let mut cut = SegmentWords::default();
    cut.extend(&words[..words.len() - 1]);
    let refused = Segment::open_words(cut).expect_err("a word is missing");
    assert!(
        matches!(refused, SegmentError::WrongLength { .. }),
        "{refused}"
    );
}

#[test]
fn unaligned_bytes_are_copied() {
    struct Shifted(Vec<u8>);
    impl AsRef<[u8]> for Shifted {
        fn as_ref(&self) -> &[u8] {
            &self.0[1..]
        }
    }
    let mut shifted = vec![0];
    shifted.extend(sample().to_bytes());
    let opened = Segment::open(Shifted(shifted)).expect("the same bytes");
    assert!(opened.iter().eq(sample().iter()));
}

#[test]
fn a_mapped_file_is_searched_where_it_lies() {
    let file = tempfile::NamedTempFile::new().expect("a place for it");
    std::fs::write(file.path(), sample().to_bytes()).expect("room");
    let file = std::fs::File::open(file.path()).expect("just written");
    // SAFETY: no other program changes the temporary file.
    let map = unsafe { memmap2::Mmap::map(&file) }.expect("mapped");
    let mapped = Segment::open(map).expect("the same bytes");
    assert!(mapped.iter().eq(sample().iter()));
    assert!(use_up(mapped) > 327);
}

/// Files of format version 1 stay readable.
#[test]
fn version_1_is_read() {
    let bytes = include_bytes!("segment_v1.bin");
    assert!(
        sample().to_bytes() == bytes,
        "the format changed: give it a new version"
    );
    assert!(Segment::open(bytes).is_ok());
}

#[test]
fn refusals_say_what_is_wrong() {
    let bytes = sample().to_bytes();
    let open = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        Segment::open(bytes).expect_err("damaged")
    };
    assert_eq!(open(&|bytes| bytes.clear()), SegmentError::NotASegment);
    assert_eq!(open(&|bytes| bytes[0] = b'X'), SegmentError::NotASegment);
    assert_eq!(open(&|bytes| bytes[4] = 2), SegmentError::UnknownVersion(2));
    assert_eq!(
        open(&|bytes| bytes.truncate(bytes.len() - 4)),
        SegmentError::WrongLength {
            expected: bytes.len() as u64,
            found: bytes.len() as u64 - 4
        }
    );
    assert!(matches!(
        open(&|bytes| bytes.push(0)),
        SegmentError::WrongLength { .. }
    ));
    assert_eq!(open(&|bytes| bytes[100] ^= 1), SegmentError::WrongChecksum);
    assert_eq!(
        SegmentError::UnknownVersion(2).to_string(),
        "the segment has format version 2; this program reads 1"
    );
}

#[test]
fn a_key_cannot_be_there_twice() {
    let mut builder = SegmentBuilder::new();
    builder.add(DocumentKey(1), [], [1, 2]);
    builder.add(DocumentKey(1), [], [3]);
    assert_eq!((builder.documents(), builder.tokens()), (2, 3));
    assert_eq!(
        builder.build().err(),
        Some(SegmentError::DuplicateDocument(DocumentKey(1)))
    );
}

#[test]
fn an_empty_segment_is_one() {
    let segment = SegmentBuilder::new().build().expect("nothing to object to");
    assert_eq!((segment.documents(), segment.tokens()), (0, 0));
    use_up(Segment::open(segment.to_bytes()).expect("its own bytes"));
}

/// A sealed token takes at most 9 bytes. The documents have only 100 tokens each, so that their table takes much of
/// it.
#[test]
fn sealed_text_costs_at_most_nine_bytes_per_token() {
    let mut builder = SegmentBuilder::new();
    for number in 0..500 {
        builder.add(key(number), [], random(100, 100_000, number as u32));
    }
    let segment = builder.build().expect("distinct keys");
    let bytes = segment.len_bytes() + segment.overhead_bytes() as u64;
    assert!(bytes <= 9 * segment.tokens(), "{bytes} bytes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16 * ProptestConfig::default().cases))]

    /// Bytes that are flipped, cut or extended are refused without a panic.
    #[test]
    fn damaged_bytes_are_refused(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
        more in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        let original = sample().to_bytes();
        let mut bytes = original.clone();
        for (at, flip) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        bytes.extend(more);
        prop_assert_eq!(Segment::open(bytes.clone()).is_ok(), bytes == original);
    }
}

/// A word of a forged segment. Small values make plausible lengths and positions, and any value may be anywhere.
#[derive(Clone, Copy, Debug, bolero::TypeGenerator)]
enum Word {
    Small(u8),
    Near(u16),
    Any(u32),
}

/// A right checksum does not prove that a segment is sound, so every segment that opens must be usable without a
/// panic.
///
/// This is a fuzz target. `cargo test` runs it for a second, and `cargo bolero test -p refrain-suffix-index
/// tests::bytes::forged_bytes_do_no_harm` runs it for as long as wanted, guided by coverage.
#[test]
fn forged_bytes_do_no_harm() {
    let original = sample().to_bytes();
    let forged = |words: &Vec<(u16, Word)>| {
        let mut bytes = original.clone();
        for &(at, word) in words {
            // The checksum and the words before it stay as they are.
            let at = 16 + usize::from(at) % (bytes.len() / 4 - 4) * 4;
            let word = match word {
                Word::Small(word) => u32::from(word),
                Word::Near(word) => u32::from(word) % 400,
                Word::Any(word) => word,
            };
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[16..]);
        bytes[8..16].copy_from_slice(&checksum.to_le_bytes());
        if let Ok(segment) = Segment::open(bytes) {
            use_up(segment);
        }
    };
    bolero::check!()
        .with_type::<Vec<(u16, Word)>>()
        .with_max_len(64)
        .for_each(forged);
}
