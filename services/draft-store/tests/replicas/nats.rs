//! A real NATS server with JetStream, and a wire to it that a test can cut.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// The server's program: the one that `tests/run` has unpacked, or an installed one.
fn program() -> PathBuf {
    let unpacked =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/usr/sbin/nats-server");
    if unpacked.exists() {
        return unpacked;
    }
    let installed = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|path| std::env::split_paths(&path).collect::<Vec<_>>())
        .chain([PathBuf::from("/usr/sbin")])
        .map(|folder| folder.join("nats-server"))
        .find(|program| program.exists());
    installed.unwrap_or_else(|| {
        panic!(
            "nats-server is missing: tests/run unpacks it into target/tools, or install the package nats-server"
        )
    })
}

/// A free port of the loopback interface, which no other test gets. It is below those that the system chooses for
/// outgoing connections: one of these may take such a port before it is used.
pub(super) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        // Another run of the tests may be in progress, so each run starts at another port.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let number = number.wrapping_add(std::process::id().wrapping_mul(97));
        let port = 10_000 + (number % 10_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A server that keeps its data and its port when it is killed and started again.
pub(super) struct Nats {
    dir: PathBuf,
    port: u16,
    process: Option<Child>,
}

impl Nats {
    pub(super) fn start(dir: &Path) -> Nats {
        let mut nats = Nats {
            dir: dir.join("nats"),
            port: free_port(),
            process: None,
        };
        nats.restart();
        nats
    }

    pub(super) fn addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    pub(super) fn url(&self) -> String {
        format!("nats://{}", self.addr())
    }

    /// Its data.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Starts the server, and waits until it listens.
    pub(super) fn restart(&mut self) {
        assert!(self.process.is_none());
        let process = Command::new(program())
            .args([
                "-a",
                "127.0.0.1",
                "-p",
                &self.port.to_string(),
                "-js",
                "-sd",
            ])
            .arg(&self.dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some(process);
        let until = Instant::now() + super::PATIENCE;
        while std::net::TcpStream::connect(self.addr()).is_err() {
            assert!(Instant::now() < until, "nats-server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// kill -9.
    pub(super) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Number of messages of the stream of shard 0 with such a subject.
    pub(super) async fn messages(&self, subject: &str) -> usize {
        let client = async_nats::connect(self.url()).await.unwrap();
        let context = async_nats::jetstream::new(client);
        let stream = context.get_stream("refrain-0").await.unwrap();
        let mut found = stream.info_with_subjects(subject).await.unwrap();
        let mut count = 0;
        while let Some(subject) = futures_util::StreamExt::next(&mut found).await {
            count += subject.unwrap().1;
        }
        count
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A wire between a replica and the server. While it is cut nothing passes, and nobody is refused either: connections
/// end, and new ones end at once.
pub(super) struct Wire {
    addr: SocketAddr,
    cut: Arc<watch::Sender<bool>>,
}

impl Wire {
    pub(super) async fn to(server: SocketAddr) -> Wire {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let cut = Arc::new(watch::Sender::new(false));
        let is_cut = cut.clone();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut is_cut = is_cut.subscribe();
                tokio::spawn(async move {
                    if *is_cut.borrow() {
                        return;
                    }
                    let Ok(mut far) = tokio::net::TcpStream::connect(server).await else {
                        return;
                    };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = is_cut.wait_for(|cut| *cut) => {}
                    }
                });
            }
        });
        Wire { addr, cut }
    }

    pub(super) fn url(&self) -> String {
        format!("nats://{}", self.addr)
    }

    pub(super) fn set_cut(&self, cut: bool) {
        self.cut.send_replace(cut);
    }
}
