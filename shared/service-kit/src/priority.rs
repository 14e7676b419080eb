//! Threads whose work others should not wait for.

/// How much lower the priority of such a thread is, as a nice value. A core that both kinds of thread want gives it
/// about a tenth of the time.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;

/// Has this thread run after others that want the processor.
///
/// On Linux each thread has a priority of its own. Elsewhere it is that of the whole process, so it stays as it is.
#[cfg(target_os = "linux")]
pub fn give_way() {
    use rustix::process::{getpriority_process, setpriority_process};
    let given = getpriority_process(None).and_then(|priority| match priority < NICE {
        true => setpriority_process(None, NICE),
        // An operator has the whole process give way even more.
        false => Ok(()),
    });
    if let Err(error) = given {
        tracing::debug!(%error, "a background thread runs with the usual priority");
    }
}

/// Has this thread run after others, where the system can do that: not here.
#[cfg(not(target_os = "linux"))]
pub fn give_way() {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gives_way_alone_and_not_more_each_time() {
        let priority = || rustix::process::getpriority_process(None).unwrap();
        let before = priority();
        let of_job = std::thread::spawn(move || {
            give_way();
            let once = priority();
            give_way();
            (once, priority())
        });
        let expected = before.max(NICE);
        assert_eq!(of_job.join().unwrap(), (expected, expected));
        assert_eq!(priority(), before, "the others keep theirs");
    }
}
