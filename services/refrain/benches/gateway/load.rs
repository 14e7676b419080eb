//! Sends requests and reads their answers, as fast as they are answered.

use anyhow::ensure;
use futures_util::future::try_join_all;

/// The last event of a stream.
const STREAM_END: &str = "data: [DONE]\n\n";

/// A server, and connections to it.
pub(crate) struct Target {
    http: reqwest::Client,
    url: String,
}

impl Target {
    pub(crate) fn new(base: &str) -> Self {
        Target {
            http: reqwest::Client::new(),
            url: format!("{base}/v1/chat/completions"),
        }
    }

    /// Sends a body and reads the answer. A stream has to end as streams do.
    async fn send(&self, body: Vec<u8>) -> anyhow::Result<()> {
        let is_stream = body.ends_with(b"\"stream\":true}");
        let request = self
            .http
            .post(&self.url)
            .header("content-type", "application/json");
        let mut response = request.body(body).send().await?;
        let status = response.status();
        let mut last = Vec::new();
        while let Some(bytes) = response.chunk().await? {
            last.extend_from_slice(&bytes);
            if status.is_success() && is_stream {
                // Only the end of a stream is looked at.
                last.drain(..last.len().saturating_sub(STREAM_END.len()));
            }
        }
        let text = String::from_utf8_lossy(&last);
        ensure!(status.is_success(), "{}: {status}: {text}", self.url);
        let is_whole = match is_stream {
            true => text == STREAM_END,
            false => text.contains("\"finish_reason\":\"length\""),
        };
        ensure!(is_whole, "{}: an answer ends with {text}", self.url);
        Ok(())
    }

    /// Sends all bodies, `at_once` of them at any time.
    pub(crate) async fn send_all(
        &self,
        bodies: Vec<Vec<u8>>,
        at_once: usize,
    ) -> anyhow::Result<()> {
        let bodies = std::sync::Mutex::new(bodies.into_iter());
        let next = || bodies.lock().ok().and_then(|mut bodies| bodies.next());
        try_join_all((0..at_once).map(|_| async {
            while let Some(body) = next() {
                self.send(body).await?;
            }
            anyhow::Ok(())
        }))
        .await?;
        Ok(())
    }
}
