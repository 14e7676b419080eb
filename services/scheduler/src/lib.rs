//! The scheduler: grants each request the right to decode its next chunk on one worker.
//!
//! Gateways ask for leases and workers report with heartbeats. The scheduler sees no tokens and no text, and it
//! writes nothing to disk. It starts empty and learns the mesh from one round of heartbeats, so a restart delays
//! requests by about a second and loses none.
//!
//! # Where to read
//!
//! | file | content |
//! |---|---|
//! | `dispatch.rs` | **Read this first.** The core that decides, as a pure function of events and instants. |
//! | `dispatch/fair_queue.rs` | The order of waiting requests: fair between tenants, rollouts last. |
//! | `order.rs` | The order of a tenant's rollouts, by what is known about their lengths. |
//! | `dispatch/groups.rs`, `ordering.rs` | What is known about groups, and how ranks follow it. |
//! | `placement.rs` | The choice of a worker for a request, by its load and what its KV cache holds. |
//! | `dispatch/granting.rs`, `refusing.rs` | How waiting requests get a lease or an error. |
//! | `dispatch/preemption.rs` | How waiting requests get another tenant's slot. |
//! | `dispatch/lease_table.rs`, `worker_table.rs` | The state behind these decisions. |
//! | `core.rs` | The core as callers outside this crate see it, such as a simulator. |
//! | `dispatcher.rs` | The core with its surroundings: clock, timer, replies, recovery from panics. |
//! | `event_log.rs` | The log lines of who asked, who got a chunk, and how it ended. |
//! | `handle.rs`, `http.rs` | The ways in: for callers in this process, and for all others. |
//! | `leadership.rs` | Which of several schedulers grants leases. |
//! | `server.rs` | Start and drain. |
//!
//! ```no_run
//! # async fn example(mesh: refrain_service_kit::mesh::MeshAuth) -> anyhow::Result<()> {
//! use refrain_rpc::Scheduler as _;
//! let metrics = refrain_service_kit::telemetry::Metrics::new()?;
//! let config = refrain_scheduler::SchedulerConfig::default();
//! let scheduler = refrain_scheduler::start(config, mesh, &metrics).await?;
//! println!("{:?}", scheduler.handle().models().await?);
//! scheduler.drain(std::time::Duration::from_secs(5)).await;
//! # Ok(())
//! # }
//! ```
//!
//! Slots are shared fairly between tenants. Interactive requests of a tenant are served first come, first served, and
//! before its rollouts, which keep a share of the slots. The order of rollouts follows Seer (arXiv 2511.14617).

mod config;
pub mod core;
mod dispatch;
mod dispatcher;
mod event_log;
mod handle;
mod http;
mod leadership;
mod metrics;
mod order;
mod placement;
mod server;

pub use config::{SchedulerConfig, StandbyConfig};
pub use handle::SchedulerHandle;
pub use server::{SchedulerServer, start};
