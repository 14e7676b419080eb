//! The JSON formats between services. Each has a committed file in `tests/fixtures`, which today's types read and
//! write.
//!
//! A file may change only if services of both versions understand both forms, since services of a mesh are upgraded
//! one by one. `UPDATE_EXPECT=1` writes the files anew.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::panic::RefUnwindSafe;
use std::path::PathBuf;

use expect_test::expect_file;
use refrain_protocol::admin::{
    ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ErasedReplica,
};
use refrain_protocol::adoption::{AdoptRequest, AdoptedEngine, AdopterReport, ReleaseRequest};
use refrain_protocol::chunk::*;
use refrain_protocol::document::StoreStats;
use refrain_protocol::engine::{
    AbortRequest, CloseRequest, Draft, DrafterCapabilities, DrafterKind, EngineCapabilities,
    EngineLoad, OutputForm, Sampling, SelfDraft, SessionSpec, StepItem, StepOutput, StepRequest,
    StepResponse, TextForm, TokenLogprob,
};
use refrain_protocol::engine_order::{
    EngineAnswer, EngineCall, EngineOrder, EngineOrderReply, EngineState, PauseMode,
};
use refrain_protocol::error::code;
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::join::ReplicaState;
use refrain_protocol::openai::ErrorBody;
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::scheduling::{
    Eagle3Report, Heartbeat, HeartbeatReply, KvReport, KvUse, Lease, LeaseFinish, LeaseOutcome,
    LeaseRequest, RequestClass, ServedModel, SessionHash, TenantWeight, WorkerDrain, WorkerReport,
};
use refrain_protocol::{
    ApiError, EngineSessionId, ErrorKind, LeaseId, Namespace, NamespaceId, RequestId,
    SignedNamespace, TenantId, WorkerId,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

type Reads = dyn Fn(&str) + RefUnwindSafe;

/// A type of the wire, without its Rust type: a fixture with an example, and how bytes are read.
struct Format {
    name: &'static str,
    /// The example as JSON.
    written: String,
    /// Reads JSON and checks that it survives being written again. Returns whether it was read.
    survives: fn(&[u8]) -> bool,
    /// Checks that the text is read as the example.
    reads: Box<Reads>,
}

fn format<T>(name: &'static str, example: T) -> Format
where
    T: Serialize + DeserializeOwned + PartialEq + Debug + RefUnwindSafe + 'static,
{
    Format {
        name,
        written: serde_json::to_string_pretty(&example).unwrap() + "\n",
        survives: |bytes| {
            let Ok(value) = serde_json::from_slice::<T>(bytes) else {
                return false;
            };
            let written = serde_json::to_vec(&value).unwrap();
            assert_eq!(serde_json::from_slice::<T>(&written).unwrap(), value);
            true
        },
        reads: Box::new(move |text| {
            assert_eq!(serde_json::from_str::<T>(text).unwrap(), example, "{name}");
        }),
    }
}

fn signed() -> SignedNamespace {
    SignedNamespace {
        namespace: Namespace {
            tenant: "acme".into(),
            model: "tiny".into(),
            tokenizer: "ab12".into(),
        }
        .into(),
        issued_at_s: 1_700_000_000,
        signature: "00ff".into(),
        kid: "1f2e3d4c5b6a7988".into(),
    }
}

fn step() -> StepMessage {
    StepMessage {
        sequence: 3,
        tokens: vec![5, 6, 7],
        logprobs: None,
        weight_version: 2,
        source: DraftSource::Suffix,
        scope: DraftScope::Group,
        drafted: 4,
        accepted: 2,
        merged: None,
        forced: None,
    }
}

fn end(reason: ChunkEndReason) -> ChunkEvent {
    ChunkEvent::End(ChunkEnd {
        reason,
        next_worker: (reason == ChunkEndReason::Transfer).then(|| WorkerId("w1".into())),
        cached_tokens: 3,
        prefill_s: 0.25,
        decode_s: 0.5,
        decode_tokens: 9,
    })
}

fn engine_state() -> EngineState {
    EngineState {
        weight_version: 7,
        pause: Some(PauseMode::Keep),
        running: 2,
        held: 1,
    }
}

fn chunk() -> ChunkRequest {
    ChunkRequest {
        lease: LeaseId(1),
        epoch: 2,
        request: RequestId(3),
        namespace: signed(),
        session: Some("s".into()),
        group: Some("g".into()),
        resumes: None,
        tokens: vec![1, 2, 3],
        prompt_len: 2,
        sampling: Sampling {
            temperature: 0.5,
            top_k: 40,
            top_p: 0.75,
            min_p: 0.125,
            seed: 7,
            choice: 1,
            logit_bias: vec![(4, -1.5)],
            stop_token_ids: vec![2],
            top_logprobs: Some(2),
            presence_penalty: 0.5,
            frequency_penalty: -0.5,
            repetition_penalty: 1.25,
            min_tokens: 3,
            ignore_eos: true,
            bad_words: vec!["no".into()],
            bad_tokens: vec![vec![5], vec![6, 7]],
            forced_output: vec![8],
            form: Some(Box::new(OutputForm {
                after: Some(9),
                opened_by: Some(8),
                text: TextForm::AnyOf(vec![TextForm::Regex("a+".into())]),
            })),
        },
        max_new_tokens: 100,
        chunk_tokens: Some(10),
        speculation: Speculation::DraftModel,
        drafts: DraftRules {
            alpha: Some(2.5),
            min_token_prob: Some(0.25),
            max_spec_tokens: Some(16),
        },
        urgency: Urgency {
            priority: Priority::High,
            tpot_ms: Some(20),
        },
        budget: ChunkBudget {
            attempts: 3,
            time_left_ms: Some(60_000),
        },
        expected_tokens: Some(120),
        prediction: vec![8, 9],
        transferred: true,
        alive_within_ms: Some(10_000),
    }
}

fn step_item() -> StepItem {
    StepItem {
        session: EngineSessionId(5),
        open: Some(SessionSpec {
            namespace: NamespaceId(6),
            tenant: TenantId(0x77),
            sampling: Sampling::default(),
            prompt_len: 2,
            self_drafts: true,
            ahead: vec![8],
        }),
        keep_len: 0,
        tokens: vec![1, 2],
        sample: true,
        draft: Some(Draft {
            tokens: vec![3, 4],
            parents: vec![None, Some(0)],
        }),
        self_draft: Some(SelfDraft {
            depth: 4,
            top_k: 2,
            tokens_max: 8,
            path_prob_min: 0.25,
            sampled: false,
        }),
        max_emit: 5,
    }
}

fn formats() -> Vec<Format> {
    let error = ApiError::new(ErrorKind::Overloaded, "try again")
        .with_code(code::WORKER_FULL)
        .with_retry_after_ms(250)
        .with_detail("for the log only");
    let sent = ApiError {
        detail: None,
        ..error.clone()
    };
    vec![
        format(
            "lease_request",
            LeaseRequest {
                request: RequestId(3),
                namespace: signed(),
                group: Some("g".into()),
                session: Some(SessionHash(5)),
                class: RequestClass::Rollout,
                weight: TenantWeight::try_from(2.5).unwrap(),
                age_ms: 7,
                epoch_seen: 1,
                ended: Some(LeaseFinish {
                    lease: LeaseId(1),
                    outcome: LeaseOutcome::Continues,
                    emitted_tokens: 2,
                    worker_ended_ms_ago: Some(1),
                    cached_tokens: Some(8),
                    rejected_tokens: 3,
                    accepted_tokens: 1,
                }),
                expected_tokens: Some(60),
                prefixes: vec![PrefixHash(u64::MAX)],
                chunk_tokens: Some(2),
                context_tokens: 12,
                generated_tokens: 2,
                max_new_tokens: 100,
                prefer: Some(WorkerId("w1".into())),
                transferred: true,
                exclude: vec![WorkerId("w0".into())],
            },
        ),
        format(
            "lease",
            Lease {
                lease: LeaseId(u128::MAX),
                epoch: 2,
                worker: WorkerId("w0".into()),
                url: "http://w0:8202".into(),
                ttl_ms: 10_000,
                chunk_tokens: Some(2),
            },
        ),
        format(
            "lease_finish",
            [
                LeaseOutcome::Finished,
                LeaseOutcome::GivenUp,
                LeaseOutcome::Aborted,
                LeaseOutcome::Continues,
                LeaseOutcome::WorkerFailed,
            ]
            .map(|outcome| LeaseFinish {
                lease: LeaseId(1),
                outcome,
                emitted_tokens: 10,
                worker_ended_ms_ago: (outcome == LeaseOutcome::Finished).then_some(5),
                cached_tokens: (outcome == LeaseOutcome::Finished).then_some(8),
                rejected_tokens: 0,
                accepted_tokens: 0,
            })
            .to_vec(),
        ),
        format(
            "adopt_request",
            AdoptRequest {
                url: "http://10.0.0.5:30000".into(),
                pause: Some(PauseMode::Keep),
            },
        ),
        format(
            "release_request",
            ReleaseRequest {
                engine: "10.0.0.5:30000".into(),
            },
        ),
        format(
            "adopter_report",
            AdopterReport {
                model: "tiny".into(),
                engines_max: 4,
                engines: vec![AdoptedEngine {
                    id: "10.0.0.5:30000".into(),
                    url: "http://10.0.0.5:30000".into(),
                    worker: WorkerId("w0@10.0.0.5:30000".into()),
                    running: 3,
                    weight_version: 7,
                    fault: Some("draining".into()),
                }],
            },
        ),
        format(
            "heartbeat",
            Heartbeat {
                worker: WorkerId("w0".into()),
                incarnation: 9,
                url: "http://w0:8202".into(),
                model: "tiny".into(),
                tokenizer: "ab12".into(),
                max_context: 4_096,
                max_running: 8,
                running: vec![LeaseId(1), LeaseId(2)],
                epoch_seen: 3,
                draining: false,
                trouble: None,
                leaves: false,
                compiles_forms: true,
                eagle3: Some(Eagle3Report {
                    accepted_length: 2.5,
                    speedup: 1.25,
                }),
                fallback: Some(WorkerId("w1".into())),
                kv: Some(KvReport {
                    capacity_tokens: 4_096,
                    running_tokens: 96,
                    kept_tokens: 12,
                    prefill_ms_per_1k: Some(1.5),
                    held: Some(vec![PrefixHash(3)]),
                }),
                state: Some(engine_state()),
            },
        ),
        format(
            "heartbeat_reply",
            HeartbeatReply {
                next_in_ms: 1_000,
                fallback: Some(Eagle3Report {
                    accepted_length: 2.5,
                    speedup: 1.25,
                }),
                give_way: vec![LeaseId(1)],
            },
        ),
        format(
            "served_models",
            vec![ServedModel {
                model: "tiny".into(),
                tokenizer: "ab12".into(),
                max_context: 4_096,
                workers: 2,
                open: None,
                trouble: None,
                compiles_forms: true,
            }],
        ),
        format(
            "workers",
            vec![WorkerReport {
                worker: WorkerId("w-1".into()),
                url: "http://w-1:8202".into(),
                model: "tiny".into(),
                running: 2,
                max_running: 16,
                draining: false,
                trouble: None,
                suspect: false,
                silent_ms: 120,
                kv: Some(KvUse {
                    capacity_tokens: 65_536,
                    running_tokens: 400,
                    kept_tokens: 9_000,
                }),
                state: Some(engine_state()),
            }],
        ),
        format("worker_drain", WorkerDrain { drains: true }),
        format(
            "forget_tenant",
            ForgetTenant {
                tenant: TenantId(0x77),
            },
        ),
        format(
            "tenant_forgotten",
            TenantForgotten {
                sessions: 3,
                memory_blocks: 12,
                file_blocks: 11,
                running: 1,
            },
        ),
        format(
            "engine_orders",
            vec![
                EngineOrder::Report,
                EngineOrder::Pause {
                    mode: PauseMode::Wait,
                    clears_cache: true,
                },
                EngineOrder::Resume,
                EngineOrder::FlushCache,
                EngineOrder::LoadWeights {
                    directory: "/weights/8".into(),
                    version: Some(8),
                },
                EngineOrder::SetVersion { version: 9 },
                EngineOrder::PassOn(EngineCall {
                    is_post: true,
                    path: "/release_memory_occupation".into(),
                    body: "{}".into(),
                }),
            ],
        ),
        format(
            "engine_order_reply",
            EngineOrderReply {
                state: engine_state(),
                answer: Some(EngineAnswer {
                    status: 200,
                    body: "{}".into(),
                }),
            },
        ),
        format("chunk_request", chunk()),
        format(
            "chunk_request_resumed",
            ChunkRequest {
                resumes: Some(ParkedContext {
                    epoch: 1,
                    tokens: 3,
                    hash: PrefixHash(u64::MAX),
                }),
                tokens: Vec::new(),
                sampling: Sampling::default(),
                expected_tokens: None,
                prediction: Vec::new(),
                ..chunk()
            },
        ),
        format(
            "chunk_events",
            vec![
                ChunkEvent::Retry,
                ChunkEvent::Held { ms: 5_000 },
                ChunkEvent::Step(step()),
                ChunkEvent::Step(StepMessage {
                    logprobs: Some(vec![TokenLogprob {
                        logprob: -0.5,
                        top: vec![(5, -0.5), (6, -1.5)],
                    }]),
                    source: DraftSource::Prediction,
                    scope: DraftScope::None,
                    forced: None,
                    merged: Some(DraftShare {
                        source: DraftSource::Eagle3,
                        drafted: 2,
                        accepted: 1,
                    }),
                    ..step()
                }),
                end(ChunkEndReason::Stop),
                end(ChunkEndReason::Length),
                end(ChunkEndReason::ChunkLimit),
                end(ChunkEndReason::GaveWay),
                end(ChunkEndReason::Draining),
                end(ChunkEndReason::Transfer),
            ],
        ),
        format(
            "chunk_cut",
            ChunkCut {
                lease: LeaseId(1),
                output_len: 42,
                aborted: false,
            },
        ),
        format(
            "chunk_cut_aborted",
            ChunkCut {
                lease: LeaseId(1),
                output_len: 42,
                aborted: true,
            },
        ),
        format("chunk_error", BTreeMap::from([("error".to_owned(), sent)])),
        format("error_body", ErrorBody::from(&error)),
        format(
            "engine_capabilities",
            EngineCapabilities {
                model: "tiny".into(),
                tokenizer: "ab12".into(),
                vocab_size: 512,
                max_context: 4_096,
                max_batch: 16,
                max_step_tokens: 2_048,
                max_sessions: 64,
                tree_drafts: true,
                max_draft_tokens: 64,
                eos_token_ids: vec![2],
                output_forms: false,
                reads_ahead: true,
                token_bodies: true,
                drafter: Some(DrafterCapabilities {
                    kind: DrafterKind::Eagle3,
                    depth_max: 8,
                    top_k_max: 4,
                }),
            },
        ),
        format(
            "step_request",
            StepRequest {
                items: vec![step_item()],
            },
        ),
        format(
            "step_response",
            StepResponse {
                results: vec![
                    Ok(StepOutput {
                        emitted: vec![3, 9],
                        accepted_nodes: vec![0],
                        self_drafted: 2,
                        agreed_nodes: vec![0],
                        text_len: 4,
                        cached_tokens: 1,
                        stopped: false,
                        logprobs: None,
                    }),
                    Err(ApiError::new(ErrorKind::NotFound, "no such session")),
                ],
                step_s: 0.5,
                draft_s: 0.25,
                weight_version: 2,
            },
        ),
        format(
            "engine_close",
            CloseRequest {
                sessions: vec![EngineSessionId(5)],
                keep_kv: true,
                parks: true,
            },
        ),
        format(
            "engine_abort",
            AbortRequest {
                sessions: vec![EngineSessionId(5)],
            },
        ),
        format(
            "engine_load",
            EngineLoad {
                sessions_open: 1,
                sessions_parked: 6,
                sessions_kept: 2,
                kv_tokens: 3,
                kv_tokens_max: 4,
                steps_waiting: 5,
            },
        ),
        format(
            "store_stats",
            StoreStats {
                documents: 1,
                tokens: 2,
                logical_bytes: 3,
                log_bytes: 4,
                segment_bytes: 5,
                disk_bytes: 6,
                namespaces: 7,
                evicted_documents: 8,
            },
        ),
        format(
            "erase_request",
            EraseRequest {
                tenant: Some("acme".into()),
                model: None,
                session: Some("s".into()),
                from_ms: Some(1),
                until_ms: Some(2),
                quarantines: true,
            },
        ),
        format(
            "erase_reply",
            EraseReply {
                files: vec!["log".into()],
                erased_at_ms: 1,
                documents: 2,
                quarantines: 3,
                quarantines_kept: 4,
                replicas: vec![ErasedReplica {
                    url: "http://store-1".into(),
                    is_done: false,
                    sequence: Some(5),
                    trouble: Some("away".into()),
                }],
            },
        ),
        format(
            "replica_state",
            ReplicaState {
                generation: 1,
                sequence: 2,
                erased_sequence: 3,
                quarantines: 4,
            },
        ),
        format(
            "confirm",
            (
                ConfirmRequest {
                    loss: true,
                    clock: false,
                },
                ConfirmReply {
                    lost_documents: Some(3),
                    clock_offset_ms: None,
                },
            ),
        ),
    ]
}

#[test]
fn committed_messages_are_read_and_written_as_ever() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for format in formats() {
        let file = folder.join(format!("{}.json", format.name));
        expect_file![&file].assert_eq(&format.written);
        (format.reads)(&std::fs::read_to_string(&file).unwrap());
        assert!(
            (format.survives)(format.written.as_bytes()),
            "{}",
            format.name
        );
    }
}

#[test]
fn fields_that_older_services_do_not_send_have_defaults() {
    let read = |json: &str| serde_json::from_str::<ChunkRequest>(json);
    let mut oldest = serde_json::to_value(chunk()).unwrap();
    for field in [
        "urgency",
        "budget",
        "prediction",
        "handed_over",
        "alive_within_ms",
    ] {
        oldest.as_object_mut().unwrap().remove(field).unwrap();
    }
    let request = read(&oldest.to_string()).unwrap();
    assert!(!request.transferred && request.prediction.is_empty());
    assert_eq!(request.budget, ChunkBudget::default());
}

/// A fuzz target: `cargo test` runs it for a moment, `cargo bolero test` for as long as wanted, guided by coverage.
///
/// A message is one of the examples with some bytes changed, or arbitrary bytes. Reading it never panics, and a
/// message that is read is the same after it was written and read again.
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
                false => format.written.clone().into_bytes(),
            };
            for (at, byte) in edits {
                let at = usize::from(*at) % forged.len();
                forged[at] = *byte;
            }
            (format.survives)(&forged);
        });
}
