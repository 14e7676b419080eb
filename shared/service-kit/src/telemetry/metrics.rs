//! The registry of metrics of a process, and families that are declared as the fields of a struct.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Encoder, IntGauge, PullingGauge, Registry, TextEncoder};

use super::process::ProcessMetrics;

/// Upper bounds of histograms of seconds, from 1 ms to 2 minutes.
pub const SECONDS_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
];

/// Buckets of the time that requests take, seconds. Rollouts may take hours.
pub const REQUEST_SECONDS_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0, 1_800.0, 3_600.0, 10_800.0,
];

/// Counts one in a gauge until it is dropped.
pub struct GaugeGuard {
    gauge: IntGauge,
    number: i64,
}

impl GaugeGuard {
    /// Adds one to the gauge.
    pub fn new(gauge: &IntGauge) -> Self {
        GaugeGuard::of(gauge, 1)
    }

    /// Adds a number to the gauge.
    pub fn of(gauge: &IntGauge, number: i64) -> Self {
        gauge.add(number);
        GaugeGuard {
            gauge: gauge.clone(),
            number,
        }
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.gauge.sub(self.number);
    }
}

/// Declares a struct whose fields are families of metrics, and its constructor `register(&Registry)`.
///
/// The doc comment of a field is the help text of its family. After the name of the family come its labels in
/// brackets, the buckets of a histogram after `in`, and after `with` the values of a single label that are there from
/// the start: a rate over a counter that does not exist yet shows nothing instead of 0.
///
/// ```
/// use refrain_service_kit::telemetry::{Metrics, SECONDS_BUCKETS};
///
/// refrain_service_kit::metric_families! {
///     /// Metrics of a bakery.
///     #[derive(Clone)]
///     pub struct BakeryMetrics {
///         /// Loaves in the oven.
///         pub loaves: IntGauge = "bakery_loaves",
///         /// Customers who left without bread, by the reason.
///         pub lost: IntCounterVec = "bakery_customers_lost_total" ["reason"] with ["queue", "sold_out"],
///         /// Seconds from kneading to the shelf, by the kind of bread.
///         pub baking_seconds: HistogramVec = "bakery_baking_seconds" ["kind"] in SECONDS_BUCKETS,
///     }
/// }
///
/// let metrics = Metrics::new()?;
/// let bakery = BakeryMetrics::register(metrics.registry())?;
/// bakery.loaves.set(7);
/// assert!(String::from_utf8(metrics.render())?.contains("bakery_customers_lost_total{reason=\"queue\"} 0"));
/// # anyhow::Ok(())
/// ```
#[macro_export]
macro_rules! metric_families {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $(
                $(#[doc = $help:literal])+
                $field_vis:vis $field:ident : $kind:ident = $family:literal
                $([$($label:literal),+])? $(in $buckets:ident)? $(with $values:expr)?
            ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $( $(#[doc = $help])+ $field_vis $field: $crate::telemetry::kinds::$kind, )+
        }

        impl $name {
            /// Registers all families.
            ///
            /// # Errors
            /// The registry has one of the names already.
            $vis fn register(registry: &$crate::telemetry::kinds::Registry) -> ::anyhow::Result<Self> {
                $(
                    let $field = $crate::metric_families!(
                        @new $kind, $family, concat!($($help),+).trim(), [$([$($label),+])?], [$($buckets)?]
                    )?;
                    registry.register(Box::new($field.clone()))?;
                    $( for value in $values { $field.with_label_values(&[value]); } )?
                )+
                Ok($name { $($field),+ })
            }
        }
    };
    (@new $kind:ident, $family:literal, $help:expr, [], []) => {
        $crate::telemetry::kinds::$kind::with_opts($crate::telemetry::kinds::opts($family, $help))
    };
    (@new $kind:ident, $family:literal, $help:expr, [[$($label:literal),+]], []) => {
        $crate::telemetry::kinds::$kind::new($crate::telemetry::kinds::opts($family, $help), &[$($label),+])
    };
    (@new $kind:ident, $family:literal, $help:expr, [], [$buckets:ident]) => {
        $crate::telemetry::kinds::$kind::with_opts($crate::telemetry::kinds::histogram_opts($family, $help, $buckets))
    };
    (@new $kind:ident, $family:literal, $help:expr, [[$($label:literal),+]], [$buckets:ident]) => {
        $crate::telemetry::kinds::$kind::new(
            $crate::telemetry::kinds::histogram_opts($family, $help, $buckets),
            &[$($label),+],
        )
    };
}

/// Declares the values of a label as an enum. `LABELS` has all of them, and `as_str` is the text of one.
///
/// ```
/// refrain_service_kit::label_values! {
///     /// Why a customer left without bread.
///     enum Loss {
///         /// There were too many others.
///         Queue = "queue",
///         SoldOut = "sold_out",
///     }
/// }
///
/// assert_eq!(Loss::LABELS, ["queue", "sold_out"]);
/// assert_eq!(Loss::SoldOut.as_str(), "sold_out");
/// ```
#[macro_export]
macro_rules! label_values {
    (
        $(#[$meta:meta])*
        $vis:vis enum $name:ident {
            $( $(#[doc = $doc:literal])* $variant:ident = $label:literal ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name {
            $( $(#[doc = $doc])* $variant ),+
        }

        impl $name {
            /// The values of all variants.
            $vis const LABELS: &[&str] = &[$($label),+];

            /// The value of the label.
            $vis fn as_str(self) -> &'static str {
                Self::LABELS[self as usize]
            }
        }
    };
}

/// The kinds of families that [`metric_families`](crate::metric_families) knows.
#[doc(hidden)]
pub mod kinds {
    pub use prometheus::{
        Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec,
        IntGauge, IntGaugeVec, Registry,
    };

    pub fn opts(family: &str, help: &str) -> prometheus::Opts {
        prometheus::Opts::new(family, help)
    }

    pub fn histogram_opts(family: &str, help: &str, buckets: &[f64]) -> prometheus::HistogramOpts {
        prometheus::HistogramOpts::new(family, help).buckets(buckets.to_vec())
    }
}

/// The metrics of one process. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    registry: Registry,
    process: ProcessMetrics,
    http: Arc<HttpMetrics>,
    watched: Arc<Mutex<Vec<Watched>>>,
    refreshes: Arc<Mutex<Vec<Refresh>>>,
}

/// Sets the values of some families.
type Refresh = Box<dyn Fn() + Send + Sync>;

/// The check of a service. It is not kept alive: it may hold the whole service, which holds these metrics.
struct Watched {
    service: &'static str,
    is_ready: Weak<dyn Fn() -> Result<(), String> + Send + Sync>,
}

metric_families! {
    /// Metrics of the HTTP listeners of a process.
    pub(crate) struct HttpMetrics {
        /// Requests that were answered, by service, route and status.
        pub(crate) requests: IntCounterVec = "refrain_http_requests_total" ["service", "route", "status"],
        /// Seconds from a request's head to its response's head.
        pub(crate) seconds: HistogramVec = "refrain_http_request_seconds" ["service", "route"] in REQUEST_SECONDS_BUCKETS,
        /// Open connections of callers.
        pub(crate) connections: IntGaugeVec = "refrain_http_connections" ["service"],
        /// Idle connections that were closed to make room for new ones.
        pub(crate) gave_way: IntCounterVec = "refrain_http_connections_gave_way_total" ["service"],
        /// Connections that were refused, by the limit that was reached.
        pub(crate) rejections: IntCounterVec = "refrain_http_rejections_total" ["service", "limit"],
        /// TLS handshakes that failed, by the reason.
        pub(crate) handshake_failures: IntCounterVec = "refrain_tls_handshake_failures_total" ["service", "reason"],
        /// When a certificate of this process expires, in Unix seconds, by the listener or `mesh` for calls.
        pub(crate) certificate_expiry: IntGaugeVec = "refrain_tls_certificate_expiry_seconds" ["certificate"],
        /// When the credential of this process ends, in Unix seconds, by its role.
        pub(crate) credential_expiry: IntGaugeVec = "refrain_mesh_credential_expiry_seconds" ["role"],
        /// 1 while a service of this process is ready, otherwise 0. The answer of `/readyz` has the reason.
        pub(crate) ready: IntGaugeVec = "refrain_ready" ["service"],
        /// Changed files that were read again, or refused while the earlier ones stay in use.
        pub(crate) reloads: IntCounterVec = "refrain_reloads_total" ["files", "outcome"],
    }
}

impl Metrics {
    /// Creates a registry with the metrics of the process and of its HTTP listeners.
    ///
    /// # Errors
    /// A name is taken, which would be a fault of this module.
    pub fn new() -> anyhow::Result<Self> {
        let registry = Registry::new();
        Ok(Metrics {
            process: ProcessMetrics::register(&registry)?,
            http: Arc::new(HttpMetrics::register(&registry)?),
            registry,
            watched: Arc::default(),
            refreshes: Arc::default(),
        })
    }

    /// Creates metrics of a part of the process, such as one of several workers. Its families may have the names of
    /// another part's. They are shown with this label, on the part's own page and on that of the process.
    ///
    /// # Errors
    /// Another part has this value.
    pub fn part(&self, label: &str, value: &str) -> anyhow::Result<MetricsPart> {
        let labels = HashMap::from([(label.to_owned(), value.to_owned())]);
        let registry = Registry::new_custom(None, Some(labels.clone()))?;
        let metrics = Metrics {
            process: self.process.clone(),
            http: Arc::new(HttpMetrics::register(&registry)?),
            registry,
            watched: Arc::default(),
            refreshes: Arc::default(),
        };
        let help = "A part of the process.".to_owned();
        let desc = Desc::new("refrain_part".to_owned(), help, Vec::new(), labels)?;
        let part = PartCollector { desc, metrics };
        self.registry.register(Box::new(part.clone()))?;
        Ok(MetricsPart {
            whole: self.registry.clone(),
            part,
        })
    }

    /// The registry that families are registered in.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Registers a gauge whose value is computed whenever metrics are rendered. It suits values that change with time
    /// alone.
    pub fn computed_gauge(
        &self,
        name: &str,
        help: &str,
        value: impl Fn() -> f64 + Send + Sync + 'static,
    ) -> anyhow::Result<()> {
        let gauge = PullingGauge::new(name, help, Box::new(value))?;
        Ok(self.registry.register(Box::new(gauge))?)
    }

    /// Does this whenever metrics are rendered, before their values are read. It suits families whose series come and
    /// go with time alone.
    pub fn before_rendering(&self, refresh: impl Fn() + Send + Sync + 'static) {
        self.refreshes.lock().push(Box::new(refresh));
    }

    /// The metrics of the HTTP listeners.
    pub(crate) fn http(&self) -> &Arc<HttpMetrics> {
        &self.http
    }

    /// Shows from now on whether a service is ready, as long as it runs.
    pub(crate) fn watch(
        &self,
        service: &'static str,
        is_ready: &Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
    ) {
        let is_ready = Arc::downgrade(is_ready);
        self.watched.lock().push(Watched { service, is_ready });
    }

    /// Brings everything up to date that is computed when it is read.
    fn update(&self) {
        for refresh in self.refreshes.lock().iter() {
            refresh();
        }
        let gauges = &self.http.ready;
        self.watched.lock().retain(|Watched { service, is_ready }| {
            let Some(is_ready) = is_ready.upgrade() else {
                // It fails where the service was never seen.
                let _ = gauges.remove_label_values(&[service]);
                return false;
            };
            let gauge = gauges.with_label_values(&[service]);
            gauge.set(is_ready().is_ok().into());
            true
        });
    }

    /// Renders all metrics in the text format of Prometheus.
    pub fn render(&self) -> Vec<u8> {
        self.process.update();
        self.update();
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            tracing::error!(%error, "metrics cannot be rendered");
        }
        text
    }
}

/// The metrics of a part of the process, which the page of the process shows until this is dropped.
pub struct MetricsPart {
    whole: Registry,
    part: PartCollector,
}

impl MetricsPart {
    /// The metrics of the part.
    pub fn metrics(&self) -> &Metrics {
        &self.part.metrics
    }
}

impl Drop for MetricsPart {
    fn drop(&mut self) {
        // It was registered when this was made.
        let _ = self.whole.unregister(Box::new(self.part.clone()));
    }
}

/// Shows the families of a part on the page of the process.
#[derive(Clone)]
struct PartCollector {
    /// Tells the part from others. It has no series.
    desc: Desc,
    metrics: Metrics,
}

impl Collector for PartCollector {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.metrics.update();
        self.metrics.registry.gather()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_families_of_the_same_names_and_are_told_apart_by_a_label() {
        let metrics = Metrics::new().unwrap();
        let first = metrics.part("worker", "a").unwrap();
        let second = metrics.part("worker", "b").unwrap();
        assert!(metrics.part("worker", "b").is_err());
        for (part, count) in [(&first, 1), (&second, 2)] {
            let families = Families::register(part.metrics().registry()).unwrap();
            families.counter.inc_by(count);
        }
        let shown = |metrics: &Metrics| String::from_utf8(metrics.render()).unwrap();
        let lines = [
            "test_counter_total{worker=\"a\"} 1",
            "test_counter_total{worker=\"b\"} 2",
        ];
        let page = shown(&metrics);
        assert!(lines.iter().all(|line| page.contains(line)), "{page}");
        assert_eq!(page.matches("# TYPE test_counter_total").count(), 1);
        let own = shown(first.metrics());
        assert!(own.contains(lines[0]) && !own.contains(lines[1]), "{own}");
        drop(first);
        let page = shown(&metrics);
        assert!(
            !page.contains(lines[0]) && page.contains(lines[1]),
            "{page}"
        );
        assert!(metrics.part("worker", "a").is_ok());
    }

    const TEST_BUCKETS: &[f64] = &[1.0, 2.0];

    metric_families! {
        /// One family of each kind.
        struct Families {
            /// A counter.
            counter: IntCounter = "test_counter_total",
            /// A counter whose help text
            /// has two lines.
            by_limit: IntCounterVec = "test_limits_total" ["limit"] with ["a", "b"],
            /// A histogram.
            seconds: Histogram = "test_seconds" in TEST_BUCKETS,
            /// A histogram with labels.
            by_kind: HistogramVec = "test_kind_seconds" ["kind", "size"] in SECONDS_BUCKETS,
            /// A gauge.
            level: Gauge = "test_level",
        }
    }

    #[test]
    fn the_readiness_of_a_service_is_shown_while_it_runs() {
        use std::sync::atomic::{AtomicBool, Ordering};

        let metrics = Metrics::new().unwrap();
        let state = Arc::new(AtomicBool::new(false));
        let shown = || String::from_utf8(metrics.render()).unwrap();
        let seen = state.clone();
        let is_ready: Arc<dyn Fn() -> Result<(), String> + Send + Sync> =
            Arc::new(move || match seen.load(Ordering::Relaxed) {
                true => Ok(()),
                false => Err("not yet".to_owned()),
            });
        metrics.watch("bakery", &is_ready);
        assert!(shown().contains("refrain_ready{service=\"bakery\"} 0"));
        state.store(true, Ordering::Relaxed);
        assert!(shown().contains("refrain_ready{service=\"bakery\"} 1"));
        drop(is_ready);
        assert!(!shown().contains("refrain_ready"));
    }

    #[test]
    fn values_are_refreshed_when_a_part_or_the_whole_is_rendered() {
        let metrics = Metrics::new().unwrap();
        let part = metrics.part("worker", "a").unwrap();
        let level = Families::register(part.metrics().registry()).unwrap().level;
        part.metrics().before_rendering(move || level.inc());
        for (metrics, value) in [(part.metrics(), 1), (&metrics, 2)] {
            let page = String::from_utf8(metrics.render()).unwrap();
            let line = format!("test_level{{worker=\"a\"}} {value}\n");
            assert!(page.contains(&line), "{page}");
        }
    }

    #[test]
    fn declared_families_are_registered_with_help_labels_and_buckets() {
        let metrics = Metrics::new().unwrap();
        let families = Families::register(metrics.registry()).unwrap();
        families.counter.inc();
        families.seconds.observe(1.5);
        families.by_kind.with_label_values(&["x", "y"]).observe(1.0);
        families.level.set(0.5);
        families.by_limit.with_label_values(&["b"]).inc();
        let text = String::from_utf8(metrics.render()).unwrap();
        for line in [
            "# HELP test_limits_total A counter whose help text has two lines.",
            "# TYPE test_limits_total counter",
            "test_limits_total{limit=\"a\"} 0",
            "test_limits_total{limit=\"b\"} 1",
            "test_counter_total 1",
            "test_seconds_bucket{le=\"2\"} 1",
            "test_kind_seconds_count{kind=\"x\",size=\"y\"} 1",
            "test_level 0.5",
        ] {
            assert!(text.contains(line), "{line} is missing in:\n{text}");
        }
        let again = Families::register(metrics.registry());
        assert!(again.is_err(), "the names are taken");
    }
}
