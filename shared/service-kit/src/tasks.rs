//! Tasks that run for the life of a process, and what becomes of the process when one of them panics.
//!
//! A panic ends the task that it happens in, and nobody hears of it. So such a task runs in one of these ways:
//!
//! * [`lasting`], and [`lasting_work`] for threads: after a panic the process is not ready, and `/readyz` names the
//!   task. It suits tasks whose state is lost with them.
//! * With a [`Sentinel`] inside, for actors: the same.
//! * [`restarted`]: after a panic the task begins anew. It suits tasks that keep nothing, or whose state others hold.
//!
//! [`report_panics`] counts and logs all panics of the process, also those of calls, whose callers learn of them.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;

/// Pause before a task begins anew, so that one that always panics does not fill the log.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// Panics of this process since [`report_panics`].
static PANICS: AtomicU64 = AtomicU64::new(0);

/// The lasting tasks that panicked.
static LOST: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Counts and logs all panics from now on. Call it once per process, after the log is set up.
pub fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let place = panic.location().map(ToString::to_string);
        let (thread, reason) = (std::thread::current(), reason(panic));
        tracing::error!(place, thread = name(&thread), reason, "panic");
    }));
}

fn name(thread: &Thread) -> &str {
    thread.name().unwrap_or("without a name")
}

/// The message of a panic if it is fixed in the program. One with values in it may quote a user's text, such as that
/// of a slice between the bytes of a character.
fn reason<'a>(panic: &PanicHookInfo<'a>) -> &'a str {
    let fixed = panic.payload().downcast_ref::<&'static str>();
    fixed
        .copied()
        .unwrap_or("not shown, as it may quote a text")
}

/// Number of panics since [`report_panics`].
pub(crate) fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Whether all lasting tasks of this process run.
///
/// # Errors
/// One has panicked; the text is for `/readyz`.
pub fn all_run() -> Result<(), String> {
    match LOST.lock().first() {
        None => Ok(()),
        Some(name) => Err(format!(
            "the task \"{name}\" panicked; the log says where. Restart this process"
        )),
    }
}

/// A task without which the process cannot do its work. After a panic, which goes on to its handle, the process is
/// not ready.
pub async fn lasting<F: Future>(name: &'static str, task: F) -> F::Output {
    let outcome = AssertUnwindSafe(task).catch_unwind().await;
    outcome.unwrap_or_else(|panic| lose(name, panic))
}

/// As [`lasting`], for the work of a thread.
pub fn lasting_work<T>(name: &'static str, work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    move || catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| lose(name, panic))
}

/// Part of an actor without which the process cannot do its work. If it is dropped by a panic, the process is not
/// ready, as by [`lasting`].
pub struct Sentinel(pub &'static str);

impl Drop for Sentinel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            note_lost(self.0);
        }
    }
}

fn lose(name: &'static str, panic: Box<dyn Any + Send>) -> ! {
    note_lost(name);
    resume_unwind(panic)
}

fn note_lost(name: &'static str) {
    LOST.lock().push(name);
    tracing::error!(
        task = name,
        "a task of this process panicked, so it is no longer ready; restart it"
    );
}

/// A task that `begin` makes, and makes again after each panic.
pub async fn restarted<F: Future>(name: &'static str, mut begin: impl FnMut() -> F) -> F::Output {
    loop {
        let run = AssertUnwindSafe(async { begin().await });
        match run.catch_unwind().await {
            Ok(output) => return output,
            Err(_) => tracing::error!(task = name, "a task panicked, and begins anew"),
        }
        tokio::time::sleep(RESTART_PAUSE).await;
    }
}
