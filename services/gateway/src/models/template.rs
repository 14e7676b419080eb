//! A model's chat template, as far as it can be used.

use anyhow::Context;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_tokenization::{ChatTemplate, ModelFiles};

use super::config::ModelConfig;

/// OpenAI's `code` of errors that the operator's template has caused.
pub(super) const CHAT_TEMPLATE_FAILED: &str = "chat_template_failed";

/// The template, if it compiles and renders a small chat; otherwise why not. One model's faulty template must not
/// keep the gateway, and with it all other models, from starting.
pub(super) fn usable_template(
    config: &ModelConfig,
    files: &ModelFiles,
) -> anyhow::Result<(Option<ChatTemplate>, Option<String>)> {
    let read = files.chat_template().and_then(|template| match template {
        Some(template) => template.check().map(|()| Some(template)),
        None => Ok(None),
    });
    match read {
        Ok(None) => Ok((None, None)),
        Ok(Some(template)) => {
            let template = match config.template_date.as_deref() {
                None => template,
                Some(date) => template
                    .with_date(date)
                    .with_context(|| format!("template_date {date:?}"))?,
            };
            Ok((Some(template), None))
        }
        Err(error) => {
            let fault = error.to_string();
            tracing::error!(
                model = config.id,
                files = config.files,
                fault,
                "chat is off for this model, since its chat template cannot be used: mend chat_template.jinja, or \
                 chat_template in tokenizer_config.json, and restart; /v1/completions goes on"
            );
            Ok((None, Some(fault)))
        }
    }
}

/// The error of a chat that the operator's template cannot render. No field of the request is to blame, so none is
/// named. Its status is 400, as that of other servers: clients repeat a request on 5xx, and it would fail each time.
pub(crate) fn template_failed(fault: &str) -> ApiError {
    let message = format!(
        "{fault}; this is a fault of the model's files on the server, which its operator must mend; /v1/completions \
         does not need them"
    );
    ApiError::new(ErrorKind::InvalidRequest, message).with_code(CHAT_TEMPLATE_FAILED)
}
