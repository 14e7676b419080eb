//! Scripts of pieces and answers.

use super::*;
use refrain_protocol::Namespace;

const ID: NamespaceId = NamespaceId(1);

fn signed() -> SignedNamespace {
    let namespace = Namespace {
        tenant: "t".into(),
        model: "m".into(),
        tokenizer: "k".into(),
    };
    SignedNamespace {
        namespace,
        issued_at_s: 0,
        signature: String::new(),
    }
}

fn piece(prev_len: u32, tokens: &[u32], finish: Option<FinishReason>) -> DocumentUpdate {
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
fn exchange(gathered: &mut Gathered, length: u32) -> Option<(u32, Vec<u32>)> {
    let (id, request) = gathered.batch(1000, true).requests.into_iter().next()?;
    let sent = (
        request.updates[0].prev_len,
        request.updates[0].tokens.clone(),
    );
    gathered.acknowledge(
        id,
        &request,
        &AppendReply {
            lengths: vec![length],
        },
    );
    Some(sent)
}

#[test]
fn pieces_are_sent_once_and_forgotten_at_the_end() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1, 2], None)).into());
    assert_eq!(exchange(&mut gathered, 2), Some((0, vec![1, 2])));
    assert_eq!(exchange(&mut gathered, 2), None);
    gathered.push(
        ID,
        &signed(),
        (&piece(2, &[3], Some(FinishReason::Stop))).into(),
    );
    assert_eq!(exchange(&mut gathered, 3), Some((2, vec![3])));
    assert_eq!((gathered.tokens(), gathered.documents.len()), (0, 0));
}

#[test]
fn a_store_that_lost_the_beginning_gets_it_again() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1, 2], None)).into());
    exchange(&mut gathered, 2);
    gathered.push(ID, &signed(), (&piece(2, &[3], None)).into());
    assert_eq!(exchange(&mut gathered, 0), Some((2, vec![3])));
    assert_eq!(exchange(&mut gathered, 3), Some((0, vec![1, 2, 3])));
    assert!(gathered.is_settled());
}

#[test]
fn what_the_store_knows_better_is_not_sent_for_ever() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1, 2], None)).into());
    // The store has one token of a newer attempt and ignores this one.
    assert_eq!(exchange(&mut gathered, 1), Some((0, vec![1, 2])));
    assert_eq!(exchange(&mut gathered, 1), Some((1, vec![2])));
    assert_eq!(exchange(&mut gathered, 1), None);
    assert_eq!(gathered.documents.len(), 0);
}

#[test]
fn a_cut_shortens_what_is_sent() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1, 2, 3], None)).into());
    let mut cut = piece(1, &[], Some(FinishReason::Stop));
    cut.epoch = 2;
    gathered.push(ID, &signed(), (&cut).into());
    let (_, request) = gathered.batch(1000, true).requests.remove(0);
    assert_eq!(
        (request.updates[0].epoch, &request.updates[0].tokens[..]),
        (2, &[1][..])
    );
}

#[test]
fn what_came_while_a_message_was_under_way_is_not_forgotten() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1], None)).into());
    let (id, request) = gathered.batch(1000, true).requests.remove(0);
    gathered.push(
        ID,
        &signed(),
        (&piece(1, &[2], Some(FinishReason::Stop))).into(),
    );
    gathered.acknowledge(id, &request, &AppendReply { lengths: vec![1] });
    assert_eq!(exchange(&mut gathered, 2), Some((1, vec![2])));
    assert_eq!(gathered.documents.len(), 0);
}

#[test]
fn shedding_takes_finished_documents_first() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1, 2], None)).into());
    let mut finished = piece(0, &[3, 4, 5], Some(FinishReason::Stop));
    finished.document = DocumentId(8);
    gathered.push(ID, &signed(), (&finished).into());
    assert_eq!(gathered.shed(2), 3);
    assert_eq!(gathered.documents.len(), 1);
}

#[test]
fn a_released_document_leaves_once_the_store_has_it() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1], None)).into());
    gathered.release(ID, DocumentId(7));
    assert_eq!(exchange(&mut gathered, 1), Some((0, vec![1])));
    assert_eq!(gathered.documents.len(), 0);
}

/// An output of five tokens that another worker wrote.
fn adopted() -> Gathered {
    let mut gathered = Gathered::default();
    let mut said = piece(0, &[1, 2, 3, 4, 5], None);
    said.epoch = 2;
    gathered.adopt(ID, &signed(), (&said).into());
    gathered
}

fn later(prev_len: u32, tokens: &[u32]) -> DocumentUpdate {
    DocumentUpdate {
        epoch: 2,
        ..piece(prev_len, tokens, None)
    }
}

#[test]
fn an_adopted_output_is_sent_only_if_the_store_lacks_it() {
    let mut gathered = adopted();
    assert!(gathered.is_settled());
    assert_eq!(exchange(&mut gathered, 5), None);
    gathered.push(ID, &signed(), (&later(5, &[6])).into());
    assert_eq!(exchange(&mut gathered, 6), Some((5, vec![6])));
    assert!(gathered.is_settled());
}

#[test]
fn a_store_that_lost_an_adopted_output_gets_it_from_there() {
    for (known, missing) in [(2, vec![3, 4, 5, 6]), (0, vec![1, 2, 3, 4, 5, 6])] {
        let mut gathered = adopted();
        gathered.push(ID, &signed(), (&later(5, &[6])).into());
        assert_eq!(exchange(&mut gathered, known), Some((5, vec![6])));
        assert_eq!(exchange(&mut gathered, 6), Some((known, missing)));
        assert!(gathered.is_settled());
    }
}

