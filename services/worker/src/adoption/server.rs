//! The process that adopts engines.

use std::net::SocketAddr;
use std::time::Duration;

use refrain_service_kit::http::Server;

use super::adopter::{Adopter, AdopterDeps};
use super::http;
use crate::config::WorkerConfig;

/// How long callers may read their last answers.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// A running process that adopts engines.
pub struct AdopterServer {
    adopter: Adopter,
    server: Option<Server>,
}

impl AdopterServer {
    /// Starts it. Engines that an earlier process had adopted appear as soon as they answer.
    ///
    /// # Errors
    /// The listener cannot be opened, a metric name is taken, or the file of engines cannot be read.
    pub fn start(config: WorkerConfig, with: AdopterDeps) -> anyhow::Result<Self> {
        let (listen, listener) = (config.listen, config.http.clone());
        let (auth, metrics) = (with.auth.clone(), with.metrics.clone());
        let adopter = Adopter::new(config, with)?;
        let serve = |listen| http::serve(listen, listener.clone(), adopter.clone(), auth, &metrics);
        let server = listen.map(serve).transpose()?;
        Ok(AdopterServer { adopter, server })
    }

    /// The adopter for callers in this process.
    pub fn adopter(&self) -> Adopter {
        self.adopter.clone()
    }

    /// The address of the listener, if there is one.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::addr)
    }

    /// Stops the workers of all engines as a signal would, and the listener. The engines stay known for the next
    /// process.
    pub async fn drain(self) {
        self.adopter.drain().await;
        if let Some(server) = &self.server {
            server.stop_within(STOP_GRACE).await;
        }
    }
}
