//! How many files and connections this process may have open, and how many of them callers may take.
//!
//! A process that accepts until the system refuses it another descriptor cannot call anybody itself, and takes its
//! own poverty for the failure of others. So callers get a share, and what is left stays for the process's own calls
//! and files.

use std::error::Error;
use std::io;

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// When a descriptor may be free again.
const RETRY_AFTER_MS: u64 = 1_000;

/// Descriptors that a process has open beside connections: its log, its segments, sockets that listen, pools' spares.
const FILES_RESERVE: u64 = 64;
/// A caller's connection usually makes the process open one of its own: to a worker, an engine, a store.
const DESCRIPTORS_PER_CALLER: u64 = 2;
/// However little there is, a listener that takes nobody would be of no use.
const CALLERS_MIN: u64 = 8;

/// Raises the number of descriptors that this process may have open to what it is allowed to raise it to. Returns
/// that number; `None`: there is no limit, or it could not be raised, in which case the old one stays in force.
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
            tracing::warn!(%error, "the limit on open files could not be raised");
            limit.current
        }
    }
}

/// The error of a call that was never made, if it was not made because this process, or its machine, has too many
/// files and connections open.
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
    let message = "a service of the mesh has as many connections open as it may; try again";
    let exhausted = ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::OUT_OF_DESCRIPTORS)
        .with_retry_after_ms(RETRY_AFTER_MS);
    Some(exhausted.with_detail(error))
}

/// Connections that callers of this process may hold at once, by its limit on descriptors as it is now.
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
    fn want_of_descriptors_is_found_however_deep_it_lies() {
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
    fn the_limit_can_be_raised_to_what_is_allowed() {
        let raised = raise_limit();
        assert_eq!(raised, getrlimit(Resource::Nofile).current);
        assert_eq!(raised, getrlimit(Resource::Nofile).maximum);
    }
}
