//! The connection to Redis, which is there or not: nobody but its own task waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, Pipeline, RedisConnectionInfo, RedisError,
    ServerErrorKind, Value,
};
use refrain_service_kit::actors::{self, Actor};
use refrain_service_kit::backoff::Backoff;
use refrain_service_kit::tls;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use super::config::{LimitsRedisConfig, RedisServer};
use super::script::SCRIPT;

/// How often a connection that nobody uses is tried.
const PING_EVERY: Duration = Duration::from_secs(1);

/// How long a new connection may take. Requests do not wait for it.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// The shortest and the longest pause before a new connection.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];

/// A connection that lived for so long was a good one: the next pause is a short one again.
const GOOD_AFTER: Duration = Duration::from_secs(10);

/// Why there is no answer of Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Away {
    /// There is no connection, so nothing was sent.
    NotSent,
    /// Whether Redis has done what it was asked to is unknown.
    Unknown,
}

/// The connection. Dropping it ends its task.
pub(super) struct Link {
    shared: Arc<Shared>,
    _actor: Actor,
}

struct Shared {
    config: LimitsRedisConfig,
    server: RedisServer,
    current: watch::Sender<Option<Connected>>,
    is_up: prometheus::IntGauge,
}

#[derive(Clone)]
struct Connected {
    connection: MultiplexedConnection,
    /// The name of the script at the server.
    script: Arc<str>,
    number: u64,
}

impl Link {
    /// Begins to connect, and sets the gauge to whether there is a connection.
    ///
    /// # Errors
    /// The configuration has faults.
    pub(super) fn start(
        config: LimitsRedisConfig,
        is_up: prometheus::IntGauge,
    ) -> anyhow::Result<Self> {
        let server = config.server().map_err(anyhow::Error::msg)?;
        let shared = Arc::new(Shared {
            config,
            server,
            current: watch::Sender::new(None),
            is_up,
        });
        let kept = shared.clone();
        let keep = move || kept.clone().keep();
        let actor = actors::start("connection to Redis", keep);
        Ok(Link {
            shared,
            _actor: actor,
        })
    }

    /// Waits for a connection.
    pub(super) async fn connected(&self) {
        let mut current = self.shared.current.subscribe();
        // The sender lives as long as this.
        let _ = current.wait_for(Option::is_some).await;
    }

    /// Calls the script. `call` makes the command out of the one that runs a script, and its name or text.
    ///
    /// # Errors
    /// There is no connection, or Redis has not answered in time or with an error. Later calls then fail at once,
    /// until Redis answers again.
    pub(super) async fn run(&self, call: impl Fn([&str; 2]) -> Cmd) -> Result<Value, Away> {
        let connected = self.shared.connected()?;
        let by_name = call(["EVALSHA", &connected.script]);
        let asked = async |command: Cmd| {
            let mut connection = connected.connection.clone();
            let answer = connection.send_packed_command(&command).await;
            answer.and_then(|value| value.extract_error())
        };
        let answer = async {
            match asked(by_name).await {
                // Somebody has emptied the server's list of scripts.
                Err(error) if is_unknown_script(&error) => asked(call(["EVAL", SCRIPT])).await,
                answer => answer,
            }
        };
        let answer = timeout(self.shared.config.timeout(), answer).await;
        self.shared.judge(connected.number, answer)
    }

