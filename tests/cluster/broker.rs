//! A nats-server with JetStream as a child process.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context as _, ensure};
use e2e::repository;

use crate::network::{NODES, Network, Node, Port};

/// A broker that keeps its data when it is killed and started again.
pub(crate) struct Broker {
    number: usize,
    dir: PathBuf,
    process: Option<Child>,
}

impl Broker {
    /// Writes the configuration of a broker, which is not started yet.
    pub(crate) fn prepare(dir: &Path, number: usize, network: &Network) -> anyhow::Result<Broker> {
        let dir = dir.join(format!("broker-{number}"));
        std::fs::create_dir_all(&dir)?;
        let node = Node::Broker(number);
        let routes: Vec<String> = (0..NODES)
            .filter(|other| *other != number)
            .map(|other| network.reach(node, Node::Broker(other), Port::Routes))
            .map(|addr| format!("nats://{addr}"))
            .collect();
        let advertise = network.advertised();
        let advertise = advertise.map_or_else(String::new, |addr| format!("advertise: \"{addr}\""));
        let config = format!(
            r#"
            server_name: broker-{number}
            listen: "{clients}"
            # A connection that was cut is to be noticed within seconds.
            ping_interval: "2s"
            ping_max: 2
            jetstream {{ store_dir: "{store}", max_file_store: 2G }}
            cluster {{
                name: refrain
                listen: "{listen}"
                {advertise}
                no_advertise: true
                routes: {routes:?}
            }}
            "#,
            clients = network.listen(node, Port::Clients),
            store = dir.join("data").display(),
            listen = network.listen(node, Port::Routes),
        );
        std::fs::write(dir.join("nats.conf"), config)?;
        Ok(Broker {
            number,
            dir,
            process: None,
        })
    }

    pub(crate) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    pub(crate) fn start(&mut self, network: &Network) -> anyhow::Result<()> {
        ensure!(self.process.is_none(), "broker {} runs", self.number);
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("log"))?;
        let mut words = network.through(Node::Broker(self.number));
        words.push(program()?.to_string_lossy().into_owned());
        let process = Command::new(&words[0])
            .args(&words[1..])
            .arg("--config")
            .arg(self.dir.join("nats.conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("nats-server does not run")?;
        self.process = Some(process);
        Ok(())
    }

    /// kill -9.
    pub(crate) fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }

    /// The exit status, if it has ended by itself.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.process.as_mut()?.try_wait().ok().flatten()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// The server's program: the one that `NATS_SERVER` names, or the one that `tests/run` has unpacked for this test, or
/// an installed one. After `kill -9` Debian's version 2.9 loses a stream's quorum now and then, so it comes last.
fn program() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("NATS_SERVER") {
        let named = PathBuf::from(named);
        ensure!(
            named.exists(),
            "NATS_SERVER is {}, which is missing",
            named.display()
        );
        return Ok(named);
    }
    let tools = repository().join("target/tools");
    let path = std::env::var_os("PATH").unwrap_or_default();
    [tools.join("nats")]
        .into_iter()
        .chain(std::env::split_paths(&path))
        .chain([tools.join("usr/sbin"), PathBuf::from("/usr/sbin")])
        .map(|folder| folder.join("nats-server"))
        .find(|program| program.exists())
        .context(
            "nats-server is missing: tests/run unpacks it into target/tools, or set NATS_SERVER",
        )
}

/// The version of the server's program, in its own words.
pub(crate) fn version() -> anyhow::Result<String> {
    let output = Command::new(program()?).arg("--version").output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
