//! The listener of a worker, which is there before the worker: its engine may be away at the start.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::scheduling::Heartbeat;
use refrain_protocol::{ApiError, WorkerId};
use refrain_rpc::{HEARTBEAT_RETRY_PAUSE, HEARTBEAT_TIMEOUT, Scheduler};
use refrain_service_kit::backoff::Backoff;
use refrain_service_kit::http::Server;
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::random;
use refrain_service_kit::telemetry::Metrics;

use super::handle::WorkerHandle;
use super::heartbeat::{INTERVAL_MIN, sent_trouble};
use super::http;
use super::late_worker::{LateWorker, STARTING};
use crate::config::WorkerConfig;
use crate::engine::{
    ExpectedModel, WorkerEngine, engine_words, expected_tokenizer, without_version,
};

/// Pauses between attempts to reach an engine that is away. They grow and are drawn at random, so that many
/// workers do not ask at the same moments.
const ENGINE_PAUSE_MIN: Duration = Duration::from_millis(250);
const ENGINE_PAUSE_MAX: Duration = Duration::from_secs(4);
/// Longest text of a model whose files do not say, until its engine does.
const CONTEXT_DEFAULT: u32 = 4_096;

/// The listener of a worker. Until the worker starts, it says what it waits for, and refuses all calls.
pub struct WorkerListener {
    late: LateWorker,
    server: Option<Server>,
    /// A random number of the process, which its heartbeats have.
    incarnation: u64,
}

/// A worker whose engine is away.
pub struct EngineWait<'a> {
    /// Its settings.
    pub config: &'a WorkerConfig,
    /// The receiver of its heartbeats.
    pub scheduler: Arc<dyn Scheduler>,
    /// The URL of the engine, as `urls.engine` has it.
    pub url: &'a str,
    /// The model that the engine has to serve. `None`: only the engine knows it, so there are no heartbeats.
    pub expected: Option<&'a ExpectedModel>,
}

impl WorkerListener {
    /// Opens the listener, if the configuration has an address for it.
    ///
    /// # Errors
    /// The address cannot be bound, the files of the certificate cannot be used, or the system has no random numbers.
    pub fn open(config: &WorkerConfig, auth: &MeshAuth, metrics: &Metrics) -> anyhow::Result<Self> {
        let late = LateWorker::new();
        let (ready, http) = (late.clone(), config.http.clone());
        let readiness = Arc::new(move || ready.readiness());
        let open = |listen| http::serve(listen, http, late.clone(), auth, readiness, metrics);
        let server = config.listen.map(open).transpose()?;
        Ok(WorkerListener {
            late,
            server,
            incarnation: random::u128()? as u64,
        })
    }

