//! Tests of the drafts that an engine gets while other threads hold an index, and of the uploads to the store.

mod contention;
mod default_namespace;
mod devices;
mod reach;
mod resumption;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use refrain_draft_replica::{DraftIndex, GroupMembership, NamespaceReplica, UploaderConfig};
use refrain_protocol::document::{
    DocumentHead, DocumentUpdate, FeedEvent, FinishReason, LEFT_CONTEXT_TOKENS,
};
use refrain_protocol::history::PromptHash;
use refrain_protocol::{DocumentId, Namespace, SignedNamespace};
use refrain_rpc::testing::FakeStore;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner, token_of};

use crate::metrics::{FIELDS, READING_TOKENS_MAX, TOKEN};
use crate::{EngineRules, PluginConfig, Proposer, RequestStart, RequestStep};

/// The longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);
const TOKENIZER: &str = "the engine's tokenizer";
const NAMED: &str = "000000000000000000000000000000ab";

/// The outputs that arrived in a store, with their finish reasons.
fn uploaded(store: &FakeStore) -> Vec<(DocumentId, Vec<u32>, Option<FinishReason>)> {
    let mut outputs: Vec<(DocumentId, Vec<u32>, Option<FinishReason>)> = Vec::new();
    for update in store.content().updates() {
        let known = outputs.iter().position(|(id, ..)| *id == update.document);
        let position = known.unwrap_or_else(|| {
            outputs.push((update.document, Vec::new(), None));
            outputs.len() - 1
        });
        let (_, tokens, finish) = &mut outputs[position];
        tokens.truncate(update.prev_len as usize);
        assert_eq!(
            tokens.len(),
            update.prev_len as usize,
            "an update is missing"
        );
        tokens.extend(&update.tokens);
        *finish = update.finish;
    }
    outputs
}

/// A proposer, its store, and the key of the gateway.
struct Rig {
    proposer: Arc<Proposer>,
    store: Arc<FakeStore>,
    signer: NamespaceSigner,
}

impl Rig {
    fn new(change: impl FnOnce(&mut PluginConfig)) -> Self {
        Rig::over(FakeStore::default(), change)
    }

    fn over(store: FakeStore, change: impl FnOnce(&mut PluginConfig)) -> Self {
        let mesh = MeshConfig::generate().unwrap();
        let signer = NamespaceSigner::new(&mesh).unwrap();
        let mut config = PluginConfig {
            token: Some(token_of(&sign(&signer, "model")).unwrap()),
            mesh: mesh.into(),
            uploader: UploaderConfig {
                interval_ms: 10,
                ..UploaderConfig::default()
            },
            ..PluginConfig::default()
        };
        change(&mut config);
        let store = Arc::new(store);
        let proposer = Proposer::start(config, TOKENIZER, |_, _| Ok(store.clone())).unwrap();
        Rig {
            proposer: Arc::new(proposer),
            store,
            signer,
        }
    }

    fn token(&self, model: &str) -> String {
        token_of(&sign(&self.signer, model)).unwrap()
    }

    fn namespace(&self) -> Arc<NamespaceReplica> {
        let signed = sign(&self.signer, "model");
        self.proposer
            .replica
            .namespace(signed.namespace.id(), &signed)
    }

    fn group(&self, name: &str) -> GroupMembership {
        let replica = &self.proposer.replica;
        replica
            .join_group(self.namespace().id, name, DocumentId(1))
            .unwrap()
    }

    fn begin(&self, request: &str, prompt: &[u32], group: Option<&str>) {
        let begin = RequestStart {
            request: request.into(),
            prompt: prompt.to_vec(),
            group: group.map(str::to_owned),
            epoch: 1,
            ..RequestStart::default()
        };
        self.proposer.begin(begin).unwrap();
    }

    fn draft(&self, request: &str, room: usize) -> Vec<u32> {
        let wanted = vec![(request.to_owned(), room)];
        let mut drafts = self.proposer.propose(wanted, &EngineRules::default());
        drafts.remove(0).tokens
    }

    /// Tries until the draft is `due`: a step that meets another thread goes without.
    fn await_draft(&self, request: &str, due: &[u32]) {
        wait_until(|| {
            self.proposer.extend(request, &[]);
            self.draft(request, due.len()) == due
        });
    }

