//! The section of the identity provider.

use std::net::IpAddr;
use std::path::PathBuf;

use refrain_service_kit::config::Validate;
use serde::Deserialize;

/// Largest leeway. A token must not live on for long.
const LEEWAY_S_MAX: u64 = 300;

/// Shortest time for which keys are used. One reading may fail.
const STALE_S_MIN: u64 = 600;

/// Callers with a JWT (RFC 7519) of an identity provider. Its signature must be RS256, ES256 or EdDSA.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct JwtConfig {
    /// The issuer, which the claim `iss` of a token must be.
    pub issuer: String,
    /// The audience, which must be in the claim `aud` of a token.
    pub audience: String,
    /// URL of the issuer's public keys (JWKS). It must be `https://`, or lead to this machine.
    pub jwks_url: Option<String>,
    /// File with the issuer's public keys, in place of the URL. The gateway follows its changes.
    pub jwks_file: Option<PathBuf>,
    /// The claim that names the tenant.
    pub tenant_claim: String,
    /// The claim with the models that a caller may use, as a list or separated by spaces. Without it in a token, the
    /// caller may use all. None: there is no such claim.
    pub models_claim: Option<String>,
    /// The same for endpoints: `chat`, `completions`, `messages`, `responses`, `tokenize` and `passthrough`.
    pub endpoints_claim: Option<String>,
    /// Whether a token may name a tenant that the gateway does not know. It has no limits then.
    pub unknown_tenants: bool,
    /// Seconds by which the clock of the issuer may differ (at most 300).
    pub leeway_s: u64,
    /// Seconds for which the issuer's keys are used since they were last read, at least 600. After that tokens get a
    /// 503 until the keys can be read again. A key that the issuer withdraws meanwhile is good for so long at most.
    pub jwks_stale_s_max: u64,
}

impl Default for JwtConfig {
    fn default() -> Self {
        JwtConfig {
            issuer: String::new(),
            audience: String::new(),
            jwks_url: None,
            jwks_file: None,
            tenant_claim: "tenant".into(),
            models_claim: None,
            endpoints_claim: None,
            unknown_tenants: false,
            leeway_s: 30,
            jwks_stale_s_max: 24 * 3_600,
        }
    }
}

/// Whether nobody on the way can replace what comes from this URL.
fn is_safe(url: &str) -> bool {
    let Ok(url) = reqwest::Url::parse(url) else {
        return false;
    };
    let is_local = url.host_str().is_some_and(|host| {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    });
    url.scheme() == "https" || url.scheme() == "http" && is_local
}

impl Validate for JwtConfig {
    fn faults(&self) -> Vec<String> {
        let url = self.jwks_url.as_deref();
        let rules = [
            (
                !self.issuer.is_empty(),
                "issuer: missing, such as https://idp.example.com",
            ),
            (
                !self.audience.is_empty(),
                "audience: missing; it keeps tokens for other services out",
            ),
            (
                !self.tenant_claim.is_empty(),
                "tenant_claim: must not be empty",
            ),
            (
                url.is_some() != self.jwks_file.is_some(),
                "jwks_url: give either this or jwks_file",
            ),
            (
                url.is_none_or(is_safe),
                "jwks_url: must be https://, or http:// on this machine, since whoever replaces the keys gets in",
            ),
            (self.leeway_s <= LEEWAY_S_MAX, "leeway_s: at most 300"),
            (
                self.jwks_stale_s_max >= STALE_S_MIN,
                "jwks_stale_s_max: at least 600, since keys are read every 300 seconds",
            ),
        ];
        let broken = rules.into_iter().filter(|(holds, _)| !holds);
        broken.map(|(_, fault)| fault.to_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_from_one_place_that_nobody_can_replace() {
        let with = |url: Option<&str>, file: Option<&str>| JwtConfig {
            issuer: "i".into(),
            audience: "a".into(),
            jwks_url: url.map(str::to_owned),
            jwks_file: file.map(PathBuf::from),
            ..JwtConfig::default()
        };
        for (url, file, is_right) in [
            (Some("https://idp.example.com/keys"), None, true),
            (Some("http://127.0.0.1:9/keys"), None, true),
            (Some("http://[::1]:9/keys"), None, true),
            (Some("http://localhost:9/keys"), None, true),
            (None, Some("keys.json"), true),
            (Some("http://idp.example.com/keys"), None, false),
            (Some("http://127.0.0.1.example.com/keys"), None, false),
            (Some("keys.json"), None, false),
            (Some("https://a"), Some("keys.json"), false),
            (None, None, false),
        ] {
            let faults = with(url, file).faults();
            assert_eq!(faults.is_empty(), is_right, "{url:?} {file:?}: {faults:?}");
        }
        let hasty = JwtConfig {
            jwks_stale_s_max: 599,
            ..with(None, Some("keys.json"))
        };
        assert!(hasty.faults()[0].starts_with("jwks_stale_s_max"));
        assert_eq!(JwtConfig::default().faults().len(), 3);
    }
}
