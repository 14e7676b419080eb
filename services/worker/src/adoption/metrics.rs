//! The metrics of adoption.

refrain_service_kit::label_values! {
    /// The outcomes of a wish that an engine be adopted or given up.
    pub(super) enum AdoptionOutcome {
        /// It was adopted.
        Adopted = "adopted",
        /// It was adopted before.
        Repeated = "repeated",
        /// Its address may not be called, or it cannot serve the model.
        Refused = "refused",
        /// There was no room for another engine.
        Full = "engines_max",
        /// It does not answer, or its worker does not start.
        Failed = "failed",
        /// It was given up.
        Released = "released",
    }
}

refrain_service_kit::metric_families! {
    /// The families of adoption.
    pub(super) struct AdoptionFamilies {
        /// Engines that were adopted and not given up.
        pub(super) engines: IntGauge = "refrain_worker_adopted_engines",
        /// Wishes that an engine be adopted or given up, by what became of them.
        pub(super) outcomes: IntCounterVec = "refrain_worker_adoptions_total" ["outcome"] with AdoptionOutcome::LABELS,
    }
}

refrain_service_kit::metric_families! {
    /// The families of sources that name engines.
    pub(super) struct DiscoveryFamilies {
        /// Engines that a source named when it was last read.
        pub(super) engines: IntGaugeVec = "refrain_worker_discovered_engines" ["source"],
        /// Readings of a source that failed.
        pub(super) faults: IntCounterVec = "refrain_worker_discovery_faults_total" ["source"],
    }
}

impl AdoptionFamilies {
    /// Counts what became of a wish.
    pub(super) fn count(&self, outcome: AdoptionOutcome) {
        self.outcomes.with_label_values(&[outcome.as_str()]).inc();
    }
}
