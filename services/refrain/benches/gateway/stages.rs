//! The mesh with a clock on the stages of a request.
//!
//! The gateway has a span for each stage. The layer here adds up the CPU time that threads spend inside of them. A
//! span of an asynchronous stage is entered at each poll, so waiting does not count. Tasks that a stage only waits
//! for, such as the scheduler's, count as none of the stages.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use parking_lot::Mutex;
use refrain::config::MeshFile;
use refrain::role::Role;
use refrain::roles::Process;
use tracing::{Id, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// CPU time by stage, nanoseconds, without that of stages inside of it.
#[derive(Clone, Default)]
struct StageTimes(Arc<Mutex<BTreeMap<&'static str, u64>>>);

thread_local! {
    /// The stages that this thread is in, with the CPU time at which the innermost one began or went on.
    static ENTERED: RefCell<(Vec<&'static str>, u64)> = const { RefCell::new((Vec::new(), 0)) };
}

/// CPU time of this thread, nanoseconds.
fn thread_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl StageTimes {
    /// Credits the time since the last change to the innermost stage.
    fn credit(&self, stages: &[&'static str], since: u64, now: u64) {
        if let Some(stage) = stages.last() {
            let mut times = self.0.lock();
            *times.entry(stage).or_default() += now.saturating_sub(since);
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for StageTimes {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        metadata.target() == refrain_tokenization::STAGE
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else {
            return;
        };
        ENTERED.with_borrow_mut(|(stages, since)| {
            let now = thread_ns();
            self.credit(stages, *since, now);
            stages.push(span.name());
            *since = now;
        });
    }

    fn on_exit(&self, _: &Id, _: Context<'_, S>) {
        ENTERED.with_borrow_mut(|(stages, since)| {
            let now = thread_ns();
            self.credit(stages, *since, now);
            stages.pop();
            *since = now;
        });
    }
}

/// Runs the mesh of a configuration file. Each line of input is answered by the times since the last one, as JSON.
pub(crate) fn serve(config: &Path) -> anyhow::Result<()> {
    let times = StageTimes::default();
    let subscriber = tracing_subscriber::registry().with(times.clone());
    tracing::subscriber::set_global_default(subscriber)?;
    refrain_service_kit::telemetry::install_crypto_provider();
    let mut file: MeshFile = toml::from_str(&std::fs::read_to_string(config)?)?;
    file.gateway.listen = "127.0.0.1:0".to_owned();
    file.draft_store.data_dir = config.with_file_name("data");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let process = runtime.block_on(Process::start(Role::Up, file))?;
    println!("http://{}", process.addr().context("no listener")?);
    for line in std::io::stdin().lock().lines() {
        line?;
        let taken = std::mem::take(&mut *times.0.lock());
        println!("{}", serde_json::to_string(&taken)?);
    }
    Ok(())
}
