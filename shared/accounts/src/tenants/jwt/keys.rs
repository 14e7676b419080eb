//! The public keys of an issuer, of a set as in RFC 7517.

use anyhow::Context as _;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use serde_json::Value;

/// Most keys of a set. Issuers have a handful.
const KEYS_MAX: usize = 64;

/// A key, and the only algorithm that it is used with.
#[derive(Clone)]
pub(super) struct IssuerKey {
    kid: Option<String>,
    pub(super) algorithm: Algorithm,
    pub(super) key: DecodingKey,
}

/// The keys of an issuer.
#[derive(Clone, Default)]
pub(super) struct IssuerKeys(Vec<IssuerKey>);

/// The algorithm that goes with a kind of key. So no token decides how its own signature is checked.
fn algorithm(jwk: &Jwk) -> Option<Algorithm> {
    let (algorithm, named) = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => (Algorithm::RS256, KeyAlgorithm::RS256),
        AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
            (Algorithm::ES256, KeyAlgorithm::ES256)
        }
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
            (Algorithm::EdDSA, KeyAlgorithm::EdDSA)
        }
        _ => return None,
    };
    let common = &jwk.common;
    let is_named = common.key_algorithm.is_none_or(|given| given == named);
    let is_for_signatures = match &common.public_key_use {
        None | Some(PublicKeyUse::Signature) => true,
        Some(_) => false,
    };
    (is_named && is_for_signatures).then_some(algorithm)
}

impl IssuerKeys {
    /// Reads the text of a set. Keys of other kinds are left out. A set without keys withdraws all.
    ///
    /// # Errors
    /// It is no set, or has too many keys.
    pub(super) fn parse(text: &[u8]) -> anyhow::Result<Self> {
        let set: Value = serde_json::from_slice(text).context("it is not JSON")?;
        let keys = set.get("keys").and_then(Value::as_array);
        let keys = keys.context("it is no JWKS: it has no list of keys")?;
        anyhow::ensure!(
            keys.len() <= KEYS_MAX,
            "it has {} keys; at most {KEYS_MAX} are read",
            keys.len()
        );
        let read = |key: &Value| {
            let jwk: Jwk = serde_json::from_value(key.clone()).ok()?;
            Some(IssuerKey {
                algorithm: algorithm(&jwk)?,
                key: DecodingKey::from_jwk(&jwk).ok()?,
                kid: jwk.common.key_id,
            })
        };
        Ok(IssuerKeys(keys.iter().filter_map(read).collect()))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The key of a token by the id in its header. A token without an id fits if there is one key of its algorithm.
    pub(super) fn find(&self, kid: Option<&str>, algorithm: Algorithm) -> Option<&IssuerKey> {
        let mut fitting = self.0.iter().filter(|key| match kid {
            Some(kid) => key.kid.as_deref() == Some(kid),
            None => key.algorithm == algorithm,
        });
        let first = fitting.next()?;
        match fitting.next() {
            Some(_) if kid.is_none() => None,
            _ => Some(first),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const X: &str = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";

    fn ed(kid: &str) -> Value {
        json!({"kty": "OKP", "crv": "Ed25519", "x": X, "kid": kid})
    }

    fn parse(keys: &[Value]) -> anyhow::Result<IssuerKeys> {
        IssuerKeys::parse(json!({"keys": keys}).to_string().as_bytes())
    }

    #[test]
    fn keys_of_other_kinds_are_left_out() {
        let secret = json!({"kty": "oct", "k": "c2VjcmV0", "kid": "h"});
        let p384 = json!({"kty": "EC", "crv": "P-384", "x": X, "y": X, "kid": "p"});
        let mut encrypts = ed("e");
        encrypts["use"] = "enc".into();
        let mut other = ed("o");
        other["alg"] = "RS256".into();
        let unknown = json!({"kty": "new", "kid": "n"});
        let bad = [secret, p384, encrypts, other, unknown, json!(7)];
        assert_eq!(parse(&bad).unwrap().len(), 0);
        assert_eq!(parse(&[]).unwrap().len(), 0);
        let keys = parse(&[&bad[..], &[ed("a")]].concat()).unwrap();
        assert_eq!(keys.len(), 1);
        assert!(keys.find(Some("a"), Algorithm::EdDSA).is_some());
        for kid in ["h", "p", "e", "o", "n", ""] {
            assert!(keys.find(Some(kid), Algorithm::EdDSA).is_none(), "{kid}");
        }
        assert!(keys.find(None, Algorithm::EdDSA).is_some());
        assert!(keys.find(None, Algorithm::RS256).is_none());
        let two = parse(&[ed("a"), ed("b")]).unwrap();
        assert!(two.find(None, Algorithm::EdDSA).is_none());
    }

    #[test]
    fn a_text_that_is_no_set_is_refused() {
        for text in ["", "[]", "{}", "{\"keys\": {}}"] {
            assert!(IssuerKeys::parse(text.as_bytes()).is_err(), "{text}");
        }
        let many: Vec<Value> = (0..65).map(|number| ed(&number.to_string())).collect();
        assert!(parse(&many).is_err());
    }
}