#[test]
fn what_this_worker_still_owed_is_sent_with_what_it_adopts() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1, 2], None)).into());
    exchange(&mut gathered, 2);
    gathered.push(ID, &signed(), (&piece(2, &[3], None)).into());
    gathered.release(ID, DocumentId(7));
    gathered.adopt(ID, &signed(), (&later(0, &[1, 2, 3, 4, 5])).into());
    gathered.push(ID, &signed(), (&later(5, &[6])).into());
    assert_eq!(gathered.tokens(), 6);
    assert_eq!(exchange(&mut gathered, 6), Some((2, vec![3, 4, 5, 6])));
    assert_eq!(gathered.documents.len(), 1);
}

#[test]
fn adopting_another_text_or_a_shorter_one_replaces() {
    for said in [&[1, 9, 9, 9][..], &[1][..]] {
        let mut gathered = Gathered::default();
        gathered.push(ID, &signed(), (&piece(0, &[1, 2, 3], None)).into());
        gathered.adopt(ID, &signed(), (&later(0, said)).into());
        let len = said.len() as u32;
        gathered.push(ID, &signed(), (&later(len, &[7])).into());
        let (prev_len, tokens) = exchange(&mut gathered, len + 1).unwrap();
        assert_eq!(
            [&said[..prev_len as usize], &tokens].concat(),
            [said, &[7]].concat()
        );
        assert_eq!(gathered.tokens(), said.len() + 1);
    }
}

#[test]
fn an_output_without_its_beginning_is_counted_as_lost() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(3, &[4, 5], None)).into());
    let (id, request) = gathered.batch(1000, true).requests.remove(0);
    let lost = gathered.acknowledge(id, &request, &AppendReply { lengths: vec![1] });
    assert_eq!((lost, gathered.documents.len()), (2, 0));
}

#[test]
fn acknowledged_tokens_are_not_lost_by_shedding() {
    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1, 2], None)).into());
    exchange(&mut gathered, 2);
    gathered.push(ID, &signed(), (&piece(2, &[3], None)).into());
    assert_eq!(gathered.shed(0), 1);
}

#[test]
fn updates_weigh_something_and_are_cut_into_messages() {
    let mut gathered = Gathered::default();
    let documents = 2 * UPDATES_MAX as u128 + 5;
    for document in 0..documents {
        let mut end = piece(0, &[], Some(FinishReason::Stop));
        end.document = DocumentId(document);
        gathered.push(ID, &signed(), (&end).into());
    }
    let sizes = |tokens_max| -> Vec<usize> {
        let batch = gathered.batch(tokens_max, true);
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
fn outputs_that_merely_grow_may_wait() {
    let mut gathered = Gathered::default();
    let sent = |gathered: &Gathered, growing| {
        let messages = gathered.batch(1000, growing).requests;
        let updates = messages.iter().flat_map(|(_, request)| &request.updates);
        updates.map(|update| update.tokens.len()).sum::<usize>()
    };
    gathered.push(ID, &signed(), (&piece(0, &[1, 2], None)).into());
    assert_eq!((sent(&gathered, false), sent(&gathered, true)), (0, 2));
    let many = vec![3; GROWN_TOKENS - 2];
    gathered.push(ID, &signed(), (&piece(2, &many, None)).into());
    assert_eq!(sent(&gathered, false), GROWN_TOKENS);
    exchange(&mut gathered, GROWN_TOKENS as u32);

    let grown = GROWN_TOKENS as u32;
    gathered.push(ID, &signed(), (&piece(grown, &[4], None)).into());
    assert_eq!(sent(&gathered, false), 0);
    let end = piece(grown + 1, &[], Some(FinishReason::Stop));
    gathered.push(ID, &signed(), (&end).into());
    assert_eq!(sent(&gathered, false), 1);
    exchange(&mut gathered, grown + 1);

    let mut of_group = piece(0, &[1], None);
    of_group.head.group = Some("samples".into());
    gathered.push(ID, &signed(), (&of_group).into());
    assert_eq!(sent(&gathered, false), 1);

    let mut gathered = Gathered::default();
    gathered.push(ID, &signed(), (&piece(0, &[1], None)).into());
    gathered.release(ID, piece(0, &[], None).document);
    assert_eq!(sent(&gathered, false), 1, "it goes on elsewhere");
}

#[test]
fn nothing_starves_however_much_grows() {
    const DOCUMENTS: usize = 10;
    // Of so many at once.
    const ROOM: usize = 4 * UPDATE_WEIGHT_TOKENS;
    let mut gathered = Gathered::default();
    let mut lengths = [0; DOCUMENTS];
    let mut sent = [0; DOCUMENTS];
    for turn in 0..30 {
        // All of them grow with every turn.
        for (document, length) in lengths.iter_mut().enumerate() {
            let mut grown = piece(*length, &[7], None);
            grown.document = DocumentId(document as u128);
            gathered.push(ID, &signed(), (&grown).into());
            *length += 1;
        }
        let batch = gathered.batch(ROOM, true);
        assert!(!batch.is_complete, "turn {turn}");
        for (id, request) in batch.requests {
            let taken = |update: &DocumentUpdate| update.prev_len + update.tokens.len() as u32;
            let reply = AppendReply {
                lengths: request.updates.iter().map(taken).collect(),
            };
            for update in &request.updates {
                let document = update.document.0 as usize;
                // What came in so many turns. With places for four of ten, everyone's turn comes within four.
                assert!((1..=4).contains(&update.tokens.len()), "turn {turn}");
                sent[document] += update.tokens.len() as u32;
            }
            gathered.acknowledge(id, &request, &reply);
        }
    }
    let waits = |sent: &u32| 30 - sent;
    assert!(sent.iter().map(waits).all(|turns| turns < 4), "{sent:?}");
    assert!(gathered.batch(usize::MAX, true).is_complete);
}
