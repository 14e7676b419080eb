//! What an engine's thread is told while others hold what it would like, and what the store gets of what it says.

mod crowded;
mod pauses;
mod standing;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use refrain_draft_replica::{Drafts, HarvestConfig, Membership, NamespaceMemory};
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentUpdate, FeedEvent, FinishReason, FollowReply,
    FollowRequest, LEFT_CONTEXT_TOKENS, StoreStats, TouchRequest,
};
use refrain_protocol::{ApiError, DocumentId, Namespace, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner, token_of};

use crate::metrics::{FIELDS, READING_TOKENS_MAX, TOKEN};
use crate::{Begin, InEngineConfig, Proposer, Step};

/// After this long something that must come has not come.
const PATIENCE: Duration = Duration::from_secs(60);
const TOKENIZER: &str = "the engine's tokenizer";
const NAMED: &str = "000000000000000000000000000000ab";

/// A store that has nothing, and remembers what it was sent.
#[derive(Default)]
struct Sent {
    updates: Mutex<Vec<DocumentUpdate>>,
    /// What it erased, and has not told yet.
    erased: Mutex<Vec<DocumentId>>,
}

impl Sent {
    /// The whole outputs that came, with why they ended.
    fn outputs(&self) -> Vec<(DocumentId, Vec<u32>, Option<FinishReason>)> {
        let mut outputs: Vec<(DocumentId, Vec<u32>, Option<FinishReason>)> = Vec::new();
        for update in self.updates.lock().unwrap().iter() {
            let known = outputs.iter().position(|(id, ..)| *id == update.document);
            let place = known.unwrap_or_else(|| {
                outputs.push((update.document, Vec::new(), None));
                outputs.len() - 1
            });
            let (_, tokens, finish) = &mut outputs[place];
            tokens.truncate(update.prev_len as usize);
            assert_eq!(tokens.len(), update.prev_len as usize, "a piece is missing");
            tokens.extend(&update.tokens);
            *finish = update.finish;
        }
        outputs
    }
}

#[async_trait]
impl DraftStore for Sent {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        let updates = request.updates.iter();
        let lengths = updates.map(|update| update.prev_len + update.tokens.len() as u32);
        let lengths = lengths.collect();
        self.updates.lock().unwrap().extend(request.updates);
        Ok(AppendReply { lengths })
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        tokio::time::sleep(Duration::from_millis(request.wait_ms.into())).await;
        let erased = std::mem::take(&mut *self.erased.lock().unwrap());
        Ok(FollowReply {
            reset: false,
            events: erased.into_iter().map(FeedEvent::Remove).collect(),
            cursor: request.after,
            caught_up: true,
        })
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }
}

/// A proposer, its store, and the gateway's key.
struct Rig {
    proposer: Arc<Proposer>,
    store: Arc<Sent>,
    signer: NamespaceSigner,
}

impl Rig {
    fn new(change: impl FnOnce(&mut InEngineConfig)) -> Self {
        let mesh = MeshConfig::generate().unwrap();
        let signer = NamespaceSigner::new(&mesh).unwrap();
        let mut config = InEngineConfig {
            token: Some(token_of(&sign(&signer, "model")).unwrap()),
            mesh,
            harvest: HarvestConfig {
                interval_ms: 10,
                ..HarvestConfig::default()
            },
            ..InEngineConfig::default()
        };
        change(&mut config);
        let store = Arc::new(Sent::default());
        let proposer = Proposer::start(config, TOKENIZER, store.clone()).unwrap();
        Rig {
            proposer: Arc::new(proposer),
            store,
            signer,
        }
    }

    fn token(&self, model: &str) -> String {
        token_of(&sign(&self.signer, model)).unwrap()
    }

    fn memory(&self) -> Arc<NamespaceMemory> {
        let signed = sign(&self.signer, "model");
        self.proposer
            .memory
            .namespace(signed.namespace.id(), &signed)
    }

    fn group(&self, name: &str) -> Membership {
        let memory = &self.proposer.memory;
        memory
            .group(self.memory().id(), name, DocumentId(1))
            .unwrap()
    }