    /// Steps until the replica has `len` tokens of an output: a step that met another thread could not merge.
    fn settle(&self, request: &str, document: DocumentId, len: u32) {
        wait_until(|| {
            self.proposer.extend(request, &[]);
            self.namespace().read().len_of(document) == Some(len)
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

fn wait_until(mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "it never happened");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Makes a call on another thread. A call that waits for a lock of the caller never returns.
fn on_another_thread<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (answer, answered): (_, Receiver<T>) = channel();
    thread::spawn(move || drop(answer.send(call())));
    let answered = answered.recv_timeout(PATIENCE);
    answered.expect("the call waits for a lock that the caller holds")
}

fn text(from: u32, len: u32) -> Vec<u32> {
    (from..from + len).collect()
}

#[test]
fn a_sample_in_another_engine_is_drafted_from_while_it_runs() {
    let rig = Rig::new(|_| {});
    let prompt: Vec<u32> = (0..40).collect();
    rig.begin("here", &prompt, Some("g"));
    rig.begin("alone", &prompt, None);
    let elsewhere = DocumentUpdate {
        document: DocumentId(77),
        epoch: 1,
        prev_len: 0,
        tokens: vec![900, 901, 902, 903, 904],
        head: DocumentHead {
            left_context: prompt[prompt.len() - LEFT_CONTEXT_TOKENS..].to_vec(),
            ..DocumentHead::default()
        },
        finish: None,
    };
    rig.store.push_to_group("g", FeedEvent::Update(elsewhere));
    rig.await_draft("here", &[900, 901, 902]);
    // The log is that of the group; nothing of it is in the namespace.
    rig.proposer.extend("alone", &[]);
    assert_eq!(rig.draft("alone", 3), [0u32; 0]);
    rig.proposer.extend("here", &[900, 901]);
    rig.await_draft("here", &[902, 903, 904]);
    // An upload says which prompt it belongs to.
    rig.proposer.finish("here".into(), Some("stop"));
    rig.drain();
    let content = rig.store.content();
    let head = &content.updates().last().unwrap().head;
    assert_eq!(head.prompt_hash, Some(PromptHash::of(&prompt)));
}

#[test]
fn a_step_waits_for_no_lock_and_a_later_one_merges_what_it_missed() {
    let rig = Rig::new(|_| {});
    let prompt = text(1_000, 20);
    let (emitted, more) = (text(0, 30), text(30, 30));
    for request in ["a", "b"] {
        rig.begin(request, &prompt, Some("g"));
    }
    rig.proposer.extend("a", &emitted);
    rig.proposer.extend("b", &emitted[..10]);
    let member = rig.group("g");
    // Both outputs stand behind the last tokens of their prompts.
    const CONTEXTS: u64 = 2 * LEFT_CONTEXT_TOKENS as u64;
    let tokens = |of: &DraftIndex| of.index().tokens();
    let are =
        |count| tokens(&rig.namespace().read()) == count && tokens(&member.group().read()) == count;
    wait_until(|| {
        rig.proposer.extend("a", &[]);
        rig.proposer.extend("b", &[]);
        are(CONTEXTS + 40)
    });
    rig.await_draft("b", &emitted[10..20]);

    // This thread holds both indexes while the engine's thread goes on.
    let namespace = rig.namespace();
    let (held, group_held) = (namespace.write(), member.group().write());
    let busy = rig.proposer.metrics.busy.get();
    let (proposer, more_emitted) = (rig.proposer.clone(), more.clone());
    let drafts = on_another_thread(move || {
        proposer.extend("a", &more_emitted);
        let begin = RequestStart {
            request: "c".into(),
            // The prompt repeats itself, so the request can draft from its own text.
            prompt: [7, 8, 9, 10, 7, 8].to_vec(),
            group: Some("g".into()),
            ..RequestStart::default()
        };
        proposer.begin(begin).unwrap();
        let wanted = ["a", "b", "c"].map(|request| (request.to_owned(), 2));
        let drafts = proposer.propose(wanted.to_vec(), &EngineRules::default());
        let step = RequestStep {
            request: "c".into(),
            emitted: vec![9],
            draft_tokens_max: 1,
            engine_draft: Vec::new(),
        };
        let stepped = proposer.step(vec![step]);
        proposer.finish("c".into(), Some("stop"));
        (drafts, stepped)
    });
    let (drafts, stepped) = drafts;
    let drafts: Vec<Vec<u32>> = drafts.into_iter().map(|draft| draft.tokens).collect();
    assert_eq!(drafts, [vec![], vec![], vec![9, 10]]);
    assert_eq!(stepped, [Some(vec![10])]);
    assert!(rig.proposer.metrics.busy.get() > busy);
    assert_eq!(
        (tokens(&held), tokens(&group_held)),
        (CONTEXTS + 40, CONTEXTS + 40)
    );
    drop((held, group_held));

    // The engine emits no more, but the next step merges what the last one could not.
    wait_until(|| {
        rig.proposer.extend("a", &[]);
        are(CONTEXTS + 70 + 7)
    });
    rig.proposer.extend("b", &emitted[10..]);
    rig.await_draft("b", &more[..20]);
}

#[test]
fn long_prompts_are_indexed_beside_the_engine() {
    let prompt = [text(0, 500), text(0, 20)].concat();
    let rig = Rig::new(|config| config.prompt_tokens_at_once = 100);
    rig.begin("long", &prompt, None);
    // Tokens that are emitted meanwhile are not lost.
    rig.proposer.extend("long", &text(20, 10));
    rig.await_draft("long", &text(30, 5));
    rig.proposer.extend("long", &text(30, 100));
    rig.await_draft("long", &text(130, 5));
    wait_until(|| rig.proposer.metrics.reading_tokens.get() == 0);

    // A short prompt is there at once, and one that exceeds the limit never.
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
fn outputs_reach_the_store_with_the_engines_finish_reason() {
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
    let mut outputs = uploaded(&rig.store);
    outputs.sort_by_key(|(_, tokens, _)| tokens.len());
    for (number, (_, finish)) in ends.iter().enumerate() {
        assert_eq!(outputs[number].1, text(100, 20 + number as u32));
        assert_eq!(outputs[number].2, Some(*finish), "{number}");
    }
    // A request that the engine only made room with resumes its output, and the rest is uploaded.
    let again = RequestStart {
        request: "5".into(),
        prompt: vec![1, 2, 3],
        ..RequestStart::default()
    };
    assert_eq!(rig.proposer.begin(again).unwrap(), 25);
    rig.proposer.extend("5", &[7, 7]);
    rig.proposer.finish("5".into(), Some("stop"));
    rig.drain();
    let outputs = uploaded(&rig.store);
    assert_eq!(outputs.len(), ends.len());
    let last = outputs.iter().max_by_key(|(_, tokens, _)| tokens.len());
    let last = last.unwrap();
    assert_eq!((&last.1[25..], last.2), (&[7, 7][..], Some(Stop)));
    let content = rig.store.content();
    let epochs = content.updates().filter(|update| update.document == last.0);
    assert_eq!(epochs.map(|update| update.epoch).max(), Some(2));
}

#[test]
fn a_named_output_is_drafted_from_here_and_not_uploaded() {
    let rig = Rig::new(|config| config.piece_tokens = 8);
    let token = rig.token("model");
    let begin = |request: &str| RequestStart {
        request: request.into(),
        prompt: [text(1_000, 20), text(0, 2)].concat(),
        namespace: Some(&token),
        document: Some(NAMED),
        epoch: 3,
        written: 2,
        ..RequestStart::default()
    };
    assert_eq!(rig.proposer.begin(begin("named")).unwrap(), 0);
    rig.proposer.extend("named", &text(2, 30));
    let document = NAMED.parse().unwrap();
    rig.settle("named", document, 32);
    rig.begin("other", &text(1_000, 20), None);
    rig.proposer.extend("other", &text(0, 12));
    rig.await_draft("other", &text(12, 10));
    // The engine makes room and resumes the request. Its worker knows of one attempt.
    rig.proposer.finish("named".into(), None);
    assert_eq!(rig.proposer.begin(begin("named")).unwrap(), 30);
    rig.proposer.extend("named", &text(32, 30));
    rig.settle("named", document, 62);
    rig.proposer.extend("other", &text(12, 20));
    rig.await_draft("other", &text(32, 10));
    rig.proposer.finish("named".into(), Some("stop"));
    rig.proposer.finish("other".into(), Some("stop"));
    rig.drain();
    let outputs = uploaded(&rig.store);
    assert_eq!(outputs.len(), 1);
    assert_eq!(outputs[0].1, text(0, 32));
    // The worker cuts the output where a stop string began, under the next epoch.
    let cut = DocumentUpdate {
        document,
        epoch: 4,
        prev_len: 40,
        tokens: Vec::new(),
        head: Default::default(),
        finish: Some(FinishReason::Stop),
    };
    rig.namespace().merge((&cut).into());
    let len = rig.namespace().read().len_of(cut.document);
    assert_eq!(len, Some(40));
}

#[test]
fn a_request_that_ends_before_its_sources_are_found_is_kept() {
    let rig = Rig::new(|_| {});
    // These namespaces are not followed yet, so the background thread finds the sources.
    for number in 0..20 {
        let token = rig.token(&format!("model-{number}"));
        let begin = RequestStart {
            request: number.to_string(),
            prompt: vec![1],
            namespace: Some(&token),
            group: Some("g".into()),
            ..RequestStart::default()
        };
        rig.proposer.begin(begin).unwrap();
        rig.proposer.extend(&number.to_string(), &text(number, 50));
        rig.proposer.finish(number.to_string(), Some("length"));
    }
    rig.drain();
    let outputs = uploaded(&rig.store);
    assert_eq!(outputs.len(), 20);
    for number in 0..20 {
        let kept = outputs.iter().any(|output| output.1 == text(number, 50));
        assert!(kept, "{number}");
    }
}

#[test]
fn prometheus_can_scrape_metrics() {
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
    assert!(get(addr).contains("\nrefrain_client_emitted_tokens_total 7\n"));
    // Another engine on the machine goes on without the address.
    let other = Rig::new(|config| config.metrics_listen = Some(addr));
    assert!(other.proposer.metrics_addr().is_none());
    other.begin("a", &[1, 2, 3, 1, 2], None);
    assert_eq!(other.draft("a", 1), [3]);
}

#[test]
fn requests_with_unreadable_fields_are_counted() {
    let rig = Rig::new(|_| {});
    let begin = |namespace, document| RequestStart {
        request: "a".into(),
        namespace,
        document,
        ..RequestStart::default()
    };
    assert!(rig.proposer.begin(begin(Some("nonsense"), None)).is_err());
    assert!(rig.proposer.begin(begin(None, Some("xyz"))).is_err());
    assert_eq!((rig.rejected(TOKEN), rig.rejected(FIELDS)), (1, 1));
}
