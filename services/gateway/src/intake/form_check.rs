//! Checks that the form of an output can be compiled, before anything else is done for the request.
//!
//! Most forms come again and again, so their outcome is known at once. To compile one takes milliseconds, which must
//! not delay the other requests of an HTTP thread. The number of forms that are compiled at once is limited, and so
//! is that of those that wait.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::IntGauge;
use refrain_output_grammar::GrammarError;
use refrain_protocol::engine::OutputForm;
use refrain_protocol::{ApiError, NamespaceId, TenantId};
use tokio::sync::{Semaphore, TryAcquireError};

use super::rate_limited;
use crate::metrics::GatewayMetrics;
use crate::models::{FormModel, Model};
use crate::request::{FormSource, ParsedRequest};

/// Time after which no further part of a form is compiled alone to find the place of an error.
const LOCATE_TIME_MAX: Duration = Duration::from_secs(1);

/// Admits forms to be compiled. No tenant takes all places: it has at most half of each, but one at least.
pub(crate) struct FormCheck {
    bytes_max: usize,
    all: Arc<Places>,
    tenant_max: PlacesMax,
    /// The places of the tenants that have some.
    by_tenant: Mutex<HashMap<String, Weak<Places>>>,
    metrics: Arc<GatewayMetrics>,
}

/// The limits of forms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FormLimits {
    /// Forms that are compiled at once.
    pub(crate) compiling_max: usize,
    /// Forms that wait for it.
    pub(crate) waiting_max: usize,
    /// Bytes of the texts of one form.
    pub(crate) bytes_max: usize,
}

/// Places for forms that are compiled, and for those that wait for it.
struct Places {
    compiling: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

#[derive(Clone, Copy)]
struct PlacesMax {
    compiling: usize,
    waiting: usize,
}

/// The result of checking a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FormVerdict {
    /// There is none, or it can be compiled.
    Compiles,
    /// Only [`ParsedRequest::loose_form`] can be compiled.
    CompilesLoosely,
}

impl Places {
    fn new(most: PlacesMax) -> Arc<Self> {
        Arc::new(Places {
            compiling: Arc::new(Semaphore::new(most.compiling)),
            waiting: Arc::new(Semaphore::new(most.waiting)),
        })
    }
}

impl FormCheck {
    pub(crate) fn new(limits: FormLimits, metrics: Arc<GatewayMetrics>) -> Self {
        FormCheck {
            bytes_max: limits.bytes_max,
            all: Places::new(PlacesMax {
                compiling: limits.compiling_max,
                waiting: limits.waiting_max,
            }),
            tenant_max: PlacesMax {
                compiling: limits.compiling_max.div_ceil(2),
                waiting: limits.waiting_max.div_ceil(2),
            },
            by_tenant: Mutex::default(),
            metrics,
        }
    }

    /// Holds the texts of a request's tools to their grammars, if their form can be compiled. The request goes on
    /// without that otherwise, and then returns false.
    pub(crate) async fn tighten(&self, request: &mut ParsedRequest) -> bool {
        let Some(tight) = request.tight_form.as_deref() else {
            return false;
        };
        let (form, parts) = (&tight.form, &tight.parts);
        if form.text.text_bytes() > self.bytes_max {
            return false;
        }
        match self.compile(request, form, None, parts).await {
            Ok(_) => request.tighten_form(),
            Err(error) => {
                tracing::debug!(%error, "no output can be held to the grammars of these tools");
                return false;
            }
        }
        true
    }

    /// Checks the form of a request, if it has one.
    ///
    /// # Errors
    /// `InvalidRequest` with the place of the fault, or `Overloaded` if too many forms wait.
    pub(crate) async fn check(&self, request: &ParsedRequest) -> Result<FormVerdict, ApiError> {
        let Some(form) = request.sampling.form.as_deref() else {
            return Ok(FormVerdict::Compiles);
        };
        // The form is written as JSON to be found, which a long one is not worth.
        let bytes = form.text.text_bytes();
        if bytes > self.bytes_max {
            self.metrics.rejected(&request.tenant, "form_bytes");
            let reason = format!("the form has {bytes} bytes, more than {}", self.bytes_max);
            let place = FormSource::place_of_all(&request.form_sources);
            return Err(at(place, &GrammarError::Refused(reason)));
        }
        let loose = request.loose_form.as_deref();
        self.compile(request, form, loose, &request.form_sources)
            .await
    }