    fn begin(&self, request: &str, prompt: &[u32], group: Option<&str>) {
        let begin = Begin {
            request: request.into(),
            prompt: prompt.to_vec(),
            group: group.map(str::to_owned),
            epoch: 1,
            ..Begin::default()
        };
        self.proposer.begin(begin).unwrap();
    }

    fn draft(&self, request: &str, room: usize) -> Vec<u32> {
        let wanted = vec![(request.to_owned(), room)];
        let mut drafts = self.proposer.propose(wanted, 1.0, 0.0, 0.1);
        drafts.remove(0).0
    }

    /// Tries until the draft is the one that is due: a step that meets somebody else goes without.
    fn await_draft(&self, request: &str, due: &[u32]) {
        wait_until(|| {
            self.proposer.extend(request, &[]);
            self.draft(request, due.len()) == due
        });
    }

    /// Has the memory brought what steps that met somebody else could not bring it, until it has so much of an output.
    fn settle(&self, request: &str, document: DocumentId, len: u32) {
        wait_until(|| {
            self.proposer.extend(request, &[]);
            self.memory().read().len_of(document) == Some(len)
        });
    }

    fn drain(&self) {
        assert!(self.proposer.drain(PATIENCE));
    }

    fn rejected(&self, limit: &str) -> u64 {
        let rejections = &self.proposer.metrics.rejections;
        rejections.with_label_values(&[limit]).get()
    }
}

fn sign(signer: &NamespaceSigner, model: &str) -> SignedNamespace {
    signer.sign(Namespace {
        tenant: "acme".into(),
        model: model.into(),
        tokenizer: TOKENIZER.into(),
    })
}

fn wait_until(holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "in vain");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Does it on a thread of its own. Whoever waits there for what the caller holds never answers.
fn elsewhere<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (answer, answered): (_, Receiver<T>) = channel();
    thread::spawn(move || drop(answer.send(call())));
    let answered = answered.recv_timeout(PATIENCE);
    answered.expect("the call waits for what somebody else holds")
}

fn text(from: u32, len: u32) -> Vec<u32> {
    (from..from + len).collect()
}

#[test]
fn a_step_waits_for_nobody_and_what_it_missed_comes_with_a_later_one() {
    let rig = Rig::new(|_| {});
    let prompt = text(1_000, 20);
    let (said, more) = (text(0, 30), text(30, 30));
    for request in ["a", "b"] {
        rig.begin(request, &prompt, Some("g"));
    }
    rig.proposer.extend("a", &said);
    rig.proposer.extend("b", &said[..10]);
    let member = rig.group("g");
    // Both outputs stand behind the last tokens of their prompts.
    const CONTEXTS: u64 = 2 * LEFT_CONTEXT_TOKENS as u64;
    let tokens = |of: &Drafts| of.index().tokens();
    let are =
        |count| tokens(&rig.memory().lock()) == count && tokens(&member.group().lock()) == count;
    wait_until(|| {
        rig.proposer.extend("a", &[]);
        rig.proposer.extend("b", &[]);
        are(CONTEXTS + 40)
    });
    rig.await_draft("b", &said[10..20]);

    // Both copies of the drafts are held by this thread while the engine's goes on.
    let memory = rig.memory();
    let (held, group_held) = (memory.lock(), member.group().lock());
    let busy = rig.proposer.metrics.busy.get();
    let (proposer, more_said) = (rig.proposer.clone(), more.clone());
    let drafts = elsewhere(move || {
        proposer.extend("a", &more_said);
        let begin = Begin {
            request: "c".into(),
            // It repeats itself, so it can be drafted for from its own text.
            prompt: [7, 8, 9, 10, 7, 8].to_vec(),
            group: Some("g".into()),
            ..Begin::default()
        };
        proposer.begin(begin).unwrap();
        let wanted = ["a", "b", "c"].map(|request| (request.to_owned(), 2));
        let drafts = proposer.propose(wanted.to_vec(), 1.0, 0.0, 0.1);
        let step = Step {
            request: "c".into(),
            said: vec![9],
            room: 1,
            rival: Vec::new(),
        };
        let stepped = proposer.step(vec![step], 1.0, 0.0, 0.1);
        proposer.finish("c".into(), Some("stop"));
        (drafts, stepped)
    });
    let (drafts, stepped) = drafts;
    let drafts: Vec<Vec<u32>> = drafts.into_iter().map(|draft| draft.0).collect();
    assert_eq!(drafts, [vec![], vec![], vec![9, 10]]);
    assert_eq!(stepped, [Some(vec![10])]);
    assert!(rig.proposer.metrics.busy.get() > busy);
    assert_eq!(
        (tokens(&held), tokens(&group_held)),
        (CONTEXTS + 40, CONTEXTS + 40)
    );
    drop((held, group_held));

    // The engine says no more, but the next step tells what the last one could not.
    wait_until(|| {
        rig.proposer.extend("a", &[]);
        are(CONTEXTS + 70 + 7)
    });
    rig.proposer.extend("b", &said[10..]);
    rig.await_draft("b", &more[..20]);
}

