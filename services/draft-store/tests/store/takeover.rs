//! Workers take over segments while the store goes on.

use refrain_protocol::ErrorKind;
use refrain_protocol::admin::EraseRequest;
use refrain_protocol::lookup::{LookupContext, LookupRequest, LookupRules};
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

/// A request for a draft of at most ten tokens.
pub(super) fn lookup(namespace: SignedNamespace, tokens: Vec<TokenId>) -> LookupRequest {
    LookupRequest {
        namespace,
        rules: LookupRules {
            alpha: 2.0,
            offset: 0.0,
            min_token_prob: 0.1,
            min_match_tokens: 1,
            max_pattern_tokens: 64,
            tree: true,
        },
        contexts: vec![LookupContext {
            tokens,
            draft_tokens_max: 10,
        }],
    }
}

impl Store {
    /// The draft of the store, and the document that it comes from.
    async fn drafted(&self, tenant: &str, tokens: &[TokenId]) -> Option<(Vec<TokenId>, u128)> {
        let request = lookup(self.sign(tenant), tokens.to_vec());
        let reply = self.handle().lookup(request).await.unwrap();
        let found = reply.drafts.into_iter().next()??;
        assert!(found.score > 1.0 && found.match_len > 0);
        let place = found.nodes[0].place.unwrap();
        Some((
            found.nodes.iter().map(|node| node.token).collect(),
            place.0.0,
        ))
    }
}

#[tokio::test]
async fn the_store_drafts_from_sealed_documents_of_the_namespace_that_still_exist() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(sealing(dir.path())).await;
    for document in 0..30u128 {
        let mut sent = whole(document);
        sent.head.session = Some(format!("s{}", document % 2));
        store.append("a", vec![sent]).await.unwrap();
    }
    store.append("b", vec![whole(100)]).await.unwrap();
    store.handle().compact().await.unwrap();
    for document in [7u128, 8, 21] {
        let text = noise(document, 300);
        let drafted = store.drafted("a", &text[80..100]).await;
        assert_eq!(drafted, Some((text[100..110].to_vec(), document)));
        assert_eq!(store.drafted("b", &text[80..100]).await, None);
    }
    // Erased documents are not drafted from once the erasure is answered, however new the view is.
    let session = EraseRequest {
        tenant: Some("a".into()),
        session: Some("s1".into()),
        ..EraseRequest::default()
    };
    store.handle().erase(session).await.unwrap();
    for document in [7u128, 8, 21] {
        let text = noise(document, 300);
        let drafted = store.drafted("a", &text[80..100]).await;
        assert_eq!(drafted.is_some(), document == 8, "{document}");
    }
    let mut many = lookup(store.sign("a"), vec![1]);
    many.contexts = vec![many.contexts[0].clone(); 257];
    let refused = store.handle().lookup(many).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::TooLarge);
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

#[cfg(target_os = "linux")]
#[tokio::test]
async fn look_ups_keep_no_deleted_segment_on_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(sealing(dir.path())).await;
    let documents: Vec<DocumentUpdate> = (0..10).map(whole).collect();
    store.append("a", documents).await.unwrap();
    store.handle().compact().await.unwrap();
    let text = noise(7, 310);
    let expected = Some((text[100..110].to_vec(), 7));
    assert_eq!(store.drafted("a", &text[80..100]).await, expected);
    // The document continues, so it leaves its segment, which is rewritten without it.
    store
        .append("a", vec![update(3, 300, &[1, 2, 3])])
        .await
        .unwrap();
    store.handle().compact().await.unwrap();
    // The file is gone by then, sooner than a view is dropped for lack of use.
    assert_eq!(deleted_files_held(dir.path()), [""; 0]);
    assert_eq!(store.metric("refrain_draft_store_lookup_views"), 0.0);
    assert_eq!(store.drafted("a", &text[80..100]).await, expected);
    store.stop().await;
}

#[tokio::test]
async fn look_ups_find_documents_sealed_later() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(sealing(dir.path())).await;
    let old = noise(0, 300);
    for document in [0, 20] {
        let documents = (document..document + 20).map(whole).collect();
        store.append("a", documents).await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        store.handle().compact().await.unwrap();
        let text = noise(document, 300);
        eventually(async || store.drafted("a", &text[80..100]).await.is_some()).await;
    }
    assert!(store.drafted("a", &old[80..100]).await.is_some());
    store.stop().await;
}
