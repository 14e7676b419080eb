//! Messages survive the way to bytes and back, and no bytes do harm.

use super::*;
use proptest::prelude::*;

fn properties(head: DocumentHead) -> PartProperties {
    PartProperties {
        names: Namespace {
            tenant: "tenant".into(),
            model: "model".into(),
            tokenizer: "tokenizer".into(),
        },
        document: DocumentId(77),
        epoch: 3,
        revision: 1,
        finish: 2,
        is_static: false,
        stored_ms: 1_700_000_000_000,
        head,
        sequence: 12,
    }
}

fn message(change: StreamChange) -> StreamMessage {
    StreamMessage {
        origin: 5,
        seen: 9,
        change,
    }
}

fn parts(text: &[TokenId], start: u32) -> Vec<DocumentPart> {
    DocumentPart::split(
        &properties(DocumentHead::default()),
        text,
        start,
        PART_TOKENS_MAX,
    )
}

#[test]
fn a_long_document_is_sent_in_parts_that_name_what_is_before_them() {
    let text: Vec<TokenId> = (0..PART_TOKENS_MAX as u32 * 2 + 10).collect();
    let found = parts(&text, 0);
    assert_eq!(found.len(), 3);
    let mut joined = Vec::new();
    for (at, part) in found.iter().enumerate() {
        assert_eq!(part.start as usize, joined.len());
        assert_eq!(part.before, text_checksum(&joined));
        assert_eq!(part.finish, if at == 2 { 2 } else { 0 });
        joined.extend(part.tokens().unwrap());
    }
    assert_eq!(joined, text);
    let rest = parts(&text, 100);
    assert_eq!(rest[0].before, text_checksum(&text[..100]));
    assert_eq!(parts(&[], 0).len(), 1);
}

#[test]
fn the_largest_message_is_within_the_limit() {
    let head = DocumentHead {
        session: Some("s".repeat(512)),
        group: Some("g".repeat(512)),
        left_context: vec![u32::MAX; 16],
        ..DocumentHead::default()
    };
    // Ids without any pattern, so that nothing is won by compression.
    let mut state = 1u32;
    let text: Vec<TokenId> = (0..PART_TOKENS_MAX)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state | 1 << 31
        })
        .collect();
    let part = DocumentPart::split(&properties(head), &text, 0, PART_TOKENS_MAX).remove(0);
    let bytes = encode(&message(StreamChange::Document(Box::new(part))));
    assert!(bytes.len() > PART_TOKENS_MAX * 4);
    assert!(bytes.len() < MESSAGE_BYTES_MAX / 2, "{}", bytes.len());
}

#[test]
fn a_later_version_is_no_damage() {
    let mut bytes = encode(&message(StreamChange::Erasure(ErasureRecord::default())));
    bytes[2] = VERSION + 1;
    let sum = checksum(&bytes[..4], &bytes[ENVELOPE_BYTES..]);
    bytes[4..ENVELOPE_BYTES].copy_from_slice(&sum);
    assert_eq!(decode(&bytes), Err(MessageError::Later(VERSION + 1)));
}

#[test]
fn an_id_tells_states_apart_and_not_what_the_sender_had_seen() {
    let of = |text: &[TokenId], seen, sequence| {
        let properties = PartProperties {
            sequence,
            ..properties(DocumentHead::default())
        };
        let part = DocumentPart::split(&properties, text, 0, PART_TOKENS_MAX).remove(0);
        let sent = StreamMessage {
            seen,
            ..message(StreamChange::Document(Box::new(part)))
        };
        let (id, bytes) = encode_with_id(&sent);
        assert_eq!(decode(&bytes), Ok(sent));
        id
    };
    assert_eq!(of(&[1, 2], 1, 5), of(&[1, 2], 2, 5));
    assert_ne!(of(&[1, 2], 1, 5), of(&[1, 3], 1, 5));
    assert_ne!(of(&[1, 2], 1, 5), of(&[1, 2], 1, 6), "it was stored anew");
    assert!(of(&[1, 2], 1, 5).starts_with("0000000000000000000000000000004d.3.2."));
}

proptest! {
    #[test]
    fn every_flipped_bit_is_noticed(
        text in proptest::collection::vec(any::<u32>(), 0..60),
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let part = parts(&text, 0).remove(0);
        let sent = message(StreamChange::Document(Box::new(part)));
        let mut bytes = encode(&sent);
        prop_assert_eq!(decode(&bytes), Ok(sent));
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(decode(&bytes).is_err());
    }

    #[test]
    fn any_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(decode(&bytes).is_err());
    }
}
