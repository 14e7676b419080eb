//! Trace files: one completed call per line as JSON, plain or compressed with zstd.
//!
//! A line has `output_token_ids`, or text in `output`. It may have `prompt_token_ids` or `prompt`, `tenant`,
//! `workload`, `session` and `group`; other keys are ignored. Files are read during the replay, one line at a time.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use refrain_suffix_index::Token;
use refrain_tokenization::Tokenizer;
use serde::Deserialize;

use crate::json_lines::{JsonLines, ReadProgress, line_error, unreadable};

/// One recorded call.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RecordedCall {
    pub(crate) workload: Option<String>,
    pub(crate) tenant: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) group: Option<String>,
    /// When the call began, Unix milliseconds.
    pub(crate) at_ms: Option<u64>,
    /// How long it took, milliseconds.
    pub(crate) duration_ms: Option<u64>,
    pub(crate) prompt: Vec<Token>,
    pub(crate) output: Vec<Token>,
}

#[derive(Deserialize)]
struct TraceLine {
    workload: Option<String>,
    tenant: Option<String>,
    session: Option<String>,
    group: Option<String>,
    at_ms: Option<u64>,
    duration_ms: Option<u64>,
    prompt_token_ids: Option<Vec<Token>>,
    output_token_ids: Option<Vec<Token>>,
    prompt: Option<String>,
    output: Option<String>,
}

/// The calls of several files, in order.
pub(crate) struct Traces {
    /// Files that are not open yet.
    paths: VecDeque<PathBuf>,
    tokenizer: Option<Arc<Tokenizer>>,
    open: Option<JsonLines>,
    progress: ReadProgress,
}

impl Traces {
    /// Checks that all files exist, so that a wrong name is reported before hours of work.
    pub(crate) fn new(
        paths: &[PathBuf],
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> anyhow::Result<Self> {
        let mut size_bytes = 0;
        for path in paths {
            let metadata = std::fs::metadata(path).with_context(|| unreadable(path))?;
            ensure!(metadata.is_file(), "{}: not a file", path.display());
            size_bytes += metadata.len();
        }
        Ok(Traces {
            paths: paths.iter().cloned().collect(),
            tokenizer,
            open: None,
            progress: ReadProgress::new(size_bytes),
        })
    }

    pub(crate) fn progress(&self) -> ReadProgress {
        self.progress.clone()
    }

    fn next_call(&mut self) -> anyhow::Result<Option<RecordedCall>> {
        loop {
            if self.open.is_none() {
                let Some(path) = self.paths.pop_front() else {
                    return Ok(None);
                };
                self.open = Some(JsonLines::open(path, self.progress.clone())?);
            }
            let Some(open) = &mut self.open else { continue };
            if !open.advance()? {
                self.open = None;
                continue;
            }
            if open.line().is_empty() {
                continue;
            }
            return parse(open.line(), self.tokenizer.as_deref())
                .with_context(|| open.position())
                .map(Some);
        }
    }
}

impl Iterator for Traces {
    type Item = anyhow::Result<RecordedCall>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_call().transpose()
    }
}

/// Reads the tokenizer of this file, if one is named.
pub(crate) fn tokenizer(path: Option<&Path>) -> anyhow::Result<Option<Arc<Tokenizer>>> {
    let Some(path) = path else { return Ok(None) };
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let tokenizer = Tokenizer::from_bytes(&bytes).with_context(|| path.display().to_string())?;
    Ok(Some(Arc::new(tokenizer)))
}

