//! `refrain store` as an operator's script uses it: what an import acknowledged survives kill -9 at any moment.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};
use e2e::refrain_binary;
use serde_json::Value;

const DOCUMENTS: u32 = 6_000;
const KILLS: u32 = 20;

/// What a call of the trace said: of any length, and different for each.
fn output(call: u32) -> Vec<u32> {
    let len = 5 + call * 37 % 60;
    let token = |at: u32| call.wrapping_mul(2_654_435_761).wrapping_add(at * 40_503) >> 14;
    (0..len).map(token).collect()
}

fn write_trace(path: &Path) -> anyhow::Result<()> {
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
    let trace: String = (0..DOCUMENTS).map(line).collect();
    Ok(std::fs::write(path, trace)?)
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
    let trace = dir.path().join("trace.jsonl");
    write_trace(&trace)?;
    let tokens: usize = (0..DOCUMENTS).map(|call| output(call).len()).sum();
    let started = Instant::now();
    let whole = dir.path().join("whole");
    let mut child = import(&trace, &whole)?.spawn()?;
    let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let told = acknowledged(lines.map_while(Result::ok), |_| ())?;
    ensure!(
        child.wait()?.success() && told == u64::from(DOCUMENTS),
        "{told}"
    );
    let took = started.elapsed();
    let seed = std::process::id();
    let (mut cut, mut partial) = (0, 0);
    for round in 0..KILLS {
        let data_dir = dir.path().join(format!("round-{round}"));
        let began = Instant::now();
        let mut child = import(&trace, &data_dir)?.spawn()?;
        let stdout = child.stdout.take().context("no stdout")?;
        let (progress, told) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            acknowledged(lines, |documents| _ = progress.send(documents))
        });
        // Twenty moments, one after each twentieth of what there is to do, however quick the machine is just now.
        let goal = u64::from(DOCUMENTS / KILLS * round);
        let _ = (round > 0).then(|| told.iter().find(|documents| *documents >= goal));
        let within =
            f64::from((seed ^ round).wrapping_mul(2_654_435_761) >> 8) / f64::from(1 << 24);
        // A little later, by the pace of this very run: another may have had the machine to itself, or not.
        let pace = if round == 0 { took } else { began.elapsed() };
        std::thread::sleep(pace.mul_f64(within / f64::from(2 * KILLS)));
        cut += u32::from(child.try_wait()?.is_none());
        child.kill()?;
        child.wait()?;
        let told = reader
            .join()
            .map_err(|_| anyhow::anyhow!("the reader panicked"))??;
        partial += u32::from(told > 0 && told < u64::from(DOCUMENTS));
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
    ensure!(
        cut >= KILLS / 2 && partial >= 3,
        "{cut} were cut, {partial} half way"
    );
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
