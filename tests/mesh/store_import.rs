//! `refrain store` as operators' scripts use it: acknowledged documents of an import survive `kill -9` at any moment.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, ensure};
use e2e::{PATIENCE, refrain_binary};
use serde_json::Value;

const DOCUMENTS: u32 = 6_000;
const KILLS: u32 = 20;
/// Number of imports that are killed early, mostly before any document is acknowledged.
const EARLY_KILLS: u32 = 3;
/// Longest time for which an import goes on before it is killed: a part of the time of the whole trace. No assertion
/// depends on how far the import gets.
const MOMENT: Duration = Duration::from_millis(200);
/// Number of documents in a batch.
const BATCH: u32 = 512;
/// Number of batches in flight before the import waits for an acknowledgement.
const IN_FLIGHT: u32 = 4;

/// The output of a call in the trace. Each output is different, and lengths vary.
fn output(call: u32) -> Vec<u32> {
    let len = 5 + call * 37 % 60;
    let token = |at: u32| call.wrapping_mul(2_654_435_761).wrapping_add(at * 40_503) >> 14;
    (0..len).map(token).collect()
}

fn trace() -> String {
    let line = |call: u32| {
        let prompt: Vec<u32> = (0..call % 30).collect();
        format!(
            "{{\"workload\":\"w\",\"session\":\"s{}\",\"turn\":{},\"group\":null,\"model\":\"gpt\",\
             \"prompt_token_ids\":{prompt:?},\"output_token_ids\":{:?}}}\n",
            call / 10,
            call % 10,
            output(call)
        )
    };
    (0..DOCUMENTS).map(line).collect()
}

/// How many documents an import surely acknowledges after this many lines without an end of the file. It sends a
/// batch when it reads the line after it, and waits when one batch too many is in flight.
fn surely_acknowledged(lines: u32) -> u32 {
    let sent = lines.saturating_sub(1) / BATCH;
    sent.saturating_sub(IN_FLIGHT) * BATCH
}

/// Writes the first lines of a trace, and the rest after a message. The file ends only when the returned sender is
/// dropped, so an import never finishes earlier.
fn feed(mut stdin: ChildStdin, trace: Arc<str>, first: u32) -> (mpsc::Sender<()>, JoinHandle<()>) {
    let (go_on, told) = mpsc::channel();
    let feeder = thread::spawn(move || {
        let first = trace.split_inclusive('\n').take(first as usize);
        let (first, others) = trace.split_at(first.map(str::len).sum());
        for part in [first, others] {
            // A killed import no longer reads, so writing may fail.
            let _ = stdin.write_all(part.as_bytes());
            let _ = told.recv();
        }
    });
    (go_on, feeder)
}

