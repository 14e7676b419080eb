//! The number of files and connections that this process may have open, and the share of them for its callers.
//!
//! A process that accepts connections until the system refuses another descriptor can call nobody itself, and
//! mistakes that for the failure of others. So callers get a share, and the rest stays for the process's own calls
//! and files.

use std::error::Error;
use std::io;

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::causes;

/// Time after which a descriptor may be free again.
const RETRY_AFTER_MS: u64 = 1_000;

/// Descriptors that are not connections of callers: the log, segments, listening sockets, idle connections of pools.
const FILES_RESERVE: u64 = 64;
/// Descriptors per connection of a caller. It usually makes the process open one of its own, such as to a worker.
const DESCRIPTORS_PER_CALLER: u64 = 2;
/// Fewest connections for callers. A listener that takes none would be useless, however few descriptors there are.
const CALLERS_MIN: u64 = 8;

/// Raises the limit on open descriptors to the most that this process may set, and returns the limit that then holds.
/// `None` means that there is no limit.
pub fn raise_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return limit.current;
    }
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::warn!(%error, "cannot raise the limit on open files");
            limit.current
        }
    }
}

/// The error of a call that was never made because this process, or its machine, has too many files and connections
/// open. `None` if the call failed for another reason.
pub fn exhausted(error: &(dyn Error + 'static)) -> Option<ApiError> {
    let mut cause = error;
    loop {
        let cause_io = cause.downcast_ref::<io::Error>();
        let errno = cause_io.and_then(Errno::from_io_error);
        if let Some(Errno::MFILE | Errno::NFILE) = errno {
            break;
        }
        cause = cause.source()?;
    }
    let message = "a service of the mesh has reached its limit on open connections; try again";
    let exhausted = ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::OUT_OF_DESCRIPTORS)
        .with_retry_after_ms(RETRY_AFTER_MS);
    Some(exhausted.with_detail(causes::plain(error)))
}

/// Connections that callers of this process may hold at once, by its present limit on descriptors.
pub(crate) fn callers_max() -> usize {
    share_of_callers(getrlimit(Resource::Nofile).current)
}

fn share_of_callers(descriptors: Option<u64>) -> usize {
    let Some(descriptors) = descriptors else {
        return usize::MAX;
    };
    let share = descriptors.saturating_sub(FILES_RESERVE) / DESCRIPTORS_PER_CALLER;
    usize::try_from(share.max(CALLERS_MIN)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_never_get_all_descriptors() {
        assert_eq!(share_of_callers(Some(1_024)), 480);
        assert_eq!(share_of_callers(Some(256)), 96);
        assert_eq!(share_of_callers(Some(10)), 8);
        assert_eq!(share_of_callers(None), usize::MAX);
    }

    #[test]
    fn the_lack_of_descriptors_is_found_at_any_depth_of_an_error() {
        let cause = io::Error::from_raw_os_error(Errno::MFILE.raw_os_error());
        let outer = anyhow::Error::new(cause)
            .context("tcp open")
            .context("connect");
        let error = exhausted(outer.as_ref()).unwrap();
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert_eq!(error.retry_after_ms, Some(RETRY_AFTER_MS));
        let refused = io::Error::from_raw_os_error(Errno::CONNREFUSED.raw_os_error());
        assert_eq!(exhausted(&refused), None);
    }

    #[test]
    fn the_limit_can_be_raised_to_the_hard_limit() {
        let raised = raise_limit();
        assert_eq!(raised, getrlimit(Resource::Nofile).current);
        assert_eq!(raised, getrlimit(Resource::Nofile).maximum);
    }
}
