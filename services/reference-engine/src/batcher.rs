//! The thread that owns the model, and its queue.
//!
//! A forward pass keeps a core busy for milliseconds; on an async worker it would stall everything there, so
//! it has an OS thread of its own, fed by a bounded queue.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use refrain_protocol::engine::{CloseRequest, EngineLoad, StepRequest, StepResponse};
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};
use tokio::sync::oneshot;

use crate::engine::Core;
use crate::metrics::EngineMetrics;

/// When a caller whom the full queue refused may try again: a few steps later.
const QUEUE_RETRY_AFTER_MS: u64 = 50;

/// The queue between callers and the model thread, and what the thread tells about itself.
pub(crate) struct Batcher {
    queue: Mutex<Queue>,
    wake: Condvar,
    load: Mutex<EngineLoad>,
    steps_max: usize,
    weight_version: u64,
    metrics: EngineMetrics,
}

#[derive(Default)]
struct Queue {
    commands: VecDeque<Command>,
    /// Steps among the commands. Closing and aborting are never refused: each waits for its caller, and those
    /// are bounded by the connections.
    steps: usize,
    closed: bool,
}

enum Command {
    Step(StepRequest, oneshot::Sender<Result<StepResponse, ApiError>>),
    Close(CloseRequest, oneshot::Sender<()>),
}

impl Queue {
    fn check_open(&self) -> Result<(), ApiError> {
        if self.closed {
            return Err(ApiError::new(
                ErrorKind::Unavailable,
                "the engine is shutting down",
            ));
        }
        Ok(())
    }
}

impl Batcher {
    pub(crate) fn new(steps_max: usize, weight_version: u64, metrics: EngineMetrics) -> Self {
        Batcher {
            queue: Mutex::default(),
            wake: Condvar::new(),
            load: Mutex::default(),
            steps_max,
            weight_version,
            metrics,
        }
    }

