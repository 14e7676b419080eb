//! One chunk's part: what it tells of its stream, and the calls that it is to make.

use std::time::Instant;

use refrain_protocol::chunk::ChunkRequest;
use refrain_protocol::{NamespaceId, TokenId};
use refrain_speculation::{Asked, Candidate, ProposeParams, walk_drawn};

use super::{Call, Lessons, Moment, SharedDrive, Stretch, Verdict};
use crate::engine::{Verified, VerifyAbilities, VerifyWay};
use crate::router::{asked, drafts_from_memory};
use crate::running::Judged;

/// See the module.
pub(crate) struct Driving {
    drive: SharedDrive,
    namespace: NamespaceId,
    asked: Asked,
    /// How drafts of it can be judged; none, and it is only listened to.
    ways: Vec<VerifyWay>,
    /// Tokens that end its output, whoever says them.
    stop_ids: Vec<TokenId>,
    lessons: Lessons,
    stream: Stream,
    /// What the stream said last.
    heard_last: Option<TokenId>,
    /// What is being measured.
    measured: Option<Measured>,
}

/// Where the chunk stands with its stream.
enum Stream {
    /// It was started behind a call, and has said nothing.
    Restarts(Instant),
    /// It is listened to, since then; `None`: it has said nothing yet, or was not listened to for a while.
    Runs(Option<Instant>),
}

struct Measured {
    stretch: Stretch,
    /// Tokens of this chunk in it.
    tokens: u32,
    /// It is over with so many of them; a call's with the first token of the stream behind it.
    tokens_wanted: Option<u32>,
}

impl Driving {
    /// A chunk begins.
    pub(crate) fn new(
        drive: SharedDrive,
        able: &VerifyAbilities,
        namespace: NamespaceId,
        request: &ChunkRequest,
    ) -> Self {
        let drafts = drafts_from_memory(request.speculation);
        let is_driven = request.sampling.temperature == 0.0 || drive.drives_sampled;
        let ways = match drafts && is_driven {
            true => able.ways(&request.sampling).collect(),
            false => Vec::new(),
        };
        drive.lock().enter();
        Driving {
            drive,
            namespace,
            asked: asked(request.speculation),
            ways,
            stop_ids: request.sampling.stop_token_ids.clone(),
            lessons: Lessons::default(),
            stream: Stream::Runs(None),
            heard_last: None,
            measured: None,
        }
    }

    /// A stream was asked for, behind a call or not.
    pub(crate) fn stream_began(&mut self, is_restart: bool, now: Instant) {
        self.stream = match is_restart {
            true => Stream::Restarts(now),
            false => Stream::Runs(None),
        };
        self.heard_last = None;
    }

    /// The stream ended by itself, before anything that the request knows for an end: no draft is to be accepted past that.
    pub(crate) fn stream_ended(&mut self) {
        if let Some(token) = self.heard_last {
            self.drive.lock().ended_at(token);
        }
    }

    /// The stream said so much at `now`.
    pub(crate) fn heard(&mut self, tokens: &[u32], now: Instant) {
        self.heard_last = tokens.last().copied().or(self.heard_last);
        let mut drive = self.drive.lock();
        drive.said(tokens.len());
        let seconds = |since: Instant| now.saturating_duration_since(since).as_secs_f64();
        let mut is_first = false;
        match std::mem::replace(&mut self.stream, Stream::Runs(None)) {
            Stream::Restarts(since) => {
                is_first = true;
                drive.restarted(seconds(since));
            }
            Stream::Runs(Some(since)) => drive.streamed(tokens.len(), seconds(since)),
            Stream::Runs(None) => {}
        }
        self.lessons.said(tokens, |found, said| {
            drive.learn(self.namespace, found, said)
        });
        if let Some(measured) = &mut self.measured {
            measured.tokens += tokens.len() as u32;
            let is_over = match measured.tokens_wanted {
                Some(wanted) => measured.tokens >= wanted,
                None => is_first,
            };
            if is_over {
                drive.end(measured.stretch, measured.tokens, now);
                self.measured = None;
            }
        }
    }

