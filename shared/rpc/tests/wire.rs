//! The binary formats between services: bincode between workers and the draft store, and requests with tokens.
//! Each has a committed file in `tests/fixtures`, in hex, which today's types read and write.
//!
//! bincode has no names and no optional fields, so any change of a type is a change of its format. `UPDATE_EXPECT=1`
//! writes the files anew.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::fmt::Debug;
use std::panic::RefUnwindSafe;
use std::path::PathBuf;

use expect_test::expect_file;
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::admin::{
    ExportCursor, ExportReply, ExportRequest, ExportedDocument, ImportRequest,
};
use refrain_protocol::chunk::{ChunkBudget, ChunkRequest, DraftRules, Speculation, Urgency};
use refrain_protocol::document::{
    Acknowledgement, AppendReply, AppendRequest, DocumentHead, DocumentUpdate, FeedCursor,
    FeedDelta, FeedEvent, FinishReason, StreamPosition, TouchRequest, UnknownDocumentsReply,
    UnknownDocumentsRequest,
};
use refrain_protocol::engine::{Draft, Sampling, SessionSpec, StepItem, StepRequest};
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest, PromptHash};
use refrain_protocol::join::{
    JoinDocuments, JoinDocumentsRequest, JoinList, JoinListRequest, JoinOffer, JoinOfferRequest,
    JoinPiece, JoinPieceRequest, JoinSegment, JoinedDocument, JoinedErasure,
};
use refrain_protocol::pull::{
    NamespacePull, PullReply, PullRequest, Scope, ScopeDelta, ScopeNews, ScopePull,
};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentInfo, SegmentPiece, SegmentPieceRequest,
    SegmentsReply, SegmentsRequest,
};
use refrain_protocol::tenants::{
    TenantChange, TenantChangeReply, TenantRecord, TenantsReply, TenantsRequest,
};
use refrain_protocol::token_body::{TokenBody, decode_token_body, encode_token_body};
use refrain_protocol::usage::{
    RecordUsageReply, RecordUsageRequest, Spender, SpentTokens, UsageCounts, UsageErasure,
    UsageRow, UsageRowId, UsageRowsReply, UsageRowsRequest, UsageTotal,
};
use refrain_protocol::{
    ApiError, DocumentId, EngineSessionId, ErrorKind, LeaseId, Namespace, NamespaceId, RequestId,
    SignedNamespace, TokenId,
};
use refrain_rpc::{decode_bincode, encode_bincode};
use serde::Serialize;
use serde::de::DeserializeOwned;

type Reads = dyn Fn(&[u8]) + RefUnwindSafe;

/// A type of the wire, without its Rust type.
struct Format {
    name: &'static str,
    /// The example as it is sent.
    written: Vec<u8>,
    /// Decodes bytes and checks that they are what is encoded again.
    survives: fn(&[u8]),
    /// Checks that the bytes are decoded as the example.
    reads: Box<Reads>,
}

