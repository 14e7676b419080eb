//! Credentials of roles: each process of a mesh proves what it is, and may call what its role needs.
//!
//! An operator holds the private half of an Ed25519 key, and signs a credential for each process. Services know the
//! public half. So a worker or an engine that is taken over cannot pass for an operator, or for another worker.

use std::fmt;
use std::num::NonZeroUsize;

use actix_web::{HttpMessage as _, HttpRequest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::{ApiError, ErrorKind};
use serde::{Deserialize, Serialize};

use super::keys::{KID_BYTES, PublicKey, SigningKey};
use crate::random;

/// The start of each credential, so that it is never taken for a secret.
pub(super) const PREFIX: &str = "rmc-";

/// The signed bytes begin with this, so that a signature for another purpose is none of a credential.
const PURPOSE: &[u8] = b"refrain mesh credential\0";

/// Maximum number of credentials whose signature is not verified again. A mesh has one for each process.
const VERIFIED_MAX: NonZeroUsize = NonZeroUsize::new(4_096).unwrap();

/// Longest name, bytes.
const NAME_BYTES_MAX: usize = 256;

/// The role of a process in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MeshRole {
    /// It asks for leases and chunks, and signs namespaces.
    Gateway,
    /// It grants leases. It calls nobody.
    Scheduler,
    /// It decodes chunks. Its name is `worker.id`.
    Worker,
    /// It keeps outputs, and calls other replicas.
    DraftStore,
    /// An engine with the plugin inside.
    Engine,
    /// A person or a tool that administers the mesh.
    Operator,
}

impl MeshRole {
    /// All roles.
    pub const ALL: [MeshRole; 6] = [
        MeshRole::Gateway,
        MeshRole::Scheduler,
        MeshRole::Worker,
        MeshRole::DraftStore,
        MeshRole::Engine,
        MeshRole::Operator,
    ];

    /// Its name in credentials and errors.
    pub fn as_str(self) -> &'static str {
        match self {
            MeshRole::Gateway => "gateway",
            MeshRole::Scheduler => "scheduler",
            MeshRole::Worker => "worker",
            MeshRole::DraftStore => "draft-store",
            MeshRole::Engine => "engine",
            MeshRole::Operator => "operator",
        }
    }
}

impl fmt::Display for MeshRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The contents of a credential.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleCredential {
    /// The role of its holder.
    pub role: MeshRole,
    /// The name of its holder.
    pub name: String,
    /// When it was signed, in Unix seconds.
    pub issued_at_s: u64,
    /// When it ends, in Unix seconds.
    pub expires_at_s: u64,
    /// The id of the key that signed it.
    pub kid: String,
}

impl RoleCredential {
    /// Whether the holder may call itself so. A name that ends in `*` is that of all whose names begin so: the
    /// processes of a pool, whose names nobody knows before.
    pub fn is_of(&self, name: &str) -> bool {
        match self.name.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => self.name == name,
        }
    }
}

/// The private key that signs credentials. Only the operator has it.
pub struct CredentialIssuer {
    key: SigningKey,
}

impl CredentialIssuer {
    /// Makes a new key. Returns it with its private half in hex.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn generate() -> anyhow::Result<(Self, String)> {
        let seed = random::bytes::<32>()?;
        let key = SigningKey::from_seed(&seed)?;
        Ok((CredentialIssuer { key }, hex::encode(seed)))
    }

    /// Reads a private key in hex.
    ///
    /// # Errors
    /// The text is no key. The error does not repeat it.
    pub fn from_hex(text: &str) -> anyhow::Result<Self> {
        let seed = hex::decode(text.trim())
            .ok()
            .filter(|seed| seed.len() == 32);
        let seed = seed.ok_or_else(|| {
            anyhow::anyhow!("the issuer key must be 64 hex digits; `refrain mesh issuer` makes one")
        })?;
        Ok(CredentialIssuer {
            key: SigningKey::from_seed(&seed)?,
        })
    }

    /// The public half, in hex, for `mesh.issuer_public_keys`.
    pub fn public_key(&self) -> String {
        self.key.public.hex()
    }

    /// Signs a credential. Both times are Unix seconds.
    ///
    /// # Errors
    /// The name is empty, too long, or has control characters.
    pub fn issue(
        &self,
        role: MeshRole,
        name: &str,
        issued_at_s: u64,
        expires_at_s: u64,
    ) -> anyhow::Result<String> {
        anyhow::ensure!(
            !name.trim().is_empty()
                && name.len() <= NAME_BYTES_MAX
                && !name.chars().any(char::is_control),
            "the name must have 1 to {NAME_BYTES_MAX} bytes and no control characters"
        );
        let credential = RoleCredential {
            role,
            name: name.to_owned(),
            issued_at_s,
            expires_at_s,
            kid: self.key.public.kid.clone(),
        };
        let text = URL_SAFE_NO_PAD.encode(serde_json::to_vec(&credential)?);
        let signature = self.key.sign(&signed_bytes(&text));
        Ok(format!("{PREFIX}{text}.{signature}"))
    }
}

