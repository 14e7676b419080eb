//! Tests that sessions which begin with blocks of the pool have the bits of uninterrupted ones.

mod http;

use std::sync::Arc;

use refrain_protocol::engine::{CloseRequest, Sampling, StepItem, StepRequest, TokenLogprob};
use refrain_protocol::prefix::prefix_hashes;
use refrain_protocol::{EngineSessionId, NamespaceId, TenantId, TokenId};

use super::draft_model::stranger;
use super::eagle3::tiny_head;
use super::self_drafts::{drafting, opening_for_drafts, wanted};
use super::support::{
    Random, TestEngine, by_head, engine, engine_with_drafter, item, opening, tiny,
};
use crate::config::{EngineConfig, KvPoolConfig};
use crate::engine::KV_LOADING;
use crate::network::{BLOCK_TOKENS, KvShape};
use crate::pool::{BlockId, BlockSource, KvPool, LoadJob, PoolQueues, PooledText, encoded_len};

const PROMPT_TOKENS: usize = 70;
const OUTPUT_TOKENS: usize = 60;

/// A pool without threads: a test does their work when it likes.
struct TestPool {
    pool: Arc<KvPool>,
    queues: PoolQueues,
    config: KvPoolConfig,
}

fn in_memory(blocks_max: usize) -> KvPoolConfig {
    let block_bytes = KvShape::of(&tiny().architecture).block_len() * 4;
    KvPoolConfig {
        memory_bytes_max: (blocks_max * block_bytes) as u64,
        ..KvPoolConfig::default()
    }
}

impl TestPool {
    fn open(config: KvPoolConfig) -> Self {
        let shape = KvShape::of(&tiny().architecture);
        let (pool, queues) = KvPool::open(&config, shape).unwrap().unwrap();
        TestPool {
            pool: Arc::new(pool),
            queues,
            config,
        }
    }

    /// An engine that has nothing but this pool.
    fn engine(&self, version: u64) -> TestEngine {
        self.pooled(engine(config()), version)
    }

    fn pooled(&self, engine: TestEngine, version: u64) -> TestEngine {
        let TestEngine { core, now } = engine;
        TestEngine {
            core: core.with_pool(Some(self.pool.clone()), version),
            now,
        }
    }

    /// Writes what waits.
    fn write(&self) -> usize {
        let waiting = self.queues.writes.try_iter();
        waiting.map(|block| self.pool.write(&block)).count()
    }

    /// Loads what a session waits for.
    fn load(&mut self) -> LoadJob {
        let job = self.queues.loads.try_recv().unwrap();
        self.pool.load_from_file(&job.ids);
        self.pool.load_ended(&job);
        job
    }

    /// The same pool after a restart of the process.
    fn reopen(self) -> Self {
        let TestPool { pool, config, .. } = self;
        drop(pool);
        TestPool::open(config)
    }
}

fn config() -> EngineConfig {
    EngineConfig {
        kv_tokens_max: 1024,
        ..EngineConfig::default()
    }
}

fn greedy() -> Sampling {
    Sampling {
        top_logprobs: Some(3),
        ..Sampling::default()
    }
}

fn drawn() -> Sampling {
    Sampling {
        temperature: 0.9,
        seed: 7,
        presence_penalty: 0.5,
        repetition_penalty: 1.2,
        top_logprobs: Some(2),
        ..Sampling::default()
    }
}

fn prompt() -> Vec<TokenId> {
    Random(5).tokens(PROMPT_TOKENS)
}

/// The output of a request, and the work that it took.
#[derive(Debug, Default)]
struct Outcome {
    emitted: Vec<TokenId>,
    logprobs: Vec<TokenLogprob>,
    cached: usize,
    computed: usize,
    self_drafted: u32,
}

impl Outcome {
    fn text(&self) -> Vec<TokenId> {
        [prompt(), self.emitted.clone()].concat()
    }

    /// Makes a step, if its session need not wait.
    fn try_step(&mut self, engine: &mut TestEngine, item: StepItem) -> Option<()> {
        let request = StepRequest { items: vec![item] };
        let mut report = engine.core.step(request, engine.now).unwrap();
        let output = match report.results.remove(0) {
            Ok(output) => output,
            Err(error) => {
                assert_eq!(error.code.as_deref(), Some(KV_LOADING));
                return None;
            }
        };
        self.cached += output.cached_tokens as usize;
        self.computed += report.computed_tokens;
        self.self_drafted += output.self_drafted;
        self.emitted.extend(output.emitted);
        self.logprobs.extend(output.logprobs.unwrap_or_default());
        Some(())
    }

