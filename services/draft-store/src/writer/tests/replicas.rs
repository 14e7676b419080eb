//! Replicas on one stream: random calls, lost acknowledgements, repetitions and restarts. At the end all are equal.

mod join;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::*;
use proptest::prelude::*;

use crate::config::FeedConfig;
use refrain_protocol::join::JoinOffer;

use crate::message::{StreamChange, StreamMessage, decode, encode_with_id};
use crate::metrics::RemovalReason;
use crate::reading::document_text::read_document;
use crate::reading::erasure::documents_hit;
use crate::reading::join as handed_over;
use crate::reading::outbox::{Outgoing, next_outgoing};
use crate::record::ErasureRecord;
use crate::writer::replication::{SentDocument, SentEntry};

const REPLICAS: usize = 3;
const STREAM: u64 = 99;

/// Most tokens of a part, so that most documents have several.
const PART_TOKENS: usize = 7;

#[derive(Clone, Debug)]
enum Op {
    Append {
        replica: usize,
        document: u128,
        epoch: u64,
        prev_len: u32,
        count: u32,
        /// A faulty writer, whose text differs from that of others.
        salt: u32,
        finish: bool,
        session: bool,
        age_ms: u64,
    },
    /// Continues a document where it ends.
    Grow {
        replica: usize,
        document: u128,
        count: u32,
        finish: bool,
    },
    /// Reads entries of the outbox, which are then on the way.
    Read {
        replica: usize,
        count: usize,
    },
    /// The message that is longest on the way arrives at the broker.
    Arrive {
        replica: usize,
    },
    /// The broker's acknowledgement arrives, or it is lost, with or without the message.
    Acknowledge {
        replica: usize,
        arrives: bool,
    },
    /// Applies messages, some of them again.
    Apply {
        replica: usize,
        count: usize,
        again: usize,
    },
    Evict {
        replica: usize,
        document: u128,
    },
    Erase {
        replica: usize,
        session: bool,
        span: Option<(u64, u64)>,
    },
    CarryOut {
        replica: usize,
    },
    Release {
        replica: usize,
    },
    Tick {
        replica: usize,
        elapsed_ms: u64,
    },
    Seal {
        replica: usize,
    },
    Reopen {
        replica: usize,
    },
    /// Takes over the documents of another replica, as if the stream had lost what came before.
    Join {
        replica: usize,
        peer: usize,
        /// Applied by the peer while its documents are read.
        meanwhile: usize,
        /// The replica lost its disk before, unless something on it was not sent.
        is_new: bool,
        /// A document that a caller of the replica begins while files are on their way.
        appended: Option<u128>,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let replica = || 0usize..REPLICAS;
    let document = || 0u128..4;
    prop_oneof![
        8 => (replica(), document(), 1u64..4, 0u32..12, 0u32..12, 0u32..8, any::<bool>(), any::<bool>(), 0u64..50)
            .prop_map(|(replica, document, epoch, prev_len, count, salt, finish, session, age_ms)| {
                let salt = salt / 7;
                Op::Append { replica, document, epoch, prev_len, count, salt, finish, session, age_ms }
            }),
        10 => (replica(), document(), 1u32..20, any::<bool>())
            .prop_map(|(replica, document, count, finish)| Op::Grow { replica, document, count, finish }),
        8 => (replica(), 1usize..4).prop_map(|(replica, count)| Op::Read { replica, count }),
        20 => replica().prop_map(|replica| Op::Arrive { replica }),
        10 => (replica(), prop::bool::weighted(0.7))
            .prop_map(|(replica, arrives)| Op::Acknowledge { replica, arrives }),
        10 => (replica(), 1usize..5, 0usize..4)
            .prop_map(|(replica, count, again)| Op::Apply { replica, count, again }),
        2 => (replica(), document()).prop_map(|(replica, document)| Op::Evict { replica, document }),
        1 => (replica(), any::<bool>(), proptest::option::of((0u64..40, 1u64..40)))
            .prop_map(|(replica, session, span)| Op::Erase { replica, session, span }),
        2 => replica().prop_map(|replica| Op::CarryOut { replica }),
        3 => replica().prop_map(|replica| Op::Release { replica }),
        3 => (replica(), 1u64..30).prop_map(|(replica, elapsed_ms)| Op::Tick { replica, elapsed_ms }),
        1 => replica().prop_map(|replica| Op::Seal { replica }),
        2 => replica().prop_map(|replica| Op::Reopen { replica }),
        3 => (replica(), replica(), 0usize..4, any::<bool>(), proptest::option::of(document()))
            .prop_map(|(replica, peer, meanwhile, is_new, appended)| {
                Op::Join { replica, peer, meanwhile, is_new, appended }
            }),
    ]
}

/// Messages on the way from a replica to the broker.
struct OnTheWay {
    outgoing: Outgoing,
    /// Number of its messages that have arrived.
    arrived: usize,
}

impl OnTheWay {
    fn next(&mut self) -> Option<StreamMessage> {
        let message = self.outgoing.messages.get(self.arrived).cloned();
        self.arrived += usize::from(message.is_some());
        message
    }
}

struct Replica {
    /// `None` only while it is opened again.
    store: Option<Store>,
    on_the_way: Vec<OnTheWay>,
}

/// A document with all that replicas must agree on.
type Held = (u64, u32, DocumentUpdate, u8, u64);

fn config() -> DraftStoreConfig {
    DraftStoreConfig {
        feed: Some(FeedConfig::default()),
        ..DraftStoreConfig::default()
    }
}

struct Cluster {
    replicas: Vec<Replica>,
    /// The stream; sequences begin with 1.
    stream: Vec<Vec<u8>>,
    ids: HashMap<String, usize>,
    erasures: Vec<ErasureRecord>,
    now_ms: u64,
    /// Generation of the next new disk.
    generation: u64,
}

fn tenant(document: u128) -> &'static str {
    if document < 3 { "a" } else { "b" }
}

