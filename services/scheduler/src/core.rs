//! The scheduler without its shell, for callers that have a clock and workers of their own, such as a simulator.
//!
//! [`Dispatch`] is the very core that serves live requests. It has no clock and does no I/O. The caller passes events
//! with the time in milliseconds, and carries out the effects that [`Dispatch::apply`] returns:
//!
//! * A request asks with [`DispatchEvent::Submit`], under a [`LeaseCallId`] that grows from call to call. It gets
//!   one [`DispatchEffect::Grant`] or one [`DispatchEffect::Reject`], now or with a later event.
//! * The end of a chunk comes as [`DispatchEvent::Finish`], or in the field `ended` of the request's next
//!   `Submit`. The field `age_ms` keeps the request's place in line.
//! * Workers register by [`DispatchEvent::Heartbeat`], and are forgotten after `worker_ttl_ms` without one.
//! * [`DispatchEvent::Tick`] is due at [`Dispatch::due_ms`], if no other event comes first.
//!
//! [`SchedulerConfig`] chooses the order of rollouts ([`OrderPolicy`]) and the placement ([`PlacementPolicy`]).

pub use crate::config::{OrderPolicy, PlacementPolicy, SchedulerConfig};
pub use crate::dispatch::{
    Dispatch, DispatchEffect, DispatchEvent, DispatchState, LeaseCallId, LeaseEnd, LeaseRefusal,
    Placed, PoolState, WorkerState,
};