fn signed_bytes(text: &str) -> Vec<u8> {
    [PURPOSE, text.as_bytes()].concat()
}

/// Reads the contents of a credential and its signature, which is not verified.
fn split(token: &str) -> Option<(RoleCredential, &str, Vec<u8>)> {
    let (text, signature) = token.strip_prefix(PREFIX)?.split_once('.')?;
    let credential = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
    Some((credential, text, hex::decode(signature).ok()?))
}

/// The keys of those who may sign credentials.
pub(super) struct Issuers {
    keys: Vec<PublicKey>,
    /// Credentials whose signature is valid.
    verified: Mutex<LruCache<String, RoleCredential>>,
}

impl Issuers {
    pub(super) fn new(keys: Vec<PublicKey>) -> Self {
        Issuers {
            keys,
            verified: Mutex::new(LruCache::new(VERIFIED_MAX)),
        }
    }

    /// Whether there are any, so that roles count.
    pub(super) fn exist(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Verifies a credential at a time in Unix seconds. Clocks may differ by `skew_s`.
    ///
    /// # Errors
    /// Why it is refused, in words for the holder.
    pub(super) fn verify(
        &self,
        token: &str,
        now_s: u64,
        skew_s: u64,
    ) -> Result<RoleCredential, String> {
        let known = self.verified.lock().get(token).cloned();
        let credential = match known {
            Some(credential) => credential,
            None => self.signed(token)?,
        };
        if credential.issued_at_s > now_s.saturating_add(skew_s) {
            return Err("it was signed ahead of this service's clock; check the clocks".to_owned());
        }
        if credential.expires_at_s <= now_s {
            return Err("it has expired; `refrain mesh credential` makes a new one".to_owned());
        }
        Ok(credential)
    }

    fn signed(&self, token: &str) -> Result<RoleCredential, String> {
        let malformed = || "it is malformed".to_owned();
        let (credential, text, signature) = split(token).ok_or_else(malformed)?;
        let mut keys = self.keys.iter();
        let Some(key) = keys.find(|key| key.kid == credential.kid) else {
            let kid: String = credential.kid.chars().take(2 * KID_BYTES).collect();
            return Err(format!(
                "its issuer's key {kid:?} is not among mesh.issuer_public_keys of this service"
            ));
        };
        if !key.verifies(&signed_bytes(text), &signature) {
            return Err("its signature is wrong".to_owned());
        }
        self.verified
            .lock()
            .put(token.to_owned(), credential.clone());
        Ok(credential)
    }
}

/// The end of a process's own name in the name of a part of it, such as a worker of one of several engines.
pub const PART_MARK: char = '@';

/// Somebody who calls an internal route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MeshCaller {
    /// A holder of the mesh secret, who may call everything.
    Secret,
    /// A holder of a credential.
    Role(RoleCredential),
}

impl MeshCaller {
    /// Notes who makes a request, for its handler.
    pub(crate) fn note(self, request: &HttpRequest) {
        request.extensions_mut().insert(self);
    }

    /// The caller of a request that [`mesh_only`](crate::http::mesh_only) has let in.
    ///
    /// # Errors
    /// `Unauthorized` for any other request.
    pub fn of(request: &HttpRequest) -> Result<Self, ApiError> {
        let noted = request.extensions().get::<Self>().cloned();
        noted.ok_or_else(|| ApiError::new(ErrorKind::Unauthorized, "the caller is unknown"))
    }

    /// Checks that the caller may call a route of these roles.
    ///
    /// # Errors
    /// `Forbidden` if its role is another one.
    pub(crate) fn check_role(&self, roles: &[MeshRole]) -> Result<(), ApiError> {
        let MeshCaller::Role(RoleCredential { role, .. }) = self else {
            return Ok(());
        };
        if roles.contains(role) {
            return Ok(());
        }
        let allowed: Vec<_> = roles.iter().map(|role| role.as_str()).collect();
        let message = format!(
            "a credential of the role {role} may not call this route; it is for {}",
            allowed.join(", ")
        );
        Err(ApiError::new(ErrorKind::Forbidden, message).with_code("role_not_allowed"))
    }

