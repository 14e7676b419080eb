//! Acceptance statistics: one table per namespace, kept for the workers that serve it.

use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_speculation::statistics::{AcceptanceStatistics, STATISTICS_BYTES_MAX};

use crate::log::random;
use crate::service::handle::DraftStoreHandle;
use crate::writer::messages::WriterMessage;
use crate::writer::requests::{SavedStatistics, StatisticsUpdate};

impl DraftStoreHandle {
    pub(super) async fn exchange_statistics(
        &self,
        request: AcceptanceStatsRequest,
    ) -> Result<AcceptanceStatsReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        let names = request.namespace.namespace;
        self.check(&names, &[])?;
        if request.statistics.is_empty() {
            let ask = self.ask(|reply| WriterMessage::ReadStatistics(namespace, reply));
            let kept = ask.await?;
            return Ok(kept.map_or_else(AcceptanceStatsReply::default, |kept| {
                AcceptanceStatsReply {
                    table: kept.table,
                    statistics: kept.statistics,
                }
            }));
        }
        check(&request.statistics)?;
        let update = StatisticsUpdate {
            namespace,
            names,
            continues: request.table,
            // Never 0, which stands for no table.
            new_table: random().map_err(ApiError::internal)? | 1,
            statistics: request.statistics,
        };
        let save = self.ask(|reply| WriterMessage::SaveStatistics(update, reply));
        match save.await? {
            SavedStatistics::Table(table) => Ok(AcceptanceStatsReply {
                table,
                statistics: Vec::new(),
            }),
            SavedStatistics::Erased => {
                let message =
                    "these statistics were erased; ask for the present ones and learn anew";
                Err(ApiError::new(ErrorKind::Conflict, message).with_code(code::STATISTICS_ERASED))
            }
        }
    }
}

fn check(statistics: &[u8]) -> Result<(), ApiError> {
    if statistics.len() > STATISTICS_BYTES_MAX {
        let message = format!("statistics: more than {STATISTICS_BYTES_MAX} bytes");
        return Err(ApiError::new(ErrorKind::TooLarge, message));
    }
    AcceptanceStatistics::from_bytes(statistics)
        .map(drop)
        .map_err(|error| ApiError::invalid("statistics", error.to_string()))
}