impl Cluster {
    fn new() -> Self {
        let replica = |number| Replica {
            store: Some(Store::with_generation(config(), 100 + number)),
            on_the_way: Vec::new(),
        };
        Cluster {
            replicas: (0..REPLICAS as u64).map(replica).collect(),
            stream: Vec::new(),
            ids: HashMap::new(),
            erasures: Vec::new(),
            now_ms: 1_000_000_000_000,
            generation: 200,
        }
    }

    fn store(&mut self, replica: usize) -> &mut Store {
        self.replicas[replica].store.as_mut().unwrap()
    }

    /// The broker takes a message, unless it has its id.
    fn accept(&mut self, message: &StreamMessage) {
        let next = self.stream.len();
        let (id, bytes) = encode_with_id(message);
        if self.ids.try_insert_new(id, next) {
            self.stream.push(bytes);
        }
    }

    fn append(&mut self, replica: usize, sent: DocumentUpdate) {
        let tenant = tenant(sent.document.0);
        self.store(replica).append(tenant, &[sent]);
    }

    fn read(&mut self, replica: usize, count: usize) {
        let Replica { store, on_the_way } = &mut self.replicas[replica];
        let open = store.as_ref().unwrap().shared.read().unwrap();
        let busy: BTreeSet<u64> = on_the_way
            .iter()
            .flat_map(|sent| sent.outgoing.entries.iter().map(|entry| entry.number))
            .collect();
        let next =
            next_outgoing(&open, count, PART_TOKENS, |number| busy.contains(&number)).unwrap();
        assert!(next.damaged.is_empty());
        drop(open);
        on_the_way.extend(next.outgoing.into_iter().map(|outgoing| OnTheWay {
            outgoing,
            arrived: 0,
        }));
    }

    fn arrive(&mut self, replica: usize) {
        let sent = &mut self.replicas[replica].on_the_way;
        if let Some(message) = sent.iter_mut().find_map(OnTheWay::next) {
            self.accept(&message);
        }
    }

    fn acknowledge(&mut self, replica: usize, arrives: bool) {
        let Replica { store, on_the_way } = &mut self.replicas[replica];
        if on_the_way.is_empty() {
            return;
        }
        let sent = on_the_way.remove(0);
        if !arrives || sent.arrived < sent.outgoing.messages.len() {
            return;
        }
        let Outgoing {
            entries,
            sent: text,
            document,
            ..
        } = sent.outgoing;
        let document = document.map(|(key, sequence)| SentDocument {
            key,
            sequence,
            text: text.map(|(_, text)| text),
        });
        let settled: Vec<SentEntry> = entries.iter().map(|entry| (*entry, document)).collect();
        store.as_mut().unwrap().run(|core, catalog| {
            core.settle_outbox(catalog, &settled);
            Ok(CommitOutcome::default())
        });
    }

