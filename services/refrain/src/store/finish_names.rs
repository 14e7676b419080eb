//! The names that trace files use for the end of an output.

use anyhow::bail;
use refrain_protocol::document::FinishReason;

/// The reason that a line names. A line without one is a complete output; `running` is an output without an end.
pub(super) fn finish_of(name: Option<&str>) -> anyhow::Result<Option<FinishReason>> {
    Ok(match name {
        None | Some("stop") => Some(FinishReason::Stop),
        Some("length") => Some(FinishReason::Length),
        Some("cancelled") => Some(FinishReason::Cancelled),
        Some("failed") => Some(FinishReason::Failed),
        Some("running") => None,
        Some(other) => {
            bail!("finish: {other} is not one of stop, length, cancelled, failed, running")
        }
    })
}

/// The name of a reason.
pub(super) fn finish_name(finish: Option<FinishReason>) -> &'static str {
    match finish {
        Some(FinishReason::Stop) => "stop",
        Some(FinishReason::Length) => "length",
        Some(FinishReason::Cancelled) => "cancelled",
        Some(FinishReason::Failed) => "failed",
        None => "running",
    }
}