#[test]
fn long_prompts_are_read_beside_the_engine() {
    let prompt = [text(0, 500), text(0, 20)].concat();
    let rig = Rig::new(|config| config.prompt_tokens_at_once = 100);
    rig.begin("long", &prompt, None);
    // What is said while it is read is not lost.
    rig.proposer.extend("long", &text(20, 10));
    rig.await_draft("long", &text(30, 5));
    rig.proposer.extend("long", &text(30, 100));
    rig.await_draft("long", &text(130, 5));
    wait_until(|| rig.proposer.metrics.reading_tokens.get() == 0);

    // What is short is there at once, and what there is no room for never.
    rig.begin("short", &[1, 2, 3, 1, 2], None);
    assert_eq!(rig.draft("short", 1), [3]);
    assert_eq!(rig.rejected(READING_TOKENS_MAX), 0);
    let none = Rig::new(|config| {
        config.prompt_tokens_at_once = 100;
        config.reading_tokens_max = 519;
    });
    none.begin("long", &prompt, None);
    assert!(none.draft("long", 5).is_empty());
    assert_eq!(none.rejected(READING_TOKENS_MAX), 1);
}

#[test]
fn outputs_reach_the_store_with_the_engines_word_for_their_end() {
    use FinishReason::{Cancelled, Failed, Length, Stop};
    let ends = [
        (Some("stop"), Stop),
        (Some("length"), Length),
        (Some("repetition"), Length),
        (Some("error"), Failed),
        (Some("abort"), Cancelled),
        (None, Cancelled),
    ];
    let rig = Rig::new(|config| config.piece_tokens = 8);
    for (number, (reason, _)) in ends.iter().enumerate() {
        let request = number.to_string();
        rig.begin(&request, &[1, 2, 3], None);
        rig.proposer.extend(&request, &text(100, 10));
        rig.proposer
            .extend(&request, &text(110, 10 + number as u32));
        rig.proposer.finish(request, *reason);
    }
    rig.drain();
    let mut outputs = rig.store.outputs();
    outputs.sort_by_key(|(_, tokens, _)| tokens.len());
    for (number, (_, finish)) in ends.iter().enumerate() {
        assert_eq!(outputs[number].1, text(100, 20 + number as u32));
        assert_eq!(outputs[number].2, Some(*finish), "{number}");
    }
    // One that the engine had only made room with goes on as the same output, and is told the rest.
    let again = Begin {
        request: "5".into(),
        prompt: vec![1, 2, 3],
        ..Begin::default()
    };
    assert_eq!(rig.proposer.begin(again).unwrap(), 25);
    rig.proposer.extend("5", &[7, 7]);
    rig.proposer.finish("5".into(), Some("stop"));
    rig.drain();
    let outputs = rig.store.outputs();
    assert_eq!(outputs.len(), ends.len());
    let last = outputs.iter().max_by_key(|(_, tokens, _)| tokens.len());
    let last = last.unwrap();
    assert_eq!((&last.1[25..], last.2), (&[7, 7][..], Some(Stop)));
    let updates = rig.store.updates.lock().unwrap();
    let epochs = updates.iter().filter(|update| update.document == last.0);
    assert_eq!(epochs.map(|update| update.epoch).max(), Some(2));
}

