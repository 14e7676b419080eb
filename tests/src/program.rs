//! The `refrain` binary as a child process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, ensure};
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use crate::{PATIENCE, repository, wait_until};

/// A running `refrain`. It is killed when it is dropped.
pub struct Program {
    child: Child,
    output: Arc<Mutex<String>>,
    /// The tasks that read its two output streams to their ends.
    readers: JoinSet<()>,
}

impl Program {
    /// Starts it with arguments and environment variables. The test's own `REFRAIN_*` variables are removed.
    ///
    /// # Errors
    /// There is no binary, and it cannot be built.
    pub fn start(
        dir: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        Program::start_through(&[], dir, arguments, variables)
    }

    /// As [`Program::start`], with another binary, such as that of an earlier version.
    ///
    /// # Errors
    /// The binary does not run.
    pub fn start_binary(
        binary: &Path,
        dir: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        Program::run(Command::new(binary), dir, arguments, variables)
    }

    /// As [`Program::start`], by another program that becomes this one, such as `ip netns exec NAME`.
    ///
    /// # Errors
    /// As [`Program::start`].
    pub fn start_through(
        through: &[String],
        dir: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let binary = refrain_binary()?;
        let mut words: Vec<OsString> = through.iter().map(OsString::from).collect();
        // A process under `nohup` ignores SIGHUP, and so would its children. The tests behave the same there.
        if ignores_hang_ups() {
            words.extend(["env", "--default-signal=HUP"].map(OsString::from));
        }
        words.push(binary.into());
        let mut command = Command::new(words.remove(0));
        command.args(words);
        Program::run(command, dir, arguments, variables)
    }

    /// As [`Program::start`], with a soft and a hard limit on open files.
    ///
    /// # Errors
    /// As [`Program::start`].
    pub fn start_with_descriptors(
        dir: &Path,
        (soft, hard): (u32, u32),
        arguments: &[&str],
    ) -> anyhow::Result<Self> {
        let mut command = Command::new("sh");
        let limited = format!("ulimit -Sn {soft} && ulimit -Hn {hard} && exec \"$0\" \"$@\"");
        command.args(["-c", &limited]).arg(refrain_binary()?);
        Program::run(command, dir, arguments, &[])
    }

    fn run(
        mut command: Command,
        dir: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("REFRAIN_") {
                command.env_remove(name);
            }
        }
        let mut child = command
            .args(arguments)
            .envs(variables.iter().copied())
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("the binary does not run")?;
        let output = Arc::new(Mutex::new(String::new()));
        let mut readers = JoinSet::new();
        readers.spawn(gather(child.stdout.take(), output.clone()));
        readers.spawn(gather(child.stderr.take(), output.clone()));
        Ok(Program {
            child,
            output,
            readers,
        })
    }

    /// Starts `refrain up` on a free port, and waits until it prints its address.
    ///
    /// # Errors
    /// It does not start.
    pub async fn up(
        data_dir: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> anyhow::Result<(Self, String)> {
        let data_dir_text = data_dir.to_string_lossy();
        let mut all = vec![
            "up",
            "--listen",
            "127.0.0.1:0",
            "--data-dir",
            &*data_dir_text,
        ];
        all.extend(arguments);
        let mut program = Program::start(data_dir, &all, variables)?;
        let line = program.line_with("Refrain is up: ").await?;
        let url = line.split("Refrain is up: ").nth(1).unwrap_or_default();
        let url = url.trim_end_matches("/v1").to_owned();
        Ok((program, url))
    }

    /// Waits for a line of output that contains `text`.
    ///
    /// # Errors
    /// The program ends without one.
    pub async fn line_with(&mut self, text: &str) -> anyhow::Result<String> {
        let output = self.output.clone();
        let child = &mut self.child;
        let line = wait_until(text, async || {
            let ended = matches!(child.try_wait(), Ok(Some(_)));
            let output = output.lock();
            let line = output
                .lines()
                .find(|line| line.contains(text))
                .map(str::to_owned);
            line.map(Ok).or_else(|| ended.then(|| Err(output.clone())))
        })
        .await;
        line.map_err(|output| anyhow::anyhow!("it ended without saying {text:?}:\n{output}"))
    }

    /// The output so far, of both streams.
    pub fn output(&self) -> String {
        self.output.lock().clone()
    }

    /// Kills it without warning, as the loss of a machine would.
    ///
    /// # Errors
    /// It cannot be killed.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }

    /// Asks it to stop.
    ///
    /// # Errors
    /// It has already ended.
    pub async fn terminate(&self) -> anyhow::Result<()> {
        self.signal("TERM").await
    }

    /// Sends a signal to it, such as `STOP`.
    ///
    /// # Errors
    /// It has already ended.
    pub async fn signal(&self, name: &str) -> anyhow::Result<()> {
        let id = self.child.id().context("it has ended already")?;
        // This is the shell's own `kill`, because a minimal machine has no other.
        let status = Command::new("sh")
            .args(["-c", &format!("kill -{name} {id}")])
            .status()
            .await?;
        ensure!(status.success(), "kill: {status}");
        Ok(())
    }

    /// The exit status, if it has ended.
    pub fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Waits until it has ended and all of its output was read.
    ///
    /// # Errors
    /// It does not end.
    pub async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let waited = tokio::time::timeout(PATIENCE, async {
            let status = self.child.wait().await;
            while self.readers.join_next().await.is_some() {}
            status
        })
        .await;
        Ok(waited.with_context(|| format!("it does not stop:\n{}", self.output()))??)
    }
}

