//! Operators of gateways and their tokens.

use std::collections::HashSet;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use refrain_protocol::ApiError;
use refrain_service_kit::random;
use serde::Deserialize;

use crate::tenants::key::digest;

/// The first characters of each token.
const PREFIX: &str = "rfo-";

/// An operator, who may call the admin API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct OperatorConfig {
    /// The name, which the audit log has.
    pub name: String,
    /// SHA-256 of the token in hex. `refrain keys operator NAME` makes both.
    pub token_sha256: String,
    /// Whether the operator may look, and change nothing.
    pub read_only: bool,
}

impl OperatorConfig {
    /// The SHA-256 of the token, if it can be read.
    pub fn digest(&self) -> Option<[u8; 32]> {
        hex::decode(&self.token_sha256).ok()?.try_into().ok()
    }
}

/// A new token of an operator. It is shown once.
pub struct OperatorToken {
    /// The token, with 256 random bits.
    pub token: String,
    /// Its SHA-256, in hex.
    pub sha256: String,
}

impl OperatorToken {
    /// Makes a token.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn random() -> Result<Self, ApiError> {
        let token = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(random::bytes::<32>()?));
        Ok(OperatorToken {
            sha256: OperatorToken::sha256_of(&token),
            token,
        })
    }

    /// The SHA-256 of a token, in hex.
    pub fn sha256_of(token: &str) -> String {
        hex::encode(digest(token))
    }
}

/// The faults of a list of operators, one sentence per fault.
pub fn operator_faults(operators: &[OperatorConfig]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut names = HashSet::new();
    for (place, operator) in operators.iter().enumerate() {
        let at = format!("operators[{place}]");
        if operator.name.trim().is_empty() {
            faults.push(format!("{at}.name: must not be empty"));
        }
        if !names.insert(&operator.name) {
            faults.push(format!("{at}.name: {} is there twice", operator.name));
        }
        if operator.digest().is_none() {
            faults.push(format!(
                "{at}.token_sha256: must be 64 hex digits; `refrain keys operator NAME` makes them"
            ));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_name_the_operator() {
        let config = |name: &str, hash: &str| OperatorConfig {
            name: name.into(),
            token_sha256: hash.into(),
            read_only: false,
        };
        let hash = "00".repeat(32);
        let faults = operator_faults(&[config("", &hash), config("a", "ab"), config("a", &hash)]);
        let faults = faults.join("\n");
        for part in [
            "operators[0].name",
            "operators[1].token_sha256",
            "operators[2].name: a is there twice",
        ] {
            assert!(faults.contains(part), "{part} in {faults}");
        }
    }
}
