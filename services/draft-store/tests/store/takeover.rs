//! Workers take over segments while the store goes on.

use refrain_protocol::ErrorKind;
use refrain_protocol::admin::EraseRequest;
use refrain_protocol::segment::{
    DocumentsRequest, SegmentInfo, SegmentPieceRequest, SegmentsRequest,
};
use refrain_rpc::StoreAdmin as _;
use refrain_suffix_index::Segment;

use super::rewrite::noise;
use super::*;

impl Store {
    async fn segment(&self, tenant: &str, info: &SegmentInfo) -> Result<Segment, ApiError> {
        let mut words: Vec<u32> = Vec::new();
        while (words.len() as u64) < info.words {
            let request = SegmentPieceRequest {
                namespace: self.sign(tenant),
                segment: info.segment,
                offset: words.len() as u64,
                max_words: 1_000,
            };
            let piece = self.handle().segment_piece(request).await?;
            assert!((1..=1_000).contains(&piece.words.len()));
            words.extend(piece.words);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Ok(Segment::open(bytes).unwrap())
    }

    /// A follower that takes over the segments. Also the number of segments, and of documents that came one by one.
    async fn taken_over(&self, tenant: &str) -> Result<(Follower, usize, usize), ApiError> {
        let namespace = self.sign(tenant);
        let listed = self
            .handle()
            .segments(SegmentsRequest { namespace })
            .await?;
        let mut texts = BTreeMap::new();
        for info in &listed.segments {
            let segment = self.segment(tenant, info).await?;
            for (number, document) in (0u32..).zip(segment.iter()) {
                if !info.masked.contains(&number) {
                    let before = texts.insert(document.key.0, document.output.to_vec());
                    assert_eq!(before, None, "in two segments");
                }
            }
        }
        let mut left = &listed.unsealed[..];
        while !left.is_empty() {
            let request = DocumentsRequest {
                namespace: self.sign(tenant),
                documents: left.to_vec(),
                max_tokens: 1_200,
            };
            let reply = self.handle().documents(request).await?;
            for update in reply.updates {
                assert_eq!(update.prev_len, 0);
                texts.insert(update.document.0, update.tokens);
            }
            assert!(reply.covered > 0);
            left = &left[reply.covered as usize..];
        }
        let follower = Follower {
            cursor: listed.cursor,
            texts,
            ..Follower::default()
        };
        Ok((follower, listed.segments.len(), listed.unsealed.len()))
    }
}

fn whole(document: u128) -> DocumentUpdate {
    finished(update(document, 0, &noise(document, 300)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segments_documents_and_changes_add_up_to_the_feed() {
    let dir = tempfile::tempdir().unwrap();
    let store = std::sync::Arc::new(Store::start(sealing(dir.path())).await);
    let writer = tokio::spawn({
        let store = store.clone();
        async move {
            for number in 0..150u128 {
                store.append("a", vec![whole(number)]).await.unwrap();
                // One document runs, grows, and continues after it was sealed.
                let len = number as u32 * 4;
                let grown = update(1_000, len, &noise(7, 604)[len as usize..len as usize + 4]);
                let grown = if number % 20 == 0 {
                    finished(grown)
                } else {
                    grown
                };
                store.append("a", vec![grown]).await.unwrap();
                if number % 50 == 49 {
                    store.handle().compact().await.unwrap();
                }
            }
        }
    });
    let (mut taken, mut most_segments) = (0, 0);
    while !writer.is_finished() || most_segments == 0 {
        // The segment was merged away during the take-over, which must start again.
        let Ok((mut follower, segments, _)) = store.taken_over("a").await else {
            continue;
        };
        tokio::task::yield_now().await;
        follower.catch_up(&store, "a").await;
        assert_eq!(follower.resets, 0, "the cursor means nothing");
        for (document, text) in &follower.texts {
            if *document == 1_000 {
                assert_eq!(*text, noise(7, 604)[..text.len()]);
            } else {
                assert_eq!(*text, noise(*document, 300));
            }
        }
        most_segments = most_segments.max(segments);
        taken += 1;
    }
    writer.await.unwrap();
    assert!(taken >= 3 && most_segments >= 1, "{taken} {most_segments}");
    let (mut follower, ..) = store.taken_over("a").await.unwrap();
    follower.catch_up(&store, "a").await;
    let mut fresh = Follower::default();
    fresh.catch_up(&store, "a").await;
    assert_eq!((&follower.texts, follower.texts.len()), (&fresh.texts, 151));
}

#[tokio::test]
async fn removed_documents_are_masked_and_a_removed_segment_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(DraftStoreConfig {
        document_tokens_max: 1_000,
        tokens_max: 12_000,
        // Sealed completely on request: otherwise a last document alone would stay in the log.
        seal_tokens: 1_000_000,
        ..sealing(dir.path())
    })
    .await;
    for document in 0..40u128 {
        let mut sent = whole(document);
        sent.head.session = Some(format!("s{}", document % 2));
        store.append("a", vec![sent]).await.unwrap();
    }
    store.handle().compact().await.unwrap();
    // Evicts the first document, which is too little for a rewrite of its segment.
    store.append("a", vec![whole(40)]).await.unwrap();
    let namespace = store.sign("a");
    let request = SegmentsRequest { namespace };
    let listed = store.handle().segments(request).await.unwrap();
    assert_eq!(listed.unsealed, [DocumentId(40)]);
    let masked: Vec<_> = listed
        .segments
        .iter()
        .flat_map(|info| &info.masked)
        .collect();
    assert_eq!(masked, [&0]);
    let (mut follower, ..) = store.taken_over("a").await.unwrap();
    assert_eq!(follower.texts.len(), 40);
    let session = EraseRequest {
        tenant: Some("a".into()),
        session: Some("s1".into()),
        ..EraseRequest::default()
    };
    store.handle().erase(session).await.unwrap();
    // The segments were rewritten without them.
    let gone = store.segment("a", &listed.segments[0]).await.unwrap_err();
    assert_eq!(gone.kind, ErrorKind::NotFound);
    follower.catch_up(&store, "a").await;
    assert_eq!(follower.resets, 0);
    let (again, ..) = store.taken_over("a").await.unwrap();
    assert_eq!(again.texts, follower.texts);
    assert_eq!(again.texts.len(), 20);
    store.stop().await;
}

/// Deleted files of the store whose blocks the disk still holds for this process.
#[cfg(target_os = "linux")]
pub(super) fn deleted_files_held(dir: &Path) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let dir = dir.to_str().unwrap();
    let held = maps.lines().filter(|line| line.contains(dir));
    let deleted = held.filter(|line| line.ends_with("(deleted)"));
    deleted.map(str::to_owned).collect()
}