    /// Puts a step last.
    ///
    /// # Errors
    /// `Overloaded` when too many wait, `Unavailable` after [`Batcher::end`].
    pub(crate) fn step(
        &self,
        request: StepRequest,
    ) -> Result<oneshot::Receiver<Result<StepResponse, ApiError>>, ApiError> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut queue = lock(&self.queue);
            queue.check_open()?;
            if queue.steps >= self.steps_max {
                let error = ApiError::new(
                    ErrorKind::Overloaded,
                    format!("{} steps are waiting already", queue.steps),
                )
                .with_code("engine_queue_full")
                .with_retry_after_ms(QUEUE_RETRY_AFTER_MS);
                self.metrics.rejected(&error);
                return Err(error);
            }
            queue.steps += 1;
            queue.commands.push_back(Command::Step(request, sender));
        }
        self.wake.notify_one();
        Ok(receiver)
    }

    /// Closes sessions after the steps that wait already.
    ///
    /// # Errors
    /// `Unavailable` after [`Batcher::end`].
    pub(crate) fn close(&self, request: CloseRequest) -> Result<oneshot::Receiver<()>, ApiError> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut queue = lock(&self.queue);
            queue.check_open()?;
            queue.commands.push_back(Command::Close(request, sender));
        }
        self.wake.notify_one();
        Ok(receiver)
    }

    /// Closes sessions before anything else, and keeps steps that wait from opening them.
    ///
    /// # Errors
    /// `Unavailable` after [`Batcher::end`].
    pub(crate) fn abort(
        &self,
        sessions: Vec<EngineSessionId>,
    ) -> Result<oneshot::Receiver<()>, ApiError> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut queue = lock(&self.queue);
            queue.check_open()?;
            for command in &mut queue.commands {
                if let Command::Step(request, _) = command {
                    for item in request
                        .items
                        .iter_mut()
                        .filter(|item| sessions.contains(&item.session))
                    {
                        item.open = None;
                    }
                }
            }
            let request = CloseRequest {
                sessions,
                keep_kv: false,
            };
            queue.commands.push_front(Command::Close(request, sender));
        }
        self.wake.notify_one();
        Ok(receiver)
    }

    /// Takes no more commands; the thread ends after those that wait.
    pub(crate) fn end(&self) {
        lock(&self.queue).closed = true;
        self.wake.notify_all();
    }

    /// How busy the engine is.
    pub(crate) fn load(&self) -> EngineLoad {
        let steps = lock(&self.queue).steps;
        EngineLoad {
            steps_waiting: steps as u32,
            ..*lock(&self.load)
        }
    }

    /// The model thread.
    pub(crate) fn run(&self, mut core: Core, idle_check: Duration) {
        let mut checked = Instant::now();
        while let Some(command) = self.next(idle_check) {
            match command {
                // Nobody waits for it any more, so nobody has counted on its effect.
                Some(Command::Step(_, reply)) if reply.is_closed() => {}
                Some(Command::Step(request, reply)) => {
                    let answer = self.execute(&mut core, request);
                    self.publish_load(&core);
                    // The caller may be gone by now; its sessions expire or are closed by it.
                    let _ = reply.send(answer);
                }
                Some(Command::Close(request, reply)) => {
                    core.close(&request);
                    self.publish_load(&core);
                    let _ = reply.send(());
                }
                None => {}
            }
            if checked.elapsed() >= idle_check {
                checked = Instant::now();
                self.metrics.expired(core.expire(checked));
                self.publish_load(&core);
            }
        }
    }

    /// The next command; `Some(None)` when none came for `wait`, `None` when all is done.
    #[allow(clippy::option_option, reason = "three outcomes, used in one place")]
    fn next(&self, wait: Duration) -> Option<Option<Command>> {
        let queue = lock(&self.queue);
        let (mut queue, _) = self
            .wake
            .wait_timeout_while(queue, wait, |queue| {
                queue.commands.is_empty() && !queue.closed
            })
            .unwrap_or_else(PoisonError::into_inner);
        let command = queue.commands.pop_front();
        if matches!(command, Some(Command::Step(..))) {
            queue.steps -= 1;
        }
        if command.is_none() && queue.closed {
            None
        } else {
            Some(command)
        }
    }

    fn execute(&self, core: &mut Core, request: StepRequest) -> Result<StepResponse, ApiError> {
        let started = Instant::now();
        let ids: Vec<EngineSessionId> = request.items.iter().map(|item| item.session).collect();
        // What a panic can leave half changed is thrown away: the batch's sessions here, buffers by the next
        // pass, which sizes them anew.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut batch = core.begin(request, started)?;
            let drafting = Instant::now();
            let drafted = core.draft(&mut batch);
            let draft_s = match drafted {
                true => drafting.elapsed().as_secs_f64(),
                false => 0.0,
            };
            Ok((core.verify(batch, started), draft_s))
        }));
        let seconds = started.elapsed().as_secs_f64();
        match outcome {
            Ok(Ok((stepped, draft_s))) => {
                self.metrics.stepped(&stepped, seconds);
                Ok(StepResponse {
                    results: stepped.results,
                    step_s: seconds,
                    draft_s,
                    weight_version: self.weight_version,
                })
            }
            Ok(Err(error)) => {
                self.metrics.rejected(&error);
                Err(error)
            }
            Err(_) => {
                self.metrics.panicked();
                tracing::error!(
                    sessions = ids.len(),
                    "step panicked; its sessions are dropped"
                );
                core.close(&CloseRequest {
                    sessions: ids,
                    keep_kv: false,
                });
                Err(ApiError::internal("the step panicked"))
            }
        }
    }

    /// Tells others how busy the engine is.
    pub(crate) fn publish_load(&self, core: &Core) {
        let (open, kept) = core.sessions().counts();
        let (kv_tokens, kv_tokens_max) = core.sessions().kv_tokens();
        let load = EngineLoad {
            sessions_open: open as u32,
            sessions_kept: kept as u32,
            kv_tokens,
            kv_tokens_max,
            steps_waiting: lock(&self.queue).steps as u32,
        };
        self.metrics.load(&load, core.sessions().state_tokens());
        *lock(&self.load) = load;
    }
}

/// Nothing that is done under these locks can panic half way, so a poisoned one is as good as new.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
