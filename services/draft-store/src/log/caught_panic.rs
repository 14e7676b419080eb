//! Panics of a library that are expected and caught. They are told as errors, so the log does not show them as
//! panics.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::Once;

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send + 'static>;

thread_local! {
    /// Whether the next panic of this thread will be caught by [`catch`].
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// A hook that shows only panics that nobody expects.
fn unless_caught(usual: Hook) -> Hook {
    Box::new(move |panic| {
        if !IS_CAUGHT.get() {
            usual(panic);
        }
    })
}

/// Runs a call, and returns the message of its panic as an error. The caller discards what the call has changed.
pub(super) fn catch<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| set_hook(unless_caught(take_hook())));
    let before = IS_CAUGHT.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(call));
    IS_CAUGHT.set(before);
    outcome.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        text.unwrap_or("without a message").to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_caught_panic_is_an_error_and_only_others_are_shown() {
        let shown = Arc::new(AtomicUsize::new(0));
        catch(|| ()).unwrap();
        let (counted, of_test) = (shown.clone(), std::thread::current().id());
        set_hook(unless_caught(Box::new(move |_| {
            // Other tests run beside this one.
            let is_own = std::thread::current().id() == of_test;
            counted.fetch_add(usize::from(is_own), Ordering::Relaxed);
        })));
        assert_eq!(
            catch(|| -> u8 { panic!("page {}", 7) }),
            Err("page 7".into())
        );
        assert_eq!(catch(|| 3), Ok(3));
        assert_eq!(shown.load(Ordering::Relaxed), 0);
        assert!(catch_unwind(|| panic!("a fault of ours")).is_err());
        assert_eq!(shown.load(Ordering::Relaxed), 1);
        set_hook(unless_caught(Box::new(|panic| eprintln!("{panic}"))));
    }
}