fn parse(line: &[u8], tokenizer: Option<&Tokenizer>) -> anyhow::Result<RecordedCall> {
    let line: TraceLine = serde_json::from_slice(line).map_err(line_error)?;
    let tokenizer = |key: &str| {
        tokenizer
            .with_context(|| format!("{key} is text: name the tokenizer.json with --tokenizer"))
    };
    let prompt = match (line.prompt_token_ids, line.prompt) {
        (Some(ids), _) => ids,
        (None, Some(text)) => tokenizer("prompt")?.encode_sequence(&text)?,
        (None, None) => Vec::new(),
    };
    let output = match (line.output_token_ids, line.output) {
        (Some(ids), _) => ids,
        (None, Some(text)) => tokenizer("output")?.encode(&text)?,
        (None, None) => bail!("the call has neither output_token_ids nor output"),
    };
    Ok(RecordedCall {
        workload: line.workload,
        tenant: line.tenant,
        session: line.session,
        group: line.group,
        at_ms: line.at_ms,
        duration_ms: line.duration_ms,
        prompt,
        output,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use refrain_tokenization::testing;

    use super::*;

    fn read(
        content: &[u8],
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> anyhow::Result<Vec<RecordedCall>> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("calls.jsonl");
        File::create(&path)?.write_all(content)?;
        Traces::new(&[path], tokenizer)?.collect()
    }

    fn refusal(content: &str) -> String {
        format!("{:#}", read(content.as_bytes(), None).unwrap_err())
    }

    #[test]
    fn plain_and_compressed_files_are_read_alike() -> anyhow::Result<()> {
        let text = concat!(
            r#"{"session":"s","turn":0,"group":null,"prompt_token_ids":[1,2],"output_token_ids":[3]}"#,
            "\n\n",
            r#"{"tenant":"t","group":"g","output_token_ids":[],"kept":{"by":["nobody"]}}"#,
        );
        let calls = read(text.as_bytes(), None)?;
        assert_eq!(calls.len(), 2);
        assert_eq!(
            (&calls[0].prompt[..], &calls[0].output[..]),
            (&[1, 2][..], &[3][..])
        );
        assert_eq!(calls[0].session.as_deref(), Some("s"));
        assert_eq!(calls[1].tenant.as_deref(), Some("t"));
        assert_eq!(calls[1].group.as_deref(), Some("g"));
        // Two frames, as `cat a.zst b.zst` makes them.
        let (first, second) = text.split_at(90);
        let mut frames = zstd::bulk::compress(first.as_bytes(), 1)?;
        frames.extend(zstd::bulk::compress(second.as_bytes(), 1)?);
        assert_eq!(read(&frames, None)?, calls);
        Ok(())
    }

    #[test]
    fn files_follow_each_other_and_are_counted() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let paths: Vec<PathBuf> = (0..3)
            .map(|number| folder.path().join(number.to_string()))
            .collect();
        std::fs::write(&paths[0], "{\"output_token_ids\":[1]}\n")?;
        std::fs::write(&paths[1], "")?;
        std::fs::write(&paths[2], "{\"output_token_ids\":[2]}")?;
        let traces = Traces::new(&paths, None)?;
        let progress = traces.progress();
        assert_eq!(progress.share(), 0.0);
        let outputs: Vec<_> = traces
            .map(|call| call.map(|call| call.output))
            .collect::<anyhow::Result<_>>()?;
        assert_eq!(outputs, [[1], [2]]);
        assert_eq!(progress.share(), 1.0);
        Ok(())
    }

    #[test]
    fn text_needs_a_tokenizer() -> anyhow::Result<()> {
        let line = r#"{"prompt":"What is 2 + 2?","output":"4"}"#;
        assert!(
            refusal(line)
                .contains("line 1: prompt is text: name the tokenizer.json with --tokenizer")
        );
        let tokenizer = Arc::new(testing::byte_level_files().tokenizer()?);
        let calls = read(line.as_bytes(), Some(tokenizer.clone()))?;
        assert_eq!(calls[0].output, tokenizer.encode("4")?);
        assert_eq!(
            calls[0].prompt,
            tokenizer.encode_sequence("What is 2 + 2?")?
        );
        Ok(())
    }

    #[test]
    fn an_error_names_file_and_line() {
        let good = "{\"output_token_ids\":[1]}\n";
        for (line, wanted) in [
            (
                "{\"output_token_ids\":[1]",
                "line 2: EOF while parsing an object (column 23)",
            ),
            ("nonsense", "line 2: expected ident (column 2)"),
            ("[1]", "line 2: invalid type: integer `1`"),
            (
                "{\"output_token_ids\":[-1]}",
                "line 2: invalid value: integer `-1`, expected u32",
            ),
            ("{\"output_token_ids\":[4294967296]}", "expected u32"),
            (
                "{\"session\":7,\"output_token_ids\":[1]}",
                "line 2: invalid type: integer `7`, expected a string",
            ),
            (
                "{\"prompt_token_ids\":[1]}",
                "line 2: the call has neither output_token_ids nor output",
            ),
        ] {
            let message = refusal(&format!("{good}{line}\n"));
            assert!(
                message.contains("calls.jsonl, ") && message.contains(wanted),
                "{line}: {message}"
            );
        }
        let missing = Traces::new(&["no/such/file".into()], None).err();
        let message = format!("{:#}", missing.expect("there is no such file"));
        assert!(
            message.contains("no/such/file: the trace cannot be read"),
            "{message}"
        );
    }

    #[test]
    fn a_damaged_frame_is_an_error() {
        let mut frame = zstd::bulk::compress(&[b' '; 10_000], 1).unwrap();
        frame.truncate(frame.len() - 1);
        let message = format!("{:#}", read(&frame, None).unwrap_err());
        assert!(message.contains("calls.jsonl, line 1"), "{message}");
    }
}
