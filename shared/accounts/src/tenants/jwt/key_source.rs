//! Reads the keys of an issuer, from a URL or a file, within bounds.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use refrain_service_kit::telemetry::install_crypto_provider;

use super::config::JwtConfig;

/// Largest set of keys, bytes.
const BYTES_MAX: usize = 1 << 20;

/// How long an answer may take as a whole.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// The place of the keys.
pub(super) enum KeySource {
    Url {
        url: String,
        client: reqwest::Client,
    },
    File(PathBuf),
}

impl KeySource {
    /// The place that a checked configuration names.
    pub(super) fn new(config: &JwtConfig) -> anyhow::Result<Self> {
        if let Some(path) = &config.jwks_file {
            return Ok(KeySource::File(path.clone()));
        }
        install_crypto_provider();
        // A redirect could lead to a place that the configuration would not allow.
        let client = reqwest::Client::builder()
            .timeout(ANSWER_WAIT)
            .redirect(reqwest::redirect::Policy::none())
            .build()?;
        let url = config.jwks_url.clone().unwrap_or_default();
        Ok(KeySource::Url { url, client })
    }

    /// How often the keys are read although no token asks for new ones.
    pub(super) fn interval(&self) -> Duration {
        match self {
            KeySource::Url { .. } => Duration::from_secs(300),
            KeySource::File(_) => Duration::from_secs(1),
        }
    }

    /// The text of the set.
    pub(super) async fn read(&self) -> anyhow::Result<Vec<u8>> {
        let text = match self {
            KeySource::Url { url, client } => {
                let read = async {
                    let mut answer = client.get(url).send().await?.error_for_status()?;
                    let mut text = Vec::new();
                    while let Some(piece) = answer.chunk().await?
                        && text.len() <= BYTES_MAX
                    {
                        text.extend_from_slice(&piece);
                    }
                    Ok::<_, reqwest::Error>(text)
                };
                read.await.context("gateway.jwt.jwks_url cannot be read")?
            }
            KeySource::File(path) => {
                let name = || format!("gateway.jwt.jwks_file, {}, cannot be read", path.display());
                tokio::fs::read(path).await.with_context(name)?
            }
        };
        anyhow::ensure!(
            text.len() <= BYTES_MAX,
            "the keys of gateway.jwt have more than {BYTES_MAX} bytes"
        );
        Ok(text)
    }
}
