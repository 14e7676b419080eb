//! The metrics of the listener.

refrain_service_kit::metric_families! {
    /// The families of the listener.
    pub(super) struct TrainerFamilies {
        /// Requests of trainers in flight, those that are held included.
        pub(super) in_flight: IntGauge = "refrain_gateway_trainer_requests_in_flight",
        /// Bytes of bodies of trainers that are read, and whose requests are not admitted yet.
        pub(super) held_bytes: IntGauge = "refrain_gateway_trainer_held_bytes",
        /// Requests of trainers by route and outcome. Those that `left` have lost their client.
        pub(super) requests: IntCounterVec =
            "refrain_gateway_trainer_requests_total" ["route", "outcome"],
        /// Requests that trainers have aborted.
        pub(super) aborts: IntCounter = "refrain_gateway_trainer_aborts_total",
        /// Orders of trainers to workers, by the answer of each worker.
        pub(super) orders: IntCounterVec =
            "refrain_gateway_trainer_orders_total" ["order", "outcome"],
        /// Sessions whose tokens are kept.
        pub(super) sessions: IntGauge = "refrain_gateway_trainer_sessions",
        /// Bytes of memory that the turns of sessions take.
        pub(super) session_bytes: IntGauge = "refrain_gateway_trainer_session_bytes",
        /// Turns of sessions: `first` ones, those that `continued` an earlier one token by token, and those that were
        /// `rendered_anew`, because the history was edited or the template does not tell where answers end.
        pub(super) session_turns: IntCounterVec =
            "refrain_gateway_trainer_session_turns_total" ["prompt"],
        /// Sessions that were `erased` by the trainer, or have `expired`.
        pub(super) sessions_ended: IntCounterVec =
            "refrain_gateway_trainer_sessions_ended_total" ["reason"],
    }
}
