//! Carries out the orders of trainers.
//!
//! A pause shuts the worker's own gate ([`crate::orders`]) before the engine is told, so that it works for every
//! engine in the same way, and survives the loss of its caller. Orders that the engine carries out take turns. While
//! one of them is under way, other weights are refused, and a pause or its end takes effect at the gate at once.

use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::engine_order::{EngineAnswer, EngineOrder, EngineOrderReply, PauseMode};
use refrain_protocol::{ApiError, ErrorKind};

use super::handle::WorkerParts;
use crate::chunk::EndOrder;
use crate::engine::{RestoredWeights, StreamingEngine, WorkerEngine};
use crate::metrics::OrderKind;
use crate::orders::Pause;

/// How long a pause that waits for running requests waits for one that is between two chunks. Where it cannot go on
/// here, it is held like a new one, and goes on after the pause.
const BETWEEN_CHUNKS: Duration = Duration::from_secs(1);

/// Attempts to tell an engine that it goes on after it has read weights, and the pause between two of them.
const RESUME_ATTEMPTS: u32 = 5;
const RESUME_PAUSE: Duration = Duration::from_millis(200);
/// Longest time of an attempt.
const RESUME_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time in which an engine goes back to its earlier weights, which it reads from a disk.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(300);

impl WorkerParts {
    /// Carries out an order, whether or not its caller waits for the end of it.
    pub(super) async fn order(
        self: &Arc<Self>,
        order: EngineOrder,
    ) -> Result<EngineOrderReply, ApiError> {
        let parts = self.clone();
        let carried_out = tokio::spawn(async move {
            let kind = OrderKind::of(&order);
            let outcome = parts.carry_out(order).await;
            parts.shared.metrics.order(kind, outcome.is_ok());
            let name = kind.as_str();
            match &outcome {
                Ok(_) if kind == OrderKind::Report => {}
                Ok(_) => tracing::info!(order = name, "a trainer's order was carried out"),
                // The engine's message is not logged: it may repeat a request.
                Err(error) => tracing::warn!(
                    order = name,
                    kind = ?error.kind,
                    code = error.code,
                    "a trainer's order failed"
                ),
            }
            outcome
        });
        carried_out.await.map_err(ApiError::internal)?
    }

    async fn carry_out(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        if self.commands.is_closed() {
            let message = "this worker has stopped";
            return Err(ApiError::new(ErrorKind::Unavailable, message));
        }
        if let (WorkerEngine::Streaming(engine), false) =
            (&self.engine, matches!(order, EngineOrder::Report))
        {
            engine.check_order(&order)?;
        }
        let answer = match order {
            EngineOrder::Report => None,
            EngineOrder::Pause { mode, clears_cache } => {
                self.pause(mode, clears_cache).await?;
                None
            }
            EngineOrder::Resume => {
                self.resume().await?;
                None
            }
            EngineOrder::LoadWeights { directory, version } => {
                self.load_weights(directory, version).await?;
                None
            }
            EngineOrder::SetVersion { version } => {
                let _turn = self.shared.orders.engine_turn.lock().await;
                self.tell_engine(order).await?;
                self.shared.orders.set_weight_version(version);
                None
            }
            EngineOrder::FlushCache | EngineOrder::PassOn(_) => {
                let _turn = self.shared.orders.engine_turn.lock().await;
                self.tell_engine(order).await?
            }
        };
        Ok(EngineOrderReply {
            state: self.shared.orders.engine_state(),
            answer,
        })
    }

    /// Pauses the worker, and then its engine.
    async fn pause(&self, mode: PauseMode, clears_cache: bool) -> Result<(), ApiError> {
        let orders = &self.shared.orders;
        let (pause, is_first) = orders.begin_pause(mode);
        if let Some(streams) = &self.streams {
            streams.end_ordered(&EndOrder::Abort);
        }
        orders.followed().await;
        let stands = match mode {
            PauseMode::Keep => true,
            PauseMode::Abort => orders.none_runs(pause).await,
            PauseMode::Wait if pause.is_settled() => true,
            PauseMode::Wait => self.running_have_ended(pause).await,
        };
        if !stands {
            return Err(other_order());
        }
        orders.settle(pause);
        orders.followed().await;
        if self.needs_no_pause() && !clears_cache {
            return Ok(());
        }
        let _turn = orders.engine_turn.lock().await;
        if orders.gate().pause().is_none_or(|now| !now.is_same(&pause)) {
            return Err(other_order());
        }
        let told = self
            .tell_engine(EngineOrder::Pause { mode, clears_cache })
            .await;
        if told.is_err() && is_first {
            // Neither half of a pause stays without the other.
            if !self.needs_no_pause() {
                let _ = self.tell_engine(EngineOrder::Resume).await;
            }
            orders.end_pause();
        }
        told.map(drop)
    }

    /// Whether the engine does nothing that it is not asked for, so that only this worker pauses.
    fn needs_no_pause(&self) -> bool {
        matches!(self.engine, WorkerEngine::Verifying(_))
    }

