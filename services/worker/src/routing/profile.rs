//! The seconds of the engine's steps by their number of tokens, measured before the first request. The budget of the
//! first steps uses them.
//!
//! The steps verify chains, as far as the engine takes them that long: a row that is verified has logits, which the
//! rows of a prompt lack. With a small model and a large vocabulary it costs several times as much.
//!
//! One throw-away session makes a few steps, each twice: the first step of a size pays for buffers and compiled
//! kernels that the next ones reuse. The session belongs to no tenant's namespace, and nothing of it is kept. It ends
//! early when its time is up. If it fails, the costs are learnt from requests, as without a profile.

use std::time::Duration;

use refrain_protocol::engine::{Draft, SessionSpec, StepItem, StepRequest};
use refrain_protocol::{ApiError, EngineSessionId, NamespaceId};
use refrain_service_kit::random;

use crate::engine::VerifyingEngine;

/// Steps of each size; the quickest one counts.
const REPEATS: usize = 2;
/// Fewest sizes of a profile: a slope through the smallest steps does not predict large ones.
const SIZES_MIN: usize = 4;
/// Tokens before those of a step: the one that opened the session.
const KEPT_TOKENS: u32 = 1;

/// Measures the seconds of steps of up to `tokens_max` tokens, for at most `time_max`. The result is pairs of tokens
/// and seconds, or nothing if too few sizes were measured. To end the session may take `time_max` again.
pub(crate) async fn profile(
    engine: &dyn VerifyingEngine,
    tokens_max: u32,
    time_max: Duration,
) -> Vec<(u32, f64)> {
    let mut points = Vec::new();
    if time_max.is_zero() {
        return points;
    }
    let id = match random::u128() {
        Ok(id) => id,
        Err(error) => {
            tracing::debug!(%error, "the engine's steps were not measured");
            return points;
        }
    };
    let session = EngineSessionId(id);
    let measured = measure(engine, session, tokens_max, &mut points);
    match tokio::time::timeout(time_max, measured).await {
        Ok(Ok(())) | Err(_) => {}
        Ok(Err(error)) => tracing::debug!(%error, "the engine's steps were not all measured"),
    }
    // The abort also ends a step that still waits, and no KV is kept. If it fails, the session expires by itself.
    match tokio::time::timeout(time_max, engine.abort(vec![session])).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "the session that measured was not aborted"),
        Err(_) => tracing::debug!("the session that measured takes long to abort"),
    }
    if points.len() < SIZES_MIN {
        points.clear();
    }
    points
}

async fn measure(
    engine: &dyn VerifyingEngine,
    session: EngineSessionId,
    tokens_max: u32,
    points: &mut Vec<(u32, f64)>,
) -> Result<(), ApiError> {
    let capabilities = engine.capabilities();
    let largest = tokens_max
        .min(capabilities.max_step_tokens)
        .min(capabilities.max_context.saturating_sub(KEPT_TOKENS + 1));
    let token = |at: u32| at % capabilities.vocab_size.max(1);
    let item = |open: Option<SessionSpec>, keep_len: u32, count: u32| {
        let verified = count - 1;
        let drafted = match verified <= capabilities.max_draft_tokens {
            true => verified,
            false => 0,
        };
        StepItem {
            session,
            open,
            keep_len,
            tokens: (0..count - drafted).map(token).collect(),
            sample: true,
            draft: (drafted > 0).then(|| Draft {
                tokens: (0..drafted).map(token).collect(),
                parents: (0..drafted).map(|node| node.checked_sub(1)).collect(),
            }),
            self_draft: None,
            max_emit: 1,
        }
    };
    let open = SessionSpec {
        namespace: NamespaceId(session.0),
        ..SessionSpec::default()
    };
    step(engine, item(Some(open), 0, KEPT_TOKENS)).await?;
    let sizes = (0..u32::BITS).map(|power| 1 << power);
    for size in sizes.take_while(|size| *size <= largest) {
        let mut quickest = f64::INFINITY;
        for _ in 0..REPEATS {
            let seconds = step(engine, item(None, KEPT_TOKENS, size)).await?;
            quickest = quickest.min(seconds);
        }
        points.push((size, quickest));
    }
    Ok(())
}

/// Makes a step of one item and returns its seconds.
async fn step(engine: &dyn VerifyingEngine, item: StepItem) -> Result<f64, ApiError> {
    let response = engine.step(StepRequest { items: vec![item] }).await?;
    for result in response.results {
        result?;
    }
    Ok(response.step_s)
}
