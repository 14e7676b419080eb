//! Tests that the output equals that of plain decoding, for any draft and any mix of steps.

use std::collections::HashMap;

use proptest::prelude::*;
use refrain_protocol::engine::{CloseRequest, Draft, Sampling, SelfDraft, StepItem, StepRequest};
use refrain_protocol::{EngineSessionId, TokenId};

use super::opening_for_drafts;
use crate::config::EngineConfig;
use crate::tests::draft_model::stranger;
use crate::tests::eagle3::tiny_head;
use crate::tests::support::{
    Random, TestEngine, VOCAB, chain, engine, engine_with_drafter, engine_with_head, item,
};

/// A text that is being decoded, and its expected continuation.
struct Stream {
    prompt: Vec<TokenId>,
    sampling: Sampling,
    /// The output of plain decoding.
    truth: Vec<TokenId>,
    text: Vec<TokenId>,
    session: u128,
    open: bool,
    /// The tokens that the engine has, which are a prefix of `text`.
    sent: usize,
}

const OUTPUT: usize = 40;

/// The longest draft of a caller, the token of noise included.
const DRAFT_MAX: usize = 6;
/// The most tokens that an engine's own draft is asked for.
const SELF_DRAFT_MAX: usize = 39;
/// The most tokens that are sent again although the engine has them.
const REPEATED_MAX: usize = 4;

fn streams(random: &mut Random, temperature: f32) -> Vec<Stream> {
    let shared_len = random.below(50);
    let shared = random.tokens(shared_len);
    (0..3)
        .map(|at| {
            let own = 1 + random.below(30);
            let mut prompt = shared.clone();
            prompt.extend(random.tokens(own));
            let sampling = Sampling {
                temperature,
                seed: random.next(),
                ..Sampling::default()
            };
            let mut plain = engine(EngineConfig::default());
            Stream {
                truth: plain.decode(1, &sampling, &prompt, OUTPUT + 20),
                text: prompt.clone(),
                prompt,
                sampling,
                session: at,
                open: false,
                sent: 0,
            }
        })
        .collect()
}

impl Stream {
    /// The most tokens that the next item can count as in a step.
    fn item_tokens_max(&self) -> usize {
        self.text.len() - self.sent + REPEATED_MAX + DRAFT_MAX + SELF_DRAFT_MAX
    }

    /// Returns the next item: a piece of the text, or all of it, with any kind of draft or none.
    fn item(&mut self, random: &mut Random) -> StepItem {
        if random.below(4) == 0 {
            // The caller cuts the text, or sends tokens again that the engine already has.
            let cut = self.text.len().saturating_sub(random.below(6));
            self.text.truncate(cut.max(self.prompt.len()));
            self.sent = self.sent.min(self.text.len());
            self.sent -= random.below(REPEATED_MAX + 1).min(self.sent);
        }
        let owed = self.text.len() - self.sent;
        let piece = random.below(3) == 0 && owed > 1;
        let count = if piece {
            1 + random.below(owed - 1)
        } else {
            owed
        };
        let tokens = &self.text[self.sent..self.sent + count];
        let mut item = if self.open {
            item(self.session, self.sent, tokens)
        } else {
            opening_for_drafts(self.session, &self.sampling, tokens)
        };
        self.open = true;
        item.sample = !piece;
        item.max_emit = 1 + random.below(9) as u32;
        if piece {
            return item;
        }
        match random.below(8) {
            0 => {}
            1 => item.draft = Some(self.draft(random)),
            kind => {
                // Some items have a draft of the caller too.
                item.draft = (kind > 5).then(|| self.draft(random));
                item.self_draft = Some(SelfDraft {
                    depth: 1 + random.below(6) as u32,
                    top_k: 1 + random.below(16) as u32,
                    tokens_max: random.below(SELF_DRAFT_MAX + 1) as u32,
                    path_prob_min: [0.0, 0.0, 0.001, 0.05][random.below(4)],
                    sampled: false,
                });
            }
        }
        item
    }

    /// Returns a part of the true continuation, and noise after it.
    fn draft(&self, random: &mut Random) -> Draft {
        let done = self.text.len() - self.prompt.len();
        let mut tokens = self.truth[done..done + random.below(DRAFT_MAX)].to_vec();
        tokens.push(random.below(VOCAB as usize) as TokenId);
        chain(&tokens)
    }

    fn done(&self) -> bool {
        self.text.len() >= self.prompt.len() + OUTPUT
    }
}

/// Counts of work that the test needs to be meaningful.
#[derive(Default)]
struct Work {
    self_drafted: u32,
    accepted: usize,
    followed: usize,
}

/// Creates an engine with a drafter.
type Engine = fn(EngineConfig) -> TestEngine;

const ENGINES: [Engine; 2] = [
    |config| engine_with_head(tiny_head(), config),
    |config| engine_with_drafter(stranger(), config),
];