#[test]
fn an_output_that_somebody_named_is_drafted_from_here_and_written_by_them() {
    let rig = Rig::new(|config| config.piece_tokens = 8);
    let token = rig.token("model");
    let begin = |request: &str| Begin {
        request: request.into(),
        prompt: [text(1_000, 20), text(0, 2)].concat(),
        namespace: Some(&token),
        document: Some(NAMED),
        epoch: 3,
        written: 2,
        ..Begin::default()
    };
    assert_eq!(rig.proposer.begin(begin("named")).unwrap(), 0);
    rig.proposer.extend("named", &text(2, 30));
    let document = NAMED.parse().unwrap();
    rig.settle("named", document, 32);
    rig.begin("other", &text(1_000, 20), None);
    rig.proposer.extend("other", &text(0, 12));
    rig.await_draft("other", &text(12, 10));
    // The engine makes room, and goes on: its worker knows of one attempt.
    rig.proposer.finish("named".into(), None);
    assert_eq!(rig.proposer.begin(begin("named")).unwrap(), 30);
    rig.proposer.extend("named", &text(32, 30));
    rig.settle("named", document, 62);
    rig.proposer.extend("other", &text(12, 20));
    rig.await_draft("other", &text(32, 10));
    rig.proposer.finish("named".into(), Some("stop"));
    rig.proposer.finish("other".into(), Some("stop"));
    rig.drain();
    let outputs = rig.store.outputs();
    assert_eq!(outputs.len(), 1);
    assert_eq!(outputs[0].1, text(0, 32));
    // The worker cut it where a stop string began, under the epoch behind its own.
    let cut = DocumentUpdate {
        document,
        epoch: 4,
        prev_len: 40,
        tokens: Vec::new(),
        head: Default::default(),
        finish: Some(FinishReason::Stop),
    };
    rig.memory().merge(&cut);
    let len = rig.memory().lock().len_of(cut.document);
    assert_eq!(len, Some(40));
}

#[test]
fn a_request_that_ends_before_its_place_was_found_is_kept() {
    let rig = Rig::new(|_| {});
    // Nobody follows these yet, so the background thread is asked.
    for number in 0..20 {
        let token = rig.token(&format!("model-{number}"));
        let begin = Begin {
            request: number.to_string(),
            prompt: vec![1],
            namespace: Some(&token),
            group: Some("g".into()),
            ..Begin::default()
        };
        rig.proposer.begin(begin).unwrap();
        rig.proposer.extend(&number.to_string(), &text(number, 50));
        rig.proposer.finish(number.to_string(), Some("length"));
    }
    rig.drain();
    let outputs = rig.store.outputs();
    assert_eq!(outputs.len(), 20);
    for number in 0..20 {
        let kept = outputs.iter().any(|output| output.1 == text(number, 50));
        assert!(kept, "{number}");
    }
}

#[test]
fn prometheus_can_ask() {
    let get = |addr: SocketAddr| {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let request = "GET /metrics HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let rig = Rig::new(|config| config.metrics_listen = Some(([127, 0, 0, 1], 0).into()));
    let addr = rig.proposer.metrics_addr().unwrap();
    rig.begin("a", &[1, 2, 3], None);
    rig.proposer.extend("a", &text(0, 7));
    assert!(get(addr).contains("\nrefrain_client_said_tokens_total 7\n"));
    // Another engine of the machine goes on without.
    let other = Rig::new(|config| config.metrics_listen = Some(addr));
    assert!(other.proposer.metrics_addr().is_none());
    other.begin("a", &[1, 2, 3, 1, 2], None);
    assert_eq!(other.draft("a", 1), [3]);
}

#[test]
fn what_cannot_be_read_is_counted() {
    let rig = Rig::new(|_| {});
    let begin = |namespace, document| Begin {
        request: "a".into(),
        namespace,
        document,
        ..Begin::default()
    };
    assert!(rig.proposer.begin(begin(Some("nonsense"), None)).is_err());
    assert!(rig.proposer.begin(begin(None, Some("xyz"))).is_err());
    assert_eq!((rig.rejected(TOKEN), rig.rejected(FIELDS)), (1, 1));
}
