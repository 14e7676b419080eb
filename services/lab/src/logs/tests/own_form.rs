//! Refrain's own form, and how files are opened.

use std::io::Write;
use std::sync::Arc;

use refrain_tokenization::testing;

use super::*;

fn recorded(content: &[u8]) -> anyhow::Result<Vec<RecordedCall>> {
    recorded_by(content, LogTokenizer::default())
}

fn recorded_by(content: &[u8], tokenizer: LogTokenizer) -> anyhow::Result<Vec<RecordedCall>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("calls.jsonl");
    std::fs::write(&path, content)?;
    Logs::open(&[path], tokenizer)?.collect()
}

fn refusal(content: &[u8]) -> String {
    format!("{:#}", recorded(content).unwrap_err())
}

#[test]
fn plain_and_compressed_files_are_read_alike() -> anyhow::Result<()> {
    let text = concat!(
        r#"{"session":"s","turn":0,"group":null,"prompt_token_ids":[1,2],"output_token_ids":[3]}"#,
        "\n\n",
        r#"{"tenant":"t","group":"g","output_token_ids":[],"kept":{"by":["nobody"]}}"#,
    );
    let calls = recorded(text.as_bytes())?;
    assert_eq!(calls.len(), 2);
    assert_eq!(
        (&calls[0].prompt[..], &calls[0].output[..]),
        (&[1, 2][..], &[3][..])
    );
    assert_eq!(calls[0].session.as_deref(), Some("s"));
    assert_eq!(calls[1].tenant.as_deref(), Some("t"));
    assert_eq!(calls[1].group.as_deref(), Some("g"));
    // Two frames or members, as `cat` makes them of two files.
    let (first, second) = text.split_at(90);
    let mut frames = zstd::bulk::compress(first.as_bytes(), 1)?;
    frames.extend(zstd::bulk::compress(second.as_bytes(), 1)?);
    assert_eq!(recorded(&frames)?, calls);
    let mut members = Vec::new();
    for part in [first, second] {
        let mut member = flate2::write::GzEncoder::new(&mut members, flate2::Compression::fast());
        member.write_all(part.as_bytes())?;
        member.finish()?;
    }
    assert_eq!(recorded(&members)?, calls);
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
    let mut logs = Logs::open(&paths, LogTokenizer::default())?;
    let progress = logs.progress();
    let outputs: Vec<_> = logs
        .by_ref()
        .map(|call| call.map(|call| call.output))
        .collect::<anyhow::Result<_>>()?;
    assert_eq!(outputs, [[1], [2]]);
    assert_eq!(progress.share(), 1.0);
    let summary = logs.summary();
    assert_eq!(
        (summary.calls, summary.left_out.len()),
        (2, 1),
        "{summary:?}"
    );
    assert_eq!(summary.left_out[0].reason, "an empty file");
    Ok(())
}

#[test]
fn text_is_read_by_the_models_tokenizer_or_by_an_approximate_one() -> anyhow::Result<()> {
    let line = br#"{"prompt":"What is 2 + 2?","output":"4"}"#;
    let calls = recorded(line)?;
    assert_eq!((calls[0].prompt.len(), calls[0].output.len()), (8, 1));
    let tokenizer = Arc::new(testing::byte_level_files().tokenizer()?);
    let calls = recorded_by(line, LogTokenizer::Own(tokenizer.clone()))?;
    assert_eq!(calls[0].output, tokenizer.encode("4")?);
    assert_eq!(
        calls[0].prompt,
        tokenizer.encode_sequence("What is 2 + 2?")?
    );
    Ok(())
}

#[test]
fn what_is_no_call_is_left_out_with_its_place() -> anyhow::Result<()> {
    let good = "{\"output_token_ids\":[1]}\n";
    for (line, reason) in [
        (
            "{\"output_token_ids\":[1]",
            "no JSON, or a record that was cut off",
        ),
        ("nonsense", "a line of text without a call"),
        ("[1]", "a line of text without a call"),
        (
            "{\"output_token_ids\":[-1]}",
            "neither a prompt nor an output",
        ),
        (
            "{\"output_token_ids\":[4294967296]}",
            "neither a prompt nor an output",
        ),
        ("{\"prompt\":\"a\"}", "a request without its response"),
        ("{\"prompt\":\"a\",\"output\":\"\"}", "the output is empty"),
    ] {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("calls.jsonl");
        std::fs::write(&path, format!("{good}{line}\n{good}"))?;
        let (calls, summary) = read(&[path])?;
        let left = &summary.left_out;
        assert_eq!((calls.len(), left.len()), (2, 1), "{line}: {left:?}");
        assert!(
            left[0].reason.contains(reason) && left[0].first.ends_with("calls.jsonl, line 2"),
            "{line}: {left:?}"
        );
        // Alone, words are a text that a model may have written.
        if !line.starts_with('{') {
            continue;
        }
        let message = refusal(line.as_bytes());
        assert!(
            message.contains(reason) && message.contains("This line would do"),
            "{line}: {message}"
        );
    }
    let missing = Logs::open(&["no/such/file".into()], LogTokenizer::default()).err();
    let message = format!("{:#}", missing.expect("there is no such file"));
    assert!(
        message.contains("no/such/file: the trace cannot be read"),
        "{message}"
    );
    Ok(())
}

#[test]
fn errors_say_no_text_of_the_log() {
    for line in [
        "{\"secret\": \"hidden\"}",
        "hidden\"",
        "{\"prompt\": \"hidden\"}",
        "{'prompt': 'hidden'}",
    ] {
        // Alone, words are a text that a model may have written.
        if !line.starts_with('{') {
            continue;
        }
        let message = refusal(line.as_bytes());
        assert!(!message.contains("hidden"), "{message}");
    }
}

#[test]
fn a_damaged_frame_is_an_error() {
    let mut frame = zstd::bulk::compress(&vec![b' '; 100_000], 1).unwrap();
    frame.truncate(frame.len() - 1);
    let message = refusal(&frame);
    assert!(message.contains("calls.jsonl, line 1"), "{message}");
}