    fn position(&mut self, replica: usize) -> u64 {
        let open = self.store(replica).shared.read().unwrap();
        open.catalog.replication.sequence()
    }

    fn apply(&mut self, replica: usize, count: usize, again: usize) {
        let position = self.position(replica) as usize;
        let from = position.saturating_sub(again);
        let until = self.stream.len().min(position + count);
        let messages: Vec<_> = (from..until)
            .map(|at| (at as u64 + 1, Some(decode(&self.stream[at]).unwrap())))
            .collect();
        let store = self.store(replica);
        let now_ms = store.now_ms;
        store.run(|core, catalog| core.apply_messages(catalog, STREAM, &messages, now_ms));
    }

    /// Removes what an erasure hits, here first or because the stream says so.
    fn remove_hit(&mut self, replica: usize, mark: &ErasureRecord, known_ms: Option<u64>) {
        let store = self.store(replica);
        let keys = documents_hit(&store.shared, mark, known_ms).unwrap();
        let now_ms = store.now_ms;
        store.run(|core, catalog| core.remove(catalog, &keys, RemovalReason::Erased, now_ms));
    }

    fn carry_out(&mut self, replica: usize) {
        let open_erasures = {
            let open = self.store(replica).shared.read().unwrap();
            open.catalog.replication.open_erasures()
        };
        for erasure in open_erasures {
            self.remove_hit(replica, &erasure.mark, Some(erasure.applied_ms));
            let store = self.store(replica);
            let now_ms = store.now_ms;
            let (id, sequence) = (erasure.mark.id(), erasure.sequence);
            store.run(|core, catalog| core.complete_erasure(catalog, id, sequence, now_ms));
        }
    }

    fn erase(&mut self, replica: usize, session: bool, span: Option<(u64, u64)>) {
        let store = self.store(replica);
        let start = 1_000_000_000_000;
        let mark = ErasureRecord {
            tenant: Some("a".into()),
            session: session.then(|| "s".into()),
            from_ms: span.map(|(from, _)| start + from),
            until_ms: span.map(|(from, len)| start + from + len),
            ..ErasureRecord::default()
        };
        let mut open = store.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let (mark, _) = store.core.mark(catalog, mark, store.now_ms).unwrap();
        drop(open);
        let mark = mark.unwrap();
        self.remove_hit(replica, &mark, None);
        self.erasures.push(mark);
    }

    fn release(&mut self, replica: usize) {
        self.store(replica).run(|core, catalog| {
            core.release_silent(catalog, u64::MAX);
            Ok(CommitOutcome::default())
        });
    }

    fn reopen(&mut self, replica: usize) {
        let Replica { store, on_the_way } = &mut self.replicas[replica];
        // Messages on the way may still arrive, or not. Nobody waits for them any more.
        *store = Some(store.take().unwrap().reopen());
        let arriving = std::mem::take(on_the_way);
        for mut sent in arriving.into_iter().step_by(2) {
            if let Some(message) = sent.next() {
                self.accept(&message);
            }
        }
    }

