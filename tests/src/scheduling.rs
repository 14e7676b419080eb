//! A reader of the scheduler's log lines of requests and chunks.

use serde_json::Value;

/// A line of the scheduler about a request or a chunk, in the order in which its core applied them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SchedulingEvent {
    /// A request asks for a chunk.
    Asked {
        /// The request.
        request: String,
        /// Its class: `interactive` or `rollout`.
        class: String,
        /// Its group.
        group: Option<String>,
        /// Its output tokens so far.
        generated_tokens: u64,
        /// Most tokens of its output.
        max_new_tokens: u64,
        /// How long ago the gateway took it.
        age_ms: u64,
    },
    /// The caller of a request that waits is gone.
    Withdrawn {
        /// The request.
        request: String,
    },
    /// A request gets a chunk.
    Granted {
        /// The request.
        request: String,
        /// The lease of the chunk.
        lease: String,
        /// The worker that runs it.
        worker: String,
        /// Whether it finds out how long the outputs of its group are.
        probe: bool,
        /// The estimate by which it was ordered.
        estimated_tokens: Option<u64>,
    },
    /// A chunk has ended.
    Ended {
        /// The lease of the chunk.
        lease: String,
        /// Its outcome, such as `continues`.
        outcome: String,
        /// Tokens that it brought.
        emitted_tokens: u64,
    },
}

impl SchedulingEvent {
    /// The events of a scheduler's output, which has other lines as well.
    ///
    /// # Panics
    /// A line about scheduling lacks a field.
    pub fn read(output: &str) -> Vec<Self> {
        let lines = output.lines().filter_map(|line| {
            let line: Value = serde_json::from_str(line).ok()?;
            (line["target"] == "scheduling").then_some(line)
        });
        lines
            .map(|line| {
                let event = Self::of_fields(&line["fields"]);
                event.unwrap_or_else(|| panic!("no event: {line}"))
            })
            .collect()
    }

    fn of_fields(fields: &Value) -> Option<Self> {
        let text = |name: &str| fields[name].as_str().map(str::to_owned);
        let number = |name: &str| fields[name].as_u64();
        Some(match fields["message"].as_str()? {
            "a request asks for a chunk" => SchedulingEvent::Asked {
                request: text("request")?,
                class: text("class")?,
                group: text("group"),
                generated_tokens: number("generated_tokens")?,
                max_new_tokens: number("max_new_tokens")?,
                age_ms: number("age_ms")?,
            },
            "a request is withdrawn" => SchedulingEvent::Withdrawn {
                request: text("request")?,
            },
            "a chunk is granted" => SchedulingEvent::Granted {
                request: text("request")?,
                lease: text("lease")?,
                worker: text("worker")?,
                probe: fields["probe"].as_bool()?,
                estimated_tokens: number("estimated_tokens"),
            },
            "a chunk has ended" => SchedulingEvent::Ended {
                lease: text("lease")?,
                outcome: text("outcome")?,
                emitted_tokens: number("emitted_tokens")?,
            },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_about_scheduling_are_read_and_others_are_not() {
        let line = r#"{"target":"scheduling","fields":{"message":"a chunk has ended","lease":"1","outcome":"continues","emitted_tokens":5}}"#;
        let other = r#"{"target":"access","fields":{"message":"a chunk has ended"}}"#;
        let events = SchedulingEvent::read(&format!("{other}\nno JSON\n{line}\n"));
        let ended = SchedulingEvent::Ended {
            lease: "1".into(),
            outcome: "continues".into(),
            emitted_tokens: 5,
        };
        assert_eq!(events, [ended]);
    }
}
