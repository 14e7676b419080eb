//! Counts one request while it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::usage::UsageCounts;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock::unix_ms;
use tokio::sync::mpsc::OwnedPermit;
use tokio::sync::oneshot;

use super::book::UsageSubject;
use super::keeper::{KeeperHandle, Message, RequestCounts};
use crate::metrics::TokenSeries;
use crate::tenants::BudgetTicket;

/// Progress is noted after this many tokens of a choice,
pub(crate) const PROGRESS_TOKENS: u64 = 256;
/// or after this time.
pub(crate) const PROGRESS_TIME: Duration = Duration::from_secs(1);

/// How long a request waits for room in the queue of a slow disk.
const ROOM_WAIT: Duration = Duration::from_secs(10);

/// How long an answer waits until its counts are written. A slow disk delays answers, but does not hold them back.
const WRITTEN_WAIT: Duration = Duration::from_secs(1);

/// Time after which a request that found no room may be tried again.
const ROOM_RETRY_MS: u64 = 2_000;

/// The place where requests begin to be counted. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Usage {
    kept_by: Option<Arc<KeptBy>>,
}

struct KeptBy {
    keeper: KeeperHandle,
    next_request: AtomicU64,
}

/// A request as it begins.
pub(crate) struct UsageStart {
    pub(crate) subject: UsageSubject,
    /// Tokens of its prompts.
    pub(crate) input_tokens: u64,
    pub(crate) choices_per_prompt: usize,
    pub(crate) choices: usize,
    pub(crate) budget: Arc<BudgetTicket>,
    /// The metrics that show the tokens.
    pub(crate) shown: Arc<TokenSeries>,
}

/// The counts of a request. One that has no answer is settled when it is dropped.
pub struct UsageMeter {
    kept: Option<Kept>,
    subject: Arc<UsageSubject>,
    input_tokens: u64,
    choices_per_prompt: usize,
    budget: Arc<BudgetTicket>,
    shown: Arc<TokenSeries>,
    state: Mutex<MeterState>,
}

struct Kept {
    keeper: KeeperHandle,
    request: u64,
}

struct MeterState {
    /// The room for the last message. Taken when the request is settled.
    room: Option<OwnedPermit<Message>>,
    choices: Vec<UsageCounts>,
    /// The counts that the budgets and the metrics know.
    known: UsageCounts,
    /// Whether the keeper knows of the request.
    is_known: bool,
}

impl Usage {
    pub(super) fn kept_by(keeper: KeeperHandle) -> Self {
        Usage {
            kept_by: Some(Arc::new(KeptBy {
                keeper,
                next_request: AtomicU64::new(1),
            })),
        }
    }

    /// Begins to count a request. It waits while the disk is so slow that the queue is full.
    ///
    /// # Errors
    /// `Unavailable` if it waited for too long.
    pub(crate) async fn begin(&self, start: UsageStart) -> Result<UsageMeter, ApiError> {
        let (kept, room) = match &self.kept_by {
            None => (None, None),
            Some(of) => {
                let room = of.keeper.messages.clone().reserve_owned();
                let room = tokio::time::timeout(ROOM_WAIT, room).await;
                let Ok(Ok(room)) = room else {
                    let message = "this gateway cannot write down usage at the moment; try again";
                    return Err(ApiError::new(ErrorKind::Unavailable, message)
                        .with_retry_after_ms(ROOM_RETRY_MS));
                };
                let kept = Kept {
                    keeper: of.keeper.clone(),
                    request: of.next_request.fetch_add(1, Ordering::Relaxed),
                };
                (Some(kept), Some(room))
            }
        };
        Ok(UsageMeter {
            kept,
            subject: Arc::new(start.subject),
            input_tokens: start.input_tokens,
            choices_per_prompt: start.choices_per_prompt.max(1),
            budget: start.budget,
            shown: start.shown,
            state: Mutex::new(MeterState {
                room,
                choices: vec![UsageCounts::default(); start.choices],
                known: UsageCounts::default(),
                is_known: false,
            }),
        })
    }
}

