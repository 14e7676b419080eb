//! A replica that joins, as `replication/join.rs` does it, without a network.

use std::io::Write as _;

use refrain_protocol::join::{
    JoinDocumentsRequest, JoinList, JoinListRequest, JoinPieceRequest, JoinSegment,
};

use super::*;
use crate::record::replication::{PositionRecord, StreamErasureRecord};
use crate::segments::{ReceivedSegment, SegmentFile};

impl Cluster {
    /// A replica that has sent everything loses its disk.
    pub(super) fn lose(&mut self, replica: usize) {
        let is_sent = {
            let Replica {
                store, on_the_way, ..
            } = &self.replicas[replica];
            let open = store.as_ref().unwrap().shared.read().unwrap();
            on_the_way.is_empty() && open.catalog.replication.outbox.len() == 0
        };
        if is_sent {
            self.generation += 1;
            let mut store = Store::with_generation(config(), self.generation);
            store.now_ms = self.store(replica).now_ms;
            self.replicas[replica].store = Some(store);
            self.store(replica).tick(0);
        }
    }

    /// Takes the listed files over. `None` if one is gone.
    fn adopt(&mut self, replica: usize, peer: usize, list: &JoinList) -> Option<Vec<u128>> {
        let mut handed_over = Vec::new();
        for segment in &list.segments {
            let (file, origin) = self.receive(replica, peer, segment)?;
            let documents = (0..).zip(file.ids());
            let documents = documents.filter(|(number, _)| !segment.gone.contains(number));
            handed_over.extend(documents.map(|(_, document)| document.0));
            let received = ReceivedSegment {
                file,
                origin,
                seen: list.seen,
                gone: segment.gone.clone(),
                used_s: segment.used_s.clone(),
            };
            let store = self.store(replica);
            store.segment += 1;
            let (dir, id, now_ms) = (store.dir.clone(), store.segment, store.now_ms);
            store
                .run(|core, catalog| core.adopt_segment(catalog, dir.path(), id, received, now_ms));
        }
        Some(handed_over)
    }

    fn receive(
        &mut self,
        replica: usize,
        peer: usize,
        segment: &JoinSegment,
    ) -> Option<(SegmentFile, u64)> {
        let dir = self.store(replica).dir.clone();
        let (mut file, path) = segments::create_received(dir.path(), segment.checksum).unwrap();
        let shared = &self.store(peer).shared;
        let namespace = {
            let open = shared.read().unwrap();
            let mut files = open.catalog.segments().files();
            files
                .find(|file| file.manifest().checksum == segment.checksum)?
                .namespace
        };
        for offset in (0..segment.bytes).step_by(100) {
            let request = JoinPieceRequest {
                namespace,
                segment: segment.checksum,
                offset,
                bytes_max: 100,
            };
            let piece = handed_over::piece(shared, &request, 100).unwrap();
            file.write_all(&piece.bytes).unwrap();
        }
        let origin = shared.read().unwrap().catalog.generation();
        let opened = segments::open_received(&path, namespace, segment.checksum);
        Some((opened.unwrap(), origin))
    }

    /// Takes everything over from another replica.
    pub(super) fn join(
        &mut self,
        replica: usize,
        peer: usize,
        meanwhile: usize,
        appended: Option<u128>,
    ) {
        let offer = self.offer(peer).unwrap();
        let erasures = offer.erasures.iter().map(|erasure| {
            let StreamChange::Erasure(mark) = decode(&erasure.message).unwrap().change else {
                panic!("an erasure is offered");
            };
            StreamErasureRecord {
                sequence: erasure.sequence,
                mark,
                applied_ms: 0,
                is_own: false,
                is_done: false,
            }
        });
        let erasures: Vec<_> = erasures.collect();
        let store = self.store(replica);
        let now_ms = store.now_ms;
        store.run(|core, catalog| core.begin_joining(catalog, now_ms));
        store.run(|core, catalog| core.note_erasures(catalog, &erasures, now_ms));
        self.carry_out(replica);
        let mut kept = BTreeSet::new();
        for tenant in ["a", "b"] {
            let namespace = names(tenant).id();
            let with_segments = {
                let open = self.store(replica).shared.read().unwrap();
                open.catalog.documents(namespace).next().is_none()
            };
            // A page has one document, so that there are changes between two pages.
            let request = JoinListRequest {
                namespace,
                with_segments,
                after: None,
                handed_over: Vec::new(),
                documents_max: 1,
            };
            let mut list = loop {
                let list = handed_over::list(&self.store(peer).shared, &request).unwrap();
                self.apply(peer, meanwhile, 0);
                if let Some(document) = appended {
                    let mut sent = update(document, 1, 0, &[10, 110, 211]);
                    sent.head.created_ms = self.now_ms;
                    self.append(replica, sent);
                }
                if let Some(files) = self.adopt(replica, peer, &list) {
                    kept.extend(files.into_iter().map(|document| key(tenant, document)));
                    break list;
                }
            };
            let mut documents = std::mem::take(&mut list.documents);
            while list.has_more {
                self.apply(peer, meanwhile, 0);
                let request = JoinListRequest {
                    after: documents.last().copied(),
                    handed_over: list.segments.iter().map(|file| file.checksum).collect(),
                    ..request.clone()
                };
                let page = handed_over::list(&self.store(peer).shared, &request).unwrap();
                assert!(page.segments.is_empty() && page.documents.len() <= 1);
                documents.extend(page.documents);
                list.has_more = page.has_more;
            }
            let keys = documents.iter();
            kept.extend(keys.map(|document| DocumentKey::new(namespace, *document)));
            self.apply(peer, meanwhile, 0);
            let request = JoinDocumentsRequest {
                namespace,
                documents,
                max_tokens: 1 << 20,
            };
            let read = handed_over::documents(&self.store(peer).shared, &request, 1 << 20);
            let documents: Vec<_> = read
                .unwrap()
                .0
                .documents
                .iter()
                .map(|document| {
                    let messages = document.messages.iter();
                    let messages = messages.map(|message| decode(message).unwrap());
                    (messages.collect(), document.is_unsent)
                })
                .collect();
            let store = self.store(replica);
            store.run(|core, catalog| core.store_joined(catalog, &documents, now_ms));
        }
        let position = PositionRecord {
            stream: STREAM,
            sequence: offer.sequence,
            checksum: 0,
        };
        let others: Vec<DocumentKey> = {
            let open = self.store(replica).shared.read().unwrap();
            let of = |tenant| {
                let documents = open.catalog.documents(names(tenant).id());
                let ids: Vec<u128> = documents.map(|(document, _)| document.0).collect();
                ids.into_iter().map(move |document| key(tenant, document))
            };
            let all = of("a").chain(of("b"));
            all.filter(|key| !kept.contains(key)).collect()
        };
        let store = self.store(replica);
        store.run(|core, catalog| core.drop_missing(catalog, &others, now_ms));
        store.run(|core, catalog| core.set_position(catalog, position, now_ms));
    }
}
