//! The core under scripts of events. Each line is an instant and an event:
//!
//! * `beat <worker> [slots=n] [inc=n] [context=n] [model=m] [runs=1,2] [drains] [eagle3=accepted length]
//!   [fallback=worker]`: `runs` names requests, whose
//!   newest leases are meant;
//! * `ask <request> <tenant> [context=n] [max=n] [prefer=w] [over] [not=w,v] [model=m]`: the nth `ask` has ticket n;
//! * `done|continues|failed <request> [tokens] [ended=ms ago]`: gives the request's newest lease back;
//! * `withdraw <ticket>`, `undelivered <request>`, `tick`, `drain`.

use std::collections::HashMap;
use std::fmt::Write as _;

use expect_test::Expect;
use refrain_protocol::scheduling::Eagle3Report;
use refrain_protocol::{Namespace, SignedNamespace, WorkerId};
use refrain_service_kit::config::Validate as _;

use super::*;

mod cases;

/// Scripts count from here, so that instants are short and epochs are those of a real clock.
const START_MS: u64 = 1_700_000_000_000;

struct Script {
    dispatch: Dispatch,
    newest_lease: HashMap<u128, LeaseId>,
    tickets: u64,
    log: String,
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
            tickets: 0,
            log: String::new(),
        }
    }

    fn lease_of(&self, request: &str) -> LeaseId {
        self.newest_lease
            .get(&request.parse().unwrap())
            .copied()
            .unwrap_or(LeaseId(7))
    }

    fn event(&mut self, words: &[&str]) -> Event {
        let given = options(words);
        let number =
            |key: &str, default: u32| given.get(key).map_or(default, |n| n.parse().unwrap());
        let model = given.get("model").copied().unwrap_or("m").to_owned();
        match words[0] {
            "beat" => Event::Heartbeat(Heartbeat {
                worker: WorkerId(words[1].to_owned()),
                incarnation: number("inc", 1).into(),
                url: format!("http://{}", words[1]),
                model,
                tokenizer: "t".into(),
                max_context: number("context", 4096),
                max_running: number("slots", 1),
                running: given.get("runs").map_or(Vec::new(), |requests| {
                    requests.split(',').map(|r| self.lease_of(r)).collect()
                }),
                draining: given.contains_key("drains"),
                eagle3: given.get("eagle3").map(|length| Eagle3Report {
                    accepted_length: length.parse().unwrap(),
                    speedup: 1.5,
                }),
                fallback: given
                    .get("fallback")
                    .map(|worker| WorkerId((*worker).to_owned())),
            }),
            "ask" => {
                self.tickets += 1;
                Event::Submit {
                    ticket: Ticket(self.tickets),
                    request: LeaseRequest {
                        request: RequestId(words[1].parse().unwrap()),
                        namespace: SignedNamespace {
                            namespace: Namespace {
                                tenant: words[2].to_owned(),
                                model,
                                tokenizer: "t".into(),
                            },
                            issued_at_s: 0,
                            signature: String::new(),
                        },
                        group: None,
                        context_tokens: number("context", 100),
                        generated_tokens: 0,
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
            "withdraw" => Event::Withdraw {
                ticket: Ticket(words[1].parse().unwrap()),
            },
            "undelivered" => Event::Undelivered {
                lease: self.lease_of(words[1]),
            },
            "tick" => Event::Tick,
            "drain" => Event::Drain,
            outcome => Event::Finish(LeaseFinish {
                lease: self.lease_of(words[1]),
                outcome: match outcome {
                    "done" => LeaseOutcome::Done,
                    "continues" => LeaseOutcome::Continues,
                    "failed" => LeaseOutcome::WorkerFailed,
                    other => panic!("no such event: {other}"),
                },
                emitted_tokens: words.get(2).map_or(0, |tokens| tokens.parse().unwrap()),
                worker_ended_ms_ago: given.get("ended").map(|ms_ago| ms_ago.parse().unwrap()),
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

    fn note(&mut self, at_ms: u64, effects: Vec<Effect>) {
        for effect in effects {
            let text = match effect {
                Effect::Grant {
                    ticket,
                    lease,
                    waited_ms,
                } => {
                    let request = lease.lease.0 & u128::from(u64::MAX);
                    self.newest_lease.insert(request, lease.lease);
                    format!(
                        "grant #{} on {} after {waited_ms} ms",
                        ticket.0, lease.worker
                    )
                }
                Effect::Reject {
                    ticket,
                    error,
                    refusal: _,
                } => format!(
                    "reject #{}: {} {}{}",
                    ticket.0,
                    error.kind.status(),
                    error.message,
                    error
                        .retry_after_ms
                        .map_or(String::new(), |ms| format!(" [retry in {ms} ms]"))
                ),
                Effect::Beat(Ok(HeartbeatReply {
                    fallback: Some(report),
                    ..
                })) => format!("its fallback accepts {}", report.accepted_length),
                Effect::Beat(Ok(reply)) if !reply.give_way.is_empty() => {
                    let requests = reply.give_way.iter();
                    let requests: Vec<String> = requests
                        .map(|lease| (lease.0 & u128::from(u64::MAX)).to_string())
                        .collect();
                    let (next, requests) = (reply.next_in_ms, requests.join(", "));
                    format!("to give way: {requests}; again in {next} ms")
                }
                Effect::Beat(Ok(_)) => continue,
                Effect::Beat(Err(error)) => {
                    format!("refuse beat: {} {}", error.kind.status(), error.message)
                }
                Effect::LeaseEnded { lease, worker, end } => {
                    format!(
                        "end of {} on {worker}: {}",
                        lease.0 & u128::from(u64::MAX),
                        end.as_str()
                    )
                }
                Effect::WorkerJoined(worker) => format!("{worker} joined"),
                Effect::WorkerRestarted(worker) => format!("{worker} restarted"),
                Effect::WorkerLost(worker) => format!("{worker} lost"),
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
