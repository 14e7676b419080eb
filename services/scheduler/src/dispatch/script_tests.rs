//! Tests of the core by scripts of events. Each line is an instant in milliseconds and an event:
//!
//! * `beat <worker> [slots=n] [inc=n] [context=n] [model=m] [runs=1,2] [drains] [eagle3=accepted length]
//!   [fallback=worker] [kv=capacity] [used=tokens] [held=1,2] [seen=request]` is a heartbeat. `runs` names requests
//!   and means their newest leases, and `seen` means the epoch of one of these; `held` are hashes of prefixes.
//! * `ask <request> <tenant> [context=n] [max=n] [prefer=w] [over] [not=w,v] [model=m] [group=g] [rollout] [age=ms]
//!   [so-far=n] [expects=n] [chunk=n] [prefixes=1,5-7] [after=tokens] [weight=w] [seen]` asks for a lease. The nth
//!   `ask` is call n. `after` ends the request's newest lease in the same call, and `seen` tells its epoch.
//! * `done|continues|failed|aborted <request> [tokens] [ended=ms ago] [cached=n] [rejected=n]` gives back the
//!   newest lease of the request.
//! * `withdraw <call>`, `undelivered <request>`, `tick` and `drain` are the other events.

use std::collections::HashMap;
use std::fmt::Write as _;

use expect_test::Expect;
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::scheduling::{Eagle3Report, KvReport, TenantWeight};
use refrain_protocol::{Namespace, SignedNamespace, WorkerId};
use refrain_service_kit::config::Validate as _;

use crate::config::{OrderPolicy, PlacementPolicy};

use super::*;

mod cases;
mod interruptions;
mod kv_placement;
mod lengths;
mod rollouts;
mod state;

/// Scripts count from this time, so that instants are short and epochs are those of a real clock.
const START_MS: u64 = 1_700_000_000_000;

struct Script {
    dispatch: Dispatch,
    newest_lease: HashMap<u128, LeaseId>,
    calls: u64,
    log: String,
}

fn hashes(list: &str) -> Vec<PrefixHash> {
    let number = |text: &str| text.parse::<u64>().unwrap();
    let range = |text: &str| match text.split_once('-') {
        Some((first, last)) => number(first)..=number(last),
        None => number(text)..=number(text),
    };
    let hashes = list.split(',').flat_map(range);
    hashes.map(PrefixHash).collect()
}

fn options<'a>(words: &[&'a str]) -> HashMap<&'a str, &'a str> {
    words
        .iter()
        .map(|word| word.split_once('=').unwrap_or((word, "")))
        .collect()
}

impl Script {
    fn new(config: SchedulerConfig) -> Self {
        assert_eq!(config.faults(), Vec::<String>::new());
        Script {
            dispatch: Dispatch::new(config, START_MS, 0),
            newest_lease: HashMap::new(),
            calls: 0,
            log: String::new(),
        }
    }

    fn lease_of(&self, request: &str) -> LeaseId {
        self.newest_lease
            .get(&request.parse().unwrap())
            .copied()
            .unwrap_or(LeaseId(7))
    }

