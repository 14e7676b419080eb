//! Usage of tenants, keys and models: counted while requests run, kept in a journal, and sent to the draft store.
//!
//! The way of a count: `meter.rs` sums up a request while it runs, and sends its progress to the thread of
//! `keeper.rs`. That writes it to the file of `journal.rs` and adds it to the totals of `book.rs`. A request that
//! ends without progress does this on its own thread, while the file is free and quick. `sender.rs` sends totals that
//! changed to every replica of the draft store, and learns there what other gateways have counted.
//!
//! Read first: `book.rs`. It is a plain core, which live records and those of the journal pass alike.

mod book;
mod journal;
mod keeper;
mod meter;
mod sender;

use std::path::Path;
use std::sync::Arc;

use refrain_rpc::DraftStore;

use crate::metrics::AccountMetrics;
use crate::tenants::Budgets;
use keeper::KeeperHandle;
use sender::{SenderParts, UsageSender};

pub(crate) use book::UsageSubject;
pub use meter::{ProgressClock, UsageMeter};
pub(crate) use meter::{Usage, UsageStart};
pub use sender::OnErasure;

/// The usage of a gateway, while it runs.
pub(crate) struct UsageService {
    usage: Usage,
    sender: Option<UsageSender>,
    keeper: Option<KeeperHandle>,
}

impl UsageService {
    /// Opens the journal in `dir`, and sends what it has from now on. Without a directory nothing is kept, and
    /// budgets count from the start of the process. `requests_max` requests may be in flight. `on_erasure` is called
    /// for each tenant whose usage was erased.
    ///
    /// # Errors
    /// The directory cannot be used, or another gateway uses it.
    pub(crate) fn start(
        dir: Option<&Path>,
        requests_max: usize,
        store: Arc<dyn DraftStore>,
        budgets: &Arc<Budgets>,
        on_erasure: OnErasure,
        metrics: &Arc<AccountMetrics>,
    ) -> anyhow::Result<Self> {
        let Some(dir) = dir else {
            return Ok(UsageService {
                usage: Usage::default(),
                sender: None,
                keeper: None,
            });
        };
        let keeper = keeper::start(dir, requests_max, budgets, metrics)?;
        budgets.share();
        let sender = UsageSender::start(SenderParts {
            keeper: keeper.clone(),
            store,
            budgets: budgets.clone(),
            on_erasure,
            metrics: metrics.clone(),
        });
        Ok(UsageService {
            usage: Usage::kept_by(keeper.clone()),
            sender: Some(sender),
            keeper: Some(keeper),
        })
    }

    /// The place where requests begin to be counted.
    pub(crate) fn usage(&self) -> Usage {
        self.usage.clone()
    }

    /// Writes and sends what is left. No request runs any more.
    pub(crate) async fn close(self) {
        if let Some(sender) = self.sender {
            sender.finish().await;
        }
        if let Some(keeper) = self.keeper {
            keeper.close().await;
        }
    }
}
