//! `refrain record`: stands in front of a server, and writes its calls down for `refrain analyze`.
//!
//! Requests and answers pass through as they are. `proxy` copies both, and `writer` writes a call that has ended.

mod copy;
mod exchange;
mod proxy;
#[cfg(test)]
mod tests;
mod writer;

use std::fs::{File, OpenOptions};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use actix_web::dev::ServerHandle;
use actix_web::rt::task::JoinHandle;
use actix_web::{App, HttpServer, web};
use anyhow::{Context, ensure};
use clap::Args;
use refrain_service_kit::telemetry::install_crypto_provider;

use self::proxy::Proxy;
use self::writer::{Enough, RecordWriter, Written};
use crate::signals::StopSignals;

/// Seconds that open answers get to end.
const GRACE_S: u64 = 5;

/// Where calls come from, and where they are written to.
#[derive(Args)]
pub struct RecordArgs {
    /// The server whose calls are recorded, as clients name it: `https://api.openai.com/v1`, `http://localhost:8000`.
    #[arg(long, value_name = "URL")]
    to: reqwest::Url,
    /// Address for the clients.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8900")]
    listen: SocketAddr,
    /// File for the calls. They are added at its end.
    #[arg(long, value_name = "FILE", default_value = "calls.jsonl")]
    output: PathBuf,
    /// Write no text: tokens become numbers that say nothing outside of this run, and names become digests. The file
    /// must be new.
    #[arg(long)]
    private: bool,
    /// Stop writing after about this many output tokens. Requests go on passing through.
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    output_tokens: u64,
    /// Stop writing after this many calls.
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    calls: u64,
    /// Stop writing after this many bytes.
    #[arg(long, value_name = "N", default_value_t = 1 << 30)]
    bytes_max: u64,
}

/// Runs until it is stopped.
///
/// # Errors
/// A URL that is none of HTTP, an address that is taken, or a file that cannot be written.
pub fn run(args: RecordArgs) -> anyhow::Result<()> {
    ensure!(
        matches!(args.to.scheme(), "http" | "https") && args.to.has_host(),
        "--to must be a URL that begins with http:// or https://, not {}",
        args.to
    );
    install_crypto_provider();
    actix_web::rt::System::new().block_on(record(args))
}

async fn record(args: RecordArgs) -> anyhow::Result<()> {
    let mut stop = StopSignals::listen()?;
    let output = args.output.clone();
    let recording = Recording::start(&args, move |written| {
        if written.is_enough {
            eprintln!("There are enough calls now. Further ones only pass through.");
        }
        eprintln!("{}", told(written, &output));
    })?;
    let (origin, base) = (origin(&args.to), args.to.path().trim_end_matches('/'));
    println!(
        "Recording calls to {origin} in {}.\nGive your clients this URL instead: http://{}{base}\nCtrl-C ends it.",
        args.output.display(),
        recording.address
    );
    stop.received().await;
    recording.stop().await
}

/// Scheme, host and port.
fn origin(url: &reqwest::Url) -> String {
    url.origin().ascii_serialization()
}

/// A running recorder.
struct Recording {
    address: SocketAddr,
    server: ServerHandle,
    running: JoinHandle<std::io::Result<()>>,
    writer: RecordWriter,
    thread: std::thread::JoinHandle<()>,
}

impl Recording {
    /// Opens the file, and listens. `told` hears at the end what was written.
    fn start(
        args: &RecordArgs,
        told: impl FnOnce(&Written) + Send + 'static,
    ) -> anyhow::Result<Self> {
        let enough = Enough {
            output_tokens: args.output_tokens,
            calls: args.calls,
            bytes: args.bytes_max,
        };
        let (writer, thread) = RecordWriter::start(open(args)?, args.private, enough, told)?;
        let proxy = web::Data::new(Proxy::new(origin(&args.to), writer.clone())?);
        let app = move || {
            App::new()
                .app_data(proxy.clone())
                .default_service(web::to(Proxy::pass))
        };
        let server = HttpServer::new(app).disable_signals();
        let server = server.shutdown_timeout(GRACE_S).bind(args.listen);
        let server = server.with_context(|| format!("--listen {}", args.listen))?;
        let address = server.addrs().first().copied().unwrap_or(args.listen);
        let server = server.run();
        Ok(Recording {
            address,
            server: server.handle(),
            running: actix_web::rt::spawn(server),
            writer,
            thread,
        })
    }

    /// Lets open answers end, and closes the file.
    async fn stop(self) -> anyhow::Result<()> {
        self.server.stop(true).await;
        self.running.await??;
        self.writer.close();
        let _ = tokio::task::spawn_blocking(|| self.thread.join()).await?;
        Ok(())
    }
}

/// Opens the file for its owner alone, since it holds prompts and outputs. Numbers of two runs do not go together.
fn open(args: &RecordArgs) -> anyhow::Result<File> {
    let mut options = OpenOptions::new();
    let options = match args.private {
        true => options.create_new(true).write(true),
        false => options.create(true).append(true),
    };
    let file = options.mode(0o600).open(&args.output);
    file.with_context(|| format!("--output {}", args.output.display()))
}

/// Says how much was written, and what to do with it.
fn told(written: &Written, path: &Path) -> String {
    let mut lines = vec![format!(
        "{} calls with about {} output tokens are in {}.",
        written.calls,
        written.output_tokens,
        path.display()
    )];
    for (reason, count) in &written.left_out {
        lines.push(format!("Left out: {reason}: {count}"));
    }
    if let Some(error) = &written.error {
        lines.push(format!("Then {error}."));
    }
    if written.calls > 0 {
        lines.push(format!("Now run: refrain analyze {}", path.display()));
    }
    lines.join("\n")
}
