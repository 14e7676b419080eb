//! Checks tokens by the issuer's keys, and remembers those that were right until they end.

use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, Validation, decode, decode_header};
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use refrain_service_kit::tasks::restarted;
use serde_json::{Map, Value};

use super::claims::{ClaimsError, identity};
use super::config::JwtConfig;
use super::key_source::KeySource;
use super::keys::IssuerKeys;
use super::ring_provider;
use crate::metrics::GatewayMetrics;
use crate::tenants::directory::KnownKey;
use crate::tenants::key::digest;

/// Longest token, bytes.
const TOKEN_BYTES_MAX: usize = 8 << 10;

/// Tokens that are remembered. The least recently used ones are checked anew.
const TOKENS_MAX: NonZeroUsize = NonZeroUsize::new(16_384).unwrap();

/// Shortest time between two readings of the keys for the sake of tokens. Anybody can send a token with another key.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// The algorithms that are accepted.
const ALGORITHMS: [Algorithm; 3] = [Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA];

/// A token that is valid.
pub(crate) struct ValidToken {
    /// Stands in the place of the key of an API key: the scopes of the token, and an id of its subject.
    pub(crate) key: Arc<KnownKey>,
    ends: i64,
}

/// Why a token is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TokenError {
    /// The issuer may have a key by now that signed it.
    UnknownKey,
    /// No keys of the issuer could be read so far.
    NoKeys,
    /// A reason that stays, for the caller.
    Refused(String),
}

fn refused(reason: &str) -> TokenError {
    TokenError::Refused(reason.to_owned())
}

/// The keys, and the text that they came from.
#[derive(Default)]
struct ReadKeys {
    keys: IssuerKeys,
    text: Vec<u8>,
}

/// Checks tokens of one issuer.
pub(crate) struct JwtVerifier {
    config: JwtConfig,
    source: KeySource,
    keys: RwLock<Arc<ReadKeys>>,
    valid: Mutex<LruCache<[u8; 32], Arc<ValidToken>>>,
    /// When the keys were last read for the sake of a token. Whoever holds it reads them.
    reading: tokio::sync::Mutex<Option<Instant>>,
    /// The trouble of the last reading.
    trouble: Mutex<Option<String>>,
    metrics: Arc<GatewayMetrics>,
}

impl JwtVerifier {
    /// Reads the keys, and follows them until this is dropped.
    ///
    /// # Errors
    /// A file that cannot be used. A URL may be away at the start: until it answers, tokens get 503.
    pub(crate) async fn start(
        config: JwtConfig,
        metrics: Arc<GatewayMetrics>,
    ) -> anyhow::Result<Arc<Self>> {
        ring_provider::install();
        let verifier = Arc::new(JwtVerifier {
            source: KeySource::new(&config)?,
            config,
            keys: RwLock::default(),
            valid: Mutex::new(LruCache::new(TOKENS_MAX)),
            reading: tokio::sync::Mutex::default(),
            trouble: Mutex::default(),
            metrics,
        });
        match verifier.source {
            KeySource::File(_) => verifier.read().await?,
            KeySource::Url { .. } => verifier.read_or_report().await,
        }
        let (followed, interval) = (Arc::downgrade(&verifier), verifier.source.interval());
        let follow = move || follow(followed.clone(), interval);
        tokio::spawn(restarted("keys of the issuer", follow));
        Ok(verifier)
    }

    fn keys(&self) -> Arc<ReadKeys> {
        self.keys.read().clone()
    }

    /// Reads the keys. Those from before stay if that fails.
    async fn read(&self) -> anyhow::Result<()> {
        let read = async {
            let text = self.source.read().await?;
            if text == self.keys().text {
                return Ok(None);
            }
            Ok(Some((IssuerKeys::parse(&text)?, text)))
        };
        let read: anyhow::Result<_> = read.await;
        let families = &self.metrics.families;
        let outcome = if read.is_ok() { "read" } else { "failed" };
        families.jwks_read.with_label_values(&[outcome]).inc();
        if let Some((keys, text)) = read? {
            families.jwks_keys.set(keys.len() as i64);
            let keys = Arc::new(ReadKeys { keys, text });
            *self.keys.write() = keys;
            // Tokens by a key that is gone are not valid any more.
            self.valid.lock().clear();
            tracing::info!("the gateway has read the keys of the tokens' issuer");
        }
        Ok(())
    }