fn format<T>(name: &'static str, example: T) -> Format
where
    T: Serialize + DeserializeOwned + PartialEq + Debug + RefUnwindSafe + 'static,
{
    Format {
        name,
        written: encode_bincode(&example).unwrap(),
        survives: |bytes| {
            if let Ok(value) = decode_bincode::<T>(bytes) {
                assert_eq!(encode_bincode(&value).unwrap(), bytes);
            }
        },
        reads: Box::new(move |bytes| {
            assert_eq!(decode_bincode::<T>(bytes).unwrap(), example, "{name}");
        }),
    }
}

/// The request for a chunk, which is JSON but for its tokens.
fn chunk_format() -> Format {
    let example = ChunkRequest {
        lease: LeaseId(1),
        epoch: 2,
        request: RequestId(3),
        namespace: signed(),
        session: Some("s".into()),
        group: None,
        resumes: None,
        tokens: vec![10, 1 << 20, 4],
        prompt_len: 2,
        sampling: Sampling {
            temperature: 0.5,
            seed: u64::MAX,
            stop_token_ids: vec![2],
            ..Sampling::default()
        },
        max_new_tokens: 5,
        chunk_tokens: None,
        speculation: Speculation::Auto,
        drafts: DraftRules::default(),
        urgency: Urgency::default(),
        budget: ChunkBudget::default(),
        expected_tokens: Some(9),
        prediction: vec![7],
        transferred: false,
        alive_within_ms: Some(2_000),
    };
    token_body_format("chunk_request", example)
}

/// A step, which is JSON but for its tokens.
fn step_format() -> Format {
    let item = |session, tokens, ahead: Option<Vec<TokenId>>| StepItem {
        session: EngineSessionId(session),
        open: ahead.map(|ahead| SessionSpec {
            ahead,
            ..SessionSpec::default()
        }),
        keep_len: 0,
        tokens,
        sample: false,
        draft: Some(Draft {
            tokens: vec![3, 1 << 24],
            parents: vec![None, Some(0)],
        }),
        self_draft: None,
        max_emit: 1,
    };
    let items = vec![
        item(1, vec![10, 1 << 20], Some(vec![7, 7, 7])),
        item(2, vec![], None),
        item(3, vec![5], Some(vec![])),
    ];
    token_body_format("step_request", StepRequest { items })
}

fn token_body_format<T>(name: &'static str, example: T) -> Format
where
    T: TokenBody + Clone + PartialEq + Debug + RefUnwindSafe + 'static,
{
    Format {
        name,
        written: encode_token_body(example.clone()).unwrap(),
        survives: |bytes| {
            if let Ok(request) = decode_token_body::<T>(bytes) {
                let again = decode_token_body::<T>(&encode_token_body(request.clone()).unwrap());
                // A number that is not a number equals nothing.
                assert_eq!(
                    format!("{again:?}"),
                    format!("{:?}", Ok::<_, ApiError>(request))
                );
            }
        },
        reads: Box::new(move |bytes| {
            assert_eq!(decode_token_body::<T>(bytes).unwrap(), example);
            // An older caller sends JSON alone.
            let json = serde_json::to_vec(&example).unwrap();
            assert_eq!(decode_token_body::<T>(&json).unwrap(), example);
        }),
    }
}

#[test]
fn a_body_with_a_fault_in_its_tokens_is_refused() {
    let chunk = |body: &[u8]| decode_token_body::<ChunkRequest>(body).map(drop);
    let body = chunk_format().written;
    assert!(chunk(&body[..body.len() - 1]).is_err());
    let twice = [&br#"{"tokens":[1],"#[..], &body[r#"{"#.len()..]].concat();
    assert!(chunk(&twice).is_err());
    assert!(chunk(b"\n\0\0\0\0").is_err());

    let step = |body: &[u8]| decode_token_body::<StepRequest>(body).map(drop);
    let body = step_format().written;
    let line = body.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    for count in [6_u32, u32::MAX] {
        let mut longer = body.clone();
        longer[line..line + 4].copy_from_slice(&count.to_le_bytes());
        assert!(step(&longer).is_err(), "{count}");
    }
    for end in (line + 4..body.len()).step_by(4).take(5) {
        assert!(step(&body[..end]).is_err(), "{end}");
    }
    assert!(step(b"{\"items\":[]}\n\0\0\0\0").is_err());
}

fn plain() -> Namespace {
    Namespace {
        tenant: "acme".into(),
        model: "tiny".into(),
        tokenizer: "ab12".into(),
    }
}

fn signed() -> SignedNamespace {
    SignedNamespace {
        namespace: plain().into(),
        issued_at_s: 1_700_000_000,
        signature: "00ff".into(),
        kid: "".into(),
    }
}

fn update(finish: Option<FinishReason>) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(1 << 100),
        epoch: 2,
        prev_len: 3,
        tokens: vec![4, 5],
        head: DocumentHead {
            session: Some("s".into()),
            group: None,
            choice: 1,
            weight_version: 2,
            created_ms: 1_700_000_000_000,
            left_context: vec![8, 9],
            prompt_hash: Some(PromptHash(1 << 90)),
        },
        finish,
    }
}

fn feed() -> FeedDelta {
    FeedDelta {
        reset: false,
        events: vec![
            FeedEvent::Update(update(None)),
            FeedEvent::Remove(DocumentId(7)),
        ],
        cursor: cursor(),
        caught_up: true,
    }
}

fn pulled() -> PullReply {
    let changes = ScopeNews::Changes {
        delta: feed(),
        age_ms: Some(120),
    };
    let refused = ScopeNews::Refused {
        kind: ErrorKind::Unauthorized,
        message: "the signature is too old".into(),
    };
    let news = [changes, ScopeNews::Unregistered, refused];
    let deltas = (0..).zip(news);
    PullReply {
        deltas: deltas
            .map(|(scope, news)| ScopeDelta { scope, news })
            .collect(),
        is_full: true,
    }
}

fn cursor() -> FeedCursor {
    FeedCursor {
        generation: 5,
        sequence: 6,
        seen: StreamPosition {
            stream: 7,
            sequence: 8,
        },
    }
}

fn formats() -> Vec<Format> {
    let finishes = [
        FinishReason::Stop,
        FinishReason::Length,
        FinishReason::Cancelled,
        FinishReason::Failed,
    ];
    let mut formats = vec![
        format(
            "append_request",
            AppendRequest {
                namespace: signed(),
                updates: finishes.map(|finish| update(Some(finish))).to_vec(),
                waited_ms: 40,
                acknowledgement: Some(Acknowledgement::Replicated),
            },
        ),
        format("join_offer_request", JoinOfferRequest { shard: 3 }),
        format(
            "join_offer",
            JoinOffer {
                generation: 7,
                stream: 1_700_000_000_000_000_000,
                sequence: 40,
                namespaces: vec![NamespaceId(5)],
                documents: 12,
                tokens: 3_400,
                erasures: vec![JoinedErasure {
                    sequence: 9,
                    message: vec![1, 2, 3],
                }],
            },
        ),
        format(
            "join_list_request",
            JoinListRequest {
                namespace: NamespaceId(5),
                with_segments: true,
                after: Some(DocumentId(6)),
                handed_over: vec![0x1234_5678_9abc_def0],
                documents_max: 1_024,
            },
        ),
        format(
            "join_list",
            JoinList {
                seen: 39,
                segments: vec![JoinSegment {
                    checksum: 0x1234_5678_9abc_def0,
                    bytes: 4_096,
                    tokens: 300,
                    gone: vec![1, 4],
                    used_s: vec![1_700_000_000, 0],
                }],
                documents: vec![DocumentId(6), DocumentId(7)],
                has_more: true,
            },
        ),
        format(
            "join_piece_request",
            JoinPieceRequest {
                namespace: NamespaceId(5),
                segment: 0x1234_5678_9abc_def0,
                offset: 1_024,
                bytes_max: 512,
            },
        ),
        format(
            "join_piece",
            JoinPiece {
                bytes: vec![9, 8, 7],
                checksum: 0x0fed_cba9_8765_4321,
            },
        ),
        format(
            "join_documents_request",
            JoinDocumentsRequest {
                namespace: NamespaceId(5),
                documents: vec![DocumentId(6)],
                max_tokens: 1_000,
            },
        ),
        format(
            "join_documents",
            JoinDocuments {
                documents: vec![JoinedDocument {
                    messages: vec![vec![4, 5], vec![6]],
                    is_unsent: true,
                }],
                covered: 2,
            },
        ),
        format(
            "append_reply",
            AppendReply {
                lengths: vec![5, 6],
            },
        ),
        format(
            "pull_request",
            PullRequest {
                namespaces: vec![NamespacePull {
                    namespace: signed(),
                    scopes: vec![
                        ScopePull {
                            scope: Scope::Namespace,
                            after: cursor(),
                            own: Vec::new(),
                        },
                        ScopePull {
                            scope: Scope::Group("g".into()),
                            after: cursor(),
                            own: vec![DocumentId(7)],
                        },
                    ],
                }],
                max_tokens: 1_000,
                wait_ms: 500,
            },
        ),
        format("pull_reply", pulled()),
        format(
            "register_group_request",
            RegisterGroupRequest {
                namespace: signed(),
                group: "g".into(),
                ttl_ms: 60_000,
            },
        ),
        format(
            "output_lengths_request",
            OutputLengthsRequest {
                namespace: signed(),
                prompt: PromptHash(1 << 90),
            },
        ),
        format(
            "output_lengths",
            OutputLengths {
                count: 2,
                median: 30,
                longest: 40,
            },
        ),
        format(
            "touch_request",
            TouchRequest {
                namespace: signed(),
                documents: vec![DocumentId(7)],
            },
        ),
        format(
            "unknown_documents_request",
            UnknownDocumentsRequest {
                namespace: signed(),
                documents: vec![DocumentId(7), DocumentId(8)],
            },
        ),
        format(
            "unknown_documents_reply",
            UnknownDocumentsReply {
                documents: vec![DocumentId(8)],
            },
        ),
        format(
            "segments_request",
            SegmentsRequest {
                namespace: signed(),
            },
        ),
        format(
            "segments_reply",
            SegmentsReply {
                cursor: cursor(),
                segments: vec![SegmentInfo {
                    segment: 11,
                    words: 12,
                    tokens: 13,
                    masked: vec![1, 4],
                }],
                unsealed: vec![DocumentId(7)],
            },
        ),
        format(
            "segment_piece_request",
            SegmentPieceRequest {
                namespace: signed(),
                segment: 11,
                offset: 12,
                max_words: 13,
            },
        ),
        format(
            "segment_piece",
            SegmentPiece {
                words: vec![1, u32::MAX],
            },
        ),
        format(
            "documents_request",
            DocumentsRequest {
                namespace: signed(),
                documents: vec![DocumentId(7)],
                max_tokens: 1_000,
            },
        ),
        format(
            "documents_reply",
            DocumentsReply {
                updates: vec![update(None)],
                covered: 1,
            },
        ),
        format(
            "acceptance_stats_request",
            AcceptanceStatsRequest {
                namespace: signed(),
                table: 9,
                statistics: vec![1, 2, 3],
            },
        ),
        format(
            "acceptance_stats_reply",
            AcceptanceStatsReply {
                table: 9,
                statistics: vec![1, 2, 3],
            },
        ),
        format(
            "import_request",
            ImportRequest {
                namespace: plain(),
                updates: vec![update(None)],
                is_static: true,
            },
        ),
        format(
            "export_request",
            ExportRequest {
                tenant: "acme".into(),
                model: None,
                after: ExportCursor {
                    snapshot: 1,
                    namespace: NamespaceId(2),
                    sequence: 3,
                },
                max_tokens: 1_000,
            },
        ),
        format(
            "export_reply",
            ExportReply {
                documents: vec![ExportedDocument {
                    namespace: plain(),
                    update: update(None),
                }],
                next: Some(ExportCursor::default()),
            },
        ),
        chunk_format(),
        step_format(),
    ];
    formats.extend(usage_formats());
    formats.extend(tenant_formats());
    formats
}

/// The calls about tenants.
fn tenant_formats() -> Vec<Format> {
    let record = TenantRecord {
        name: "acme".into(),
        version: 1_800_000_000_000,
        entry: "{\"name\":\"acme\"}".into(),
    };
    vec![
        format("tenants_request", TenantsRequest { known: Some(7) }),
        format(
            "tenants_reply",
            TenantsReply {
                state: 8,
                tenants: Some(vec![record.clone()]),
            },
        ),
        format(
            "tenant_change_request",
            TenantChange {
                name: record.name,
                expected: Some(record.version),
                entry: Some(record.entry),
            },
        ),
        format("tenant_change_reply", TenantChangeReply { version: 9 }),
    ]
}

/// The calls about usage.
fn usage_formats() -> Vec<Format> {
    let id = UsageRowId {
        hour: 495_000,
        tenant: "acme".into(),
        key: "3f09c2a71b44".into(),
        model: "m".into(),
        gateway: 1 << 100,
    };
    let row = UsageRow {
        id: id.clone(),
        total: UsageTotal {
            began_ms: 1_800_000_000_000,
            counts: UsageCounts::of_values([1, 2, 3, 4, 5, 6, 7]),
        },
    };
    let spender = |key: Option<&str>| Spender {
        tenant: "acme".into(),
        key: key.map(str::to_owned),
    };
    vec![
        format(
            "record_usage_request",
            RecordUsageRequest {
                gateway: 9,
                rows: vec![row.clone()],
                erasures_known_ms: 8,
                spenders: vec![spender(None), spender(Some("3f09c2a71b44"))],
                day: 20_000,
                month: 24_324,
            },
        ),
        format(
            "record_usage_reply",
            RecordUsageReply {
                erasures: vec![UsageErasure {
                    tenant: "bolt".into(),
                    at_ms: 5,
                }],
                spent: vec![
                    vec![SpentTokens {
                        gateway: 7,
                        day_tokens: 1,
                        month_tokens: 2,
                    }],
                    Vec::new(),
                ],
            },
        ),
        format(
            "usage_rows_request",
            UsageRowsRequest {
                from_hour: 1,
                until_hour: 2,
                tenant: Some("acme".into()),
                key: None,
                model: None,
                after: Some(id.clone()),
                rows_max: 100,
            },
        ),
        format(
            "usage_rows_reply",
            UsageRowsReply {
                rows: vec![row],
                next: Some(id),
            },
        ),
    ]
}

#[test]
fn committed_messages_are_read_and_written_as_ever() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for format in formats() {
        let file = folder.join(format!("{}.hex", format.name));
        expect_file![&file].assert_eq(&(hex::encode(&format.written) + "\n"));
        let text = std::fs::read_to_string(&file).unwrap();
        (format.reads)(&hex::decode(text.trim()).unwrap());
    }
}

