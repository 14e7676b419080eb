//! Random operations compared with a plain model, and followers compared with the store.

use super::*;
use proptest::prelude::*;

use crate::config::{DraftStoreConfig, StoreTuning};

#[derive(Clone, Debug)]
enum Op {
    Append {
        document: u128,
        epoch: u64,
        prev_len: u32,
        count: u32,
        finish: bool,
    },
    /// Continues where the document ends, as a worker does.
    Grow {
        document: u128,
        count: u32,
    },
    Poll {
        follower: usize,
        tokens_max: usize,
    },
    Touch {
        document: u128,
    },
    Tick {
        elapsed_ms: u64,
    },
    /// Seals everything in the log.
    Seal,
    /// Merges all segments.
    Merge,
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u128..4, 1u64..4, 0u32..60, 0u32..40, any::<bool>()).prop_map(
            |(document, epoch, prev_len, count, finish)| {
                Op::Append { document, epoch, prev_len, count, finish }
            }
        ),
        10 => (0u128..4, 1u32..80).prop_map(|(document, count)| Op::Grow { document, count }),
        6 => (0usize..3, 1usize..200)
            .prop_map(|(follower, tokens_max)| Op::Poll { follower, tokens_max }),
        1 => (0u128..4).prop_map(|document| Op::Touch { document }),
        1 => (1u64..200_000).prop_map(|elapsed_ms| Op::Tick { elapsed_ms }),
        1 => Just(Op::Seal),
        1 => Just(Op::Merge),
        1 => Just(Op::Reopen),
    ]
}

/// The tokens of a document's epoch: one text per epoch, as with a real request. Every third position is equal in all
/// epochs.
fn truth(document: u128, epoch: u64, from: u32, count: u32) -> Vec<TokenId> {
    (from..from + count)
        .map(|at| {
            let epoch = if at % 3 == 0 { 0 } else { epoch as u32 };
            at * 16 + epoch * 4 + document as u32
        })
        .collect()
}

/// The rule of `placement.rs`, token by token.
#[derive(Clone, Debug, Default, PartialEq)]
struct Plain {
    epoch: u64,
    epoch_start: usize,
    text: Vec<TokenId>,
    finish: Option<FinishReason>,
}

fn apply(documents: &mut BTreeMap<u128, Plain>, update: &DocumentUpdate) -> u32 {
    let start = update.prev_len as usize;
    let end = start + update.tokens.len();
    let id = update.document.0;
    let Some(plain) = documents.get_mut(&id) else {
        if start == 0 && end > 0 {
            let text = update.tokens.clone();
            documents.insert(
                id,
                Plain {
                    epoch: update.epoch,
                    epoch_start: 0,
                    text,
                    finish: update.finish,
                },
            );
            return end as u32;
        }
        return 0;
    };
    if update.epoch >= plain.epoch && start <= plain.text.len() {
        if update.epoch > plain.epoch {
            plain.epoch = update.epoch;
            plain.text.truncate(start);
            plain.epoch_start = start;
            plain.finish = update.finish;
        }
        let before = plain.text.len();
        for (at, token) in (start..).zip(&update.tokens) {
            if at < plain.text.len() {
                plain.text[at] = *token;
            } else {
                plain.text.push(*token);
            }
        }
        if end > start && end >= plain.epoch_start {
            plain.epoch_start = plain.epoch_start.min(start);
        }
        if plain.text.len() > before {
            plain.finish = update.finish;
        } else if end == plain.text.len() {
            plain.finish = plain.finish.or(update.finish);
        }
    }
    plain.text.len() as u32
}