    /// Waits until the requests that run have ended. Returns whether the pause still stands.
    async fn running_have_ended(&self, pause: Pause) -> bool {
        let orders = &self.shared.orders;
        loop {
            if !orders.none_runs(pause).await {
                return false;
            }
            let goes_on = tokio::time::timeout(BETWEEN_CHUNKS, orders.some_run());
            if self.shared.parking.len() == 0 || goes_on.await.is_err() {
                return true;
            }
        }
    }

    /// Ends a pause. The engine is told first, even if this worker knows of no pause, since it may be a new process.
    async fn resume(&self) -> Result<(), ApiError> {
        let orders = &self.shared.orders;
        let _turn = orders.engine_turn.lock().await;
        if !self.needs_no_pause() {
            self.tell_engine(EngineOrder::Resume).await?;
        }
        orders.end_pause();
        Ok(())
    }

    /// Has the engine load other weights.
    async fn load_weights(&self, directory: String, version: Option<u64>) -> Result<(), ApiError> {
        let orders = &self.shared.orders;
        let turn = orders.engine_turn.try_lock();
        let _turn = turn.map_err(|_| {
            let message = "another order is being carried out; wait for its end";
            ApiError::new(ErrorKind::Conflict, message).with_code("order_under_way")
        })?;
        let engine = match &self.engine {
            // It exchanges the weights between two steps, and says which version they have.
            WorkerEngine::Verifying(engine) => {
                let _call = orders.engine_call(false);
                let order = EngineOrder::LoadWeights { directory, version };
                let reply = engine.order(order).await?;
                orders.set_weight_version(reply.state.weight_version);
                return Ok(());
            }
            WorkerEngine::Streaming(engine) => engine,
        };
        let version = version.unwrap_or_else(|| orders.weight_version().wrapping_add(1));
        let is_paused = orders.gate().pause().is_some();
        let _loading = orders.engine_call(true);
        // The new weights must not read KV caches of the old ones.
        let clears = EngineOrder::Pause {
            mode: PauseMode::Keep,
            clears_cache: true,
        };
        let load = EngineOrder::LoadWeights {
            directory,
            version: Some(version),
        };
        let loaded = match engine.order(clears).await {
            Ok(_) => match engine.order(load).await {
                Ok(_) => {
                    orders.set_weight_version(version);
                    Ok(())
                }
                Err(error) => {
                    self.restore_weights(&**engine, &error).await;
                    Err(error)
                }
            },
            Err(error) => Err(error),
        };
        // The pause was this order's own, unless a trainer has paused the worker as well.
        let resumed = match is_paused {
            true => Ok(()),
            false => resume(&**engine).await,
        };
        loaded.and(resumed)
    }

    /// Has an engine whose load has failed go back to the weights that it had, or to those of its start.
    async fn restore_weights(&self, engine: &dyn StreamingEngine, failure: &ApiError) {
        // An engine that hangs would hang once more.
        if failure.kind == ErrorKind::Timeout {
            return;
        }
        let restored = tokio::time::timeout(RESTORE_TIMEOUT, engine.restore_weights()).await;
        match restored {
            Ok(RestoredWeights::Initial) => self.shared.orders.set_weight_version(0),
            Ok(RestoredWeights::Earlier | RestoredWeights::None) => {}
            Err(_) => tracing::error!("an engine takes too long to go back to its earlier weights"),
        }
    }

    /// Tells the engine of an order.
    async fn tell_engine(&self, order: EngineOrder) -> Result<Option<EngineAnswer>, ApiError> {
        let _call = self.shared.orders.engine_call(false);
        match &self.engine {
            WorkerEngine::Verifying(engine) => Ok(engine.order(order).await?.answer),
            WorkerEngine::Streaming(engine) => engine.order(order).await,
        }
    }
}

/// Tells an engine that it goes on after a load, while the gate is still shut. A failed load may have cost the
/// connection. An engine that is not told would generate nothing any more, so one failure is no reason to give up.
async fn resume(engine: &dyn StreamingEngine) -> Result<(), ApiError> {
    let mut attempts = 1;
    loop {
        let told = tokio::time::timeout(RESUME_TIMEOUT, engine.order(EngineOrder::Resume)).await;
        let told = told.unwrap_or_else(|_| {
            let message = "the engine loaded weights, and does not answer the call to go on";
            Err(ApiError::new(ErrorKind::Timeout, message))
        });
        match told {
            Ok(_) => return Ok(()),
            Err(error) if error.kind == ErrorKind::Timeout || attempts == RESUME_ATTEMPTS => {
                return Err(error);
            }
            Err(_) => attempts += 1,
        }
        tokio::time::sleep(RESUME_PAUSE).await;
    }
}

/// The error of a pause that another order ended before it was complete.
fn other_order() -> ApiError {
    let message = "another order has ended this pause, or given it another mode";
    ApiError::new(ErrorKind::Conflict, message).with_code("order_replaced")
}
