//! Scripts of updates and answers.

use super::*;
use refrain_protocol::Namespace;
use refrain_protocol::document::{ERASED_LEN, FENCED_LEN};

const ID: NamespaceId = NamespaceId(1);

fn signed() -> SignedNamespace {
    let namespace = Namespace {
        tenant: "t".into(),
        model: "m".into(),
        tokenizer: "k".into(),
    };
    SignedNamespace::unsigned(namespace)
}

fn update(prev_len: u32, tokens: &[u32], finish: Option<FinishReason>) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(7),
        epoch: 1,
        prev_len,
        tokens: tokens.to_vec(),
        head: DocumentHead::default(),
        finish,
    }
}

/// Sends everything to a store that answers with the given length.
fn exchange(pending: &mut PendingOutputs, length: u32) -> Option<(u32, Vec<u32>)> {
    let (id, request) = pending.batch(1000, true).requests.into_iter().next()?;
    let sent = (
        request.updates[0].prev_len,
        request.updates[0].tokens.clone(),
    );
    pending.acknowledge(
        id,
        &request,
        &AppendReply {
            lengths: vec![length],
        },
        0,
    );
    Some(sent)
}

#[test]
fn updates_are_sent_once_and_forgotten_at_the_end() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1, 2], None)).into());
    assert_eq!(exchange(&mut pending, 2), Some((0, vec![1, 2])));
    assert_eq!(exchange(&mut pending, 2), None);
    pending.push(
        ID,
        &signed(),
        (&update(2, &[3], Some(FinishReason::Stop))).into(),
    );
    assert_eq!(exchange(&mut pending, 3), Some((2, vec![3])));
    assert_eq!((pending.tokens(), pending.documents.len()), (0, 0));
}

#[test]
fn a_store_that_lost_the_beginning_gets_it_again() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1, 2], None)).into());
    exchange(&mut pending, 2);
    pending.push(ID, &signed(), (&update(2, &[3], None)).into());
    assert_eq!(exchange(&mut pending, 0), Some((2, vec![3])));
    assert_eq!(exchange(&mut pending, 3), Some((0, vec![1, 2, 3])));
    assert!(pending.is_acknowledged());
}

#[test]
fn an_output_of_which_the_store_knows_a_newer_attempt_is_not_sent_for_ever() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1, 2], None)).into());
    // The store has one token of a newer attempt and ignores this one.
    assert_eq!(exchange(&mut pending, 1), Some((0, vec![1, 2])));
    assert_eq!(exchange(&mut pending, 1), Some((1, vec![2])));
    assert_eq!(exchange(&mut pending, 1), None);
    assert_eq!(pending.documents.len(), 0);
}

#[test]
fn a_cut_shortens_what_is_sent() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1, 2, 3], None)).into());
    let mut cut = update(1, &[], Some(FinishReason::Stop));
    cut.epoch = 2;
    pending.push(ID, &signed(), (&cut).into());
    let (_, request) = pending.batch(1000, true).requests.remove(0);
    assert_eq!(
        (request.updates[0].epoch, &request.updates[0].tokens[..]),
        (2, &[1][..])
    );
}

#[test]
fn tokens_that_come_while_a_message_is_in_flight_are_not_forgotten() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1], None)).into());
    let (id, request) = pending.batch(1000, true).requests.remove(0);
    pending.push(
        ID,
        &signed(),
        (&update(1, &[2], Some(FinishReason::Stop))).into(),
    );
    pending.acknowledge(id, &request, &AppendReply { lengths: vec![1] }, 0);
    assert_eq!(exchange(&mut pending, 2), Some((1, vec![2])));
    assert_eq!(pending.documents.len(), 0);
}

#[test]
fn shedding_takes_finished_documents_first() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1, 2], None)).into());
    let mut finished = update(0, &[3, 4, 5], Some(FinishReason::Stop));
    finished.document = DocumentId(8);
    pending.push(ID, &signed(), (&finished).into());
    assert_eq!(pending.shed(2), 3);
    assert_eq!(pending.documents.len(), 1);
}

#[test]
fn a_released_document_leaves_once_the_store_has_it() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1], None)).into());
    pending.release(ID, DocumentId(7));
    assert_eq!(exchange(&mut pending, 1), Some((0, vec![1])));
    assert_eq!(pending.documents.len(), 0);
}

