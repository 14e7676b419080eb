use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_speculation::draft::{
    Candidate, Expansion, Lookup, ProposeParams, Scope, Source, propose,
};

use super::*;
use crate::update::MERGED_AT_ONCE;

const QUIET: Duration = Duration::from_secs(10);

fn update(document: u128, epoch: u64, prev_len: u32, tokens: &[u32]) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch,
        prev_len,
        tokens: tokens.to_vec(),
        head: DocumentHead::default(),
        finish: None,
    }
}

fn ended(document: u128, epoch: u64, prev_len: u32, tokens: &[u32]) -> DocumentUpdate {
    DocumentUpdate {
        finish: Some(FinishReason::Stop),
        ..update(document, epoch, prev_len, tokens)
    }
}

/// The draft after the end of `context`, which is the text so far of `document` if that runs.
pub(in crate::replica) fn proposed(
    drafts: &DraftIndex,
    params: &ProposeParams,
    context: &[u32],
    document: Option<u128>,
) -> Option<Candidate> {
    let index = &drafts.index;
    let tip = document.and_then(|document| index.tip(DocumentKey(document)));
    let lookup = Lookup {
        source: Source::Suffix,
        scope: Scope::Tenant,
        index,
        cursor: tip.unwrap_or_else(|| index.start(context)),
        context,
    };
    propose(&[lookup], params, 16)
}

/// An index at one instant, unless a test moves the clock.
struct Bench {
    drafts: DraftIndex,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        Bench {
            drafts: DraftIndex::new(IndexConfig::default()),
            now: Instant::now(),
        }
    }

    fn merge(&mut self, update: &DocumentUpdate) {
        self.drafts.merge(update.into(), true, self.now).unwrap();
    }

    fn pin(&mut self, document: u128) {
        self.drafts.pin(DocumentId(document), self.now);
        while self.drafts.revive_part() {}
    }

    fn seal(&mut self) {
        let rebuild = self.drafts.begin_seal(self.now, QUIET);
        self.drafts
            .finish_rebuild(rebuild.run().unwrap(), self.now)
            .unwrap();
    }

    fn len(&self, document: u128) -> Option<u32> {
        self.drafts.len_of(DocumentId(document))
    }

    fn is_sealed(&self, document: u128) -> bool {
        self.drafts.index.is_sealed(DocumentKey(document))
    }

    /// Tokens, parents and SCORE of what is proposed after a context, in the running document if one is named.
    fn propose(&self, context: &[u32], document: Option<u128>) -> (Vec<(u32, Option<u32>)>, f32) {
        let params = ProposeParams {
            expansion: Expansion::Tree,
            samples_max: usize::MAX,
            ..ProposeParams::default()
        };
        let found = proposed(&self.drafts, &params, context, document);
        found.map_or_else(Default::default, |candidate| {
            let tree = &candidate.tree;
            (tree.tokens().zip(tree.parents()).collect(), candidate.score)
        })
    }
}

#[test]
fn an_piecefrom_two_sides_counts_once() {
    let mut bench = Bench::new();
    for piece in [
        update(1, 1, 0, &[1, 2, 3]),
        update(1, 1, 0, &[1, 2]),
        update(1, 1, 2, &[3, 4]),
    ] {
        bench.merge(&piece);
    }
    assert_eq!(bench.len(1), Some(4));
    assert_eq!(bench.drafts.index.tokens(), 4);
}

#[test]
fn gaps_and_old_epochs_are_ignored_and_new_epochs_shorten() {
    let mut bench = Bench::new();
    bench.merge(&update(1, 5, 0, &[1, 2, 3]));
    bench.merge(&update(1, 5, 9, &[7]));
    bench.merge(&update(1, 4, 3, &[8]));
    assert_eq!(bench.len(1), Some(3));
    bench.merge(&update(1, 6, 1, &[9]));
    assert_eq!(bench.len(1), Some(2));
}

