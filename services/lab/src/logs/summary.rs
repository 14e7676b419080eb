//! The part of a report that lets a reader trust the rest: what was read from logs, and what was left out.

use serde::Serialize;

/// The counts of what was read.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LogSummary {
    /// Files that were read.
    pub files: u64,
    /// The forms in which calls were found.
    pub forms: Vec<FormCount>,
    /// Files and records that were left out, by reason.
    pub left_out: Vec<LeftOut>,
    /// Calls that were found.
    pub calls: u64,
    /// Calls whose prompt the log does not have.
    pub calls_without_prompt: u64,
    /// Calls that began before the call that stands before them in the log. All are taken in the order of the log.
    pub calls_out_of_order: u64,
    /// Output tokens that were estimated from the length of texts, because their calls are only counted.
    pub output_tokens_estimated: u64,
    /// Whether texts were split by the approximate tokenizer, for lack of the model's own.
    pub has_approximate_tokens: bool,
}

/// How often a form was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FormCount {
    /// Name of the form.
    pub form: String,
    /// Records of it that have calls.
    pub records: u64,
    /// Calls in them.
    pub calls: u64,
}

/// The records that were left out for one reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOut {
    /// The reason.
    pub reason: String,
    /// How many files or records.
    pub count: u64,
    /// File and place of the first.
    pub first: String,
}

impl LogSummary {
    pub(super) fn add_form(&mut self, form: &str, records: u64, calls: u64) {
        self.calls += calls;
        if let Some(found) = self.forms.iter_mut().find(|found| found.form == form) {
            found.records += records;
            found.calls += calls;
        } else {
            let form = form.to_owned();
            self.forms.push(FormCount {
                form,
                records,
                calls,
            });
        }
    }

    /// `first` gives the position.
    pub(super) fn leave_out(&mut self, reason: &str, first: impl FnOnce() -> String) {
        if let Some(found) = self
            .left_out
            .iter_mut()
            .find(|found| found.reason == reason)
        {
            found.count += 1;
        } else {
            self.left_out.push(LeftOut {
                reason: reason.to_owned(),
                count: 1,
                first: first(),
            });
        }
    }

    /// A sentence for each reason to leave something out.
    pub fn left_out_sentences(&self) -> impl Iterator<Item = String> {
        self.left_out.iter().map(|left| {
            format!(
                "Left out: {}, {} (first: {}).",
                left.reason,
                count(left.count, "time"),
                left.first
            )
        })
    }

    /// The summary in sentences.
    pub fn sentences(&self) -> Vec<String> {
        let mut sentences = Vec::new();
        for form in &self.forms {
            sentences.push(format!(
                "{} from {} of the form {:?}.",
                count(form.calls, "call"),
                count(form.records, "record"),
                form.form
            ));
        }
        sentences.extend(self.left_out_sentences());
        if self.calls_without_prompt > 0 {
            let calls = count(self.calls_without_prompt, "call");
            sentences.push(format!(
                "The log has no prompt of {calls}, so nothing is drafted from it."
            ));
        }
        if self.calls_out_of_order > 0 {
            let calls = count(self.calls_out_of_order, "call");
            sentences.push(format!(
                "All calls are taken in the order of the log, but {calls} began before the one above."
            ));
        }
        if self.output_tokens_estimated > 0 {
            let tokens = count(self.output_tokens_estimated, "output token");
            sentences.push(format!(
                "Calls that are only counted have {tokens}, estimated from the length of their texts."
            ));
        }
        if self.has_approximate_tokens {
            sentences.push(
                "Texts were split by an approximate tokenizer. On nine recordings its gains were within 6 % of those by the \
                 true one. --tokenizer names yours."
                    .to_owned(),
            );
        }
        sentences
    }

    /// The error of logs without a call that can be used.
    pub(super) fn nothing_usable(&self) -> anyhow::Error {
        let mut text = match self.files {
            0 => "there is no log to read".to_owned(),
            files => format!("no call can be read from {}", count(files, "file")),
        };
        for left in self.left_out.iter().take(5) {
            text += &format!(
                "\n  {}, {} (first: {})",
                left.reason,
                count(left.count, "time"),
                left.first
            );
        }
        text += "\nA call needs the text that the model wrote, and if possible the prompt before it. This line would do:\n  \
                 {\"messages\": [{\"role\": \"user\", \"content\": \"2 + 2?\"}], \"output\": \"4\"}";
        anyhow::Error::msg(text)
    }
}

fn count(number: u64, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}