    fn event(&mut self, words: &[&str]) -> DispatchEvent {
        let given = options(words);
        let number =
            |key: &str, default: u32| given.get(key).map_or(default, |n| n.parse().unwrap());
        let model = given.get("model").copied().unwrap_or("m").to_owned();
        match words[0] {
            "beat" => DispatchEvent::Heartbeat(Heartbeat {
                worker: WorkerId(words[1].to_owned()),
                incarnation: number("inc", 1).into(),
                url: format!("http://{}", words[1]),
                model,
                tokenizer: "t".into(),
                max_context: number("context", 4096),
                max_running: number("slots", 1),
                epoch_seen: given
                    .get("seen")
                    .map_or(0, |request| epoch_of(self.lease_of(request))),
                running: given.get("runs").map_or(Vec::new(), |requests| {
                    requests.split(',').map(|r| self.lease_of(r)).collect()
                }),
                draining: given.contains_key("drains"),
                trouble: given.get("trouble").map(|why| (*why).to_owned()),
                leaves: given.contains_key("leaves"),
                compiles_forms: given.contains_key("forms"),
                eagle3: given.get("eagle3").map(|length| Eagle3Report {
                    accepted_length: length.parse().unwrap(),
                    speedup: 1.5,
                }),
                fallback: given
                    .get("fallback")
                    .map(|worker| WorkerId((*worker).to_owned())),
                state: None,
                kv: given.get("kv").map(|capacity| KvReport {
                    capacity_tokens: capacity.parse().unwrap(),
                    running_tokens: number("used", 0).into(),
                    held: given.get("held").map(|held| hashes(held)),
                    ..KvReport::default()
                }),
            }),
            "ask" => {
                self.calls += 1;
                DispatchEvent::Submit {
                    call: LeaseCallId(self.calls),
                    request: LeaseRequest {
                        request: RequestId(words[1].parse().unwrap()),
                        namespace: SignedNamespace::unsigned(Namespace {
                            tenant: words[2].to_owned(),
                            model,
                            tokenizer: "t".into(),
                        }),
                        group: given.get("group").map(|group| (*group).to_owned()),
                        session: None,
                        class: if given.contains_key("group") || given.contains_key("rollout") {
                            RequestClass::Rollout
                        } else {
                            RequestClass::Interactive
                        },
                        weight: given
                            .get("weight")
                            .map_or_else(TenantWeight::default, |weight| {
                                TenantWeight::try_from(weight.parse::<f64>().unwrap()).unwrap()
                            }),
                        age_ms: number("age", 0).into(),
                        epoch_seen: match given.contains_key("seen") {
                            true => epoch_of(self.lease_of(words[1])),
                            false => 0,
                        },
                        ended: given.get("after").map(|tokens| LeaseFinish {
                            lease: self.lease_of(words[1]),
                            outcome: LeaseOutcome::Continues,
                            emitted_tokens: tokens.parse().unwrap(),
                            worker_ended_ms_ago: Some(0),
                            cached_tokens: None,
                            rejected_tokens: 0,
                            accepted_tokens: number("accepted", 0),
                        }),
                        expected_tokens: given.get("expects").map(|n| n.parse().unwrap()),
                        prefixes: given
                            .get("prefixes")
                            .map_or(Vec::new(), |list| hashes(list)),
                        chunk_tokens: given.get("chunk").map(|n| n.parse().unwrap()),
                        context_tokens: number("context", 100),
                        generated_tokens: number("so-far", 0),
                        max_new_tokens: number("max", 1_000),
                        transferred: given.contains_key("over"),
                        prefer: given
                            .get("prefer")
                            .map(|worker| WorkerId(worker.to_string())),
                        exclude: given.get("not").map_or(Vec::new(), |workers| {
                            workers
                                .split(',')
                                .map(|worker| WorkerId(worker.to_owned()))
                                .collect()
                        }),
                    },
                }
            }
            "withdraw" => DispatchEvent::Withdraw {
                call: LeaseCallId(words[1].parse().unwrap()),
            },
            "undelivered" => DispatchEvent::Undelivered {
                lease: self.lease_of(words[1]),
            },
            "tick" => DispatchEvent::Tick,
            "drain" => DispatchEvent::Drain,
            outcome => DispatchEvent::Finish(LeaseFinish {
                lease: self.lease_of(words[1]),
                outcome: match outcome {
                    "done" => LeaseOutcome::Finished,
                    "continues" => LeaseOutcome::Continues,
                    "failed" => LeaseOutcome::WorkerFailed,
                    "aborted" => LeaseOutcome::Aborted,
                    other => panic!("no such event: {other}"),
                },
                emitted_tokens: words.get(2).map_or(0, |tokens| tokens.parse().unwrap()),
                worker_ended_ms_ago: given.get("ended").map(|ms_ago| ms_ago.parse().unwrap()),
                cached_tokens: given.get("cached").map(|n| n.parse().unwrap()),
                rejected_tokens: number("rejected", 0),
                accepted_tokens: number("accepted", 0),
            }),
        }
    }