    /// Compiles a form of a request, or else `loose`.
    async fn compile(
        &self,
        request: &ParsedRequest,
        form: &OutputForm,
        loose: Option<&OutputForm>,
        sources: &[FormSource],
    ) -> Result<FormVerdict, ApiError> {
        // Another tenant must not learn from the time of a call that this one used the form before.
        let namespace = request.model.namespace(&request.tenant).id();
        if let Some(Ok(())) = request.model.grammars.known(namespace, form) {
            return Ok(FormVerdict::Compiles);
        }
        let places = self.places(&request.tenant);
        let refused = |_: TryAcquireError| {
            self.metrics.rejected(&request.tenant, "forms");
            rate_limited("too many forms of outputs wait to be compiled; try again")
        };
        let waits_in_tenant = places.waiting.clone().try_acquire_owned();
        let waits = (
            waits_in_tenant.map_err(refused)?,
            self.all
                .waiting
                .clone()
                .try_acquire_owned()
                .map_err(refused)?,
        );
        let waiting_gauge = self.metrics.families.forms_waiting.clone();
        let waiting = WaitingForm::new(waiting_gauge);
        // A tenant waits for its own place first, so it has few places in the queue of all.
        let in_tenant = places.compiling.clone().acquire_owned().await;
        let in_tenant = in_tenant.map_err(ApiError::internal)?;
        let permit = self.all.compiling.clone().acquire_owned().await;
        let permit = permit.map_err(ApiError::internal)?;
        drop((waits, waiting));
        let gauge = self.metrics.families.forms_compiling.clone();
        gauge.inc();
        let asked = AskedForm {
            form: form.clone(),
            loose: loose.cloned(),
            sources: sources.to_vec(),
            model: request.model.clone(),
            tenant: TenantId::of(&request.tenant),
        };
        let model = request.model.id.as_str();
        let verdicts = self
            .metrics
            .families
            .form_verdicts
            .with_label_values(&[model]);
        // The work goes on if the client leaves meanwhile, so the permits belong to it.
        tokio::task::spawn_blocking(move || {
            let checked = asked.check(namespace);
            gauge.dec();
            verdicts.set(asked.model.grammars.verdicts().cast_signed() as i64);
            drop((permit, in_tenant, places));
            checked
        })
        .await
        .map_err(ApiError::internal)?
    }

    /// The places of a tenant.
    fn places(&self, tenant: &str) -> Arc<Places> {
        let mut by_tenant = self.by_tenant.lock();
        if let Some(places) = by_tenant.get(tenant).and_then(Weak::upgrade) {
            return places;
        }
        // Only tenants whose forms wait or are compiled stay, so these are few.
        by_tenant.retain(|_, places| places.strong_count() > 0);
        let places = Places::new(self.tenant_max);
        by_tenant.insert(tenant.to_owned(), Arc::downgrade(&places));
        places
    }
}

/// A form that waits, in the gauge of those.
struct WaitingForm(IntGauge);

impl WaitingForm {
    fn new(gauge: IntGauge) -> Self {
        gauge.inc();
        WaitingForm(gauge)
    }
}

