//! The records of a segment file, and the bytes they take.

use super::*;
use proptest::prelude::*;

use std::collections::BTreeMap;
use std::path::Path;

use refrain_protocol::DocumentId;
use refrain_protocol::document::DocumentHead;
use refrain_protocol::history::PromptHash;

use crate::record::StateRecord;
use crate::tests::test_store::{names, text};

fn sealed(dir: &Path, entries: Vec<SegmentEntry>) -> SegmentFile {
    let names = names("a");
    write(dir, 1, names.id(), Some(&names), entries, &mut || Ok(())).unwrap()
}

fn a_time() -> impl Strategy<Value = u64> {
    prop_oneof![
        1_700_000_000_000u64..1_700_000_900_000,
        any::<u64>(),
        Just(0)
    ]
}

fn a_name() -> impl Strategy<Value = Option<String>> {
    proptest::option::of("(session|group)-[0-9\u{e9}]{0,3}")
}

prop_compose! {
    fn an_entry()(
        document in any::<u128>(),
        (epoch, epoch_start, finish, sequence) in (any::<u64>(), any::<u32>(), any::<u8>(), any::<u64>()),
        [stored_ms, used_ms, created_ms] in [a_time(), a_time(), a_time()],
        [session, group] in [a_name(), a_name()],
        (choice, weight_version) in (any::<u32>(), any::<u64>()),
        left_context in proptest::collection::vec(any::<u32>(), 0..17),
        prompt_hash in proptest::option::of((1..=u128::MAX).prop_map(PromptHash)),
        tokens in proptest::collection::vec(any::<u32>(), 0..30),
    ) -> SegmentEntry {
        let len = tokens.len() as u32;
        let state = StateRecord {
            epoch, epoch_start, len, finish, sequence, stored_ms, used_ms,
            tail_start: len, tail_pieces: 0, bytes: 0,
        };
        let head = DocumentHead { session, group, choice, weight_version, created_ms, left_context, prompt_hash };
        SegmentEntry { document: DocumentId(document), state, head, tokens }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases((ProptestConfig::default().cases / 4).max(1)))]
    #[test]
    fn packed_records_read_back(entries in proptest::collection::vec(an_entry(), 1..20)) {
        let dir = tempfile::tempdir().unwrap();
        let mut expected: BTreeMap<DocumentId, (StateRecord, DocumentHead, Vec<u32>)> = BTreeMap::new();
        for entry in &entries {
            let SegmentEntry { document, state, head, tokens } = entry;
            expected.insert(*document, (*state, head.clone(), tokens.clone()));
        }
        prop_assume!(expected.len() == entries.len());
        let sealed = sealed(dir.path(), entries);
        let states: Vec<_> = sealed.states().collect();
        prop_assert_eq!(states.len(), expected.len());
        for ((at, (document, (state, head, tokens))), (number, id, read)) in (0..).zip(expected).zip(states) {
            prop_assert_eq!((number, id), (at, document));
            prop_assert_eq!(StateRecord { bytes: 0, ..read }, state);
            prop_assert_eq!(sealed.head(number).unwrap(), head);
            prop_assert_eq!(sealed.text(document), Some(&tokens[..]));
            let entry = sealed.entry(number).unwrap();
            prop_assert_eq!((entry.document, entry.state), (document, read));
        }
    }
}

/// Bytes of the file per token, for documents like those of agents: eight to a session, within an hour, from a worker
/// that has restarted.
fn bytes_per_token(document_tokens: u32, left: usize) -> f64 {
    let documents = 4_000u64;
    let entries = (0..documents).map(|number| {
        // Ids are random, so that they do not reveal the order of arrival.
        let id = u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        let stored_ms = 1_700_000_000_000 + number * 900;
        let state = StateRecord {
            epoch: 1 + number % 2,
            epoch_start: 0,
            len: document_tokens,
            finish: 1,
            sequence: 1_000_000 + number * 3,
            stored_ms,
            used_ms: stored_ms + number % 7 * 1_000,
            tail_start: document_tokens,
            tail_pieces: 0,
            bytes: 0,
        };
        let head = DocumentHead {
            session: Some(format!("conversation-{:08x}", number / 8)),
            group: (number % 4 == 0).then(|| format!("prompt-{:08x}", number / 8)),
            choice: 0,
            weight_version: 7,
            created_ms: stored_ms - number % 5_000,
            left_context: vec![1; left],
            prompt_hash: Some(PromptHash::of(&[number as u32 / 8])),
        };
        SegmentEntry {
            document: DocumentId(id),
            state,
            head,
            tokens: text(u128::from(number), document_tokens),
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let sealed = sealed(dir.path(), entries.collect());
    let claimed: u64 = sealed
        .states()
        .map(|(.., state)| u64::from(state.bytes))
        .sum();
    let file = sealed.file_bytes();
    assert!(claimed.abs_diff(file) < file / 50, "{claimed} of {file}");
    file as f64 / sealed.tokens as f64
}

#[test]
fn short_documents_take_little_besides_their_tokens() {
    for (document_tokens, left, most) in [
        (33, 16, 12.0),
        (67, 16, 10.1),
        (300, 16, 8.7),
        (21, 0, 11.3),
    ] {
        let found = bytes_per_token(document_tokens, left);
        assert!(
            found < most,
            "{document_tokens} tokens: {found:.2} bytes each"
        );
    }
}
