//! The connections of one runtime that no call uses.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_service_kit::actors;
use tokio::runtime::Handle;

use super::connection::Connection;

/// Connections that no call uses, for as long as their engine keeps them open.
pub(super) struct IdleConnections {
    idle_max: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the time since when they are idle: the newest last.
    connections: Vec<(Instant, Connection)>,
    /// Whether a task closes those that are idle for too long.
    is_swept: bool,
}

impl IdleConnections {
    pub(super) fn new(idle_max: Duration) -> Self {
        IdleConnections {
            idle_max,
            state: Mutex::default(),
        }
    }

    /// Takes the connection that was used last, if there is one that can be used.
    pub(super) fn take(&self, now: Instant) -> Option<Connection> {
        loop {
            let (since, mut connection) = self.state.lock().connections.pop()?;
            let is_fresh = now.saturating_duration_since(since) < self.idle_max;
            if is_fresh && connection.is_usable() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection whose call has ended, unless it is closed.
    pub(super) fn put(self: &Arc<Self>, mut connection: Connection, now: Instant) {
        if !connection.is_usable() {
            return;
        }
        let mut state = self.state.lock();
        state.connections.push((now, connection));
        if !state.is_swept
            && let Ok(runtime) = Handle::try_current()
        {
            state.is_swept = true;
            drop(state);
            let (idle, idle_max) = (Arc::downgrade(self), self.idle_max);
            let sweep = move || sweep(idle.clone(), idle_max);
            actors::start_on(&runtime, "idle connections", sweep).detached();
        }
    }

    /// Closes the connections that are idle for too long. Returns whether any is left.
    fn close_old(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        let idle_max = self.idle_max;
        let is_old = |since: &Instant| now.saturating_duration_since(*since) >= idle_max;
        let old = state
            .connections
            .partition_point(|(since, _)| is_old(since));
        state.connections.drain(..old);
        state.is_swept = !state.connections.is_empty();
        state.is_swept
    }
}

/// Closes old connections until none is left.
async fn sweep(idle: Weak<IdleConnections>, idle_max: Duration) {
    loop {
        tokio::time::sleep(idle_max).await;
        let Some(idle) = idle.upgrade() else {
            return;
        };
        if !idle.close_old(Instant::now()) {
            return;
        }
    }
}