impl Drop for WaitingForm {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The form of a request, for the thread that compiles it.
struct AskedForm {
    form: OutputForm,
    loose: Option<OutputForm>,
    sources: Vec<FormSource>,
    model: Arc<Model>,
    tenant: TenantId,
}

impl AskedForm {
    fn check(&self, namespace: NamespaceId) -> Result<FormVerdict, ApiError> {
        let compiles = |form: &OutputForm| {
            let model = &self.model;
            let files = FormModel {
                tokenizer: &model.tokenizer,
                end_tokens: &model.stop_token_ids,
            };
            model.grammars.check(self.tenant, namespace, form, &files)
        };
        let Err(error) = compiles(&self.form) else {
            return Ok(FormVerdict::Compiles);
        };
        // A form that could not be compiled for another reason may be compiled next time.
        let is_refused = matches!(
            error,
            GrammarError::Invalid { .. } | GrammarError::Refused(_)
        );
        let loose = self.loose.as_ref().filter(|_| is_refused);
        if loose.is_some_and(|loose| compiles(loose).is_ok()) {
            return Ok(FormVerdict::CompilesLoosely);
        }
        let until = Instant::now() + LOCATE_TIME_MAX;
        Err(located(&self.sources, error, |form| {
            match Instant::now() < until {
                true => compiles(form),
                false => Ok(()),
            }
        }))
    }
}

/// The error of a form, at the part of the body that cannot be compiled alone.
fn located(
    sources: &[FormSource],
    error: GrammarError,
    compiles: impl Fn(&OutputForm) -> Result<(), GrammarError>,
) -> ApiError {
    if let GrammarError::Model(_) = error {
        return ApiError::invalid("model", format!("model: {error}"))
            .with_code("unsupported_parameter");
    }
    if let GrammarError::NotNow(_) = error {
        return rate_limited(error.to_string());
    }
    for FormSource { place, text } in sources {
        if let Err(error) = compiles(&OutputForm::new(text.clone())) {
            return at(place, &error);
        }
    }
    at(FormSource::place_of_all(sources), &error)
}

fn at(place: &str, error: &GrammarError) -> ApiError {
    let (param, reason) = match error {
        GrammarError::Invalid {
            place: inner,
            reason,
        } => match inner.strip_prefix('/') {
            Some(pointer) => (format!("{place}.{}", dotted(pointer)), reason.clone()),
            None => (place.to_owned(), format!("{reason} (at {inner})")),
        },
        error => (place.to_owned(), error.to_string()),
    };
    let message = format!("{param}: {reason}");
    ApiError::invalid(param, message)
}

/// A JSON pointer as the path of a field.
fn dotted(pointer: &str) -> String {
    let parts = pointer.split('/');
    let parts: Vec<String> = parts
        .map(|part| part.replace("~1", "/").replace("~0", "~"))
        .collect();
    parts.join(".")
}

#[cfg(test)]
mod tests {
    use refrain_protocol::engine::TextForm;
    use refrain_service_kit::telemetry::Metrics;

    use super::*;

    fn metrics() -> Arc<GatewayMetrics> {
        Arc::new(GatewayMetrics::new(&Metrics::new().unwrap()).unwrap())
    }

    #[test]
    fn a_tenant_has_half_of_the_places() {
        let limits = |compiling_max, waiting_max| FormLimits {
            compiling_max,
            waiting_max,
            bytes_max: 1,
        };
        let check = FormCheck::new(limits(2, 5), metrics());
        let first = check.places("a");
        let counts = |places: &Places| {
            let (compiling, waiting) = (&places.compiling, &places.waiting);
            (compiling.available_permits(), waiting.available_permits())
        };
        assert_eq!((counts(&first), counts(&check.all)), ((1, 3), (2, 5)));
        let _compiling = first.compiling.clone().try_acquire_owned().unwrap();
        assert_eq!(counts(&check.places("a")), (0, 3));
        assert_eq!(counts(&check.places("b")), (1, 3));
        // A tenant without forms is forgotten.
        check.places("c");
        assert_eq!(check.by_tenant.lock().len(), 2);
        let one = FormCheck::new(limits(1, 1), metrics());
        assert_eq!(counts(&one.places("a")), (1, 1));
    }

    #[test]
    fn an_error_names_the_part_that_cannot_be_compiled() {
        let source = |place: &str, text: &str| FormSource {
            place: place.into(),
            text: TextForm::JsonSchema(text.into()),
        };
        let sources = [
            source("tools[0].function.parameters", "good"),
            source("response_format.x", "bad"),
        ];
        let invalid = |place: &str| GrammarError::Invalid {
            place: place.into(),
            reason: "no".into(),
        };
        let compiles = |form: &OutputForm| match &form.text {
            TextForm::JsonSchema(text) if text == "bad" => Err(invalid("/properties/a~1b/not")),
            _ => Ok(()),
        };
        let whole = || GrammarError::Refused("whole".into());
        let error = located(&sources, whole(), compiles);
        let place = "response_format.x.properties.a/b.not";
        assert_eq!(error.param.as_deref(), Some(place));
        assert_eq!(error.message, format!("{place}: no"));
        // All parts can be compiled, but not together.
        let error = located(&sources, whole(), |_| Ok(()));
        assert_eq!(error.param.as_deref(), Some("tools"));
        let error = located(&sources[..1], whole(), |_| Ok(()));
        assert_eq!(error.param.as_deref(), Some("tools[0].function.parameters"));
        let error = located(&sources[1..], whole(), |_| Err(invalid("line 1, column 2")));
        assert_eq!(error.param.as_deref(), Some("response_format.x"));
        assert_eq!(error.message, "response_format.x: no (at line 1, column 2)");
        let error = located(&sources, GrammarError::Model("no end"), compiles);
        assert_eq!(error.param.as_deref(), Some("model"));
    }
}