    /// An item that opens a session with the whole text so far.
    fn opening(&self, session: u128, sampling: &Sampling, self_drafts: bool) -> StepItem {
        let mut item = match self_drafts {
            true => opening_for_drafts(session, sampling, &self.text()),
            false => opening(session, sampling, &self.text()),
        };
        if let Some(spec) = &mut item.open {
            spec.prompt_len = PROMPT_TOKENS as u32;
        }
        item.max_emit = 1;
        item
    }

    /// Decodes in an open session until the output has `count` tokens, and closes it.
    fn decode(&mut self, engine: &mut TestEngine, session: u128, count: usize, self_drafts: bool) {
        while self.emitted.len() < count {
            let mut item = match self_drafts {
                true => drafting(session, self.text().len(), wanted(3, 2, 6)),
                false => item(session, self.text().len(), &[]),
            };
            item.max_emit = (count - self.emitted.len()) as u32;
            self.try_step(engine, item).unwrap();
        }
        close(engine, session);
    }
}

fn close(engine: &mut TestEngine, session: u128) {
    engine.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(session)],
        keep_kv: true,
        parks: false,
    });
}

/// The whole output of an engine without a pool.
fn uninterrupted(sampling: &Sampling) -> Outcome {
    let (mut engine, mut outcome) = (engine(config()), Outcome::default());
    let opening = outcome.opening(1, sampling, false);
    outcome.try_step(&mut engine, opening).unwrap();
    outcome.decode(&mut engine, 1, OUTPUT_TOKENS, false);
    outcome
}

/// The number of tokens of a text that whole blocks can bring.
fn in_blocks(text_len: usize) -> usize {
    (text_len - 1) / BLOCK_TOKENS * BLOCK_TOKENS
}

/// The drafter of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Nobody,
    Head,
    Model,
}

impl By {
    fn engine(self) -> TestEngine {
        match self {
            By::Nobody => engine(config()),
            By::Head => engine_with_drafter(by_head(tiny_head()), config()),
            By::Model => engine_with_drafter(stranger(), config()),
        }
    }
}

#[test]
fn a_chunk_that_resumes_on_another_engine_has_the_same_bits_and_reads_only_the_last_block() {
    for by in [By::Nobody, By::Head, By::Model] {
        for sampling in [greedy(), drawn()] {
            let truth = uninterrupted(&sampling);
            let pool = TestPool::open(in_memory(64));
            let mut outcome = Outcome::default();
            for end in [7, 30, OUTPUT_TOKENS] {
                // Each chunk runs on an engine that has seen nothing of the request.
                let mut engine = pool.pooled(by.engine(), 0);
                let (before, text_len) = (outcome.computed, outcome.text().len());
                outcome.cached = 0;
                let opening = outcome.opening(1, &sampling, by != By::Nobody);
                outcome.try_step(&mut engine, opening).unwrap();
                if end > 7 {
                    assert_eq!(outcome.cached, in_blocks(text_len));
                    assert_eq!(outcome.computed - before, text_len - in_blocks(text_len));
                }
                outcome.decode(&mut engine, 1, end, by != By::Nobody);
            }
            assert_eq!(outcome.emitted, truth.emitted);
            assert_eq!(outcome.logprobs, truth.logprobs);
            // Drafters begin anew after blocks of the pool, with what they find there.
            assert_eq!(outcome.self_drafted > 0, by != By::Nobody, "{by:?}");
        }
    }
}

/// Runs the first half of a request on an engine with this pool.
fn first_half(pool: &TestPool, sampling: &Sampling, version: u64) -> Outcome {
    let (mut engine, mut outcome) = (pool.engine(version), Outcome::default());
    let opening = outcome.opening(1, sampling, false);
    outcome.try_step(&mut engine, opening).unwrap();
    outcome.decode(&mut engine, 1, 30, false);
    outcome.cached = 0;
    outcome
}

