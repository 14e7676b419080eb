//! The core's part in usage: what gateways send, what has become too old, and what is erased.

use refrain_protocol::usage::{RecordUsageReply, RecordUsageRequest};

use super::core::WriterCore;
use crate::catalog::Catalog;
use crate::log::LogError;
use crate::writer::edit::Edit;
use crate::writer::edit::usage::{ErasedUsagePart, first_hour};
use crate::writer::outcome::CommitOutcome;

/// Rows that one step of an erasure looks at.
const ERASE_STEP_ROWS: usize = 16_384;

/// Rows that one tick removes because of their age.
const EXPIRE_STEP_ROWS: usize = 4_096;

/// Tenants whose erasures of usage are remembered. Further ones get 429.
const ERASURES_MAX: usize = 4_096;

const DAY_MS: u64 = 24 * 3_600 * 1_000;

impl WriterCore {
    /// Stores rows of usage, and answers what the gateway asks about others. `None` if there would be too many rows.
    pub(crate) fn record_usage(
        &mut self,
        catalog: &mut Catalog,
        request: &RecordUsageRequest,
        now_ms: u64,
    ) -> Result<(Option<RecordUsageReply>, CommitOutcome), LogError> {
        let first_hour = first_hour(now_ms, self.config.usage_retention_days);
        let rows_max = self.config.usage_rows_max;
        let mut edit = self.edit(catalog, now_ms);
        let has_room = edit.usage().record(&request.rows, first_hour, rows_max)?;
        // Rows that fit are kept: they may come again, and the gateway goes on sending those that had no room.
        let outcome = self.commit(edit, now_ms)?;
        if !has_room {
            return Ok((None, outcome));
        }
        let usage = &catalog.usage;
        let periods = (request.day, request.month);
        let spenders = request.spenders.iter();
        let reply = RecordUsageReply {
            erasures: usage.erasures_after(request.erasures_known_ms),
            spent: spenders
                .map(|spender| usage.spent(spender, periods, request.gateway))
                .collect(),
        };
        Ok((Some(reply), outcome))
    }

    /// Removes what has become too old. Returns whether there is more.
    pub(super) fn expire_usage(&self, edit: &mut Edit<'_>, now_ms: u64) -> Result<bool, LogError> {
        let days = self.config.usage_retention_days;
        edit.usage()
            .forget_erasures(now_ms.saturating_sub(u64::from(days) * DAY_MS));
        edit.usage()
            .expire(first_hour(now_ms, days), EXPIRE_STEP_ROWS)
    }

    /// Remembers that the usage of a tenant is erased. Returns the time, or `None` if no more can be remembered.
    pub(crate) fn mark_usage_erased(
        &mut self,
        catalog: &mut Catalog,
        tenant: &str,
        now_ms: u64,
    ) -> Result<(Option<u64>, CommitOutcome), LogError> {
        let before = catalog.usage.erased_at(tenant);
        if before.is_none() && catalog.usage.erasures() >= ERASURES_MAX {
            return Ok((None, CommitOutcome::default()));
        }
        // Gateways ask for erasures after the last one that they know, so no two have the same time.
        let latest_ms = catalog
            .usage
            .erasures_after(0)
            .last()
            .map_or(0, |last| last.at_ms);
        let at_ms = now_ms.max(latest_ms + 1);
        let mut edit = self.edit(catalog, now_ms);
        edit.usage().mark_erased(tenant, at_ms);
        Ok((Some(at_ms), self.commit(edit, now_ms)?))
    }

    /// Removes a part of the rows that an erasure hits.
    pub(crate) fn erase_usage(
        &mut self,
        catalog: &mut Catalog,
        (tenant, at_ms): (&str, u64),
        from: &[u8],
        now_ms: u64,
    ) -> Result<(ErasedUsagePart, CommitOutcome), LogError> {
        let mut edit = self.edit(catalog, now_ms);
        let part = edit.usage().erase(tenant, at_ms, from, ERASE_STEP_ROWS)?;
        Ok((part, self.commit(edit, now_ms)?))
    }
}