    /// Runs several commands. `make` gets the name of the script.
    ///
    /// # Errors
    /// As [`Link::run`].
    pub(super) async fn run_all(
        &self,
        make: impl FnOnce(&str) -> Pipeline,
    ) -> Result<Vec<Value>, Away> {
        let connected = self.shared.connected()?;
        let commands = make(&connected.script);
        let mut connection = connected.connection;
        let answer = timeout(CONNECT_MAX, commands.query_async(&mut connection)).await;
        self.shared.judge(connected.number, answer)
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

impl Shared {
    fn connected(&self) -> Result<Connected, Away> {
        self.current.borrow().clone().ok_or(Away::NotSent)
    }

    /// Gives a connection up that has failed or is slow.
    fn judge<T>(
        &self,
        number: u64,
        answer: Result<Result<T, RedisError>, tokio::time::error::Elapsed>,
    ) -> Result<T, Away> {
        let trouble = match answer {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it does not answer in time".to_owned(),
        };
        let gave_up = self.current.send_if_modified(|current| {
            let is_this = current.as_ref().is_some_and(|one| one.number == number);
            if is_this {
                *current = None;
                self.is_up.set(0);
            }
            is_this
        });
        if gave_up {
            tracing::warn!(
                server = self.server.name(),
                trouble,
                "Redis cannot count limits; this gateway grants its own share until it can"
            );
        }
        Err(Away::Unknown)
    }

    /// Connects, and again whenever a connection was given up.
    async fn keep(self: Arc<Self>) {
        let mut backoff = Backoff::new(PAUSES[0], PAUSES[1]);
        let mut known_trouble = None;
        for number in 0.. {
            let began = Instant::now();
            let login = self.config.login(&self.server);
            let connected = match &login {
                Ok(login) => timeout(CONNECT_MAX, self.connect(login))
                    .await
                    .unwrap_or_else(|_| Err(anyhow!("it does not answer within {CONNECT_MAX:?}"))),
                Err(error) => Err(anyhow!("{error:#}")),
            };
            match connected {
                Ok((connection, script, driver)) => {
                    known_trouble = None;
                    let connected = Connected {
                        connection,
                        script,
                        number,
                    };
                    self.is_up.set(1);
                    self.current.send_replace(Some(connected.clone()));
                    tracing::info!(server = self.server.name(), "Redis counts the limits");
                    tokio::select! {
                        () = driver => {
                            let closed = RedisError::from((ErrorKind::Io, "the connection was closed"));
                            let _ = self.judge::<()>(number, Ok(Err(closed)));
                        }
                        () = self.watch(connected) => {}
                    }
                }
                Err(error) => {
                    let trouble = format!("{error:#}");
                    if known_trouble.as_ref() != Some(&trouble) {
                        tracing::warn!(
                            server = self.server.name(),
                            trouble,
                            "Redis cannot be reached"
                        );
                        known_trouble = Some(trouble);
                    }
                }
            }
            if began.elapsed() > GOOD_AFTER {
                backoff = Backoff::new(PAUSES[0], PAUSES[1]);
            }
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    /// Ends when the connection was given up.
    async fn watch(&self, connected: Connected) {
        let mut current = self.current.subscribe();
        loop {
            let given_up = timeout(PING_EVERY, current.wait_for(Option::is_none));
            if given_up.await.is_ok() {
                return;
            }
            let ping = redis::cmd("PING");
            let mut connection = connected.connection.clone();
            // Requests that are in a hurry judge a slow server by themselves.
            let answer = timeout(CONNECT_MAX, ping.exec_async(&mut connection)).await;
            let _ = self.judge(connected.number, answer);
        }
    }

    /// Connects and loads the script. Returns the connection, the name of the script, and the connection's driver.
    async fn connect<'a>(
        &self,
        login: &'a RedisConnectionInfo,
    ) -> anyhow::Result<(
        MultiplexedConnection,
        Arc<str>,
        impl Future<Output = ()> + use<'a>,
    )> {
        let RedisServer {
            host,
            port,
            has_tls,
            ..
        } = &self.server;
        let stream = TcpStream::connect((host.as_str(), *port)).await?;
        stream.set_nodelay(true)?;
        let stream: Box<dyn Stream> = match has_tls {
            false => Box::new(stream),
            true => Box::new(tls::connect(stream, host, self.config.ca.as_deref()).await?),
        };
        // Each call has a limit of its own.
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let connecting = MultiplexedConnection::new_with_config(login, stream, config);
        let (mut connection, driver) = connecting.await.context("the login")?;
        // The answer comes through the driver.
        let mut driver = Box::pin(driver);
        let load = async {
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(SCRIPT);
            load.query_async::<String>(&mut connection).await
        };
        let script = tokio::select! {
            () = &mut driver => anyhow::bail!("the connection was closed"),
            script = load => script.context("the script")?,
        };
        Ok((connection, script.into(), driver))
    }
}

/// A connection, with TLS or without.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}