#[test]
fn tokens_that_a_higher_epoch_repeats_are_not_appended_again() {
    for sealed in [false, true] {
        let mut bench = Bench::new();
        bench.merge(&ended(1, 1, 0, &[1, 2, 3, 4]));
        if sealed {
            bench.seal();
        }
        bench.merge(&update(1, 2, 1, &[2, 3, 4]));
        assert_eq!(bench.is_sealed(1), sealed);
        bench.merge(&update(1, 3, 1, &[2, 3, 4, 5]));
        assert_eq!(bench.len(1), Some(5));
        assert_eq!(bench.drafts.index.sizes().dead_tokens, 0);
        bench.merge(&update(1, 4, 1, &[2, 3, 9]));
        bench.merge(&update(1, 5, 2, &[3]));
        assert_eq!(bench.len(1), Some(3));
        assert_eq!(bench.drafts.index.sizes().dead_tokens, 3);
    }
}

#[test]
fn the_newest_attempt_of_an_epoch_replaces_earlier_ones() {
    for sealed in [false, true] {
        let mut bench = Bench::new();
        bench.merge(&update(1, 1, 0, &[1, 2, 3, 4, 5]));
        if sealed {
            bench.now += QUIET;
            bench.seal();
        }
        let emitted = |bench: &mut Bench, prev_len, tokens: &[u32], is_sole_source| {
            let piece = update(1, 1, prev_len, tokens);
            let emitted = bench
                .drafts
                .merge((&piece).into(), is_sole_source, bench.now);
            (emitted.unwrap(), bench.len(1))
        };
        assert_eq!(emitted(&mut bench, 0, &[1, 2], false), (false, Some(5)));
        assert_eq!(emitted(&mut bench, 2, &[3, 9], false), (true, Some(4)));
        assert_eq!(emitted(&mut bench, 4, &[8], true), (true, Some(5)));
        let whole = [1, 2, 3, 9, 8];
        let agreeing = bench
            .drafts
            .index
            .matching_prefix(DocumentKey(1), 0, &whole);
        assert_eq!(agreeing, whole.len());
        // An update of an older epoch, and one of a document whose beginning is gone, are ignored.
        bench.merge(&update(1, 2, 5, &[]));
        assert_eq!(emitted(&mut bench, 0, &[7], false).1, Some(5));
        bench.drafts.remove(&[DocumentId(1)]);
        assert_eq!(emitted(&mut bench, 5, &[7], false), (true, None));
    }
}

#[test]
fn the_oldest_documents_are_evicted_first_and_running_ones_stay() {
    for sealed in [false, true] {
        let mut bench = Bench::new();
        bench.pin(1);
        for document in 1..=3 {
            bench.merge(&ended(document, 1, 0, &[1, 2]));
        }
        if sealed {
            bench.seal();
        }
        assert_eq!(bench.drafts.evict(4), 1);
        assert_eq!([1, 2, 3].map(|n| bench.len(n)), [Some(2), None, Some(2)]);
        bench.drafts.reset();
        assert_eq!([1, 3].map(|n| bench.len(n)), [Some(2), None]);
    }
}

#[test]
fn outputs_that_ended_or_stopped_growing_are_sealed_and_running_ones_are_not() {
    let mut bench = Bench::new();
    bench.pin(1);
    bench.merge(&ended(1, 1, 0, &[1, 2]));
    bench.merge(&ended(2, 1, 0, &[3, 4]));
    bench.merge(&update(3, 1, 0, &[5, 6]));
    bench.now += QUIET / 2;
    bench.merge(&update(4, 1, 0, &[7, 8]));
    assert_eq!(bench.drafts.sealable_tokens(bench.now, QUIET), 2);
    bench.seal();
    let sealed = |bench: &Bench| [1, 2, 3, 4].map(|n| bench.is_sealed(n));
    assert_eq!(sealed(&bench), [false, true, false, false]);
    bench.now += QUIET / 2;
    bench.drafts.unpin(DocumentId(1));
    assert_eq!(bench.drafts.sealable_tokens(bench.now, QUIET), 4);
    bench.seal();
    assert_eq!(sealed(&bench), [true, true, true, false]);
    assert_eq!(bench.drafts.index.segments().len(), 2);
}

