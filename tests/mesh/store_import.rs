//! `refrain store` as an operator's script uses it: what an import acknowledged survives kill -9 at any moment.

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
/// Kills of imports that nobody waits for: most of these come before anything is acknowledged.
const EARLY_KILLS: u32 = 3;
/// How long an import may go on at most before it is killed: some of the time that the whole trace takes. Nothing
/// depends on how far it gets.
const MOMENT: Duration = Duration::from_millis(200);
/// Documents of a batch, and batches that travel while no acknowledgement is waited for.
const BATCH: u32 = 512;
const UNDER_WAY: u32 = 4;

/// What a call of the trace said: of any length, and different for each.
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

/// How many documents an import surely acknowledges that was sent so many lines and no end of them: a batch is sent
/// with the line behind it, and awaited when it is one too many.
fn surely_acknowledged(lines: u32) -> u32 {
    let sent = lines.saturating_sub(1) / BATCH;
    sent.saturating_sub(UNDER_WAY) * BATCH
}

/// Writes the first lines of a trace, and the others once it is told to. Its end comes with that of the returned
/// sender, so an import is never finished before.
fn feed(mut stdin: ChildStdin, trace: Arc<str>, first: u32) -> (mpsc::Sender<()>, JoinHandle<()>) {
    let (go_on, told) = mpsc::channel();
    let feeder = thread::spawn(move || {
        let first = trace.split_inclusive('\n').take(first as usize);
        let (first, others) = trace.split_at(first.map(str::len).sum());
        for part in [first, others] {
            // Who was killed reads no more.
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

/// Runs a command of `refrain store` on the directory to its end.
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

/// The last number of a run's output, which must be whole lines of `{"acknowledged": N}` that only grow. Each is told
/// as it is read.
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

/// The outputs in the store, sorted.
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

/// Going on from where an import was cut ends with all of the trace, each document once.
fn goes_on(trace: &Path, data_dir: &Path) -> anyhow::Result<()> {
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
fn what_an_import_acknowledged_survives_kill_9() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let lines: Arc<str> = trace().into();
    let trace = dir.path().join("trace.jsonl");
    std::fs::write(&trace, &*lines)?;
    let tokens: usize = (0..DOCUMENTS).map(|call| output(call).len()).sum();
    let whole = dir.path().join("whole");
    let mut child = import(&trace, &whole)?.spawn()?;
    let said = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let told = acknowledged(said.map_while(Result::ok), |_| ())?;
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
            let said = BufReader::new(stdout).lines().map_while(Result::ok);
            acknowledged(said, |documents| _ = progress.send(documents))
        });
        // What was surely acknowledged when the rest of the trace is let go, between the first batch and the last
        // one.
        let waited_for = round.checked_sub(EARLY_KILLS).map(|later| {
            let first = BATCH * (UNDER_WAY + 1) + 1;
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
            "round {round}: the import ended before its trace did"
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
            // There may be no store yet. What counts is that one can be made where another was begun.
            goes_on(&trace, &data_dir)?;
            continue;
        }
        let found = stats(&data_dir)?;
        let documents = found["documents"].as_u64().unwrap_or(0);
        ensure!(
            documents >= told,
            "round {round}: {told} acknowledged, {documents} there"
        );
        let outputs = exported(&data_dir)?;
        ensure!(
            outputs.len() as u64 == documents,
            "round {round}: some are not exported"
        );
        for call in 0..told {
            let said = output(call as u32);
            ensure!(
                outputs.binary_search(&said).is_ok(),
                "round {round}: {call} is lost"
            );
        }
        for entry in std::fs::read_dir(&data_dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            ensure!(!name.starts_with("quarantine"), "round {round}: {name}");
        }
        if round % 5 == 0 {
            store("verify", &data_dir, &[])?;
            goes_on(&trace, &data_dir)?;
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
    ensure!(
        exported(&whole)? == expected,
        "compacted, something is different"
    );
    let found = stats(&whole)?;
    ensure!(found["segment_bytes"].as_u64() > Some(0), "{found}");
    Ok(())
}
