//! What drafts are worth: observations of workers are added to the tables of their namespace, which come back.

use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_speculation::Observed;
use refrain_speculation::statistics::{STATISTICS_BYTES_MAX, StatisticsError};
use tokio::sync::oneshot;

use super::DraftStoreHandle;
use crate::shared::unavailable;
use crate::writer::Told;
use crate::writer::call::Call;

impl DraftStoreHandle {
    pub(super) async fn exchange(
        &self,
        request: AcceptanceStatsRequest,
    ) -> Result<AcceptanceStatsReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        let names = request.namespace.namespace;
        self.check(&names, &[])?;
        let observed = observed(&request.observed)?;
        let (reply, answer) = oneshot::channel();
        self.send(match observed.is_empty() {
            true => Call::Ask(namespace, reply),
            false => Call::Tell(
                Told {
                    namespace,
                    names,
                    observed,
                },
                reply,
            ),
        })?;
        let tables = answer
            .await
            .map_err(|_| unavailable().with_detail("the writer dropped the call"))??;
        Ok(AcceptanceStatsReply { tables })
    }
}

fn observed(bytes: &[u8]) -> Result<Observed, ApiError> {
    if bytes.is_empty() {
        return Ok(Observed::default());
    }
    if bytes.len() > STATISTICS_BYTES_MAX {
        let message = format!("observed: more than {STATISTICS_BYTES_MAX} bytes");
        return Err(ApiError::new(ErrorKind::TooLarge, message));
    }
    let refuse = |error: StatisticsError| ApiError::invalid("observed", error.to_string());
    Observed::from_bytes(bytes).map_err(refuse)
}
