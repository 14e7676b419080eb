//! The scheduler's decisions as log lines: who asked, who got a chunk, who went away, and how each chunk ended.
//!
//! They answer why a request waits, and why another one went first. There are three lines for each chunk, so they are
//! at `debug`, under a target of their own: `telemetry.log = "info,scheduling=debug"`. The lines are in the order in
//! which the core applied the events. They name groups, and never a prompt or an output.

use refrain_protocol::RequestId;
use refrain_protocol::scheduling::{Lease, LeaseFinish, LeaseRequest};

use crate::dispatch::{LeaseEnd, Placed};

/// The target of the lines. Filters name it.
const TARGET: &str = "scheduling";

/// A request asks for a chunk, and may end the one before.
pub(crate) fn asked(request: &LeaseRequest) {
    if let Some(finish) = &request.ended {
        ended(finish);
    }
    tracing::debug!(
        target: TARGET,
        request = %request.request,
        class = request.class.as_str(),
        group = request.group.as_deref(),
        age_ms = request.age_ms,
        generated_tokens = request.generated_tokens,
        max_new_tokens = request.max_new_tokens,
        expected_tokens = request.expected_tokens,
        "a request asks for a chunk"
    );
}

/// A request gets a chunk. The low half of the lease's id is that of the request's.
pub(crate) fn granted(lease: &Lease, waited_ms: u64, placed: &Placed) {
    tracing::debug!(
        target: TARGET,
        request = %placed.request,
        lease = %lease.lease,
        worker = %lease.worker,
        class = placed.class.as_str(),
        probe = placed.probe,
        estimated_tokens = placed.estimated_tokens,
        generated_tokens = placed.generated_tokens,
        chunk_tokens = lease.chunk_tokens,
        held_tokens = placed.held_tokens,
        missing_tokens = placed.missing_tokens,
        moved = placed.moved,
        waited_ms,
        "a chunk is granted"
    );
}

/// The caller of a request that waits is gone. Another member of its group may become the group's probe.
pub(crate) fn withdrawn(request: RequestId) {
    tracing::debug!(target: TARGET, %request, "a request is withdrawn");
}

/// A chunk has ended, by what its holder says. Ends without its holder have a line at `info`.
pub(crate) fn ended(finish: &LeaseFinish) {
    tracing::debug!(
        target: TARGET,
        lease = %finish.lease,
        outcome = LeaseEnd::Finished(finish.outcome).as_str(),
        emitted_tokens = finish.emitted_tokens,
        cached_tokens = finish.cached_tokens,
        "a chunk has ended"
    );
}