    /// Checks that a caller of this role speaks for itself, or for a part of it, whose name is its own with
    /// [`PART_MARK`] and something after it. Other callers are not concerned.
    ///
    /// # Errors
    /// `Forbidden` if its credential has another name.
    pub fn check_name(&self, of: MeshRole, name: &str) -> Result<(), ApiError> {
        let is_own = |credential: &RoleCredential| {
            let mut ends = name.match_indices(PART_MARK).map(|(at, _)| at);
            credential.is_of(name) || ends.any(|at| credential.is_of(&name[..at]))
        };
        match self {
            MeshCaller::Role(credential) if credential.role == of && !is_own(credential) => {
                let message = format!(
                    "this credential is of the {of} {:?}, which may not call as {name:?}",
                    credential.name
                );
                Err(ApiError::new(ErrorKind::Forbidden, message).with_code("name_not_allowed"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_S: u64 = 1_800_000_000;
    const DAY_S: u64 = 86_400;

    fn issuers(of: &[&CredentialIssuer]) -> Issuers {
        let keys = of
            .iter()
            .map(|issuer| hex::decode(issuer.public_key()).unwrap());
        Issuers::new(keys.map(PublicKey::new).collect())
    }

    #[test]
    fn a_credential_says_what_was_signed_until_it_ends() {
        let (issuer, seed) = CredentialIssuer::generate().unwrap();
        let again = CredentialIssuer::from_hex(&format!("{seed}\n")).unwrap();
        assert_eq!(again.public_key(), issuer.public_key());
        let token = issuer
            .issue(MeshRole::Worker, "w-1", NOW_S, NOW_S + DAY_S)
            .unwrap();
        let issuers = issuers(&[&issuer]);
        for _ in 0..2 {
            let read = issuers.verify(&token, NOW_S + 1, 60).unwrap();
            assert_eq!((read.role, read.name.as_str()), (MeshRole::Worker, "w-1"));
        }
        // The first answer is remembered, but not beyond its time.
        let expired = issuers.verify(&token, NOW_S + DAY_S, 60).unwrap_err();
        assert!(expired.contains("expired"), "{expired}");
        assert!(issuers.verify(&token, NOW_S - 60, 60).is_ok());
        let early = issuers.verify(&token, NOW_S - 61, 60).unwrap_err();
        assert!(early.contains("clock"), "{early}");
    }

    #[test]
    fn a_changed_or_foreign_credential_is_refused() {
        let (issuer, _) = CredentialIssuer::generate().unwrap();
        let (other, _) = CredentialIssuer::generate().unwrap();
        let issue = |issuer: &CredentialIssuer, role| {
            issuer.issue(role, "x", NOW_S, NOW_S + DAY_S).unwrap()
        };
        let worker = issue(&issuer, MeshRole::Worker);
        let operator = issue(&issuer, MeshRole::Operator);
        let issuers_of_one = issuers(&[&issuer]);
        let unknown = issuers_of_one.verify(&issue(&other, MeshRole::Operator), NOW_S, 0);
        assert!(unknown.unwrap_err().contains("issuer_public_keys"));
        // The text of one with the signature of another, and a text that claims the known key.
        let (text, _) = operator.split_once('.').unwrap();
        let (_, signature) = worker.split_once('.').unwrap();
        let spliced = issuers_of_one.verify(&format!("{text}.{signature}"), NOW_S, 0);
        assert!(spliced.unwrap_err().contains("signature"));
        for malformed in [
            "",
            "rmc-",
            "rmc-.",
            "rmc-e30.00",
            &worker[1..],
            &format!("{worker}zz"),
        ] {
            assert!(
                issuers_of_one.verify(malformed, NOW_S, 0).is_err(),
                "{malformed}"
            );
        }
        assert!(
            issuers(&[&other, &issuer])
                .verify(&worker, NOW_S, 0)
                .is_ok()
        );
        assert!(issuer.issue(MeshRole::Worker, " ", NOW_S, NOW_S).is_err());
        assert!(
            issuer
                .issue(MeshRole::Worker, "a\nb", NOW_S, NOW_S)
                .is_err()
        );
        assert!(CredentialIssuer::from_hex("abc").is_err());
    }

    #[test]
    fn a_role_calls_its_routes_and_a_worker_only_by_its_own_name() {
        let of = |role| {
            MeshCaller::Role(RoleCredential {
                role,
                name: "w-1".into(),
                issued_at_s: 0,
                expires_at_s: 0,
                kid: String::new(),
            })
        };
        for role in MeshRole::ALL {
            let is_allowed = of(role)
                .check_role(&[MeshRole::Worker, MeshRole::Engine])
                .is_ok();
            assert_eq!(
                is_allowed,
                matches!(role, MeshRole::Worker | MeshRole::Engine)
            );
            let json = serde_json::to_string(&role).unwrap();
            assert_eq!(json, format!("\"{role}\""));
        }
        assert!(MeshCaller::Secret.check_role(&[]).is_ok());
        let error = of(MeshRole::Worker)
            .check_name(MeshRole::Worker, "w-2")
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Forbidden);
        assert!(
            of(MeshRole::Worker)
                .check_name(MeshRole::Worker, "w-1")
                .is_ok()
        );
        assert!(
            of(MeshRole::Operator)
                .check_name(MeshRole::Worker, "w-2")
                .is_ok()
        );
        let pool = MeshCaller::Role(RoleCredential {
            role: MeshRole::Worker,
            name: "pool-a-*".into(),
            issued_at_s: 0,
            expires_at_s: 0,
            kid: String::new(),
        });
        for (name, is_own) in [("pool-a-7", true), ("pool-b-7", false), ("pool-a", false)] {
            let checked = pool.check_name(MeshRole::Worker, name);
            assert_eq!(checked.is_ok(), is_own, "{name}");
        }
        assert!(
            MeshCaller::Secret
                .check_name(MeshRole::Worker, "w-2")
                .is_ok()
        );
    }
}
