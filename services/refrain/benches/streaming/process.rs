//! Child processes, and the resources that they used by the kernel's counts.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use anyhow::Context;

/// A process that is killed when this is dropped.
pub(crate) struct Child {
    process: std::process::Child,
    // Kept open: a program whose output nobody reads would end.
    output: BufReader<ChildStdout>,
    #[allow(dead_code, reason = "only the benchmark of requests asks a process")]
    input: ChildStdin,
}

impl Child {
    /// Starts the process, and waits for a line of its output that contains `text`.
    pub(crate) fn start(mut command: Command, text: &str) -> anyhow::Result<(Self, String)> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let output = process.stdout.take().context("no output")?;
        let input = process.stdin.take().context("no input")?;
        let mut child = Child {
            process,
            output: BufReader::new(output),
            input,
        };
        let mut lines = child.output.by_ref().lines();
        let line = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains(text)));
        let line = line.with_context(|| format!("{command:?} ended before it said {text:?}"))??;
        Ok((child, line))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    #[allow(dead_code, reason = "only the benchmark of requests asks a process")]
    /// Writes an empty line to the process, and reads the line that it answers with.
    pub(crate) fn ask(&mut self) -> anyhow::Result<String> {
        self.input.write_all(b"\n")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The counts of a process's current threads. Threads that have ended are not included.
pub(crate) struct Used {
    threads: HashMap<OsString, Counts>,
}

/// Resources that threads used.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counts {
    /// CPU time in user mode and in the kernel, nanoseconds.
    pub(crate) cpu_ns: u64,
    /// Number of times that a thread went to sleep.
    pub(crate) sleeps: u64,
}

impl Used {
    pub(crate) fn by(pid: u32) -> anyhow::Result<Self> {
        let mut threads = HashMap::new();
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?;
            // A thread may end at any time.
            if let Some(counts) = counts(&task.path()) {
                threads.insert(task.file_name(), counts);
            }
        }
        Ok(Used { threads })
    }

    pub(crate) fn since(&self, before: &Used) -> Counts {
        let mut sum = Counts::default();
        for (thread, now) in &self.threads {
            let before = before.threads.get(thread).copied().unwrap_or_default();
            sum.cpu_ns += now.cpu_ns.saturating_sub(before.cpu_ns);
            sum.sleeps += now.sleeps.saturating_sub(before.sleeps);
        }
        sum
    }
}

fn counts(task: &Path) -> Option<Counts> {
    let spent = std::fs::read_to_string(task.join("schedstat")).ok()?;
    let status = std::fs::read_to_string(task.join("status")).ok()?;
    let sleeps = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    Some(Counts {
        cpu_ns: spent.split(' ').next()?.parse().ok()?,
        sleeps: sleeps.trim().parse().ok()?,
    })
}
