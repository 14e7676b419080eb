//! Logs, traces and metrics.

use std::io::IsTerminal;
use std::sync::{Arc, Once};

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, PullingGauge, Registry, TextEncoder,
};
use serde::{Deserialize, Serialize};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// How to log and where to send traces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetryConfig {
    /// `tracing` filter, such as `info` or `refrain_worker=debug,info`.
    pub log: String,
    /// JSON lines instead of text. Default: unless standard error is a terminal.
    pub log_json: Option<bool>,
    /// OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; empty: no traces leave.
    pub otlp_endpoint: String,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        TelemetryConfig {
            log: "info".into(),
            log_json: None,
            otlp_endpoint: String::new(),
        }
    }
}

/// Flushes traces when dropped. Keep it until the end of `main`.
pub struct TelemetryGuard {
    provider: Option<SdkTracerProvider>,
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        if let Some(provider) = &self.provider
            && let Err(error) = provider.shutdown()
        {
            eprintln!("traces were not flushed: {error}");
        }
    }
}

/// Sets up logging to standard error and, if asked for, trace export. Once per process.
///
/// # Errors
/// A filter that cannot be read, an exporter that cannot be built, or a second call.
pub fn init(config: &TelemetryConfig, service: &'static str) -> anyhow::Result<TelemetryGuard> {
    install_crypto_provider();
    let filter = log_filter(&config.log)?;
    let json = config
        .log_json
        .unwrap_or_else(|| !std::io::stderr().is_terminal());
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let log = if json {
        log.json().with_filter(filter).boxed()
    } else {
        log.with_target(false).with_filter(filter).boxed()
    };
    let provider = if config.otlp_endpoint.is_empty() {
        None
    } else {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_endpoint(config.otlp_endpoint.clone())
            .build()
            .map_err(|error| anyhow::anyhow!("telemetry.otlp_endpoint: {error}"))?;
        let resource = Resource::builder().with_service_name(service).build();
        Some(
            SdkTracerProvider::builder()
                .with_batch_exporter(exporter)
                .with_resource(resource)
                .build(),
        )
    };
    let traces = provider.as_ref().map(|provider| {
        // Spans of the project only: the HTTP stack's own would drown them.
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("refrain"))
            .with_filter(EnvFilter::new("off,refrain=info,refrain_service_kit=info,refrain_gateway=info,refrain_scheduler=info,refrain_worker=info,refrain_draft_store=info,refrain_reference_engine=info"))
    });
    tracing_subscriber::registry()
        .with(log)
        .with(traces)
        .try_init()?;
    Ok(TelemetryGuard { provider })
}

/// What is logged. The HTTP stack calls it an error when a stranger sends what is no HTTP, which is the stranger's;
/// who wants to see it names the stack in the filter.
fn log_filter(log: &str) -> anyhow::Result<EnvFilter> {
    const STRANGERS: &str = "actix_http::h1::dispatcher";
    let filter = EnvFilter::try_new(log)
        .map_err(|error| anyhow::anyhow!("telemetry.log: cannot be read as a filter: {error}"))?;
    Ok(match log.contains("actix_http") {
        true => filter,
        false => filter.add_directive(format!("{STRANGERS}=off").parse()?),
    })
}

/// Chooses ring for TLS. reqwest is built without a provider, since its default one is a long C build.
pub fn install_crypto_provider() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // An error means that somebody else has installed one already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// The metrics of one process. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    inner: Arc<MetricsInner>,
}

struct MetricsInner {
    registry: Registry,
    http_requests: IntCounterVec,
    http_seconds: HistogramVec,
    http_connections: IntGaugeVec,
    http_gave_way: IntCounterVec,
    http_rejections: IntCounterVec,
}

/// From 1 ms to about 2 minutes.
pub const SECONDS_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
];

impl Metrics {
    /// A registry of its own, with the process's figures and the HTTP listener's.
    ///
    /// # Errors
    /// A name is taken (which would be a fault of ours).
    pub fn new() -> anyhow::Result<Self> {
        let registry = Registry::new();
        let process = prometheus::process_collector::ProcessCollector::for_self();
        registry.register(Box::new(process))?;
        let http_requests = IntCounterVec::new(
            Opts::new("refrain_http_requests_total", "Requests answered."),
            &["service", "route", "status"],
        )?;
        let http_seconds = HistogramVec::new(
            HistogramOpts::new(
                "refrain_http_request_seconds",
                "Time until the response's head.",
            )
            .buckets(SECONDS_BUCKETS.to_vec()),
            &["service", "route"],
        )?;
        registry.register(Box::new(http_requests.clone()))?;
        registry.register(Box::new(http_seconds.clone()))?;
        let http_connections = IntGaugeVec::new(
            Opts::new(
                "refrain_http_connections",
                "Callers' connections that are open.",
            ),
            &["service"],
        )?;
        let http_gave_way = IntCounterVec::new(
            Opts::new(
                "refrain_http_connections_gave_way_total",
                "Idle connections that were closed for want of places.",
            ),
            &["service"],
        )?;
        let http_rejections = IntCounterVec::new(
            Opts::new(
                "refrain_http_rejections_total",
                "Connections refused, by the limit that was reached.",
            ),
            &["service", "limit"],
        )?;
        registry.register(Box::new(http_connections.clone()))?;
        registry.register(Box::new(http_gave_way.clone()))?;
        registry.register(Box::new(http_rejections.clone()))?;
        Ok(Metrics {
            inner: Arc::new(MetricsInner {
                registry,
                http_requests,
                http_seconds,
                http_connections,
                http_gave_way,
                http_rejections,
            }),
        })
    }