#[test]
fn an_echo_leaves_a_sealed_document_where_it_is() {
    let mut bench = Bench::new();
    bench.merge(&ended(1, 1, 0, &[1, 2, 3]));
    bench.seal();
    bench.merge(&update(1, 1, 0, &[1, 2]));
    bench.merge(&ended(1, 1, 2, &[3]));
    bench.merge(&ended(1, 2, 3, &[]));
    assert!(bench.is_sealed(1));
    assert_eq!(bench.drafts.sealable_tokens(bench.now, QUIET), 0);
    assert_eq!(bench.drafts.index.sizes().masked_tokens, 0);
}

#[test]
fn a_sealed_document_that_goes_on_is_live_again() {
    // It is cut after its end, or it grew, or it is about to grow.
    for way in 0..3 {
        let mut bench = Bench::new();
        bench.merge(&ended(1, 1, 0, &[1, 2, 3]));
        bench.seal();
        let len = match way {
            0 => {
                bench.merge(&ended(1, 2, 2, &[]));
                2
            }
            1 => {
                bench.merge(&ended(1, 1, 3, &[4]));
                4
            }
            _ => {
                bench.pin(1);
                3
            }
        };
        assert!(!bench.is_sealed(1));
        assert_eq!(bench.len(1), Some(len));
        bench.seal();
        let runs = way == 2;
        assert_eq!((bench.is_sealed(1), bench.len(1)), (!runs, Some(len)));
    }
}

#[test]
fn a_long_document_is_taken_back_in_parts_and_loses_nothing() {
    let text: Vec<u32> = (0..5_000).collect();
    // The last one is an update that comes after two parts.
    for updates in [None, Some(2)] {
        let mut bench = Bench::new();
        bench.merge(&ended(1, 1, 0, &text));
        bench.seal();
        assert_eq!(bench.drafts.index.live_tokens(), 0);
        // Each of these calls is a hold of the lock.
        bench.drafts.pin(DocumentId(1), bench.now);
        let mut live = vec![bench.drafts.index.live_tokens()];
        for _ in 0..updates.unwrap_or(100) {
            bench.drafts.revive_part();
            live.push(bench.drafts.index.live_tokens());
        }
        let holds = live.windows(2).map(|pair| pair[1] - pair[0]);
        assert!(live[0] <= MERGED_AT_ONCE as u64);
        assert!(holds.max().unwrap() <= MERGED_AT_ONCE as u64);
        bench.merge(&update(1, 1, 5_000, &[7]));
        assert!(!bench.is_sealed(1));
        let whole = [&text[..], &[7]].concat();
        let index = &bench.drafts.index;
        assert_eq!(index.matching_prefix(DocumentKey(1), 0, &whole), 5_001);
        assert_eq!((bench.len(1), index.tokens()), (Some(5_001), 5_001));
    }
}

#[test]
fn a_request_that_begins_during_the_seal_of_its_output_finds_it_live() {
    let mut bench = Bench::new();
    bench.merge(&ended(1, 1, 0, &[1, 2, 3]));
    let rebuilt = bench.drafts.begin_seal(bench.now, QUIET).run().unwrap();
    bench.pin(1);
    bench.drafts.finish_rebuild(rebuilt, bench.now).unwrap();
    assert!(bench.drafts.index.tip(DocumentKey(1)).is_some());
    assert_eq!(bench.propose(&[9, 1], Some(1)).0, vec![]);
    assert_eq!(bench.propose(&[9, 1], None).0[0], (2, None));
}

#[test]
fn sizes_leave_out_removed_documents() {
    let mut bench = Bench::new();
    for document in 0..40 {
        bench.merge(&ended(document, 1, 0, &[document as u32; 50]));
    }
    bench.seal();
    let full = settled_bytes(&bench.drafts.index.sizes());
    let gone: Vec<DocumentId> = (0..20).map(DocumentId).collect();
    bench.drafts.remove(&gone);
    let before = bench.drafts.index.bytes();
    let half = settled_bytes(&bench.drafts.index.sizes());
    bench.drafts.index.merge().unwrap();
    assert!(bench.drafts.index.bytes() < before);
    assert!(half < full * 6 / 10, "{half} of {full}");
}

/// Numbers that look like noise.
struct Noise(u64);

impl Noise {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}