    fn run(&mut self, script: &str) -> &mut Self {
        for line in script
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
        {
            let words: Vec<&str> = line.split_whitespace().collect();
            let at_ms: u64 = words[0].parse().unwrap();
            let event = self.event(&words[1..]);
            let effects = self.dispatch.apply(event, START_MS + at_ms);
            self.note(at_ms, effects);
        }
        self
    }

    fn note(&mut self, at_ms: u64, effects: Vec<DispatchEffect>) {
        for effect in effects {
            let text = match effect {
                DispatchEffect::Grant {
                    call,
                    lease,
                    waited_ms,
                    placed,
                } => {
                    let request = lease.lease.0 & u128::from(u64::MAX);
                    self.newest_lease.insert(request, lease.lease);
                    let mut text =
                        format!("grant #{} on {} after {waited_ms} ms", call.0, lease.worker);
                    if let Some(tokens) = lease.chunk_tokens {
                        write!(text, ", {tokens} tokens").unwrap();
                    }
                    if placed.moved {
                        text.push_str(", moved");
                    }
                    text
                }
                DispatchEffect::Reject {
                    call,
                    error,
                    refusal: _,
                } => format!(
                    "reject #{}: {} {}{}",
                    call.0,
                    error.kind.status(),
                    error.message,
                    error
                        .retry_after_ms
                        .map_or(String::new(), |ms| format!(" [retry in {ms} ms]"))
                ),
                DispatchEffect::HeartbeatAnswer(Ok(HeartbeatReply {
                    fallback: Some(report),
                    ..
                })) => format!("fallback accepts {}", report.accepted_length),
                DispatchEffect::HeartbeatAnswer(Ok(reply)) if !reply.give_way.is_empty() => {
                    let requests = reply.give_way.iter();
                    let requests: Vec<String> = requests
                        .map(|lease| (lease.0 & u128::from(u64::MAX)).to_string())
                        .collect();
                    let (next, requests) = (reply.next_in_ms, requests.join(", "));
                    format!("preempt {requests}; next heartbeat in {next} ms")
                }
                DispatchEffect::HeartbeatAnswer(Ok(_)) => continue,
                DispatchEffect::HeartbeatAnswer(Err(error)) => {
                    format!(
                        "refuse heartbeat: {} {}",
                        error.kind.status(),
                        error.message
                    )
                }
                DispatchEffect::LeaseEnded { lease, worker, end } => {
                    format!(
                        "end of {} on {worker}: {}",
                        lease.0 & u128::from(u64::MAX),
                        end.as_str()
                    )
                }
                DispatchEffect::LengthLearned {
                    estimated_tokens,
                    tokens,
                } => format!("{tokens} tokens where {estimated_tokens} were expected"),
                DispatchEffect::WorkerJoined(worker) => format!("{worker} joined"),
                DispatchEffect::WorkerRestarted(worker) => format!("{worker} restarted"),
                DispatchEffect::WorkerLost(worker) => format!("{worker} lost"),
            };
            writeln!(self.log, "{at_ms} {text}").unwrap();
        }
    }
}

fn small() -> SchedulerConfig {
    SchedulerConfig {
        queue_max: 4,
        tenant_queue_max: 2,
        ..SchedulerConfig::default()
    }
}

fn check(script: &str, expected: Expect) {
    expected.assert_eq(&Script::new(small()).run(script).log);
}

fn check_with(config: SchedulerConfig, script: &str, expected: Expect) {
    expected.assert_eq(&Script::new(config).run(script).log);
}