    fn add<C: Collector + Clone + 'static>(
        &self,
        collector: prometheus::Result<C>,
    ) -> anyhow::Result<C> {
        let collector = collector?;
        self.inner.registry.register(Box::new(collector.clone()))?;
        Ok(collector)
    }

    /// A counter. Names end in `_total`.
    ///
    /// # Errors
    /// The name is malformed or taken; likewise for all below.
    pub fn counter(&self, name: &str, help: &str) -> anyhow::Result<IntCounter> {
        self.add(IntCounter::new(name, help))
    }

    /// A counter with labels.
    pub fn counter_vec(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> anyhow::Result<IntCounterVec> {
        self.add(IntCounterVec::new(Opts::new(name, help), labels))
    }

    /// A counter of seconds with labels.
    pub fn float_counter_vec(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> anyhow::Result<prometheus::CounterVec> {
        self.add(prometheus::CounterVec::new(Opts::new(name, help), labels))
    }

    /// A gauge of whole numbers.
    pub fn gauge(&self, name: &str, help: &str) -> anyhow::Result<IntGauge> {
        self.add(IntGauge::new(name, help))
    }

    /// A gauge with labels.
    pub fn gauge_vec(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> anyhow::Result<IntGaugeVec> {
        self.add(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    /// A gauge of real numbers.
    pub fn float_gauge(&self, name: &str, help: &str) -> anyhow::Result<Gauge> {
        self.add(Gauge::new(name, help))
    }

    /// A gauge that is asked for its value whenever metrics are rendered: for what changes with time alone.
    pub fn asked_gauge(
        &self,
        name: &str,
        help: &str,
        value: impl Fn() -> f64 + Send + Sync + 'static,
    ) -> anyhow::Result<()> {
        let gauge = PullingGauge::new(name, help, Box::new(value))?;
        Ok(self.inner.registry.register(Box::new(gauge))?)
    }

    /// A gauge of real numbers with labels.
    pub fn float_gauge_vec(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> anyhow::Result<GaugeVec> {
        self.add(GaugeVec::new(Opts::new(name, help), labels))
    }

    /// A histogram with the given upper bounds.
    pub fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> anyhow::Result<Histogram> {
        self.add(Histogram::with_opts(
            HistogramOpts::new(name, help).buckets(buckets.to_vec()),
        ))
    }

    /// A histogram with labels.
    pub fn histogram_vec(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        buckets: &[f64],
    ) -> anyhow::Result<HistogramVec> {
        self.add(HistogramVec::new(
            HistogramOpts::new(name, help).buckets(buckets.to_vec()),
            labels,
        ))
    }

    pub(crate) fn http_requests(&self) -> &IntCounterVec {
        &self.inner.http_requests
    }

    pub(crate) fn http_connections(&self) -> &IntGaugeVec {
        &self.inner.http_connections
    }

    pub(crate) fn http_gave_way(&self) -> &IntCounterVec {
        &self.inner.http_gave_way
    }

    pub(crate) fn http_rejections(&self) -> &IntCounterVec {
        &self.inner.http_rejections
    }

    pub(crate) fn http_seconds(&self) -> &HistogramVec {
        &self.inner.http_seconds
    }

    /// Everything in Prometheus's text format.
    pub fn render(&self) -> Vec<u8> {
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.inner.registry.gather(), &mut text) {
            tracing::error!(%error, "metrics cannot be rendered");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Error lines that a filter lets through, of the HTTP stack's words on what is no HTTP and of one of our own.
    fn errors_logged(log: &str) -> usize {
        struct Lines(Arc<AtomicUsize>);
        impl std::io::Write for Lines {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.fetch_add(1, Ordering::Relaxed);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let lines = Arc::new(AtomicUsize::new(0));
        let writer = Mutex::new(Lines(lines.clone()));
        let layer = tracing_subscriber::fmt::layer().with_writer(writer);
        let subscriber =
            tracing_subscriber::registry().with(layer.with_filter(log_filter(log).unwrap()));
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!(target: "actix_http::h1::dispatcher", "stream error");
            tracing::error!("ours");
        });
        lines.load(Ordering::Relaxed)
    }

    #[test]
    fn what_strangers_send_is_no_error_of_ours() {
        assert_eq!(errors_logged("info"), 1);
        assert_eq!(errors_logged("refrain_worker=debug,info"), 1);
        assert_eq!(errors_logged("info,actix_http=debug"), 2);
    }
}