/// A text with a good deal of repetition.
fn phrase(noise: &mut Noise) -> Vec<u32> {
    let from = noise.below(24) as u32;
    (0..1 + noise.below(7) as u32)
        .map(|step| (from * 7 + step * (1 + from % 3)) % 60)
        .collect()
}

#[test]
fn an_index_that_is_sealed_now_and_then_proposes_what_a_live_one_does() {
    for seed in 0..12 {
        let mut noise = Noise(seed);
        // One index is sealed and merged, the other stays live.
        let (mut sealed, mut plain) = (Bench::new(), Bench::new());
        let mut texts: Vec<Vec<u32>> = Vec::new();
        let mut epochs: Vec<u64> = Vec::new();
        let mut running: Vec<u128> = Vec::new();
        let mut rebuild: Option<Rebuilt> = None;
        let mut compared = 0;
        for _ in 0..600 {
            match noise.below(20) {
                0..3 => {
                    let document = texts.len() as u128;
                    texts.push(Vec::new());
                    epochs.push(1);
                    running.push(document);
                    for bench in [&mut sealed, &mut plain] {
                        bench.pin(document);
                        bench.merge(&update(document, 1, 0, &[]));
                    }
                }
                3..12 if !running.is_empty() => {
                    let at = running[noise.below(running.len() as u64) as usize];
                    let text = &mut texts[at as usize];
                    let new = phrase(&mut noise);
                    let piece = update(at, epochs[at as usize], text.len() as u32, &new);
                    text.extend(new);
                    for bench in [&mut sealed, &mut plain] {
                        bench.merge(&piece);
                    }
                }
                12..14 if !running.is_empty() => {
                    let place = noise.below(running.len() as u64) as usize;
                    let at = running.swap_remove(place);
                    let end = ended(
                        at,
                        epochs[at as usize],
                        texts[at as usize].len() as u32,
                        &[],
                    );
                    for bench in [&mut sealed, &mut plain] {
                        bench.merge(&end);
                        bench.drafts.unpin(DocumentId(at));
                    }
                }
                14 if !texts.is_empty() => {
                    // A document that no request here emits is removed or cut.
                    let at = noise.below(texts.len() as u64) as u128;
                    if running.contains(&at) {
                        continue;
                    }
                    let text = &mut texts[at as usize];
                    let keep = noise.below(text.len() as u64 + 1) as usize;
                    epochs[at as usize] += 1;
                    let cut = ended(at, epochs[at as usize], keep as u32, &[]);
                    let is_removed = noise.below(2) == 0;
                    text.truncate(keep);
                    for bench in [&mut sealed, &mut plain] {
                        if is_removed {
                            bench.drafts.remove(&[DocumentId(at)]);
                        } else {
                            bench.merge(&cut);
                        }
                    }
                }
                15 if rebuild.is_none() => {
                    rebuild = Some(sealed.drafts.begin_seal(sealed.now, QUIET).run().unwrap());
                }
                16 => {
                    if let Some(rebuilt) = rebuild.take() {
                        sealed.drafts.finish_rebuild(rebuilt, sealed.now).unwrap();
                    }
                }
                17 => sealed.drafts.index.merge().unwrap(),
                18 if rebuild.is_none() => {
                    // An automaton is exact again once it is rebuilt.
                    sealed.drafts.index.rebuild().unwrap();
                    plain.drafts.index.rebuild().unwrap();
                    let context = phrase(&mut noise);
                    assert_eq!(
                        sealed.propose(&context, None),
                        plain.propose(&context, None),
                        "seed {seed}, after {context:?}"
                    );
                    for document in &running {
                        let text = &texts[*document as usize];
                        assert_eq!(
                            sealed.propose(text, Some(*document)),
                            plain.propose(text, Some(*document)),
                            "seed {seed}, document {document}"
                        );
                        compared += usize::from(!sealed.propose(text, None).0.is_empty());
                    }
                }
                _ => {}
            }
            assert_eq!(sealed.drafts.index.tokens(), plain.drafts.index.tokens());
            assert!(running.iter().all(|document| !sealed.is_sealed(*document)));
        }
        assert!(
            compared > 20,
            "seed {seed}: only {compared} drafts compared"
        );
        assert!(sealed.drafts.index.segments().len() > 0);
    }
}