    /// Reads the keys, and logs a trouble once.
    async fn read_or_report(&self) {
        let trouble = self.read().await.err().map(|error| format!("{error:#}"));
        let mut known = self.trouble.lock();
        if let Some(error) = &trouble
            && known.as_ref() != Some(error)
        {
            tracing::error!(
                error,
                "the keys of the tokens' issuer cannot be read; those from before stay"
            );
        }
        *known = trouble;
    }

    /// Whether a token may name a tenant that the gateway does not know.
    pub(crate) fn allows_unknown_tenants(&self) -> bool {
        self.config.unknown_tenants
    }

    /// Reads the keys for the sake of a token, unless that was done a moment ago.
    pub(crate) async fn read_again(&self) {
        let mut last = self.reading.lock().await;
        if last.is_some_and(|last| last.elapsed() < READ_AGAIN_AFTER) {
            return;
        }
        self.read_or_report().await;
        *last = Some(Instant::now());
    }

    /// Checks a token at a time in Unix seconds.
    ///
    /// # Errors
    /// The token is not valid, or nobody knows yet.
    pub(crate) fn verify(&self, token: &str, now: i64) -> Result<Arc<ValidToken>, TokenError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(refused("it is too long"));
        }
        let hash = digest(token);
        let known = self.valid.lock().get(&hash).cloned();
        if let Some(known) = known.filter(|known| known.ends > now) {
            return Ok(known);
        }
        let read = self.keys();
        let valid = Arc::new(check(token, &read.keys, &self.config, now)?);
        let mut remembered = self.valid.lock();
        // The keys may have been exchanged meanwhile, with all that is remembered.
        if Arc::ptr_eq(&read, &self.keys()) {
            remembered.put(hash, valid.clone());
        }
        let count = remembered.len() as i64;
        self.metrics.families.tokens_remembered.set(count);
        Ok(valid)
    }
}

/// Checks a token by these keys, at a time in Unix seconds.
fn check(
    token: &str,
    keys: &IssuerKeys,
    config: &JwtConfig,
    now: i64,
) -> Result<ValidToken, TokenError> {
    let form = "it is no JWT that is signed by RS256, ES256 or EdDSA";
    let header = decode_header(token).map_err(|_| refused(form))?;
    if !ALGORITHMS.contains(&header.alg) {
        return Err(refused(form));
    }
    if header.crit.is_some() {
        return Err(refused(
            "its header demands an extension that is not known here",
        ));
    }
    if keys.len() == 0 {
        return Err(TokenError::NoKeys);
    }
    let key = keys.find(header.kid.as_deref(), header.alg);
    let key = key.ok_or(TokenError::UnknownKey)?;
    let mut validation = Validation::new(key.algorithm);
    validation.set_issuer(&[&config.issuer]);
    validation.set_audience(&[&config.audience]);
    validation.set_required_spec_claims(&["iss", "aud"]);
    // `identity` checks the times, by the clock of the caller.
    validation.validate_exp = false;
    let claims = decode::<Map<String, Value>>(token, &key.key, &validation);
    let claims = claims.map_err(|error| match error.kind() {
        ErrorKind::InvalidIssuer => refused("it is of another issuer"),
        ErrorKind::InvalidAudience => refused("it is for another audience"),
        ErrorKind::MissingRequiredClaim(claim) => refused(&format!("it has no claim {claim}")),
        ErrorKind::InvalidSignature | ErrorKind::InvalidAlgorithm => {
            refused("its signature is wrong")
        }
        _ => refused(form),
    })?;
    let identity = identity(&claims.claims, config, now).map_err(|error| match error {
        ClaimsError::Expired => refused("it has expired"),
        ClaimsError::NotYetValid => refused("it is not valid yet"),
        ClaimsError::Malformed(reason) => TokenError::Refused(reason),
    })?;
    let ends = identity.ends;
    let key = KnownKey::of_token(
        identity.id,
        identity.tenant,
        identity.models,
        identity.endpoints,
    );
    Ok(ValidToken {
        key: Arc::new(key),
        ends,
    })
}

/// Reads the keys from time to time.
async fn follow(verifier: Weak<JwtVerifier>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let Some(verifier) = verifier.upgrade() else {
            return;
        };
        verifier.read_or_report().await;
    }
}
