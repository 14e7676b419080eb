//! The scheduler: who decodes the next chunk of a request, and where.
//!
//! Gateways ask for leases, workers report with heartbeats, and that is all it knows: no tokens, no text, no
//! disk. It starts empty and learns the mesh from one round of heartbeats, so losing it delays requests by
//! about a second and loses none.
//!
//! Start reading at [`dispatch`], the core that decides; [`placement`] picks the worker. Around it are an
//! actix actor (`dispatch/actor.rs`) that gives the core its clock and carries out what it says, the handle
//! that callers in this process use ([`SchedulerHandle`]), and the HTTP routes for all others.
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
//! Not here: length-aware order of rollout groups, and priority classes. The order is first come, first
//! served within a tenant and fair between tenants.

mod config;
pub mod dispatch;
mod handle;
mod http;
mod metrics;
pub mod placement;
mod service;

pub use config::SchedulerConfig;
pub use handle::SchedulerHandle;
pub use service::{Running, start};