/// A fuzz target: `cargo test` runs it for a moment, `cargo bolero test -p refrain-rpc
/// --test wire forged_messages_do_no_harm` for as long as wanted, guided by coverage.
///
/// A message is one of the examples with some bytes changed, or arbitrary bytes. Decoding it never panics nor
/// allocates for a false length, and each message has only one encoding.
#[test]
fn forged_messages_do_no_harm() {
    let formats = formats();
    bolero::check!()
        .with_type::<(u8, Vec<(u16, u8)>, Vec<u8>)>()
        .with_max_len(256)
        .for_each(|(format, edits, bytes)| {
            let format = &formats[usize::from(*format) % formats.len()];
            let mut forged = match edits.is_empty() {
                true => bytes.clone(),
                false => format.written.clone(),
            };
            for (at, byte) in edits {
                let at = usize::from(*at) % forged.len();
                forged[at] = *byte;
            }
            (format.survives)(&forged);
        });
}

#[test]
fn the_id_of_a_signing_key_is_not_in_bincode() {
    let named = SignedNamespace {
        kid: "1f".into(),
        ..signed()
    };
    let written = encode_bincode(&named).unwrap();
    assert_eq!(written, encode_bincode(&signed()).unwrap());
    let read: SignedNamespace = decode_bincode(&written).unwrap();
    assert_eq!(read, signed());
}
