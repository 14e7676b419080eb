//! Traces over the borders of processes and tasks: the context of a call, and links between spans.

use opentelemetry::Context;
use opentelemetry::propagation::{Injector, TextMapPropagator};
use opentelemetry::trace::{SpanContext, TraceContextExt as _};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Headers that a trace context is written to.
struct TraceHeaders(HeaderMap);

impl Injector for TraceHeaders {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(key), HeaderValue::try_from(value)) {
            self.0.insert(name, value);
        }
    }
}

/// The W3C trace context of the current span. Without a trace there are no headers.
pub fn trace_headers() -> HeaderMap {
    let mut headers = TraceHeaders(HeaderMap::new());
    TraceContextPropagator::new().inject_context(&tracing::Span::current().context(), &mut headers);
    headers.0
}

/// A span that other spans can refer to, also after its end.
#[derive(Clone, Debug)]
pub struct TraceLink(SpanContext);

impl TraceLink {
    /// The current span, if its trace is exported.
    pub fn current() -> Option<Self> {
        let context = Span::current().context();
        let span = context.span().span_context().clone();
        span.is_sampled().then_some(TraceLink(span))
    }
}

/// Makes a new span a child of the first of these, and links it to the others.
pub fn join(span: &Span, links: impl IntoIterator<Item = TraceLink>) {
    let mut links = links.into_iter();
    let Some(TraceLink(first)) = links.next() else {
        return;
    };
    // This fails only if no OpenTelemetry layer is installed, and then there are no links.
    let _ = span.set_parent(Context::new().with_remote_span_context(first));
    for TraceLink(link) in links {
        span.add_link(link);
    }
}