    /// What was heard has been dealt with, and the stream is listened to again.
    pub(crate) fn listens(&mut self, now: Instant) {
        if let Stream::Runs(since) = &mut self.stream {
            *since = Some(now);
        }
    }

    /// How drafts are looked up for it; `None` if it is only listened to.
    pub(crate) fn params(&self) -> Option<&ProposeParams> {
        (!self.ways.is_empty()).then_some(&*self.drive.params)
    }

    /// The call that is to be made at `now`, if one is, where a draft was found and the node that ends the output if it is
    /// accepted.
    pub(crate) fn call(
        &mut self,
        found: (Candidate, Option<u32>),
        text_tokens: u32,
        is_streaming: bool,
        now: Instant,
    ) -> Option<Box<Call>> {
        let (candidate, ends_with) = found;
        // One measurement at a time: what is watched is left to the stream.
        if is_streaming && self.measured.is_some() {
            self.lessons.found(&candidate);
            return None;
        }
        let moment = Moment {
            namespace: self.namespace,
            asked: self.asked,
            ways: &self.ways,
            text_tokens,
            candidate: &candidate,
            ends_with,
            is_streaming,
        };
        let mut drive = self.drive.lock();
        match drive.decide(&moment, now) {
            Verdict::Stream => {
                self.lessons.found(&candidate);
                None
            }
            Verdict::Watch(stretch, tokens) => {
                self.lessons.found(&candidate);
                self.measured = Some(Measured {
                    stretch,
                    tokens: 0,
                    tokens_wanted: Some(tokens),
                });
                None
            }
            Verdict::Call(call) => {
                if is_streaming {
                    self.measured = Some(Measured {
                        stretch: drive.begin(&call, now),
                        tokens: 0,
                        tokens_wanted: None,
                    });
                }
                Some(call)
            }
        }
    }

    /// A call was answered, or failed, after so many seconds. Returns what is to be said, if anything.
    pub(crate) fn answered(
        &mut self,
        call: Box<Call>,
        answer: Option<&Verified>,
        seconds: f64,
    ) -> Option<Judged> {
        let mut drive = self.drive.lock();
        let Some(verified) = answer else {
            drive.call_failed(&call, "failed", seconds);
            return None;
        };
        // Where the engine's stream may end by itself, it is the stream that says so.
        let mut is_open = |token: &TokenId| !self.stop_ids.contains(token) && drive.ends_at(*token);
        let drawn = verified.drawn.iter();
        let drawn: Vec<Option<TokenId>> = drawn
            .map(|drawn| drawn.filter(|token| !is_open(token)))
            .collect();
        let walk = walk_drawn(&call.verified.tree, &drawn);
        if walk.emitted.is_empty() {
            drive.call_failed(&call, "unknown", seconds);
            return None;
        }
        drive.called(&call, walk.accepted.len() as u32, seconds);
        drive.learn(self.namespace, &call.found, &walk.emitted);
        let Call {
            verified, found, ..
        } = *call;
        Some(Judged {
            verified,
            found,
            walk,
        })
    }

    /// The chunk is over at `now`.
    pub(crate) fn end(&mut self, now: Instant) {
        if let Some(measured) = self.measured.take() {
            let mut drive = self.drive.lock();
            drive.end(measured.stretch, measured.tokens, now);
        }
    }

    /// A call brought so much.
    pub(crate) fn said(&mut self, tokens: &[u32]) {
        let mut drive = self.drive.lock();
        drive.said(tokens.len());
        self.lessons.said(tokens, |found, said| {
            drive.learn(self.namespace, found, said)
        });
        if let Some(measured) = &mut self.measured {
            measured.tokens += tokens.len() as u32;
        }
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        let mut drive = self.drive.lock();
        drive.leave();
        self.lessons
            .end(|found, said| drive.learn(self.namespace, found, said));
    }
}