/// An output of five tokens that another worker wrote.
fn adopted() -> PendingOutputs {
    let mut pending = PendingOutputs::default();
    let mut output = update(0, &[1, 2, 3, 4, 5], None);
    output.epoch = 2;
    pending.adopt(ID, &signed(), (&output).into());
    pending
}

fn later(prev_len: u32, tokens: &[u32]) -> DocumentUpdate {
    DocumentUpdate {
        epoch: 2,
        ..update(prev_len, tokens, None)
    }
}

#[test]
fn an_adopted_output_is_sent_only_if_the_store_lacks_it() {
    let mut pending = adopted();
    assert!(pending.is_acknowledged());
    assert_eq!(exchange(&mut pending, 5), None);
    pending.push(ID, &signed(), (&later(5, &[6])).into());
    assert_eq!(exchange(&mut pending, 6), Some((5, vec![6])));
    assert!(pending.is_acknowledged());
}

#[test]
fn a_store_that_lost_an_adopted_output_gets_it_from_there() {
    for (known, missing) in [(2, vec![3, 4, 5, 6]), (0, vec![1, 2, 3, 4, 5, 6])] {
        let mut pending = adopted();
        pending.push(ID, &signed(), (&later(5, &[6])).into());
        assert_eq!(exchange(&mut pending, known), Some((5, vec![6])));
        assert_eq!(exchange(&mut pending, 6), Some((known, missing)));
        assert!(pending.is_acknowledged());
    }
}

#[test]
fn unsent_tokens_of_this_worker_are_sent_with_the_output_that_it_adopts() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1, 2], None)).into());
    exchange(&mut pending, 2);
    pending.push(ID, &signed(), (&update(2, &[3], None)).into());
    pending.release(ID, DocumentId(7));
    pending.adopt(ID, &signed(), (&later(0, &[1, 2, 3, 4, 5])).into());
    pending.push(ID, &signed(), (&later(5, &[6])).into());
    assert_eq!(pending.tokens(), 6);
    assert_eq!(exchange(&mut pending, 6), Some((2, vec![3, 4, 5, 6])));
    assert_eq!(pending.documents.len(), 1);
}

#[test]
fn adopting_another_text_or_a_shorter_one_replaces() {
    for output in [&[1, 9, 9, 9][..], &[1][..]] {
        let mut pending = PendingOutputs::default();
        pending.push(ID, &signed(), (&update(0, &[1, 2, 3], None)).into());
        pending.adopt(ID, &signed(), (&later(0, output)).into());
        let len = output.len() as u32;
        pending.push(ID, &signed(), (&later(len, &[7])).into());
        let (prev_len, tokens) = exchange(&mut pending, len + 1).unwrap();
        assert_eq!(
            [&output[..prev_len as usize], &tokens].concat(),
            [output, &[7]].concat()
        );
        assert_eq!(pending.tokens(), output.len() + 1);
    }
}

#[test]
fn nothing_of_an_erased_output_is_sent_again() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1, 2], None)).into());
    assert_eq!(exchange(&mut pending, ERASED_LEN), Some((0, vec![1, 2])));
    assert_eq!(exchange(&mut pending, ERASED_LEN), None);
    // Later tokens of the request are sent, so that the store can say so again.
    let end = update(2, &[3], Some(FinishReason::Stop));
    pending.push(ID, &signed(), (&end).into());
    assert_eq!(exchange(&mut pending, ERASED_LEN), Some((2, vec![3])));
    assert_eq!((pending.tokens(), pending.documents.len()), (0, 0));
}

#[test]
fn an_output_without_its_beginning_is_counted_as_lost() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(3, &[4, 5], None)).into());
    let (id, request) = pending.batch(1000, true).requests.remove(0);
    let given_up = pending.acknowledge(id, &request, &AppendReply { lengths: vec![1] }, 0);
    assert_eq!((given_up.lost, pending.documents.len()), (2, 0));
}

#[test]
fn an_output_of_which_the_store_has_a_newer_attempt_is_given_up_and_counted() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1, 2], None)).into());
    exchange(&mut pending, 2);
    pending.push(ID, &signed(), (&update(2, &[3, 4], None)).into());
    let (id, request) = pending.batch(1000, true).requests.remove(0);
    pending.push(ID, &signed(), (&update(4, &[5], None)).into());
    let reply = AppendReply {
        lengths: vec![FENCED_LEN],
    };
    let given_up = pending.acknowledge(id, &request, &reply, 0);
    assert_eq!(given_up, GivenUp { lost: 0, fenced: 3 });
    assert_eq!((pending.tokens(), pending.documents.len()), (0, 0));
}