#[test]
fn after_a_restart_a_session_waits_for_the_file_and_has_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for sampling in [greedy(), drawn()] {
        let truth = uninterrupted(&sampling);
        let pool = TestPool::open(KvPoolConfig {
            file: Some(folder.path().join("a.kvpool")),
            ..in_memory(64)
        });
        let mut outcome = first_half(&pool, &sampling, 0);
        pool.write();
        let mut pool = pool.reopen();
        let mut engine = pool.engine(0);
        let mut opening = outcome.opening(1, &sampling, false);
        assert_eq!(outcome.try_step(&mut engine, opening.clone()), None);
        // It waits as long as nothing has happened, and leaves no session behind.
        assert_eq!(outcome.try_step(&mut engine, opening.clone()), None);
        assert_eq!(engine.core.sessions().counts(), (0, 0));
        let text_len = outcome.text().len();
        assert_eq!(pool.load().ids.len() * BLOCK_TOKENS, in_blocks(text_len));
        opening.max_emit = 1;
        outcome.try_step(&mut engine, opening).unwrap();
        assert_eq!(outcome.cached, in_blocks(text_len));
        outcome.decode(&mut engine, 1, OUTPUT_TOKENS, false);
        assert_eq!(
            (&outcome.emitted, &outcome.logprobs),
            (&truth.emitted, &truth.logprobs)
        );
        std::fs::remove_file(folder.path().join("a.kvpool")).unwrap();
    }
}

#[test]
fn a_damaged_block_in_the_file_is_read_again_and_the_bits_stay_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.kvpool");
    let sampling = drawn();
    let truth = uninterrupted(&sampling);
    let pool = TestPool::open(KvPoolConfig {
        file: Some(path.clone()),
        ..in_memory(64)
    });
    let half = first_half(&pool, &sampling, 0);
    assert_eq!(pool.write(), 3);
    let mut pool = pool.reopen();
    let whole = std::fs::read(&path).unwrap();
    let slot_bytes = whole.len() / 3;
    // The rest of a slot is empty.
    let block_bytes = encoded_len(pool.pool.block_floats());
    let mut random = Random(3);
    // The first step filled two blocks, of which the second one was written first. A cut costs all that follow.
    let left = [[32, 0, 64], [0, 0, 64]];
    for round in 0..30 {
        // A flipped bit in one of the blocks, or a file that ends in it.
        let damaged = round % 3;
        let place = damaged * slot_bytes + random.below(block_bytes);
        drop(pool);
        match round % 2 {
            0 => {
                let mut changed = whole.clone();
                changed[place] ^= 1 << random.below(8);
                std::fs::write(&path, changed).unwrap();
            }
            _ => std::fs::write(&path, &whole[..place]).unwrap(),
        }
        pool = TestPool::open(KvPoolConfig {
            file: Some(path.clone()),
            ..in_memory(64)
        });
        let mut engine = pool.engine(0);
        let mut outcome = Outcome {
            emitted: half.emitted.clone(),
            logprobs: half.logprobs.clone(),
            ..Outcome::default()
        };
        let opening = outcome.opening(1, &sampling, false);
        if outcome.try_step(&mut engine, opening.clone()).is_none() {
            pool.load();
            outcome.try_step(&mut engine, opening).unwrap();
        }
        assert_eq!(outcome.cached, left[round % 2][damaged], "round {round}");
        outcome.decode(&mut engine, 1, OUTPUT_TOKENS, false);
        assert_eq!(
            (&outcome.emitted, &outcome.logprobs),
            (&truth.emitted, &truth.logprobs)
        );
    }
}

#[test]
fn blocks_cross_neither_namespaces_nor_versions_of_the_weights() {
    let pool = TestPool::open(in_memory(64));
    let half = first_half(&pool, &greedy(), 3);
    let text = half.text();
    let cached = |namespace: u128, version: u64| {
        let mut opening = opening(9, &greedy(), &text);
        if let Some(spec) = &mut opening.open {
            spec.namespace = NamespaceId(namespace);
        }
        pool.engine(version).step(opening).cached_tokens as usize
    };
    assert_eq!(cached(2, 3), 0);
    assert_eq!(cached(1, 4), 0);
    assert_eq!(cached(1, 3), in_blocks(text.len()));
}