impl UsageMeter {
    /// Notes the counts of a choice since it began. Budgets count them, and the journal gets them.
    pub fn note(&self, choice: u32, counts: UsageCounts) {
        let mut state = self.state.lock();
        if let Some(known) = state.choices.get_mut(choice as usize) {
            *known = known.max(counts);
        }
        let counts = self.counts(&mut state);
        let Some(kept) = &self.kept else { return };
        if counts.is_zero() {
            return;
        }
        // Without room the next progress says the same and more.
        if let Ok(room) = kept.keeper.messages.try_reserve() {
            room.send(Message::Progress(self.message(kept.request, counts)));
            state.is_known = true;
        }
    }

    /// Notes the last counts of a choice, which are written down with those of the other choices.
    pub fn end_choice(&self, choice: u32, counts: UsageCounts) {
        if let Some(known) = self.state.lock().choices.get_mut(choice as usize) {
            *known = known.max(counts);
        }
    }

    /// Settles the request, and waits until its counts are in the journal. So a client that has its answer is billed
    /// for it, even if this process is killed then.
    pub async fn settle(&self) {
        let Some((room, of)) = self.last() else {
            return;
        };
        let (reply, written) = oneshot::channel();
        let reply = Some(reply);
        room.send(Message::Settled { of, reply });
        // Without an answer the thread has ended, or the disk is slow. The counts are in its hands.
        let _ = tokio::time::timeout(WRITTEN_WAIT, written).await;
    }

    /// The last message and the room for it, if there is one to send. There is none if it was taken before, if the
    /// request made nothing, or if it could be written down at once.
    fn last(&self) -> Option<(OwnedPermit<Message>, RequestCounts)> {
        let mut state = self.state.lock();
        let counts = self.counts(&mut state);
        let (Some(kept), Some(room)) = (&self.kept, state.room.take()) else {
            return None;
        };
        if !state.is_known && counts.is_zero() {
            return None;
        }
        let of = self.message(kept.request, counts);
        // Progress that the keeper has not read yet must come before.
        let of = match state.is_known {
            true => of,
            false => kept.keeper.settle_at_once(of).err()?,
        };
        Some((room, of))
    }

    /// The counts of the whole request. A request that made nothing has none. Budgets and metrics get what they do
    /// not know.
    fn counts(&self, state: &mut MeterState) -> UsageCounts {
        let mut sum = UsageCounts::default();
        for (index, choice) in state.choices.iter().enumerate() {
            sum = sum.plus(UsageCounts {
                // Each prompt counts once, and so do its cached tokens: those of its first choice.
                cached_input_tokens: match index % self.choices_per_prompt {
                    0 => choice.cached_input_tokens,
                    _ => 0,
                },
                ..*choice
            });
        }
        if sum.requests == 0 {
            return UsageCounts::default();
        }
        sum.requests = 1;
        sum.input_tokens = self.input_tokens;
        // Cached tokens of a choice that has not ended may be known later than others, so no count ever falls.
        let known = state.known.max(sum);
        let more = known.minus(std::mem::replace(&mut state.known, known));
        self.budget.spend(more.tokens());
        self.shown.add(more);
        sum
    }

    fn message(&self, request: u64, counts: UsageCounts) -> RequestCounts {
        RequestCounts {
            request,
            subject: self.subject.clone(),
            at_ms: unix_ms(),
            counts,
        }
    }
}

impl Drop for UsageMeter {
    fn drop(&mut self) {
        if let Some((room, of)) = self.last() {
            room.send(Message::Settled { of, reply: None });
        }
    }
}

/// Tells when the progress of a choice is to be noted.
pub struct ProgressClock {
    tokens: u64,
    at: Instant,
}

impl ProgressClock {
    /// Begins at the start of a choice.
    pub fn new(now: Instant) -> Self {
        ProgressClock { tokens: 0, at: now }
    }

    /// Whether an output of `tokens` is to be noted. It counts as noted then.
    pub fn is_due(&mut self, tokens: u64, now: Instant) -> bool {
        let is_due = tokens.saturating_sub(self.tokens) >= PROGRESS_TOKENS
            || now.saturating_duration_since(self.at) >= PROGRESS_TIME;
        if is_due {
            *self = ProgressClock { tokens, at: now };
        }
        is_due
    }
}

#[cfg(test)]
mod tests;