    fn offer(&mut self, replica: usize) -> Option<JoinOffer> {
        handed_over::offer(&self.store(replica).shared).unwrap()
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Append {
                replica,
                document,
                epoch,
                prev_len,
                count,
                salt,
                finish,
                session,
                age_ms,
            } => {
                let tokens: Vec<TokenId> = (prev_len..prev_len + count)
                    .map(|at| at * 100 + epoch as u32 * 10 + salt)
                    .collect();
                let mut sent = update(document, epoch, prev_len, &tokens);
                sent.head.session = session.then(|| "s".into());
                sent.head.created_ms = self.now_ms - age_ms;
                self.append(replica, if finish { finished(sent) } else { sent });
            }
            Op::Grow {
                replica,
                document,
                count,
                finish,
            } => {
                let known = {
                    let open = self.store(replica).shared.read().unwrap();
                    let known = open.catalog.document(key(tenant(document), document));
                    known.map(|known| (known.state.epoch, known.state.len))
                };
                let (epoch, len) = known.unwrap_or((1, 0));
                let tokens: Vec<TokenId> = (len..len + count)
                    .map(|at| at * 100 + epoch as u32 * 10)
                    .collect();
                let mut sent = update(document, epoch, len, &tokens);
                sent.head.created_ms = self.now_ms;
                self.append(replica, if finish { finished(sent) } else { sent });
            }
            Op::Read { replica, count } => self.read(replica, count),
            Op::Arrive { replica } => self.arrive(replica),
            Op::Acknowledge { replica, arrives } => self.acknowledge(replica, arrives),
            Op::Apply {
                replica,
                count,
                again,
            } => self.apply(replica, count, again),
            Op::Evict { replica, document } => {
                let store = self.store(replica);
                let now_ms = store.now_ms;
                let keys = [key(tenant(document), document)];
                store.run(|core, catalog| {
                    core.remove(catalog, &keys, RemovalReason::Tokens, now_ms)
                });
            }
            Op::Erase {
                replica,
                session,
                span,
            } => self.erase(replica, session, span),
            Op::CarryOut { replica } => self.carry_out(replica),
            Op::Release { replica } => self.release(replica),
            Op::Tick {
                replica,
                elapsed_ms,
            } => {
                self.store(replica).tick(elapsed_ms);
                self.now_ms += elapsed_ms;
            }
            Op::Seal { replica } => {
                for tenant in ["a", "b"] {
                    self.store(replica).seal(tenant);
                }
            }
            Op::Reopen { replica } => self.reopen(replica),
            Op::Join {
                replica,
                peer,
                meanwhile,
                is_new,
                appended,
            } => {
                if is_new && replica != peer && self.offer(peer).is_some() {
                    self.lose(replica);
                }
                let here = self.position(replica);
                if let Some(offer) = self.offer(peer)
                    && replica != peer
                    && offer.sequence >= here
                {
                    self.join(replica, peer, meanwhile, appended);
                }
            }
        }
    }

    /// Lets everything reach everybody.
    fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 50, "the replicas never come to rest");
            let before = self.stream.len();
            for replica in 0..REPLICAS {
                self.carry_out(replica);
                self.release(replica);
                while let Some(sent) = self.replicas[replica].on_the_way.first() {
                    match sent.arrived < sent.outgoing.messages.len() {
                        true => self.arrive(replica),
                        false => self.acknowledge(replica, true),
                    }
                }
                self.read(replica, usize::MAX);
            }
            for replica in 0..REPLICAS {
                self.apply(replica, usize::MAX >> 1, 2);
            }
            let is_empty = |replica: &Replica| {
                let open = replica.store.as_ref().unwrap().shared.read().unwrap();
                replica.on_the_way.is_empty() && open.catalog.replication.outbox.len() == 0
            };
            if before == self.stream.len() && self.replicas.iter().all(is_empty) {
                return;
            }
        }
    }

    fn held(&mut self, replica: usize) -> BTreeMap<DocumentKey, Held> {
        let open = self.store(replica).shared.read().unwrap();
        let mut held = BTreeMap::new();
        for tenant in ["a", "b"] {
            for (document, known) in open.catalog.documents(names(tenant).id()) {
                let key = key(tenant, document.0);
                let state = known.state;
                let revision = open.catalog.replication.revision(key);
                let update = read_document(&open, key).unwrap();
                let seen = (state.epoch, revision, update, state.finish, state.stored_ms);
                held.insert(key, seen);
            }
        }
        held
    }

    fn check_equal(&mut self) {
        let first = self.held(0);
        for replica in 1..REPLICAS {
            assert_eq!(self.held(replica), first, "replica {replica}");
        }
        for mark in &self.erasures {
            for (key, (.., document, _, stored_ms)) in &first {
                let session = document.head.session.as_deref();
                let is_hit = key.namespace == names("a").id()
                    && mark.hits_session(session)
                    && mark.hits_time(*stored_ms)
                    && mark.hits_time(document.head.created_ms);
                assert!(!is_hit, "{} was erased by {mark:?}", key.document);
            }
        }
    }
}

trait TryInsertNew {
    fn try_insert_new(&mut self, id: String, at: usize) -> bool;
}

impl TryInsertNew for HashMap<String, usize> {
    fn try_insert_new(&mut self, id: String, at: usize) -> bool {
        match self.entry(id) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(at);
                true
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn replicas_end_equal(ops in proptest::collection::vec(op(), 1..150)) {
        let mut cluster = Cluster::new();
        for op in &ops {
            cluster.step(op);
        }
        cluster.settle();
        cluster.check_equal();
        for replica in 0..REPLICAS {
            cluster.reopen(replica);
        }
        cluster.settle();
        cluster.check_equal();
    }
}
