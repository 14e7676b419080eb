//! The processes of a mesh on one machine: started, started again when they end, and stopped in order.

use std::convert::Infallible;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::plan::Member;

/// How often processes are looked at.
const INTERVAL: Duration = Duration::from_millis(200);
/// How long all of them may take to be ready, and one to answer whether it is.
const READY_WAIT: Duration = Duration::from_secs(120);
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// Pause before an ended process is started again. It doubles up to the longest one while the process ends at once.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_LONGEST: Duration = Duration::from_secs(30);
/// A process that ran for so long has its first pause again.
const STEADY: Duration = Duration::from_secs(60);
/// How long a process may take to stop. A gateway's drain takes up to thirty seconds.
const STOP_WAIT: Duration = Duration::from_secs(40);
/// Lines of a log that are shown when its process does not start.
const LOG_LINES: usize = 10;

struct Process {
    member: Member,
    log: PathBuf,
    /// `None` from its end until it is started again.
    child: Option<Child>,
    pid: u32,
    started: Instant,
    pause: Duration,
    /// When an ended process is started again.
    again_at: Instant,
}

/// All processes of a mesh, in the order in which they stop.
pub(super) struct Processes {
    processes: Vec<Process>,
    http: reqwest::Client,
}

impl Processes {
    /// Starts all processes. Each waits by itself for those that it needs. When the calling thread ends, they stop.
    ///
    /// # Errors
    /// A program cannot be started, or a log cannot be written.
    pub(super) fn start(members: Vec<Member>, dir: &Path) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder().no_proxy().timeout(ANSWER_WAIT);
        let http = http.build()?;
        let start = |member: Member| {
            let log = dir.join(format!("{}.log", member.name));
            let child = spawn(&member, &log)?;
            let now = Instant::now();
            anyhow::Ok(Process {
                member,
                log,
                pid: child.id().unwrap_or(0),
                child: Some(child),
                started: now,
                pause: PAUSE_FIRST,
                again_at: now,
            })
        };
        let processes = members.into_iter().map(start);
        Ok(Processes {
            processes: processes.collect::<anyhow::Result<_>>()?,
            http,
        })
    }

    /// The processes with their ids, in the order of the plan.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Member, u32)> {
        self.processes
            .iter()
            .map(|process| (&process.member, process.pid))
    }

    /// Waits until all of them are ready.
    ///
    /// # Errors
    /// One ended, or is not ready in time. The error has the end of its log.
    pub(super) async fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + READY_WAIT;
        for at in 0..self.processes.len() {
            while !is_ready(&self.http, &self.processes[at].member).await {
                for process in &mut self.processes {
                    if let Some(status) = process.ended() {
                        bail!(
                            "{} ended ({status}); {}",
                            process.member.name,
                            process.log_end()
                        );
                    }
                }
                let process = &self.processes[at];
                if Instant::now() >= until {
                    bail!(
                        "{} is not ready; {}",
                        process.member.name,
                        process.log_end()
                    );
                }
                tokio::time::sleep(INTERVAL).await;
            }
        }
        Ok(())
    }

    /// Starts processes again that end, and says so.
    pub(super) async fn keep_running(&mut self) -> Infallible {
        loop {
            for process in &mut self.processes {
                process.keep_running();
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Stops all processes, the callers before those that they call.
    pub(super) async fn stop(&mut self) {
        let of_a_role = |one: &Process, next: &Process| one.member.role == next.member.role;
        for group in self.processes.chunk_by_mut(of_a_role) {
            for process in &*group {
                process.ask_to_stop();
            }
            let until = Instant::now() + STOP_WAIT;
            for process in group {
                let Some(child) = &mut process.child else {
                    continue;
                };
                if tokio::time::timeout_at(until, child.wait()).await.is_err() {
                    println!("{} does not stop, and is killed.", process.member.name);
                    let _ = child.kill().await;
                }
            }
        }
    }
}

impl Process {
    /// Its exit status, once after it has ended.
    fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.child.as_mut()?.try_wait().ok().flatten()?;
        self.child = None;
        Some(status)
    }

    fn keep_running(&mut self) {
        if let Some(status) = self.ended() {
            let now = Instant::now();
            self.pause = match now - self.started >= STEADY {
                true => PAUSE_FIRST,
                false => self.pause,
            };
            let (pid, pause) = (self.pid, self.pause);
            println!(
                "{} (pid {pid}) ended: {status}. It starts again in {} s.",
                self.member.name,
                pause.as_secs()
            );
            self.again_at = now + pause;
            self.pause = (pause * 2).min(PAUSE_LONGEST);
        } else if self.child.is_none() && self.again_at <= Instant::now() {
            match spawn(&self.member, &self.log) {
                Ok(child) => {
                    self.pid = child.id().unwrap_or(0);
                    println!("{} runs again, pid {}.", self.member.name, self.pid);
                    self.child = Some(child);
                }
                Err(error) => println!("{error:#}"),
            }
            self.started = Instant::now();
            self.again_at = self.started + self.pause;
        }
    }

    fn ask_to_stop(&self) {
        let pid = self.child.as_ref().and_then(Child::id);
        let pid = pid.and_then(|pid| Pid::from_raw(pid.cast_signed()));
        if let Some(pid) = pid {
            // An error means that it has ended meanwhile.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// The end of its log, for an error.
    fn log_end(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
        format!(
            "its log, {}, ends with:\n{}",
            self.log.display(),
            last.join("\n")
        )
    }
}

/// Starts a process whose output goes to the end of a log.
fn spawn(member: &Member, log: &Path) -> anyhow::Result<Child> {
    let opened = File::options().create(true).append(true).open(log);
    let stderr = opened.with_context(|| format!("{}: cannot be written", log.display()))?;
    let stdout = stderr.try_clone()?;
    let program = match &member.program {
        Some(program) => program.clone(),
        None => std::env::current_exe()?,
    };
    let mut command = Command::new(program);
    command
        .args(&member.arguments)
        .envs(member.variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(stderr)
        // Ctrl-C is for the parent, which stops its children in order.
        .process_group(0);
    // SAFETY: between fork and exec this makes one system call, which allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command
        .spawn()
        .with_context(|| format!("{} cannot be started", member.name))
}

/// Whether a process can do its work. The broker has no answer to that, so it only has to take connections.
async fn is_ready(http: &reqwest::Client, member: &Member) -> bool {
    if member.role.is_none() {
        return TcpStream::connect(member.addr).await.is_ok();
    }
    let answer = http.get(format!("http://{}/readyz", member.addr)).send();
    answer
        .await
        .is_ok_and(|answer| answer.status().is_success())
}
