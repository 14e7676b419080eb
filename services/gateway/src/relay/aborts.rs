//! Requests that a trainer aborts: they end with the output that they have, wherever they are.

use crate::request::GenerateRequest;

/// Waits for `work`, or until the request is aborted: then there is no result.
pub(super) async fn until_aborted<T>(
    request: &GenerateRequest,
    work: impl Future<Output = T>,
) -> Option<T> {
    match &request.abort {
        None => Some(work.await),
        Some(abort) => abort.run_until_cancelled(work).await,
    }
}
