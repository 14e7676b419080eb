//! The calls of a join to the other replica.

use std::time::Duration;

use refrain_protocol::ApiError;
use refrain_rpc::HttpReplicaPeer;

use crate::replication::pace::Pace;
use crate::replication::session::Session;
use crate::replication::stream::SessionError;

/// How often a call is repeated before another session begins anew.
const REPEATS_MAX: usize = 5;

/// A join that is under way.
pub(super) struct Joining<'a> {
    pub(super) session: &'a Session,
    pub(super) peer: HttpReplicaPeer,
    /// The generation of the other replica.
    pub(super) origin: u64,
    pub(super) pace: Pace,
}

/// The error of a join that cannot go on.
pub(super) fn joining(error: impl std::fmt::Display) -> SessionError {
    SessionError::broker("documents of another replica cannot be taken over", error)
}

/// Makes a call, and repeats it after errors. Earlier answers stay.
pub(super) async fn repeated<T, F: Future<Output = Result<T, ApiError>>>(
    call: impl Fn() -> F,
) -> Result<T, SessionError> {
    let mut failures = 0;
    loop {
        match call().await {
            Ok(answer) => return Ok(answer),
            Err(error) if failures == REPEATS_MAX => return Err(joining(error)),
            Err(_) => failures += 1,
        }
        tokio::time::sleep(Duration::from_millis(200 << failures)).await;
    }
}
