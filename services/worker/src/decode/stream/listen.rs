//! One chunk's task: asks the engine, listens, passes on, and tells why it ended.

use std::sync::{Arc, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::future::poll_fn;
use futures_util::{FutureExt, StreamExt};
use refrain_protocol::chunk::{ChunkCut, ChunkEnd, ChunkEndReason, ChunkEvent};
use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::{mpsc, oneshot};

use super::outside::{Interruption, Outside};
use super::patience::Patience;
use super::steps::SentTo;
use super::{Chunks, Control};
use crate::decode::Outlet;
use crate::decode::entry::Entry;
use crate::drive::{Call, Driving};
use crate::engine::{Generated, GeneratedEnd, GeneratedStream};

/// How long a chunk that has ended waits for its engine's last word, which frees the connection for the next one.
const LAST_WORD_TIMEOUT: Duration = Duration::from_millis(100);

/// Where a chunk's reader hears from it.
pub(super) type Events = mpsc::Sender<Result<ChunkEvent, ApiError>>;

/// How a stream ended.
enum Heard {
    /// With the chunk.
    Over(Outcome),
    /// A draft is to be verified instead.
    Call(Box<Call>),
}

/// What a stream that is listened to comes to next.
enum Next {
    /// The engine's next word, or the stream's end.
    Piece(Option<Result<Generated, ApiError>>),
    Outside(Interruption),
    /// For too long.
    Nothing,
}

/// A chunk that is listened to. Its task may be dropped at any time, with the thread of the listener that its reader runs on:
/// then nobody reads on.
struct Listening {
    entry: Entry,
    outlet: Outlet,
    /// The outcome's label.
    outcome: Option<&'static str>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        let running = &self.entry.running;
        if self.outcome.is_none() {
            self.outlet.cancelled(running);
        }
        self.outlet
            .left(running, self.outcome.unwrap_or("cancelled"));
    }
}

/// Why a chunk's task is over.
pub(super) enum Outcome {
    /// As it should be.
    Ended(ChunkEnd),
    Failed(ApiError),
    /// The request's time is up.
    Overdue(ApiError),
    /// Its reader is gone.
    Left,
    /// Its reader stood still for too long.
    Stalled,
    Cut(ChunkCut, oneshot::Sender<()>),
    TakenOver,
}

impl Chunks {
    pub(super) async fn chunk(self: Arc<Self>, entry: Entry, told: mpsc::Receiver<Control>) {
        let mut outside = Outside::new(told, &entry.events);
        let mut listening = Listening {
            entry,
            outlet: self.outlet.clone(),
            outcome: None,
        };
        let entry = &mut listening.entry;
        self.outlet.adopt(&entry.running);
        let over = self.listen(entry, &mut outside).await;
        let outcome = match over {
            Outcome::Ended(end) => self.outlet.end(entry, end),
            Outcome::Failed(error) => {
                self.outlet.fail(entry, error);
                "failed"
            }
            Outcome::Overdue(error) => self.outlet.overdue(entry, error),
            Outcome::Left => {
                self.outlet.cancelled(&entry.running);
                "cancelled"
            }
            Outcome::Stalled => {
                self.outlet.reader_stalled();
                let end = entry.running.end(ChunkEndReason::GaveWay);
                self.outlet.end(entry, end)
            }
            Outcome::Cut(cut, done) => {
                self.outlet.shorten(entry.ended(cut.output_len));
                let _ = done.send(());
                "cut"
            }
            Outcome::TakenOver => {
                let taken_over = "a newer lease has taken this request over";
                entry.send_last(Err(ApiError::new(ErrorKind::Conflict, taken_over)));
                "taken_over"
            }
        };
        listening.outcome = Some(outcome);
        drop(listening);
        outside.close(&self);
    }

    async fn listen(&self, entry: &mut Entry, outside: &mut Outside) -> Outcome {
        let mut driving = self.drive.clone().map(|drive| {
            let able = self.engine.capabilities().verifies;
            let running = &entry.running;
            Driving::new(drive, &able, running.namespace, &running.request)
        });
        let first_token_ms_max = self.config.first_token_ms_max;
        let mut patience = Patience::new(first_token_ms_max, entry.deadline, Instant::now());
        let over = loop {
            let stream = match self.open(entry, outside, &mut patience).await {
                Ok(stream) => stream,
                Err(over) => break over,
            };
            let heard = self.hear(entry, outside, stream, driving.as_mut(), &mut patience);
            let call = match heard.await {
                Heard::Over(over) => break over,
                Heard::Call(call) => call,
            };
            if let Some(driving) = &mut driving
                && let Err(over) = self.drive(entry, outside, driving, call).await
            {
                break over;
            }
            // A stream behind a call queues and reads its text like the first one.
            patience.renew(first_token_ms_max, Instant::now());
        };
        if let Some(driving) = &mut driving {
            driving.end(Instant::now());
        }
        over
    }