fn run(ops: &[Op], config: DraftStoreConfig, evicts: bool) {
    let mut store = Store::new(config);
    let mut plain = BTreeMap::new();
    let mut followers: Vec<Follower> = (0..3).map(|_| Follower::default()).collect();
    for op in ops {
        let sent = match op {
            Op::Append {
                document,
                epoch,
                prev_len,
                count,
                finish,
            } => {
                let tokens = truth(*document, *epoch, *prev_len, *count);
                let sent = update(*document, *epoch, *prev_len, &tokens);
                Some(if *finish { finished(sent) } else { sent })
            }
            Op::Grow { document, count } => {
                let open = store.shared.read().unwrap();
                let known = open.catalog.document(key("a", *document));
                let (epoch, len) =
                    known.map_or((1, 0), |known| (known.state.epoch, known.state.len));
                Some(update(
                    *document,
                    epoch,
                    len,
                    &truth(*document, epoch, len, *count),
                ))
            }
            Op::Poll {
                follower,
                tokens_max,
            } => {
                followers[*follower].poll(&store, names("a").id(), *tokens_max);
                None
            }
            Op::Touch { document } => {
                store.touch("a", *document);
                None
            }
            Op::Tick { elapsed_ms } => {
                store.tick(*elapsed_ms);
                None
            }
            Op::Seal => {
                store.seal("a");
                None
            }
            Op::Merge => {
                store.merge("a");
                None
            }
            Op::Reopen => {
                store = store.reopen();
                None
            }
        };
        if let Some(sent) = sent {
            let lengths = store.append("a", std::slice::from_ref(&sent));
            if !evicts {
                assert_eq!(lengths, [apply(&mut plain, &sent)], "{sent:?}");
            }
        }
    }
    if !evicts {
        for document in 0..4 {
            let text = plain.get(&document).map(|plain| plain.text.clone());
            assert_eq!(store.text("a", document), text);
        }
    }
    let mut fresh = Follower::default();
    fresh.catch_up(&store, "a", 50);
    for (id, copy) in &fresh.documents {
        assert_eq!(Some(&copy.tokens), store.text("a", id.0).as_ref());
        if !evicts {
            let plain = &plain[&id.0];
            assert_eq!((copy.epoch, copy.finish), (plain.epoch, plain.finish));
        }
    }
    assert_eq!(fresh.documents.len(), store.documents("a").len());
    for mut follower in followers {
        follower.catch_up(&store, "a", 70);
        assert_eq!(follower.documents, fresh.documents);
    }
    // The sums equal those of the documents.
    let open = store.shared.read().unwrap();
    let totals = open.catalog.totals();
    let tokens: usize = fresh.documents.values().map(|copy| copy.tokens.len()).sum();
    assert_eq!(
        (totals.tokens, totals.documents),
        (tokens as u64, fresh.documents.len() as u64)
    );
    let bytes: usize = store
        .log
        .records()
        .iter()
        .filter(|(key, _)| matches!(key[0], b'p' | b'h'))
        .map(|(key, value)| key.len() + value.len())
        .sum();
    let catalog = &open.catalog;
    let (unsealed, unsealed_bytes) = catalog.segments().unsealed_totals();
    assert_eq!(unsealed_bytes, bytes as u64);
    let (mut sealed, mut sealed_bytes) = (0, 0);
    for (document, _) in catalog.documents(names("a").id()) {
        let known = catalog.document(key("a", document.0)).unwrap();
        if known.slot.is_some() {
            sealed += 1;
            sealed_bytes += u64::from(known.state.bytes);
        }
    }
    let mounted = catalog.segments().iter();
    let live: u64 = mounted.map(|(_, mounted)| mounted.live_documents).sum();
    assert_eq!(live, sealed);
    assert_eq!(totals.documents, unsealed + sealed);
    assert_eq!(totals.bytes, unsealed_bytes + sealed_bytes);
}

proptest! {
    #[test]
    fn the_store_equals_the_plain_model(ops in proptest::collection::vec(op(), 1..120)) {
        run(&ops, DraftStoreConfig::default(), false);
    }

    #[test]
    fn followers_equal_the_store_under_eviction(ops in proptest::collection::vec(op(), 1..200)) {
        let config = DraftStoreConfig {
            tokens_max: 300,
            tuning: StoreTuning {
                eviction_step: 2,
                tombstones_max: 4,
                ..StoreTuning::default()
            },
            ..DraftStoreConfig::default()
        };
        run(&ops, config, true);
    }

    #[test]
    fn any_order_of_updates_ends_in_the_right_text(
        cuts in proptest::collection::vec(0u32..60, 1..4),
        garbage in proptest::collection::vec((0usize..4, 0u32..80, 1u32..30), 0..40),
        piece in 1u32..40,
    ) {
        // The text of each epoch: the one before it up to the cut, then its own.
        let mut texts = vec![truth(1, 1, 0, 80)];
        for (at, cut) in cuts.iter().enumerate() {
            let before = &texts[at][..*cut as usize];
            texts.push([before, &truth(1, at as u64 + 2, *cut, 80 - cut)].concat());
        }
        let mut store = Store::new(DraftStoreConfig::default());
        for (epoch, from, count) in garbage {
            let epoch = epoch.min(texts.len() - 1);
            let until = (from + count).min(80) as usize;
            let tokens = &texts[epoch][from as usize..until];
            store.append("a", &[update(1, epoch as u64 + 1, from, tokens)]);
        }
        let (epoch, last) = (texts.len() as u64, &texts[texts.len() - 1]);
        for (step, tokens) in last.chunks(piece as usize).enumerate() {
            store.append("a", &[update(1, epoch, step as u32 * piece, tokens)]);
        }
        let text = store.text("a", 1);
        prop_assert_eq!(text.as_ref(), Some(last));
    }
}
