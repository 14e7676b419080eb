//! Finds out who calls: the owner of an API key, of a token of an identity provider, or nobody in particular.

use std::sync::Arc;

use refrain_protocol::{ApiError, ErrorKind};

use super::directory::{Caller, Directory};
use super::jwt::{JwtVerifier, TokenError};

/// Time after which a token may be tried again whose issuer's keys are not known.
const KEYS_RETRY_AFTER_MS: u64 = 5_000;

/// Finds the callers of requests.
pub(crate) struct Callers {
    pub(crate) directory: Arc<Directory>,
    /// The tokens of an identity provider, if there is one.
    pub(crate) jwt: Option<Arc<JwtVerifier>>,
}

/// Whether a text has the form of a signed token: three parts, of which the first begins as JSON does in base64.
fn is_token(text: &str) -> bool {
    text.starts_with("eyJ") && text.bytes().filter(|byte| *byte == b'.').count() == 2
}

impl Callers {
    /// Finds the caller by the headers `Authorization` and `x-api-key`, at a time in Unix seconds.
    ///
    /// # Errors
    /// `Unauthorized` for a wrong key or token, `Forbidden` for a token of an unknown tenant, `Unavailable` if nobody
    /// knows yet.
    pub(crate) async fn caller(
        &self,
        authorization: Option<&str>,
        api_key: Option<&str>,
        now: i64,
    ) -> Result<Caller, ApiError> {
        if let Some(jwt) = &self.jwt {
            let bearer = authorization.and_then(|text| text.trim().split_once(' '));
            let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
            let given = match authorization {
                Some(_) => bearer.map(|(_, token)| token),
                None => api_key,
            };
            let token = given.map(str::trim).filter(|text| is_token(text));
            if let Some(token) = token {
                return self.owner(jwt, token, now).await;
            }
        }
        match (authorization, api_key) {
            (None, Some(key)) => self.directory.caller_of_key(key, now),
            (authorization, _) => self.directory.caller(authorization, now),
        }
    }

    async fn owner(&self, jwt: &JwtVerifier, token: &str, now: i64) -> Result<Caller, ApiError> {
        let mut verified = jwt.verify(token, now);
        if matches!(verified, Err(TokenError::UnknownKey | TokenError::NoKeys)) {
            // The issuer may have a new key.
            jwt.read_again().await;
            verified = jwt.verify(token, now);
        }
        let valid = verified.map_err(|error| match error {
            TokenError::NoKeys => {
                let message = "the keys of the tokens' issuer are not known, or too old; try again";
                ApiError::new(ErrorKind::Unavailable, message)
                    .with_code("issuer_unavailable")
                    .with_retry_after_ms(KEYS_RETRY_AFTER_MS)
            }
            TokenError::UnknownKey => {
                invalid("it is signed by a key that its issuer does not have")
            }
            TokenError::Refused(reason) => invalid(&reason),
        })?;
        self.directory
            .caller_of_token(&valid.key, jwt.allows_unknown_tenants())
    }
}

fn invalid(reason: &str) -> ApiError {
    let message = format!("the token is not valid: {reason}");
    ApiError::new(ErrorKind::Unauthorized, message).with_code("invalid_token")
}