    /// Listens until the chunk is over or the stream is to be given up for a call.
    async fn hear(
        &self,
        entry: &mut Entry,
        outside: &mut Outside,
        mut stream: GeneratedStream,
        mut driving: Option<&mut Driving>,
        patience: &mut Patience,
    ) -> Heard {
        if let Some(driving) = &mut driving {
            driving.stream_began(patience.has_output, Instant::now());
        }
        let mut sent = SentTo::new(&self.sent_to);
        // What has come already.
        let mut ahead = None;
        loop {
            let heard = poll_fn(|context| {
                if let Poll::Ready(piece) = stream.poll_next_unpin(context) {
                    return Poll::Ready(Next::Piece(piece));
                }
                if let Poll::Ready(interruption) = outside.poll(context) {
                    return Poll::Ready(Next::Outside(interruption));
                }
                patience.poll_spent(context).map(|()| Next::Nothing)
            });
            let next = match ahead.take() {
                Some(piece) => Next::Piece(piece),
                None => heard.await,
            };
            let piece = match next {
                Next::Piece(Some(Ok(piece))) => piece,
                Next::Piece(Some(Err(error))) => return Heard::Over(self.failed(error)),
                Next::Piece(None) => {
                    let broke_off = "the engine broke off in the middle of its answer";
                    let error = ApiError::new(ErrorKind::Upstream, broke_off);
                    return Heard::Over(self.failed(error));
                }
                Next::Outside(interruption) => {
                    return Heard::Over(interruption.outcome(&entry.running));
                }
                Next::Nothing => return Heard::Over(self.out_of_patience(entry, patience)),
            };
            match piece {
                Generated::Begun { cached_tokens } => {
                    if !patience.has_output {
                        entry.running.begun(cached_tokens);
                    }
                    self.works();
                }
                Generated::Tokens { tokens, logprobs } => {
                    let now = Instant::now();
                    if !std::mem::replace(&mut patience.has_output, true) {
                        self.works();
                    }
                    self.sent(&mut sent, now);
                    let absorbed =
                        entry
                            .running
                            .absorb_generated(tokens, logprobs, self.limits(), now);
                    let absorbed = match absorbed {
                        Ok(absorbed) => absorbed,
                        Err(error) => return Heard::Over(self.failed(error)),
                    };
                    if let Some(driving) = &mut driving {
                        driving.heard(&absorbed.message.tokens, now);
                    }
                    match self.say(entry, outside, absorbed).await {
                        Ok(None) => {}
                        Ok(Some(end)) => {
                            give_back(stream);
                            return Heard::Over(Outcome::Ended(end));
                        }
                        Err(over) => return Heard::Over(over),
                    }
                    // What the reader took is not the engine's.
                    patience.renew(self.config.idle_ms_max, Instant::now());
                    let Some(driving) = &mut driving else {
                        continue;
                    };
                    // What has come meanwhile is not given up.
                    ahead = stream.next().now_or_never();
                    if ahead.is_none()
                        && let Some(call) = self.call(&entry.running, driving, true)
                    {
                        return Heard::Call(call);
                    }
                    driving.listens(Instant::now());
                }
                Generated::End(end) => {
                    if let (GeneratedEnd::Stop, Some(driving)) = (end, &mut driving) {
                        driving.stream_ended();
                    }
                    give_back(stream);
                    return Heard::Over(self.ended(entry, end, patience.has_output));
                }
            }
        }
    }

    /// Lets the figures have what the engine's sending tells of its steps.
    fn sent(&self, sent: &mut SentTo, now: Instant) {
        let batch = sent.batch();
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gap) = steps.heard(&mut sent.last, now, batch) {
            self.metrics.engine_step(gap.share_s, 0.0);
            if let Some((batch, seconds)) = gap.median {
                self.metrics.streaming.step(batch, seconds);
            }
        }
    }
}

/// Lets the engine say its last word, if that is all that is left.
fn give_back(mut stream: GeneratedStream) {
    tokio::spawn(async move {
        let last_word = async {
            while let Some(Ok(piece)) = stream.next().await {
                if matches!(piece, Generated::Tokens { .. }) {
                    // It goes on: dropping the stream stops it.
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(LAST_WORD_TIMEOUT, last_word).await;
    });
}