/// Whether this process was started with SIGHUP ignored, which is the lowest bit of a hex mask.
fn ignores_hang_ups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 == 1)
}

async fn gather(stream: Option<impl AsyncRead + Unpin>, output: Arc<Mutex<String>>) {
    let Some(stream) = stream else { return };
    let mut lines = BufReader::new(stream).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let mut output = output.lock();
        output.push_str(&line);
        output.push('\n');
    }
}

/// The path of the binary beside this test's own executable. Cargo does not build binaries of other packages for a
/// test, so the binary is built here if it is missing or older than its sources.
///
/// # Errors
/// There is no binary, and it cannot be built.
pub fn refrain_binary() -> anyhow::Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    BUILT
        .get_or_init(|| built().map_err(|error| format!("{error:#}")))
        .clone()
        .map_err(anyhow::Error::msg)
}

fn built() -> anyhow::Result<PathBuf> {
    // From target/debug/deps/mesh-0123 to target/debug.
    let executable = std::env::current_exe()?;
    let profile_dir = executable
        .ancestors()
        .nth(2)
        .context("a test outside of a target directory")?;
    let binary = profile_dir.join("refrain");
    if !is_current(&binary)? {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut cargo = std::process::Command::new(cargo);
        cargo
            .args(["build", "--quiet", "--package", "refrain"])
            .current_dir(repository());
        // The folder of each profile has its name, but for `dev`, which has the folder `debug`.
        if let Some(profile) = profile_dir.file_name().filter(|name| *name != "debug") {
            cargo.arg("--profile").arg(profile);
        }
        let status = cargo.status().context("cargo cannot be run")?;
        ensure!(status.success(), "the binary cannot be built: {status}");
    }
    ensure!(binary.exists(), "{} was not built", binary.display());
    Ok(binary)
}

/// Whether the binary exists, and none of the sources that cargo lists beside it is newer.
fn is_current(binary: &Path) -> anyhow::Result<bool> {
    let Ok(built) = binary.metadata().and_then(|metadata| metadata.modified()) else {
        return Ok(false);
    };
    // The list has the form `/path/to/refrain: /path/to/a.rs /path/to/b.rs`. Without it, the binary was put there by
    // hand.
    let sources = std::fs::read_to_string(binary.with_extension("d")).unwrap_or_default();
    let mut sources = sources
        .split_once(": ")
        .map(|(_, sources)| sources)
        .unwrap_or_default()
        .split_whitespace();
    Ok(sources.all(|source| {
        let changed = Path::new(source)
            .metadata()
            .and_then(|metadata| metadata.modified());
        changed.is_ok_and(|changed| changed <= built)
    }))
}
