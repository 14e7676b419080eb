//! Logs, traces and metrics.

mod metrics;
mod process;

use std::io::IsTerminal;
use std::sync::Once;

use anyhow::Context as _;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::{LevelFilter, Targets, dynamic_filter_fn};
use tracing_subscriber::layer::{Filter, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::config::{Validate, is_http_url};
use crate::tasks;

pub(crate) use metrics::HttpMetrics;
pub use metrics::{
    GaugeGuard, Metrics, MetricsPart, REQUEST_SECONDS_BUCKETS, SECONDS_BUCKETS, kinds,
};

/// Settings of logs and traces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct TelemetryConfig {
    /// Filter of log lines in the syntax of `tracing`, such as `info` or `refrain_worker=debug,info`. The target
    /// `access` has the line of each request, at `info`.
    pub log: String,
    /// Writes JSON lines instead of text. By default it does so unless standard error is a terminal.
    pub log_json: Option<bool>,
    /// URL that receives traces by OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`. Empty: traces are not
    /// sent.
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

impl Validate for TelemetryConfig {
    fn faults(&self) -> Vec<String> {
        let filter = log_filter(&self.log).err();
        let mut faults: Vec<String> = filter
            .map(|error| format!("log: {error:#}"))
            .into_iter()
            .collect();
        if !self.otlp_endpoint.is_empty() && !is_http_url(&self.otlp_endpoint) {
            let rule =
                "must be an http:// or https:// URL, such as http://127.0.0.1:4318/v1/traces";
            faults.push(format!("otlp_endpoint: {rule}"));
        }
        faults
    }
}

/// Sends the remaining traces when it is dropped. Keep it until the end of `main`.
pub struct TelemetryGuard {
    provider: Option<SdkTracerProvider>,
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        if let Some(provider) = &self.provider
            && let Err(error) = provider.shutdown()
        {
            eprintln!("the last traces were not sent: {error}");
        }
    }
}

/// Sets up logs on standard error and, if configured, the export of traces. Panics are counted and logged from then
/// on. Call it once per process.
///
/// # Errors
/// The filter cannot be parsed, the exporter cannot be built, or this is a second call.
pub fn init(config: &TelemetryConfig, service: &'static str) -> anyhow::Result<TelemetryGuard> {
    install_crypto_provider();
    let filter = log_filter(&config.log).context("telemetry.log")?;
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
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("refrain"))
            .with_filter(exported_spans())
    });
    tracing_subscriber::registry()
        .with(log)
        .with(traces)
        .try_init()?;
    tasks::report_panics();
    Ok(TelemetryGuard { provider })
}

/// The spans that are exported: those of this project. Those of the HTTP stack would drown them.
///
/// The filter is asked for each span anew. One that answers once for all would lose spans: whoever asks whether a
/// line would be logged (`tracing::enabled!`, here or in a library) leaves the answers of all filters to the next
/// span of the thread, unless that asks again.
fn exported_spans<S>() -> impl Filter<S> {
    let exported = Targets::new().with_target("refrain", LevelFilter::INFO);
    dynamic_filter_fn(move |metadata, _| exported.would_enable(metadata.target(), metadata.level()))
        .with_max_level_hint(LevelFilter::INFO)
}

/// Parses the filter of log lines. The HTTP stack logs an error when a caller sends bytes that are not HTTP, which is
/// the caller's fault. These lines are off unless the filter names `actix_http`. The client of NATS logs each attempt
/// to reach a broker that is away; those lines are off unless the filter names `async_nats`.
fn log_filter(log: &str) -> anyhow::Result<EnvFilter> {
    const PROTOCOL_ERRORS: &str = "actix_http::h1::dispatcher";
    let mut filter =
        EnvFilter::try_new(log).map_err(|error| anyhow::anyhow!("not a valid filter: {error}"))?;
    if !log.contains("actix_http") {
        filter = filter.add_directive(format!("{PROTOCOL_ERRORS}=off").parse()?);
    }
    if !log.contains("async_nats") {
        filter = filter.add_directive("async_nats=warn".parse()?);
    }
    Ok(filter)
}

/// Installs ring as the TLS provider. reqwest is built without a provider, because its default takes a long C build.
pub fn install_crypto_provider() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // An error means that a provider is installed already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Counts the error lines that a filter lets through, of one from the HTTP stack and one from this project.
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

    /// Counts the spans that reach it.
    struct Spans(Arc<AtomicUsize>);

    impl<S: tracing::Subscriber> Layer<S> for Spans {
        fn on_new_span(
            &self,
            _: &tracing::span::Attributes<'_>,
            _: &tracing::span::Id,
            _: tracing_subscriber::layer::Context<'_, S>,
        ) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_question_about_a_line_of_the_log_loses_no_span() {
        let spans = Arc::new(AtomicUsize::new(0));
        let log = tracing_subscriber::fmt::layer().with_writer(std::io::sink);
        let log = log.with_filter(log_filter("info").unwrap());
        let traces = Spans(spans.clone()).with_filter(exported_spans());
        let subscriber = tracing_subscriber::registry().with(log).with(traces);
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..3 {
                let _is_logged = tracing::enabled!(target: "access", tracing::Level::INFO);
                let _span = tracing::info_span!(target: "refrain_gateway", "generate");
                let _other = tracing::info_span!(target: "hyper", "connection");
                let _stage = tracing::debug_span!(target: "refrain_gateway", "stage");
            }
        });
        assert_eq!(spans.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn errors_of_the_http_stack_are_hidden_unless_the_filter_names_it() {
        assert_eq!(errors_logged("info"), 1);
        assert_eq!(errors_logged("refrain_worker=debug,info"), 1);
        assert_eq!(errors_logged("info,actix_http=debug"), 2);
    }
}
