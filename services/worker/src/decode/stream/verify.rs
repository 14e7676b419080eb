//! Verify calls in place of a stream.

use std::time::Instant;

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

use super::Chunks;
use super::listen::Outcome;
use super::outside::Outside;
use super::patience::due;
use crate::decode::entry::Entry;
use crate::drive::{Call, Driving};
use crate::engine::VerifyRequest;
use crate::running::Running;

impl Chunks {
    /// The verify call that is to be made now, if one is.
    pub(super) fn call(
        &self,
        running: &Running,
        driving: &mut Driving,
        is_streaming: bool,
    ) -> Option<Box<Call>> {
        let params = driving.params()?;
        let started = Instant::now();
        let found = running.found(params, self.limits());
        let now = Instant::now();
        let seconds = (now - started).as_secs_f64();
        self.metrics.propose_seconds.observe(seconds);
        driving.call(found?, running.text().len() as u32, is_streaming, now)
    }

    /// Makes a call, and others behind it as long as they pay. There is no stream afterwards.
    pub(super) async fn drive(
        &self,
        entry: &mut Entry,
        outside: &mut Outside,
        driving: &mut Driving,
        first: Box<Call>,
    ) -> Result<(), Outcome> {
        let mut next = Some(first);
        while let Some(call) = next {
            let request = VerifyRequest {
                text: self.request(entry).map_err(|error| self.failed(error))?,
                draft: call.draft(),
                way: call.way,
            };
            let began = Instant::now();
            let due = due(self.config.call_ms_max, entry.deadline, began);
            let answer = tokio::select! {
                biased;
                over = outside.interrupts(&entry.running) => return Err(over),
                answer = tokio::time::timeout_at(due, self.engine.verify(request)) => answer,
            };
            if answer.is_err()
                && let Some(error) = entry.overdue(Instant::now())
            {
                return Err(Outcome::Overdue(error));
            }
            let answer = answer.unwrap_or_else(|_| {
                let late = "the engine did not judge a draft in time";
                Err(ApiError::new(ErrorKind::Timeout, late).with_code(code::ENGINE_TIMEOUT))
            });
            match &answer {
                Ok(_) => self.works(),
                // The stream that is started next finds out whether the engine is there.
                Err(error) => {
                    tracing::debug!(kind = ?error.kind, code = error.code, "a verify call failed")
                }
            }
            let now = Instant::now();
            let seconds = (now - began).as_secs_f64();
            if let Some(judged) = driving.answered(call, answer.as_ref().ok(), seconds) {
                let absorbed = entry.running.absorb_judged(judged, self.limits(), now);
                let absorbed = absorbed.map_err(|error| self.failed(error))?;
                driving.said(&absorbed.message.tokens);
                if let Some(end) = self.say(entry, outside, absorbed).await? {
                    return Err(Outcome::Ended(end));
                }
            }
            next = self.call(&entry.running, driving, false);
        }
        Ok(())
    }
}