#[test]
fn acknowledged_tokens_are_not_lost_by_shedding() {
    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1, 2], None)).into());
    exchange(&mut pending, 2);
    pending.push(ID, &signed(), (&update(2, &[3], None)).into());
    assert_eq!(pending.shed(0), 1);
}

#[test]
fn updates_weigh_something_and_are_cut_into_messages() {
    let mut pending = PendingOutputs::default();
    let documents = 2 * UPDATES_MAX as u128 + 5;
    for document in 0..documents {
        let mut end = update(0, &[], Some(FinishReason::Stop));
        end.document = DocumentId(document);
        pending.push(ID, &signed(), (&end).into());
    }
    let sizes = |tokens_max| -> Vec<usize> {
        let batch = pending.batch(tokens_max, true);
        batch
            .requests
            .iter()
            .map(|(_, request)| request.updates.len())
            .collect()
    };
    assert_eq!(sizes(10 * UPDATE_WEIGHT_TOKENS), [10]);
    assert_eq!(sizes(usize::MAX), [UPDATES_MAX, UPDATES_MAX, 5]);
}

#[test]
fn outputs_that_merely_grow_wait() {
    let mut pending = PendingOutputs::default();
    let sent = |pending: &PendingOutputs, growing| {
        let messages = pending.batch(1000, growing).requests;
        let updates = messages.iter().flat_map(|(_, request)| &request.updates);
        updates.map(|update| update.tokens.len()).sum::<usize>()
    };
    pending.push(ID, &signed(), (&update(0, &[1, 2], None)).into());
    assert_eq!((sent(&pending, false), sent(&pending, true)), (0, 2));
    let many = vec![3; GROWN_TOKENS - 2];
    pending.push(ID, &signed(), (&update(2, &many, None)).into());
    assert_eq!(sent(&pending, false), GROWN_TOKENS);
    exchange(&mut pending, GROWN_TOKENS as u32);

    let grown = GROWN_TOKENS as u32;
    pending.push(ID, &signed(), (&update(grown, &[4], None)).into());
    assert_eq!(sent(&pending, false), 0);
    let end = update(grown + 1, &[], Some(FinishReason::Stop));
    pending.push(ID, &signed(), (&end).into());
    assert_eq!(sent(&pending, false), 1);
    exchange(&mut pending, grown + 1);

    let mut of_group = update(0, &[1], None);
    of_group.head.group = Some("samples".into());
    pending.push(ID, &signed(), (&of_group).into());
    assert_eq!(sent(&pending, false), 1);

    let mut pending = PendingOutputs::default();
    pending.push(ID, &signed(), (&update(0, &[1], None)).into());
    pending.release(ID, update(0, &[], None).document);
    assert_eq!(sent(&pending, false), 1, "it goes on at another worker");
}

#[test]
fn nothing_starves_however_much_grows() {
    const DOCUMENTS: usize = 10;
    // Room for four documents in one upload.
    const ROOM: usize = 4 * UPDATE_WEIGHT_TOKENS;
    let mut pending = PendingOutputs::default();
    let mut lengths = [0; DOCUMENTS];
    let mut sent = [0; DOCUMENTS];
    for turn in 0..30 {
        // All of them grow before every upload.
        for (document, length) in lengths.iter_mut().enumerate() {
            let mut grown = update(*length, &[7], None);
            grown.document = DocumentId(document as u128);
            pending.push(ID, &signed(), (&grown).into());
            *length += 1;
        }
        let batch = pending.batch(ROOM, true);
        assert!(!batch.is_complete, "turn {turn}");
        for (id, request) in batch.requests {
            let taken = |update: &DocumentUpdate| update.prev_len + update.tokens.len() as u32;
            let reply = AppendReply {
                lengths: request.updates.iter().map(taken).collect(),
            };
            for update in &request.updates {
                let document = update.document.0 as usize;
                // With room for four of ten, each document is sent at least every fourth time.
                assert!((1..=4).contains(&update.tokens.len()), "turn {turn}");
                sent[document] += update.tokens.len() as u32;
            }
            pending.acknowledge(id, &request, &reply, 0);
        }
    }
    let waits = |sent: &u32| 30 - sent;
    assert!(sent.iter().map(waits).all(|turns| turns < 4), "{sent:?}");
    assert!(pending.batch(usize::MAX, true).is_complete);
}
