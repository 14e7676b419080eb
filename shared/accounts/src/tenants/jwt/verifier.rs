//! Checks tokens by the issuer's keys, and remembers those that were right until they end.

use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, Validation, decode, decode_header};
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use refrain_service_kit::actors;
use serde_json::{Map, Value};

use super::claims::{ClaimsError, identity};
use super::config::JwtConfig;
use super::key_source::KeySource;
use super::keys::IssuerKeys;
use super::ring_provider;
use crate::metrics::AccountMetrics;
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
    /// No keys of the issuer could be read so far, or not for too long.
    NoKeys,
    /// A reason that stays, for the caller.
    Refused(String),
}

fn refused(reason: &str) -> TokenError {
    TokenError::Refused(reason.to_owned())
}

/// The keys, and the text that they came from.
struct ReadKeys {
    keys: IssuerKeys,
    text: Vec<u8>,
}

/// The keys that were read last, and when that was.
struct LatestKeys {
    read: Arc<ReadKeys>,
    at: Instant,
}

/// Checks tokens of one issuer.
pub(crate) struct JwtVerifier {
    config: JwtConfig,
    source: KeySource,
    latest: RwLock<Option<LatestKeys>>,
    valid: Mutex<LruCache<[u8; 32], Arc<ValidToken>>>,
    /// When the keys were last read for the sake of a token. Whoever holds it reads them.
    reading: tokio::sync::Mutex<Option<Instant>>,
    /// The trouble of the last reading.
    trouble: Mutex<Option<String>>,
    metrics: Arc<AccountMetrics>,
}

impl JwtVerifier {
    /// Reads the keys, and follows them until this is dropped.
    ///
    /// # Errors
    /// A file that cannot be used. A URL may be away at the start: until it answers, tokens get 503.
    pub(crate) async fn start(
        config: JwtConfig,
        metrics: Arc<AccountMetrics>,
    ) -> anyhow::Result<Arc<Self>> {
        ring_provider::install();
        let verifier = Arc::new(JwtVerifier {
            source: KeySource::new(&config)?,
            config,
            latest: RwLock::default(),
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
        actors::start("keys of the issuer", follow).detached();
        Ok(verifier)
    }

    /// The keys, unless they were read too long ago: the issuer may have withdrawn them since.
    fn keys(&self, now: Instant) -> Option<Arc<ReadKeys>> {
        let age_max = Duration::from_secs(self.config.jwks_stale_s_max);
        let latest = self.latest.read();
        let latest = latest
            .as_ref()
            .filter(|latest| now.saturating_duration_since(latest.at) <= age_max);
        latest.map(|latest| latest.read.clone())
    }

    /// Reads the keys. Those from before stay if that fails.
    async fn read(&self) -> anyhow::Result<()> {
        let read = self.source.read().await.and_then(|text| self.take(text));
        let outcome = if read.is_ok() { "read" } else { "failed" };
        let families = &self.metrics.families;
        families.jwks_read.with_label_values(&[outcome]).inc();
        read
    }

    /// Takes the text of a set over.
    fn take(&self, text: Vec<u8>) -> anyhow::Result<()> {
        let at = Instant::now();
        if let Some(latest) = &mut *self.latest.write()
            && latest.read.text == text
        {
            latest.at = at;
            return Ok(());
        }
        let keys = IssuerKeys::parse(&text)?;
        let count = keys.len();
        self.metrics.families.jwks_keys.set(count as i64);
        let read = Arc::new(ReadKeys { keys, text });
        *self.latest.write() = Some(LatestKeys { read, at });
        // Tokens by a key that is gone are not valid any more.
        self.valid.lock().clear();
        match count {
            0 => tracing::error!(
                "the tokens' issuer has no key for RS256, ES256 (P-256) or EdDSA (Ed25519): all tokens are refused"
            ),
            _ => tracing::info!(count, "the gateway has read the keys of the tokens' issuer"),
        }
        Ok(())
    }

    /// Reads the keys, and logs a trouble once.
    async fn read_or_report(&self) {
        let failed = self.read().await.err();
        let trouble = failed.map(|error| match self.keys(Instant::now()) {
            Some(_) => format!("{error:#}; those from before stay"),
            None => format!("{error:#}; there are none, or too old ones, so tokens get 503"),
        });
        let mut known = self.trouble.lock();
        if let Some(trouble) = &trouble
            && known.as_ref() != Some(trouble)
        {
            tracing::error!(trouble, "the keys of the tokens' issuer cannot be read");
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
        let read = self.keys(Instant::now());
        let known = self.valid.lock().get(&hash).cloned();
        if let Some(known) = known.filter(|known| known.ends > now && read.is_some()) {
            return Ok(known);
        }
        let keys = read.as_ref().map(|read| &read.keys);
        let valid = Arc::new(check(token, keys, &self.config, now)?);
        let mut remembered = self.valid.lock();
        // The keys may have been exchanged meanwhile, with all that is remembered.
        if read.as_ref().map(Arc::as_ptr) == self.keys(Instant::now()).as_ref().map(Arc::as_ptr) {
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
    keys: Option<&IssuerKeys>,
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
    let keys = keys.ok_or(TokenError::NoKeys)?;
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

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use refrain_service_kit::telemetry::Metrics;

    use super::*;

    const NOW: i64 = 1_800_000_000;

    #[tokio::test]
    async fn keys_that_cannot_be_read_any_more_are_used_for_a_while_and_withdrawn_ones_no_longer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        let key = r#"{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "kid": "a"}"#;
        std::fs::write(&path, format!(r#"{{"keys": [{key}]}}"#)).unwrap();
        let config = JwtConfig {
            jwks_file: Some(path.clone()),
            jwks_stale_s_max: 600,
            ..JwtConfig::default()
        };
        let metrics = Arc::new(AccountMetrics::new(&Metrics::new().unwrap()).unwrap());
        let age_max = Duration::from_secs(600);
        let before = Instant::now();
        let verifier = JwtVerifier::start(config, metrics.clone()).await.unwrap();
        let read = verifier.keys(before + age_max).unwrap();
        assert_eq!(read.keys.len(), 1);
        // A set with the same text counts as read again.
        verifier.take(read.text.clone()).unwrap();
        assert!(verifier.keys(before + age_max).is_some());
        // Without a reading they are too old at some time, and no token is checked by them.
        let later = Instant::now() + 2 * age_max;
        assert!(verifier.keys(later).is_none());
        let part = |json: &str| URL_SAFE_NO_PAD.encode(json);
        let header = part(r#"{"alg": "EdDSA", "kid": "a"}"#);
        let token = format!("{header}.{}.AA", part("{}"));
        let error = |keys: Option<&IssuerKeys>| check(&token, keys, &verifier.config, NOW).err();
        assert_eq!(error(None), Some(TokenError::NoKeys));
        assert!(matches!(
            error(Some(&read.keys)),
            Some(TokenError::Refused(_))
        ));
        // The issuer has withdrawn all of its keys, which is no failure.
        verifier.take(br#"{"keys": []}"#.to_vec()).unwrap();
        assert_eq!(
            verifier.verify(&token, NOW).err(),
            Some(TokenError::UnknownKey)
        );
        assert_eq!(metrics.families.jwks_keys.get(), 0);
    }
}
