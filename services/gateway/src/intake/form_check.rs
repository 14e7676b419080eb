//! Checks that the form of an output can be compiled, before anything else is done for the request.
//!
//! Most forms come again and again, so their outcome is known at once. To compile one takes milliseconds, which must
//! not delay the other requests of an HTTP thread. The number of forms that are compiled at once is limited, and so
//! is that of those that wait.

use std::sync::Arc;

use refrain_output_grammar::GrammarError;
use refrain_protocol::ApiError;
use refrain_protocol::engine::OutputForm;
use tokio::sync::Semaphore;

use super::rate_limited;
use crate::metrics::GatewayMetrics;
use crate::models::Model;
use crate::request::{FormSource, GenerateRequest};

/// Admits forms to be compiled.
pub(crate) struct FormCheck {
    compiling: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    metrics: Arc<GatewayMetrics>,
}

impl FormCheck {
    /// Creates the limits: forms that are compiled at once, and that wait for it.
    pub(crate) fn new(
        compiling_max: usize,
        waiting_max: usize,
        metrics: Arc<GatewayMetrics>,
    ) -> Self {
        FormCheck {
            compiling: Arc::new(Semaphore::new(compiling_max)),
            waiting: Arc::new(Semaphore::new(waiting_max)),
            metrics,
        }
    }

    /// Checks the form of a request, if it has one.
    ///
    /// # Errors
    /// `InvalidRequest` with the place of the fault, or `Overloaded` if too many forms wait.
    pub(crate) async fn check(&self, request: &Arc<GenerateRequest>) -> Result<(), ApiError> {
        let Some(form) = request.sampling.form.as_deref() else {
            return Ok(());
        };
        if let Some(Ok(())) = request.model.grammars.known(form) {
            return Ok(());
        }
        let waits = self.waiting.clone().try_acquire_owned().map_err(|_| {
            self.metrics.rejected("forms");
            rate_limited("too many forms of outputs wait to be compiled; try again")
        })?;
        let compiling = self.compiling.clone().acquire_owned().await;
        let permit = compiling.map_err(ApiError::internal)?;
        drop(waits);
        let gauge = self.metrics.families.forms_compiling.clone();
        gauge.inc();
        let request = request.clone();
        // The work goes on if the client leaves meanwhile, so the permit belongs to it.
        tokio::task::spawn_blocking(move || {
            let checked = check(&request);
            gauge.dec();
            drop(permit);
            checked
        })
        .await
        .map_err(ApiError::internal)?
    }
}

fn check(request: &GenerateRequest) -> Result<(), ApiError> {
    let Some(form) = request.sampling.form.as_deref() else {
        return Ok(());
    };
    match compiles(&request.model, form) {
        Ok(()) => Ok(()),
        Err(error) => Err(located(&request.form_sources, error, |form| {
            compiles(&request.model, form)
        })),
    }
}

fn compiles(model: &Model, form: &OutputForm) -> Result<(), GrammarError> {
    model
        .grammars
        .check(form, &model.tokenizer, &model.stop_token_ids)
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
    match sources {
        [only] => at(&only.place, &error),
        _ => at("tools", &error),
    }
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

    use super::*;

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
