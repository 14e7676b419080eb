//! Tenants from an identity provider: callers with a JWT in place of an API key.
//!
//! `keys` has the public keys of the issuer, and `key_source` reads them anew. `claims` turns the claims of a token
//! into an identity, as a function of values. `verifier` puts them together, and `ring_provider` checks signatures.

mod claims;
mod config;
mod key_source;
mod keys;
mod ring_provider;
mod verifier;

pub use config::JwtConfig;
pub(crate) use verifier::{JwtVerifier, TokenError};
