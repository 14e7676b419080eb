//! The claims of a token whose signature is right. Pure: the time is a parameter.

use std::collections::HashSet;

use refrain_protocol::TenantName;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::config::JwtConfig;
use crate::tenants::file::KeyEndpoint;

/// The owner of a token, as it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) tenant: TenantName,
    /// Stands in the place of a key's public id. It is a hash of the subject.
    pub(super) id: String,
    /// The models that may be used. Empty: all.
    pub(super) models: HashSet<String>,
    /// The endpoints that may be called. Empty: all.
    pub(super) endpoints: HashSet<KeyEndpoint>,
    /// When the token ends, in Unix seconds, with the leeway.
    pub(super) ends: i64,
}

/// Why the claims are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ClaimsError {
    Expired,
    NotYetValid,
    /// A claim is missing or has another form.
    Malformed(String),
}

fn malformed(claim: &str, rule: &str) -> ClaimsError {
    ClaimsError::Malformed(format!("the claim {claim} {rule}"))
}

/// A time in Unix seconds. Some issuers send fractions.
fn time(claims: &Map<String, Value>, claim: &str) -> Result<Option<i64>, ClaimsError> {
    let Some(value) = claims.get(claim) else {
        return Ok(None);
    };
    let seconds = value.as_f64().filter(|seconds| seconds.abs() < 1e15);
    let seconds = seconds.ok_or_else(|| malformed(claim, "is no time in Unix seconds"))?;
    Ok(Some(seconds.floor() as i64))
}

/// A list of names, or names separated by spaces. A list that allows nothing is refused, since an empty one means all
/// elsewhere.
fn names(claims: &Map<String, Value>, claim: Option<&str>) -> Result<Vec<String>, ClaimsError> {
    let Some((claim, value)) = claim.and_then(|claim| Some((claim, claims.get(claim)?))) else {
        return Ok(Vec::new());
    };
    let names: Option<Vec<String>> = match value {
        Value::String(text) => Some(text.split_whitespace().map(str::to_owned).collect()),
        Value::Array(items) => {
            let items = items.iter().map(|item| item.as_str().map(str::to_owned));
            items.collect()
        }
        _ => None,
    };
    let names = names.filter(|names| !names.is_empty());
    names.ok_or_else(|| malformed(claim, "must be a list of names, and not an empty one"))
}

/// Checks the times of a token, and reads who its owner is.
pub(super) fn identity(
    claims: &Map<String, Value>,
    config: &JwtConfig,
    now: i64,
) -> Result<Identity, ClaimsError> {
    // The library takes a list with the issuer in it as well, which RFC 7519 does not have.
    if claims.get("iss").and_then(Value::as_str) != Some(&*config.issuer) {
        return Err(malformed("iss", "must be the issuer, as a text"));
    }
    let leeway = config.leeway_s.cast_signed();
    let ends = time(claims, "exp")?.ok_or_else(|| malformed("exp", "is missing"))?;
    let ends = ends.saturating_add(leeway);
    if ends <= now {
        return Err(ClaimsError::Expired);
    }
    if time(claims, "nbf")?.is_some_and(|begins| begins > now + leeway) {
        return Err(ClaimsError::NotYetValid);
    }
    let tenant = claims.get(&config.tenant_claim).and_then(Value::as_str);
    let tenant = tenant.ok_or_else(|| malformed(&config.tenant_claim, "must name the tenant"))?;
    let tenant = tenant.parse();
    let tenant = tenant.map_err(|fault: String| malformed(&config.tenant_claim, &fault))?;
    let subject = claims.get("sub").and_then(Value::as_str);
    let models = names(claims, config.models_claim.as_deref())?;
    let endpoints = names(claims, config.endpoints_claim.as_deref())?;
    let endpoint = |name: String| {
        serde_json::from_value(name.into()).map_err(|_| {
            let claim = config.endpoints_claim.as_deref().unwrap_or_default();
            malformed(claim, "names an endpoint that does not exist")
        })
    };
    Ok(Identity {
        tenant,
        id: id_of(subject.unwrap_or_default()),
        models: models.into_iter().collect(),
        endpoints: endpoints
            .into_iter()
            .map(endpoint)
            .collect::<Result<_, _>>()?,
        ends,
    })
}

/// The id of a subject. It does not tell the name, and no key has such an id.
fn id_of(subject: &str) -> String {
    let digest = Sha256::digest(subject.as_bytes());
    format!("jwt_{}", hex::encode(&digest[..8]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn config() -> JwtConfig {
        JwtConfig {
            issuer: "https://idp.test".into(),
            models_claim: Some("models".into()),
            endpoints_claim: Some("scope".into()),
            leeway_s: 10,
            ..JwtConfig::default()
        }
    }

    /// The identity of usual claims with these changes; null removes one.
    fn of(changes: Value) -> Result<Identity, ClaimsError> {
        let iss = "https://idp.test";
        let mut claims = json!({"iss": iss, "exp": NOW + 60, "tenant": "acme", "sub": "ann"});
        for (name, value) in changes.as_object().unwrap() {
            claims[name] = value.clone();
        }
        let claims = claims.as_object().unwrap().clone();
        let claims = claims.into_iter().filter(|(_, value)| !value.is_null());
        identity(&claims.collect(), &config(), NOW)
    }

    #[test]
    fn a_token_is_valid_between_its_times_and_a_leeway() {
        assert_eq!(of(json!({})).unwrap().ends, NOW + 70);
        assert!(of(json!({"exp": NOW - 9})).is_ok());
        assert_eq!(of(json!({"exp": NOW - 10})), Err(ClaimsError::Expired));
        assert!(of(json!({"exp": (NOW as f64) + 0.5})).is_ok());
        assert!(of(json!({"nbf": NOW + 10})).is_ok());
        assert_eq!(of(json!({"nbf": NOW + 11})), Err(ClaimsError::NotYetValid));
        for fault in [
            json!({"exp": null}),
            json!({"exp": "never"}),
            json!({"exp": 1e300}),
            json!({"nbf": "now"}),
            json!({"nbf": []}),
        ] {
            assert!(matches!(of(fault), Err(ClaimsError::Malformed(_))));
        }
    }

    #[test]
    fn a_token_names_its_tenant_and_may_have_scopes() {
        let all = of(json!({})).unwrap();
        assert_eq!(all.tenant, "acme");
        assert!(all.models.is_empty() && all.endpoints.is_empty());
        assert!(all.id.starts_with("jwt_") && !all.id.contains("ann"));
        assert_ne!(all.id, of(json!({"sub": "ben"})).unwrap().id);
        let some = of(json!({"models": ["small"], "scope": "chat tokenize"})).unwrap();
        assert!(some.models.contains("small") && some.endpoints.len() == 2);
        for fault in [
            json!({"tenant": null}),
            json!({"tenant": " "}),
            json!({"tenant": 7}),
            json!({"tenant": "x".repeat(257)}),
            json!({"tenant": "acme\u{1f}key:0123456789ab"}),
            json!({"tenant": "other"}),
            json!({"iss": ["https://idp.test"]}),
            json!({"iss": "https://idp.test/"}),
            json!({"iss": null}),
            json!({"models": []}),
            json!({"models": [7]}),
            json!({"models": {"small": true}}),
            json!({"scope": ""}),
            json!({"scope": "admin"}),
        ] {
            let refused = of(fault.clone());
            assert!(matches!(refused, Err(ClaimsError::Malformed(_))), "{fault}");
        }
    }
}
