//! The body of an answer on its way to the caller. It is counted at its end, with the usage that it tells. One that
//! breaks off is counted as an error, and one whose caller leaves as such.

use std::sync::Arc;
use std::time::Instant;

use actix_web::http::StatusCode;
use bytes::Bytes;
use futures_util::stream::{BoxStream, unfold};
use futures_util::{Stream, StreamExt as _};
use refrain_accounts::tenants::{Caller, QuotaTicket};
use refrain_accounts::{AccountedRequest, Accounts};
use refrain_protocol::usage::UsageCounts;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{AccessNote, HttpError};
use serde_json::Value;

use crate::intake::AdmissionTicket;
use crate::metrics::GatewayMetrics;

/// The end of an answer in which its usage is looked for, bytes. Embeddings have theirs behind the vectors.
const END_BYTES_MAX: usize = 16 << 10;

/// A request that was passed on.
pub(crate) struct PassedRequest {
    pub(crate) metrics: Arc<GatewayMetrics>,
    pub(crate) accounts: Arc<Accounts>,
    pub(crate) caller: Caller,
    /// The name under which it is counted.
    pub(crate) model: String,
    pub(crate) status: StatusCode,
    pub(crate) received: Instant,
    pub(crate) reserved: (u64, u64),
    pub(crate) note: AccessNote,
}

/// The body of an answer.
pub(crate) struct PassedAnswer {
    pieces: BoxStream<'static, reqwest::Result<Bytes>>,
    /// The last bytes so far.
    end: Vec<u8>,
    /// The request and its limits, until the answer has ended.
    open: Option<(PassedRequest, QuotaTicket)>,
    until: tokio::time::Instant,
    _ticket: AdmissionTicket,
}

impl PassedAnswer {
    pub(crate) fn new(
        answered: reqwest::Response,
        request: PassedRequest,
        ticket: AdmissionTicket,
        quota: QuotaTicket,
        until: tokio::time::Instant,
    ) -> Self {
        PassedAnswer {
            pieces: answered.bytes_stream().boxed(),
            end: Vec::new(),
            open: Some((request, quota)),
            until,
            _ticket: ticket,
        }
    }

    /// The pieces for the caller. Its usage is written down before the last one is sent.
    pub(crate) fn into_stream(self) -> impl Stream<Item = Result<Bytes, HttpError>> {
        unfold(self, |mut answer| async move {
            let next = tokio::time::timeout_at(answer.until, answer.pieces.next()).await;
            match next {
                Ok(Some(Ok(piece))) => {
                    answer.keep_end(&piece);
                    Some((Ok(piece), answer))
                }
                Ok(None) => {
                    answer.close().await;
                    None
                }
                Ok(Some(Err(error))) => Some((Err(answer.break_off(error.to_string())), answer)),
                Err(_) => Some((Err(answer.break_off("it took too long".to_owned())), answer)),
            }
        })
    }

    fn keep_end(&mut self, piece: &[u8]) {
        self.end.extend_from_slice(piece);
        if self.end.len() > 2 * END_BYTES_MAX {
            self.end.drain(..self.end.len() - END_BYTES_MAX);
        }
    }

    /// Counts the request as one whose answer broke off.
    fn break_off(&mut self, detail: String) -> HttpError {
        let message = "the answer of the server behind this route broke off";
        let error = ApiError::new(ErrorKind::Upstream, message).with_detail(detail);
        if let Some((request, _)) = self.open.take() {
            request.note.failed(&error);
            request.count(&error.kind.status().to_string());
        }
        HttpError::from(error)
    }

    /// Counts the request.
    async fn close(&mut self) {
        let Some((request, quota)) = self.open.take() else {
            return;
        };
        request.count(request.status.as_str());
        let usage = usage_of(&self.end).filter(|_| request.status.is_success());
        let Some((input_tokens, output_tokens)) = usage else {
            return;
        };
        request
            .note
            .note(|facts| facts.tokens = Some((input_tokens, output_tokens)));
        let tenant = &request.caller.tenant;
        let series = request.metrics.series(tenant, &request.model, true);
        series
            .seconds
            .observe(request.received.elapsed().as_secs_f64());
        let opened = request.accounts.open(
            &request.caller,
            AccountedRequest {
                model: request.model,
                input_tokens,
                choices_per_prompt: 1,
                choices: 1,
                asks_urgency: false,
                quota,
                reserved: request.reserved,
                tokens: series.tokens.clone(),
            },
        );
        match opened.await {
            Ok(account) => {
                account.made().add(output_tokens);
                let counts = UsageCounts {
                    requests: 1,
                    input_tokens,
                    output_tokens,
                    ..UsageCounts::default()
                };
                account.meter().end_choice(0, counts);
                account.meter().settle().await;
            }
            Err(error) => tracing::error!(%error, "the usage of a passed request was not counted"),
        }
    }
}

impl PassedRequest {
    fn count(&self, status: &str) {
        let tenant = &self.caller.tenant;
        self.metrics.ended(tenant, &self.model, status);
    }
}

impl Drop for PassedAnswer {
    fn drop(&mut self) {
        if let Some((request, _)) = &self.open {
            // Its caller went away.
            request.count("499");
        }
    }
}

/// The tokens of prompt and output that the end of an answer tells: JSON, or the last such event of a stream.
fn usage_of(end: &[u8]) -> Option<(u64, u64)> {
    let text = String::from_utf8_lossy(end);
    let at = text.rfind("\"usage\"")?;
    let value = text[at + "\"usage\"".len()..]
        .trim_start()
        .strip_prefix(':')?;
    let mut values = serde_json::Deserializer::from_str(value).into_iter::<Value>();
    let usage = values.next()?.ok()?;
    let field = |names: [&str; 3]| names.iter().find_map(|name| usage[*name].as_u64());
    let input = field(["prompt_tokens", "input_tokens", "total_tokens"])?;
    let output = field(["completion_tokens", "output_tokens", ""]);
    Some((input, output.unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usage_is_found_at_the_end_of_an_answer() {
        for (end, expected) in [
            (
                "0.1]}], \"usage\": {\"prompt_tokens\": 7, \"total_tokens\": 7}}",
                Some((7, 0)),
            ),
            (
                "{\"usage\":{\"total_tokens\":5},\"results\":[]}",
                Some((5, 0)),
            ),
            (
                "data: {\"usage\": null}\n\ndata: {\"usage\": {\"input_tokens\": 3, \"output_tokens\": 4}}\n\n",
                Some((3, 4)),
            ),
            ("{\"usage\": {\"seconds\": 3}}", None),
            ("{\"text\": \"the usage\"}", None),
            ("\"usage\": {\"prompt_tokens\": ", None),
            ("", None),
        ] {
            assert_eq!(usage_of(end.as_bytes()), expected, "{end}");
        }
    }
}
