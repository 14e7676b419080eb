//! A store of usage in memory, for the scripted mesh.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::usage::{
    EraseUsageReply, EraseUsageRequest, RecordUsageReply, RecordUsageRequest, SpentTokens,
    UsageCounts, UsageErasure, UsageRow, UsageRowId, UsageRowsReply, UsageRowsRequest, UsageTotal,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::UsageStore;

/// A store of usage in memory.
#[derive(Default)]
pub(crate) struct FakeUsage {
    pub(crate) rows: Mutex<BTreeMap<UsageRowId, UsageTotal>>,
    pub(crate) erasures: Mutex<Vec<UsageErasure>>,
    /// The answer about other gateways, for every spender.
    pub(crate) others: Mutex<Vec<SpentTokens>>,
    pub(crate) is_away: AtomicBool,
    calls: AtomicUsize,
}

#[async_trait]
impl UsageStore for FakeUsage {
    async fn record_usage(
        &self,
        request: RecordUsageRequest,
    ) -> Result<RecordUsageReply, ApiError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.is_away.load(Ordering::SeqCst) {
            return Err(ApiError::new(ErrorKind::Unavailable, "away by script"));
        }
        let mut rows = self.rows.lock().unwrap();
        for row in request.rows {
            let known = rows.entry(row.id).or_default();
            *known = known.merge(row.total);
        }
        let others = self.others.lock().unwrap().clone();
        let erasures = self.erasures.lock().unwrap().clone().into_iter();
        Ok(RecordUsageReply {
            erasures: erasures
                .filter(|erasure| erasure.at_ms > request.erasures_known_ms)
                .collect(),
            spent: vec![others; request.spenders.len()],
        })
    }

    async fn usage_rows(&self, _: UsageRowsRequest) -> Result<UsageRowsReply, ApiError> {
        let rows = self.rows.lock().unwrap();
        let rows = rows.iter().map(|(id, total)| UsageRow {
            id: id.clone(),
            total: *total,
        });
        Ok(UsageRowsReply {
            rows: rows.collect(),
            next: None,
        })
    }

    async fn erase_usage(&self, _: EraseUsageRequest) -> Result<EraseUsageReply, ApiError> {
        Err(ApiError::internal("not in this test"))
    }
}

impl FakeUsage {
    /// The sums of a tenant over all rows.
    pub(crate) fn of(&self, tenant: &str) -> UsageCounts {
        let rows = self.rows.lock().unwrap();
        let of_tenant = rows.iter().filter(|(id, _)| id.tenant == tenant);
        let counts = of_tenant.map(|(_, total)| total.counts);
        counts.fold(UsageCounts::default(), UsageCounts::plus)
    }

    /// Waits until the sums of a tenant are so.
    pub(crate) async fn until(
        &self,
        tenant: &str,
        is_so: impl Fn(UsageCounts) -> bool,
    ) -> UsageCounts {
        for _ in 0..12_000 {
            let counts = self.of(tenant);
            if is_so(counts) {
                return counts;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("the usage of {tenant} stays {:?}", self.of(tenant));
    }

    /// Waits for two more calls, so that at least one began after now.
    pub(crate) async fn next_calls(&self) {
        let wanted = self.calls.load(Ordering::SeqCst) + 2;
        for _ in 0..12_000 {
            if self.calls.load(Ordering::SeqCst) >= wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("the gateway does not call the store");
    }
}