#[test]
fn a_text_in_pieces_is_taken_whole_and_only_its_last_block_is_computed() {
    let pool = TestPool::open(in_memory(64));
    let half = first_half(&pool, &greedy(), 0);
    let text = half.text();
    let mut truth = engine(config());
    let expected = truth.step(StepItem {
        max_emit: 1,
        ..opening(1, &greedy(), &text)
    });
    let mut engine = pool.engine(0);
    let mut outcome = Outcome::default();
    let mut from = 0;
    while from < text.len() {
        let to = text.len().min(from + 40);
        let piece = match from {
            0 => opening(2, &greedy(), &text[..to]),
            _ => item(2, from, &text[from..to]),
        };
        let piece = StepItem {
            sample: to == text.len(),
            max_emit: 1,
            ..piece
        };
        outcome.try_step(&mut engine, piece).unwrap();
        from = to;
    }
    assert_eq!(outcome.cached, in_blocks(text.len()));
    assert_eq!(outcome.computed, text.len() - in_blocks(text.len()));
    assert_eq!(Some(outcome.emitted), Some(expected.emitted));
    assert_eq!(Some(outcome.logprobs), expected.logprobs);
}

#[test]
fn a_new_session_waits_once_for_all_the_text_that_it_announces() {
    let folder = tempfile::tempdir().unwrap();
    let pool = TestPool::open(KvPoolConfig {
        file: Some(folder.path().join("a.kvpool")),
        ..in_memory(64)
    });
    let text = first_half(&pool, &greedy(), 0).text();
    pool.write();
    let mut pool = pool.reopen();
    let mut engine = pool.engine(0);
    let mut first = StepItem {
        sample: false,
        ..opening(1, &greedy(), &text[..40])
    };
    if let Some(spec) = &mut first.open {
        spec.ahead = text[40..].to_vec();
    }
    let mut outcome = Outcome::default();
    assert_eq!(outcome.try_step(&mut engine, first.clone()), None);
    assert_eq!(pool.load().ids.len(), in_blocks(text.len()) / BLOCK_TOKENS);
    outcome.try_step(&mut engine, first.clone()).unwrap();
    outcome
        .try_step(&mut engine, item(1, 40, &text[40..]))
        .unwrap();
    assert_eq!(outcome.cached, in_blocks(text.len()));
    // A load that is late, such as one of a lost thread, is not waited for.
    drop(engine);
    let mut pool = pool.reopen();
    let mut engine = pool.engine(0);
    assert_eq!(outcome.try_step(&mut engine, first.clone()), None);
    engine.now += std::time::Duration::from_millis(pool.config.wait_ms);
    outcome.cached = 0;
    outcome.try_step(&mut engine, first).unwrap();
    assert_eq!(outcome.cached, 0);
    assert_eq!(pool.load().ids.len(), in_blocks(text.len()) / BLOCK_TOKENS);
}

#[test]
fn a_session_that_has_sampled_computes_what_is_cut_and_sent_again() {
    // Workers measure the price of reading that way.
    let pool = TestPool::open(in_memory(64));
    let (mut engine, mut outcome) = (pool.engine(0), Outcome::default());
    let text = Random(8).tokens(100);
    outcome
        .try_step(&mut engine, opening(1, &greedy(), &text[..4]))
        .unwrap();
    for _ in 0..3 {
        let before = outcome.computed;
        outcome
            .try_step(&mut engine, item(1, 4, &text[4..]))
            .unwrap();
        assert_eq!((outcome.cached, outcome.computed - before), (0, 96));
    }
}

#[test]
fn kept_sessions_that_make_room_are_found_in_the_pool() {
    let pool = TestPool::open(in_memory(64));
    let small = EngineConfig {
        kv_tokens_max: 160,
        ..config()
    };
    let mut engine = pool.pooled(engine(small), 0);
    let texts: Vec<Vec<TokenId>> = (0..4).map(|seed| Random(seed).tokens(100)).collect();
    for (session, text) in (1..).zip(&texts) {
        assert_eq!(
            engine.step(opening(session, &greedy(), text)).cached_tokens,
            0
        );
        close(&mut engine, session);
    }
    for (session, text) in (11..).zip(&texts) {
        assert!(engine.step(opening(session, &greedy(), text)).cached_tokens >= 96);
        close(&mut engine, session);
    }
    let (used, most) = engine.core.sessions().kv_tokens();
    assert!(used <= most);
    // Schedulers know of all of them, although only one has a session.
    assert_eq!(engine.core.sessions().counts(), (0, 1));
    let held = engine.core.kv_report().held.unwrap();
    for text in &texts {
        let prefix = prefix_hashes(&NamespaceId(1), text)[0];
        assert!(held.contains(&prefix));
    }
}