fn import(trace: &Path, data_dir: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(refrain_binary()?);
    command
        .args(["store", "import"])
        .arg(trace)
        .arg("--data-dir")
        .arg(data_dir)
        .args(["--tenant", "acme", "--model", "m", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    Ok(command)
}

/// Runs a command of `refrain store` on the directory, and waits for its end.
fn store(command: &str, data_dir: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(refrain_binary()?)
        .args(["store", command, "--data-dir"])
        .arg(data_dir)
        .args(arguments)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command}: {said}");
    Ok(String::from_utf8(output.stdout)?)
}

/// The last number in an import's output, which must be whole lines of `{"acknowledged": N}` with growing numbers.
/// Each number is reported as it is read.
fn acknowledged(
    lines: impl Iterator<Item = String>,
    mut tell: impl FnMut(u64),
) -> anyhow::Result<u64> {
    let mut last = 0;
    for line in lines {
        let told: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
        let documents = told["acknowledged"]
            .as_u64()
            .with_context(|| line.clone())?;
        ensure!(documents > last, "{documents} after {last}");
        last = documents;
        tell(last);
    }
    Ok(last)
}

/// All outputs in the store, sorted.
fn exported(data_dir: &Path) -> anyhow::Result<Vec<Vec<u32>>> {
    let text = store("export", data_dir, &["--tenant", "acme", "--model", "m"])?;
    let mut outputs = Vec::new();
    for line in text.lines() {
        let document: Value = serde_json::from_str(line)?;
        outputs.push(serde_json::from_value(
            document["output_token_ids"].clone(),
        )?);
    }
    outputs.sort_unstable();
    Ok(outputs)
}

/// A repeated import continues where the first one was killed, and ends with each document of the trace once.
fn ensure_resumes(trace: &Path, data_dir: &Path) -> anyhow::Result<()> {
    let again = import(Path::new("-"), data_dir)?
        .stdin(std::fs::File::open(trace)?)
        .output()?;
    ensure!(again.status.success(), "{}: {again:?}", data_dir.display());
    ensure!(stats(data_dir)?["documents"] == DOCUMENTS);
    Ok(())
}

fn stats(data_dir: &Path) -> anyhow::Result<Value> {
    let stats: Value = serde_json::from_str(&store("stats", data_dir, &["--json"])?)?;
    for key in [
        "documents",
        "tokens",
        "log_bytes",
        "segment_bytes",
        "disk_bytes",
        "namespaces",
    ] {
        ensure!(stats[key].is_u64(), "no {key} in {stats}");
    }
    Ok(stats)
}

#[test]
fn acknowledged_documents_of_an_import_survive_kill_9() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let lines: Arc<str> = trace().into();
    let trace = dir.path().join("trace.jsonl");
    std::fs::write(&trace, &*lines)?;
    let tokens: usize = (0..DOCUMENTS).map(|call| output(call).len()).sum();
    let whole = dir.path().join("whole");
    let mut child = import(&trace, &whole)?.spawn()?;
    let lines_out = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let told = acknowledged(lines_out.map_while(Result::ok), |_| ())?;
    ensure!(
        child.wait()?.success() && told == u64::from(DOCUMENTS),
        "{told}"
    );
    let seed = std::process::id();
    for round in 0..KILLS {
        let data_dir = dir.path().join(format!("round-{round}"));
        let mut child = import(Path::new("-"), &data_dir)?
            .stdin(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("no stdout")?;
        let (progress, told) = mpsc::channel();
        let reader = thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            acknowledged(lines, |documents| _ = progress.send(documents))
        });
        // The number of lines before the rest of the trace is sent. It goes from the first batch to the last one.
        let waited_for = round.checked_sub(EARLY_KILLS).map(|later| {
            let first = BATCH * (IN_FLIGHT + 1) + 1;
            first + (DOCUMENTS - first) * later / (KILLS - EARLY_KILLS)
        });
        let stdin = child.stdin.take().context("no stdin")?;
        let (go_on, feeder) = feed(stdin, lines.clone(), waited_for.unwrap_or(0));
        let goal = u64::from(waited_for.map_or(0, surely_acknowledged));
        let mut seen = 0;
        while seen < goal {
            let next = told.recv_timeout(PATIENCE);
            seen = next.with_context(|| format!("round {round}: {seen} of {goal}"))?;
        }
        let within =
            f64::from((seed ^ round).wrapping_mul(2_654_435_761) >> 8) / f64::from(1 << 24);
        go_on.send(())?;
        thread::sleep(MOMENT.mul_f64(within));
        ensure!(
            child.try_wait()?.is_none(),
            "round {round}: the import ended before its trace"
        );
        child.kill()?;
        child.wait()?;
        drop(go_on);
        let joined = |_| anyhow::anyhow!("a thread panicked");
        feeder.join().map_err(joined)?;
        let told = reader.join().map_err(joined)??;
        ensure!(
            (goal..u64::from(DOCUMENTS)).contains(&told),
            "round {round}: {told} acknowledged, {goal} seen"
        );
        if told == 0 {
            // Perhaps no store exists yet. Then it must be possible to create one where another was begun.
            ensure_resumes(&trace, &data_dir)?;
            continue;
        }
        let found = stats(&data_dir)?;
        let documents = found["documents"].as_u64().unwrap_or(0);
        ensure!(
            documents >= told,
            "round {round}: {told} documents acknowledged, {documents} stored"
        );
        let outputs = exported(&data_dir)?;
        ensure!(
            outputs.len() as u64 == documents,
            "round {round}: some documents are not exported"
        );
        for call in 0..told {
            let expected = output(call as u32);
            ensure!(
                outputs.binary_search(&expected).is_ok(),
                "round {round}: the output of call {call} is lost"
            );
        }
        for entry in std::fs::read_dir(&data_dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            ensure!(!name.starts_with("quarantine"), "round {round}: {name}");
        }
        if round % 5 == 0 {
            store("verify", &data_dir, &[])?;
            ensure_resumes(&trace, &data_dir)?;
        }
    }
    let found = stats(&whole)?;
    ensure!(
        found["documents"] == DOCUMENTS && found["tokens"] == tokens,
        "{found}"
    );
    store("compact", &whole, &["--json"])?;
    let mut expected: Vec<Vec<u32>> = (0..DOCUMENTS).map(output).collect();
    expected.sort_unstable();
    ensure!(exported(&whole)? == expected, "the compacted store differs");
    let found = stats(&whole)?;
    ensure!(found["segment_bytes"].as_u64() > Some(0), "{found}");
    Ok(())
}
