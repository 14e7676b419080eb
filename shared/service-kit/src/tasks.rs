//! Counts and logs all panics of a process, also those of calls, whose callers learn of them.

use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;

/// Panics of this process since [`report_panics`].
static PANICS: AtomicU64 = AtomicU64::new(0);

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