#[test]
fn the_pool_keeps_to_its_memory_and_gives_up_the_ends_of_texts_first() {
    let pool = TestPool::open(in_memory(4));
    let mut engine = pool.engine(0);
    let text = Random(1).tokens(180);
    engine.step(opening(1, &greedy(), &text));
    close(&mut engine, 1);
    let sizes = pool.pool.sizes();
    assert_eq!(
        (sizes.memory_blocks, sizes.memory_bytes),
        (4, pool.config.memory_bytes_max)
    );
    let reused = pool.engine(0).step(opening(2, &greedy(), &text));
    assert_eq!(reused.cached_tokens as usize, 4 * BLOCK_TOKENS);
}

/// An item that opens a session of a tenant with the whole text so far.
fn opening_of(tenant: TenantId, session: u128, outcome: &Outcome) -> StepItem {
    let mut item = outcome.opening(session, &greedy(), false);
    if let Some(spec) = &mut item.open {
        spec.tenant = tenant;
    }
    item
}

#[test]
fn a_request_that_runs_while_its_tenant_is_forgotten_goes_on_and_leaves_nothing() {
    let (truth, acme) = (uninterrupted(&greedy()), TenantId(4));
    let pool = TestPool::open(in_memory(64));
    let mut engine = pool.engine(0);
    let mut outcome = Outcome::default();
    let opening = opening_of(acme, 1, &outcome);
    outcome.try_step(&mut engine, opening).unwrap();
    // Another one is parked.
    let mut parked = Outcome::default();
    parked
        .try_step(&mut engine, opening_of(acme, 2, &parked))
        .unwrap();
    engine.core.park(&[EngineSessionId(2)], engine.now);
    assert_eq!(engine.core.forget_tenant(TenantId(5), engine.now), (0, 0));
    assert_eq!(pool.pool.forget(TenantId(5)).unwrap(), (0, 0));
    assert_eq!(engine.core.forget_tenant(acme, engine.now), (1, 1));
    assert_eq!(pool.pool.forget(acme).unwrap(), (2, 0));
    outcome.decode(&mut engine, 1, OUTPUT_TOKENS, false);
    assert_eq!(
        (&outcome.emitted, &outcome.logprobs),
        (&truth.emitted, &truth.logprobs)
    );
    assert_eq!(engine.core.sessions().counts(), (0, 0));
    assert_eq!(pool.pool.sizes().memory_blocks, 0);
    // The parked one comes back with all of its text. Later ones are as before.
    for (id, blocks) in [(3, 0), (4, 3)] {
        let mut again = Outcome::default();
        let opening = opening_of(acme, id, &again);
        again.try_step(&mut engine, opening).unwrap();
        again.decode(&mut engine, id, 30, false);
        assert_eq!(pool.pool.sizes().memory_blocks, blocks);
        engine.now += std::time::Duration::from_millis(config().session_parked_ms);
    }
}

#[test]
fn a_block_that_is_on_its_way_while_its_tenant_is_forgotten_is_dropped() {
    let pool = TestPool::open(in_memory(64));
    let mut engine = pool.engine(0);
    let mut outcome = Outcome::default();
    let opening = opening_of(TenantId(4), 1, &outcome);
    outcome.try_step(&mut engine, opening).unwrap();
    outcome.decode(&mut engine, 1, 30, false);
    let since = pool.pool.forgettings();
    let root = BlockId::root(NamespaceId(1), engine.core.weights_identity(0).unwrap());
    let mut text = PooledText::new(root);
    text.chain.extend(&outcome.text());
    let read = pool.pool.block(text.chain.ids()[0].key()).unwrap();
    assert_eq!(pool.pool.forget(TenantId(4)).unwrap(), (3, 0));
    pool.pool
        .insert(read.clone(), BlockSource::Peer, Some(since));
    assert_eq!(pool.pool.sizes().memory_blocks, 0);
    let since = pool.pool.forgettings();
    pool.pool.insert(read, BlockSource::Peer, Some(since));
    assert_eq!(pool.pool.sizes().memory_blocks, 1);
}
