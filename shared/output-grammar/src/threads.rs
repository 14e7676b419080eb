//! The threads that do the work of forms: a few at once, and of one tenant never all of them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use refrain_protocol::TenantId;
use refrain_service_kit::priority::give_way;

/// Stack of a thread. References nest as deeply as a schema has them, and rules as a grammar has them.
const STACK_BYTES: usize = 512 << 20;

/// A thread without work ends after this time, and gives its stack back.
const IDLE: Duration = Duration::from_secs(2);

/// Work for one form. It may panic: what it owns is then lost, and the thread goes on.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// The threads, and the work that waits for them. Tenants take turns.
pub(crate) struct FormThreads {
    threads_max: usize,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    tenants: HashMap<TenantId, TenantTasks>,
    /// The tenants with waiting tasks. The first one that has a thread left comes next.
    turns: VecDeque<TenantId>,
    threads: usize,
    idle: usize,
    /// Number of waiting tasks, some of which an idle thread may be about to take.
    waiting: usize,
}

/// The tasks of a tenant.
#[derive(Default)]
struct TenantTasks {
    waiting: VecDeque<Task>,
    running: usize,
}

impl FormThreads {
    pub(crate) fn new(threads_max: usize) -> Arc<Self> {
        Arc::new(FormThreads {
            threads_max: threads_max.max(1),
            state: Mutex::default(),
            wake: Condvar::new(),
        })
    }

    /// Maximum number of threads of one tenant: half of all, so that the work of others always finds one.
    fn tenant_max(&self) -> usize {
        self.threads_max.div_ceil(2)
    }

    /// Has a thread do the task in its tenant's turn. The task is given back where there is no thread at all.
    pub(crate) fn start(self: &Arc<Self>, tenant: TenantId, task: Task) -> Result<(), Task> {
        let mut state = self.state.lock();
        if state.waiting >= state.idle && state.threads < self.threads_max {
            let threads = self.clone();
            let spawned = std::thread::Builder::new()
                .name("form-worker".into())
                .stack_size(STACK_BYTES)
                .spawn(move || threads.run());
            match spawned {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads > 0 => {}
                Err(_) => return Err(task),
            }
        }
        let tasks = state.tenants.entry(tenant).or_default();
        tasks.waiting.push_back(task);
        let is_first = tasks.waiting.len() == 1;
        state.waiting += 1;
        if is_first {
            state.turns.push_back(tenant);
        }
        self.wake.notify_one();
        Ok(())
    }

    /// Takes the next task of the tenant whose turn it is.
    fn next(&self, state: &mut State) -> Option<(TenantId, Task)> {
        let has_thread = |tenant: &TenantId| {
            let tasks = state.tenants.get(tenant);
            tasks.is_some_and(|tasks| tasks.running < self.tenant_max())
        };
        let turn = state.turns.iter().position(has_thread)?;
        let tenant = state.turns.remove(turn)?;
        let tasks = state.tenants.get_mut(&tenant)?;
        let task = tasks.waiting.pop_front()?;
        tasks.running += 1;
        state.waiting -= 1;
        if !tasks.waiting.is_empty() {
            state.turns.push_back(tenant);
        }
        Some((tenant, task))
    }

    /// Does tasks until there have been none for a while. This is the body of a thread.
    fn run(&self) {
        // A form may want a whole core for a while. Steps, for which all sessions wait, go first.
        give_way();
        let mut state = self.state.lock();
        loop {
            let Some((tenant, task)) = self.next(&mut state) else {
                state.idle += 1;
                let waited = self.wake.wait_for(&mut state, IDLE);
                state.idle -= 1;
                // Tasks that still wait then are of tenants whose threads go on with them.
                if waited.timed_out() && state.turns.is_empty() {
                    break;
                }
                continue;
            };
            drop(state);
            // Those who wait for the outcome find that the task is gone.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task));
            state = self.state.lock();
            if let Some(tasks) = state.tenants.get_mut(&tenant) {
                tasks.running -= 1;
                if tasks.running == 0 && tasks.waiting.is_empty() {
                    state.tenants.remove(&tenant);
                }
            }
        }
        state.threads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn tasks_that_come_together_do_not_wait_for_one_idle_thread() {
        let threads = FormThreads::new(2);
        for _ in 0..50 {
            let (ended, ends) = channel();
            let first = ended.clone();
            let task = Box::new(move || first.send(()).unwrap());
            assert!(threads.start(TenantId(1), task).is_ok());
            ends.recv().unwrap();
            // The task of one tenant lasts until that of another was done.
            let (open, gate) = channel::<()>();
            let lasting = Box::new(move || gate.recv().unwrap());
            assert!(threads.start(TenantId(1), lasting).is_ok());
            let other = Box::new(move || ended.send(()).unwrap());
            assert!(threads.start(TenantId(2), other).is_ok());
            ends.recv_timeout(Duration::from_secs(60)).unwrap();
            open.send(()).unwrap();
        }
    }
}
