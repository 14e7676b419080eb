//! Acceptance statistics: a worker's observations are added to the tables of their namespace, which are returned.

use refrain_protocol::chances::{ChancesReply, ChancesRequest};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_speculation::{CALIBRATION_BYTES_MAX, CalibrationError, Observed};

use crate::service::handle::DraftStoreHandle;
use crate::writer::messages::WriterMessage;
use crate::writer::requests::StatisticsReport;

impl DraftStoreHandle {
    pub(super) async fn exchange_statistics(
        &self,
        request: ChancesRequest,
    ) -> Result<ChancesReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        let names = request.namespace.namespace;
        self.check(&names, &[])?;
        let observed = observed(&request.observed)?;
        let ask = self.ask(|reply| match observed.is_empty() {
            true => WriterMessage::ReadStatistics(namespace, reply),
            false => WriterMessage::AddStatistics(
                StatisticsReport {
                    namespace,
                    names,
                    observed,
                },
                reply,
            ),
        });
        let tables = ask.await?;
        Ok(ChancesReply { tables })
    }
}

fn observed(bytes: &[u8]) -> Result<Observed, ApiError> {
    if bytes.is_empty() {
        return Ok(Observed::default());
    }
    if bytes.len() > CALIBRATION_BYTES_MAX {
        let message = format!("observed: more than {CALIBRATION_BYTES_MAX} bytes");
        return Err(ApiError::new(ErrorKind::TooLarge, message));
    }
    let refuse = |error: CalibrationError| ApiError::invalid("observed", error.to_string());
    Observed::from_bytes(bytes).map_err(refuse)
}
