//! Calls about usage.

use refrain_protocol::usage::{RecordUsageReply, RecordUsageRequest};
use refrain_protocol::{ApiError, ErrorKind};

use crate::metrics::Limit;
use crate::writer::actor::WriterActor;
use crate::writer::edit::usage::ErasedUsagePart;

impl WriterActor {
    /// Stores rows of usage, which are durable once this returns.
    pub(crate) fn record_usage(
        &mut self,
        request: &RecordUsageRequest,
    ) -> Result<RecordUsageReply, ApiError> {
        if !request.rows.is_empty()
            && let Some(error) = self.no_room()
        {
            return Err(error);
        }
        let mut reply = None;
        self.run(|core, catalog, now_ms| {
            let (answer, outcome) = core.record_usage(catalog, request, now_ms)?;
            reply = answer;
            Ok(outcome)
        })?;
        reply.ok_or_else(|| {
            self.metrics.reject(Limit::UsageRows);
            let message = "the draft store has as many rows of usage as it may (usage_rows_max); raise the limit, or \
                           lower usage_retention_days";
            ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(60_000)
        })
    }

    /// Remembers that the usage of a tenant is erased. Returns the time, once that is durable.
    pub(crate) fn mark_usage_erased(&mut self, tenant: &str) -> Result<u64, ApiError> {
        let mut at_ms = None;
        self.run(|core, catalog, now_ms| {
            let (marked, outcome) = core.mark_usage_erased(catalog, tenant, now_ms)?;
            at_ms = marked;
            Ok(outcome)
        })?;
        at_ms.ok_or_else(|| {
            self.metrics.reject(Limit::Erasures);
            let message = "the usage of too many tenants is erased; erasures are forgotten after usage_retention_days";
            ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(3_600_000)
        })
    }

    /// Removes a part of the rows that an erasure hits.
    pub(crate) fn erase_usage(
        &mut self,
        tenant: &str,
        at_ms: u64,
        from: &[u8],
    ) -> Result<ErasedUsagePart, ApiError> {
        let mut erased = ErasedUsagePart::default();
        self.run(|core, catalog, now_ms| {
            let (part, outcome) = core.erase_usage(catalog, (tenant, at_ms), from, now_ms)?;
            erased = part;
            Ok(outcome)
        })?;
        Ok(erased)
    }
}
