//! Keys and codes read back as they were written.

use super::*;

#[test]
fn keys_sort_by_position_and_read_back() {
    let key = DocumentKey::new(NamespaceId(7), DocumentId(9));
    assert!(piece_key(key, 255) < piece_key(key, 256));
    assert_eq!(document_of(&piece_key(key, 3)), Some(key));
    assert_eq!(piece_start_of(&piece_key(key, 70_000)), Some(70_000));
    assert_eq!(
        tombstone_sequence_of(&tombstone_key(NamespaceId(1), 5)),
        Some(5)
    );
    assert_eq!(document_of(b"short"), None);
}

#[test]
fn finish_codes_round_trip() {
    for code in 0..=4 {
        assert_eq!(finish_code(finish_of(code)), code);
        assert_eq!(finish_of(code | STATIC), finish_of(code));
    }
}
