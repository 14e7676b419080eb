//! A real Redis server as a child process.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The folder in which `tests/run` unpacks packages.
fn tools() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools")
}

/// The server's program: the one that `REDIS_SERVER` names, or one of `PATH`, or the one that `tests/run` has
/// unpacked.
fn program() -> PathBuf {
    if let Some(named) = std::env::var_os("REDIS_SERVER") {
        return named.into();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .chain([tools().join("usr/bin")])
        .map(|folder| folder.join("redis-server"))
        .find(|program| program.exists());
    found.unwrap_or_else(|| {
        panic!(
            "redis-server is missing: tests/run unpacks it into target/tools, or set REDIS_SERVER"
        )
    })
}

/// The folders with the libraries of the unpacked program.
fn libraries() -> String {
    let folders = std::fs::read_dir(tools().join("usr/lib"));
    let folders = folders.into_iter().flatten().flatten();
    let paths = folders.map(|folder| folder.path().display().to_string());
    paths.collect::<Vec<_>>().join(":")
}

/// A server that keeps its port, and nothing else, when it is killed and started again.
pub(crate) struct RedisServer {
    _dir: tempfile::TempDir,
    addr: SocketAddr,
    arguments: Vec<String>,
    process: Option<Child>,
}

impl RedisServer {
    /// Starts it with further arguments. `port_key` is `--port`, or `--tls-port` for TLS.
    pub(crate) fn start(port_key: &str, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        drop(listener);
        let (port, folder) = (addr.port().to_string(), dir.path().display().to_string());
        let own = [
            port_key,
            &port,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            &folder,
        ];
        let all = own.iter().chain(arguments);
        let mut server = RedisServer {
            arguments: all.map(|argument| (*argument).to_owned()).collect(),
            _dir: dir,
            addr,
            process: None,
        };
        server.restart();
        server
    }

    /// Starts it without a password and without TLS.
    pub(crate) fn plain() -> Self {
        Self::start("--port", &[])
    }

    /// Its address.
    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// Starts the server, and waits until it listens.
    pub(crate) fn restart(&mut self) {
        assert!(self.process.is_none());
        let process = Command::new(program())
            .args(&self.arguments)
            .env("LD_LIBRARY_PATH", libraries())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some(process);
        let until = Instant::now() + Duration::from_secs(300);
        while TcpStream::connect(self.addr).is_err() {
            assert!(Instant::now() < until, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends it a signal, such as `STOP`.
    pub(crate) fn signal(&self, name: &str) {
        let id = self.process.as_ref().unwrap().id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status();
        assert!(sent.unwrap().success());
    }

    /// kill -9.
    pub(crate) fn kill(&mut self) {
        if self.process.is_some() {
            self.signal("KILL");
        }
        if let Some(mut process) = self.process.take() {
            process.wait().unwrap();
        }
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}