fn check(engine: Engine, temperature: f32, seed: u64, config: EngineConfig) -> Work {
    let mut random = Random(seed);
    let mut streams = streams(&mut random, temperature);
    let mut work = Work::default();
    let mut sessions = 100;
    let step_tokens_max = config.max_step_tokens as usize;
    let TestEngine { mut core, now } = engine(config);
    let mut steps = 0;
    while streams.iter().any(|stream| !stream.done()) {
        steps += 1;
        assert!(steps < 1000, "seed {seed}: no end");
        let mut items = Vec::new();
        let mut batch = Vec::new();
        // A caller keeps to the engine's limit: what has no room in this step waits for another one.
        let mut room = step_tokens_max;
        for (at, stream) in streams.iter_mut().enumerate() {
            if stream.done() || random.below(3) == 0 {
                continue;
            }
            if stream.open && random.below(12) == 0 {
                // The text continues in a new session, which may reuse the old one's KV.
                core.close(&CloseRequest {
                    sessions: vec![EngineSessionId(stream.session)],
                    keep_kv: random.below(3) > 0,
                    parks: false,
                });
                sessions += 1;
                (stream.session, stream.open, stream.sent) = (sessions, false, 0);
            }
            let Some(rest) = room.checked_sub(stream.item_tokens_max()) else {
                continue;
            };
            room = rest;
            items.push(stream.item(&mut random));
            batch.push(at);
        }
        let asked: HashMap<u128, StepItem> = items
            .iter()
            .map(|item| (item.session.0, item.clone()))
            .collect();
        let stepped = core.step(StepRequest { items }, now).unwrap();
        work.followed += stepped.draft_rows.text;
        for (at, result) in batch.into_iter().zip(stepped.results) {
            let stream = &mut streams[at];
            let output = result.unwrap();
            let asked = &asked[&stream.session];
            stream.sent = output.text_len as usize;
            if !asked.sample {
                continue;
            }
            let done = stream.text.len() - stream.prompt.len();
            let count = output.emitted.len();
            assert_eq!(
                output.emitted,
                stream.truth[done..done + count],
                "seed {seed}"
            );
            assert!(
                count >= 1 && count <= asked.max_emit as usize,
                "seed {seed}"
            );
            if let Some(wanted) = asked.self_draft {
                assert!(output.self_drafted <= wanted.tokens_max, "seed {seed}");
                let accepted = output.accepted_nodes.len();
                if asked.draft.is_some() {
                    // The last token may be a draft node of the caller that was too deep.
                    assert!([count - 1, count].contains(&accepted), "seed {seed}");
                } else {
                    assert_eq!(accepted, count - 1, "seed {seed}");
                    assert!(accepted <= wanted.depth as usize, "seed {seed}");
                }
                let sent = asked.draft.as_ref().map_or(0, |draft| draft.tokens.len()) as u32;
                let nodes = sent + output.self_drafted;
                assert!(
                    output.accepted_nodes.iter().all(|node| *node < nodes)
                        && output.agreed_nodes.iter().all(|node| *node < sent),
                    "seed {seed}"
                );
                let own = |node: &&u32| **node >= sent || output.agreed_nodes.contains(node);
                work.accepted += output.accepted_nodes.iter().filter(own).count();
            } else {
                assert_eq!(output.self_drafted, 0, "seed {seed}");
            }
            work.self_drafted += output.self_drafted;
            stream.text.extend(&output.emitted);
        }
    }
    work
}

fn short_of_room(seed: u64) -> EngineConfig {
    EngineConfig {
        eagle3_window_tokens: 1 + (seed % 40) as usize,
        kv_tokens_max: 512,
        max_step_tokens: 300,
        ..EngineConfig::default()
    }
}

/// Three texts that are read again at once do not fit into one step.
#[test]
fn texts_without_room_in_a_step_wait_for_the_next() {
    let seed = 7_861_706_162_600_736_818;
    check(ENGINES[0], 0.8, seed, short_of_room(seed));
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases((ProptestConfig::default().cases / 10).max(1))
    })]

    #[test]
    fn greedy_output_stays(seed in any::<u64>(), engine in 0..2usize) {
        check(ENGINES[engine], 0.0, seed, EngineConfig::default());
    }

    #[test]
    fn sampled_output_stays(seed in any::<u64>(), engine in 0..2usize) {
        check(ENGINES[engine], 0.8, seed, EngineConfig::default());
    }

    #[test]
    fn output_stays_where_states_are_dropped_and_room_is_short(seed in any::<u64>(), engine in 0..2usize) {
        check(ENGINES[engine], 0.8, seed, short_of_room(seed));
    }
}

#[test]
fn the_mix_drafts_accepts_and_follows() {
    for engine in ENGINES {
        let (mut drafted, mut accepted, mut followed) = (0, 0, 0);
        for seed in 0..6 {
            let work = check(engine, 0.8, seed, EngineConfig::default());
            drafted += work.self_drafted;
            accepted += work.accepted;
            followed += work.followed;
        }
        // A random network is right as often as chance.
        assert!(
            drafted > 2000 && accepted > 10 && followed > 1000,
            "{drafted} drafted, {accepted} accepted, {followed} followed"
        );
    }
}