    /// Its address, if there is one.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::addr)
    }

    /// Serves a worker that has started. Returns the server, and the number that its heartbeats go on with.
    pub(crate) fn serve(self, worker: WorkerHandle) -> (Option<Server>, u64) {
        self.late.set(worker);
        (self.server, self.incarnation)
    }

    /// Tries to connect until the engine answers. `first` is the error of the first attempt. Meanwhile the listener
    /// and the heartbeats say what the worker waits for. The log says it whenever it changes.
    pub async fn wait_for_engine<F>(
        &self,
        wait: EngineWait<'_>,
        first: ApiError,
        mut connect: impl FnMut() -> F,
    ) -> WorkerEngine
    where
        F: Future<Output = Result<WorkerEngine, ApiError>>,
    {
        let engine = engine_words(Some(wait.url), true);
        // The part of it that all calls have.
        let url = without_version(wait.url);
        let connects = async {
            let mut pauses = Backoff::new(ENGINE_PAUSE_MIN, ENGINE_PAUSE_MAX);
            let mut error = first;
            loop {
                // A message may have it, with or without `/v1`.
                let why = error.message.replace(url, "this address");
                let trouble = format!("waiting for {engine}: {why}");
                if self.late.readiness().err().as_ref() != Some(&trouble) {
                    tracing::warn!("{trouble}");
                    self.late.say(&trouble);
                }
                tokio::time::sleep(pauses.pause()).await;
                match connect().await {
                    Ok(found) => return found,
                    Err(again) => error = again,
                }
            }
        };
        tokio::select! {
            // The trouble is known before the first heartbeat.
            biased;
            found = connects => {
                tracing::info!("{engine} answers");
                self.late.say(STARTING);
                found
            }
            never = self.report(&wait) => match never {},
        }
    }

    /// Sends heartbeats of a worker that takes no chunks.
    async fn report(&self, wait: &EngineWait<'_>) -> std::convert::Infallible {
        let served = wait.expected.and_then(|expected| {
            let tokenizer = expected_tokenizer(&wait.config.engine, expected).ok()?;
            Some((expected, tokenizer))
        });
        let Some((expected, tokenizer)) = served else {
            return std::future::pending().await;
        };
        let config = wait.config;
        loop {
            let heartbeat = Heartbeat {
                worker: WorkerId(config.id.clone()),
                incarnation: self.incarnation,
                url: config.advertise_url.clone(),
                model: expected.model.clone(),
                tokenizer: tokenizer.clone(),
                max_context: expected.max_context.unwrap_or(CONTEXT_DEFAULT),
                max_running: config.running_max,
                running: Vec::new(),
                // It has run nothing in this process.
                epoch_seen: 0,
                draining: true,
                trouble: self.late.readiness().err().map(|why| sent_trouble(&why)),
                leaves: false,
                compiles_forms: false,
                eagle3: None,
                fallback: None,
                kv: None,
                state: None,
            };
            let reply =
                tokio::time::timeout(HEARTBEAT_TIMEOUT, wait.scheduler.heartbeat(heartbeat));
            let pause = match reply.await {
                Ok(Ok(reply)) => Duration::from_millis(reply.next_in_ms).max(INTERVAL_MIN),
                _ => HEARTBEAT_RETRY_PAUSE,
            };
            tokio::time::sleep(pause).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use refrain_protocol::ErrorKind;
    use refrain_rpc::HttpScheduler;
    use refrain_service_kit::http::MeshClient;

    use super::*;

    const URL: &str = "http://name:word@10.0.0.9:8000/path?key=word/v1";

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_is_away_is_waited_for_with_growing_pauses() {
        let listener = WorkerListener {
            late: LateWorker::new(),
            server: None,
            incarnation: 1,
        };
        let (attempts, config) = (Cell::new(0_u32), WorkerConfig::default());
        let started = tokio::time::Instant::now();
        // Without a known model, nothing is reported.
        let nobody = MeshClient::new("http://127.0.0.1:1", "", Duration::from_secs(1)).unwrap();
        let away = |message: &str| ApiError::new(ErrorKind::Unavailable, message);
        let connect = || async {
            attempts.set(attempts.get() + 1);
            let base = without_version(URL);
            Err(away(&format!("{base} is still loading, see {URL}")))
        };
        let wait = EngineWait {
            config: &config,
            scheduler: Arc::new(HttpScheduler::new(nobody)),
            url: URL,
            expected: None,
        };
        let waits = listener.wait_for_engine(wait, away("it is away"), connect);
        let waited = tokio::time::timeout(Duration::from_secs(60), waits).await;
        assert!(waited.is_err(), "there is no engine");
        // With pauses of 4 to 8 seconds after the first few; at a fixed rate of 2/s it would be 120 attempts.
        assert!((8..30).contains(&attempts.get()), "{}", attempts.get());
        assert!(started.elapsed() >= Duration::from_secs(60));
        let trouble = "waiting for the engine at http://10.0.0.9:8000 (urls.engine): this address is still loading, \
                       see this address/v1";
        assert_eq!(listener.late.readiness().unwrap_err(), trouble);
        assert_eq!(listener.late.get().err().unwrap().message, trouble);
    }
}
