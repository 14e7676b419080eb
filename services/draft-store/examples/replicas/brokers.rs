//! NATS servers of this machine.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_nats::jetstream::{self, stream};
use tempfile::TempDir;

/// How long brokers may take until they have agreed on one that leads.
const START: Duration = Duration::from_secs(60);

/// Running servers, one cluster if there are several.
pub(crate) struct Brokers {
    pub(crate) urls: Vec<String>,
    pub(crate) copies: usize,
    processes: Vec<Child>,
    _dir: TempDir,
}

fn program() -> PathBuf {
    let unpacked =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/usr/sbin/nats-server");
    match unpacked.exists() {
        true => unpacked,
        false => "nats-server".into(),
    }
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

impl Brokers {
    /// Starts one server for each copy of a message.
    pub(crate) async fn start(copies: usize) -> anyhow::Result<Brokers> {
        let dir = tempfile::tempdir()?;
        let ports = (0..copies).map(|_| Ok((free_port()?, free_port()?)));
        let ports = ports.collect::<anyhow::Result<Vec<_>>>()?;
        let routes = ports.iter();
        let routes: Vec<String> = routes
            .map(|(_, route)| format!("nats://127.0.0.1:{route}"))
            .collect();
        let mut brokers = Brokers {
            urls: Vec::new(),
            copies,
            processes: Vec::new(),
            _dir: dir,
        };
        for (number, (port, _)) in ports.iter().enumerate() {
            let mut command = Command::new(program());
            let folder = brokers._dir.path().join(format!("nats-{number}"));
            command.args(["-a", "127.0.0.1", "-js", "-p", &port.to_string(), "-sd"]);
            command.arg(folder);
            if copies > 1 {
                command.args(["-n", &format!("n{number}"), "--cluster_name", "bench"]);
                command.args(["--cluster", &routes[number], "--routes", &routes.join(",")]);
            }
            let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
            brokers
                .processes
                .push(process.context("nats-server does not start; install it, or run tests/run")?);
            brokers.urls.push(format!("nats://127.0.0.1:{port}"));
        }
        brokers.agree().await?;
        Ok(brokers)
    }

    /// Waits until a stream can be created.
    async fn agree(&self) -> anyhow::Result<()> {
        let until = Instant::now() + START;
        loop {
            let created = match self.context().await {
                Ok(context) => match context.create_stream(self.stream("probe")).await {
                    Ok(_) => {
                        context.delete_stream("probe").await?;
                        return Ok(());
                    }
                    Err(error) => error.to_string(),
                },
                Err(error) => error.to_string(),
            };
            anyhow::ensure!(
                Instant::now() < until,
                "the brokers do not start: {created}"
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    pub(crate) async fn context(&self) -> anyhow::Result<jetstream::Context> {
        Ok(jetstream::new(async_nats::connect(&self.urls).await?))
    }

    /// A stream with a subject of its own name.
    pub(crate) fn stream(&self, name: &str) -> stream::Config {
        stream::Config {
            name: name.into(),
            subjects: vec![name.into()],
            num_replicas: self.copies,
            max_bytes: 1 << 30,
            ..stream::Config::default()
        }
    }
}

impl Drop for Brokers {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
