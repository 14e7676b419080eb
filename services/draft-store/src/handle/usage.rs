//! Calls about usage: `refrain_rpc::UsageStore` on the handle.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::usage::{
    EraseUsageReply, EraseUsageRequest, RecordUsageReply, RecordUsageRequest, UsageRow,
    UsageRowsReply, UsageRowsRequest,
};
use refrain_rpc::UsageStore;

use crate::handle::DraftStoreHandle;
use crate::handle::checks::answer_of;
use crate::metrics::Limit;
use crate::reading::usage;
use crate::writer::usage_start;

/// Most rows of one call.
const ROWS_MAX: usize = 4_096;

/// Most spenders that one call may ask about.
const SPENDERS_MAX: usize = 65_536;

/// How long an erasure waits for the gateways, and the pause between two looks.
const GATEWAYS_WAIT: Duration = Duration::from_secs(5);
const GATEWAYS_PAUSE: Duration = Duration::from_millis(50);

#[async_trait]
impl UsageStore for DraftStoreHandle {
    async fn record_usage(
        &self,
        request: RecordUsageRequest,
    ) -> Result<RecordUsageReply, ApiError> {
        let _running = self.enter()?;
        self.check_count(request.rows.len(), ROWS_MAX, "rows", Limit::UsageRows)?;
        self.check_count(
            request.spenders.len(),
            SPENDERS_MAX,
            "spenders",
            Limit::UsageRows,
        )?;
        for row in &request.rows {
            self.check_row(row)?;
        }
        self.inner.usage_gateways.called(
            request.gateway,
            request.erasures_known_ms,
            Instant::now(),
        );
        self.ask(move |writer| writer.record_usage(&request)).await
    }

    async fn usage_rows(&self, request: UsageRowsRequest) -> Result<UsageRowsReply, ApiError> {
        let _running = self.enter()?;
        self.read_blocking(move |shared| usage::page(shared, &request))
            .await
    }

    async fn erase_usage(&self, request: EraseUsageRequest) -> Result<EraseUsageReply, ApiError> {
        let running = self.enter()?;
        self.check_usage_name("tenant", &request.tenant)?;
        let handle = self.clone();
        // An erasure is completed even if its caller hangs up.
        let erasing = tokio::spawn(async move {
            let _running = running;
            handle.erase_all_usage(request.tenant).await
        });
        erasing.await.map_err(ApiError::internal)?
    }
}

impl DraftStoreHandle {
    fn check_row(&self, row: &UsageRow) -> Result<(), ApiError> {
        let id = &row.id;
        for (param, name) in [
            ("tenant", &id.tenant),
            ("key", &id.key),
            ("model", &id.model),
        ] {
            self.check_usage_name(param, name)?;
        }
        Ok(())
    }

    fn check_usage_name(&self, param: &str, name: &str) -> Result<(), ApiError> {
        self.check_name(param, name)?;
        match name.contains('\0') {
            true => Err(ApiError::invalid(param, "a name must not have a zero byte")),
            false => Ok(()),
        }
    }

    /// Marks the usage of a tenant as erased, removes its rows, and rewrites the log, which still holds them.
    /// Then it waits for the gateways, for a while.
    async fn erase_all_usage(&self, tenant: String) -> Result<EraseUsageReply, ApiError> {
        let alone = self.inner.erasing.lock().await;
        let marked = tenant.clone();
        let erased_at_ms = self
            .ask(move |writer| writer.mark_usage_erased(&marked))
            .await?;
        let (mut rows, mut next) = (0, Some(usage_start()));
        while let Some(from) = next {
            let erased = tenant.clone();
            let call = move |writer: &mut crate::writer::actor::WriterActor| {
                writer.erase_usage(&erased, erased_at_ms, &from)
            };
            // One erasure at a time, and one call at a time: a full mailbox must not stop it half way.
            let part = answer_of(self.inner.writer.ask(call)).await?;
            rows += part.rows;
            next = part.next;
        }
        self.rewrite().await?;
        tracing::info!(rows, "draft store usage erased");
        drop(alone);
        let began = Instant::now();
        let gateways = loop {
            let now = Instant::now();
            let erased = self.inner.usage_gateways.erased(erased_at_ms, now);
            if erased.pending == 0 || now.duration_since(began) >= GATEWAYS_WAIT {
                break erased;
            }
            tokio::time::sleep(GATEWAYS_PAUSE).await;
        };
        Ok(EraseUsageReply {
            erased_at_ms,
            rows,
            gateways: gateways.done,
            gateways_pending: gateways.pending,
        })
    }
}
