//! Namespaces, the borders that drafts never cross.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

use crate::names::name_fault;
use crate::{NamespaceId, TenantId, TenantName};

/// Stands in [`Namespace::tenant`] between the name of the tenant and a part of it. No [`TenantName`] has it.
///
/// A part is a suffix of the name, and not a field of its own, so that stored and sent namespaces have the same form
/// as ever. An older service takes the whole for another tenant, which isolates as well.
pub const PARTITION_MARK: char = '\u{1f}';

/// A tenant, a model and a tokenizer. No draft, cursor or statistic crosses the border of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Namespace {
    /// The tenant, which the gateway finds by the caller's API key, and the part of it, if a tenant is divided: a key
    /// or an end user.
    pub tenant: String,
    /// Public name of the model.
    pub model: String,
    /// Identity of the tokenizer: the hash of its map from ids to bytes and of its special tokens, in hex.
    pub tokenizer: String,
}

impl TenantId {
    /// The id of a tenant by its name. All its parts have the id of the whole.
    pub fn of(tenant: &str) -> Self {
        let parts = tenant.split_once(PARTITION_MARK);
        let name = parts.map_or(tenant, |(name, _)| name);
        let digest = Sha256::digest(name);
        let mut bytes = [0u8; 16];
        bytes.copy_from_slice(&digest[..16]);
        TenantId(u128::from_be_bytes(bytes))
    }
}

impl Namespace {
    /// The name of the tenant, whatever the part of it.
    pub fn tenant_name(&self) -> &str {
        let parts = self.tenant.split_once(PARTITION_MARK);
        parts.map_or(&self.tenant, |(name, _)| name)
    }

    /// Why nothing new may be stored in it: its names, or that of the part of a tenant, have a fault. Documents that
    /// were stored before there were these rules can be read and erased.
    pub fn fault(&self) -> Option<String> {
        let tenant = self.tenant_name().parse::<TenantName>().err();
        let part = self.tenant.split_once(PARTITION_MARK).map(|(_, part)| part);
        let faults = [
            tenant.map(|fault| format!("tenant: {fault}")),
            part.and_then(name_fault)
                .map(|fault| format!("tenant: its part {fault}")),
            name_fault(&self.model).map(|fault| format!("model: {fault}")),
        ];
        faults.into_iter().flatten().next()
    }

    /// Whether it belongs to a part of a tenant.
    pub fn is_partition(&self) -> bool {
        self.tenant.contains(PARTITION_MARK)
    }

    /// Whether `wanted` names it: the tenant, or the part of the tenant with the mark between.
    pub fn is_of(&self, wanted: &str) -> bool {
        self.tenant == wanted || self.tenant_name() == wanted
    }

    /// The 128-bit id for keys, paths and messages: SHA-256 over the length-prefixed parts, cut to 16 bytes. The hash
    /// is cryptographic, so that no tenant can choose names that collide with another namespace.
    pub fn id(&self) -> NamespaceId {
        let digest = Sha256::digest(self.length_prefixed());
        let mut bytes = [0u8; 16];
        bytes.copy_from_slice(&digest[..16]);
        NamespaceId(u128::from_be_bytes(bytes))
    }

    fn length_prefixed(&self) -> Vec<u8> {
        let parts = [&self.tenant, &self.model, &self.tokenizer].into_iter();
        parts
            .flat_map(|part| [&(part.len() as u64).to_le_bytes(), part.as_bytes()].concat())
            .collect()
    }
}

/// A namespace with the signature of the gateway. Services accept no other form.
///
/// The service kit signs and verifies it. It is cheap to clone, since every call has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedNamespace {
    /// The namespace.
    pub namespace: Arc<Namespace>,
    /// Time of the signature in Unix seconds, since a signature expires.
    pub issued_at_s: u64,
    /// Ed25519 signature over [`SignedNamespace::signed_bytes`], in hex.
    pub signature: Arc<str>,
    /// The id of the key that signed it, so that the right one of several is tried. Empty if nobody said. Only JSON
    /// has it: in bincode, earlier versions would not read it.
    pub kid: Arc<str>,
}

/// The form in JSON. Earlier versions ignore `kid`, and do not write it.
#[derive(Serialize, Deserialize)]
struct NamedForm<'a> {
    namespace: Cow<'a, Namespace>,
    issued_at_s: u64,
    signature: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "str::is_empty")]
    kid: Cow<'a, str>,
}

/// The form in bincode, whose fields have no names.
#[derive(Serialize, Deserialize)]
struct BinaryForm<'a> {
    namespace: Cow<'a, Namespace>,
    issued_at_s: u64,
    signature: Cow<'a, str>,
}

impl Serialize for SignedNamespace {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (namespace, signature) = (Cow::Borrowed(&*self.namespace), (&*self.signature).into());
        let issued_at_s = self.issued_at_s;
        match serializer.is_human_readable() {
            true => NamedForm {
                namespace,
                issued_at_s,
                signature,
                kid: (&*self.kid).into(),
            }
            .serialize(serializer),
            false => BinaryForm {
                namespace,
                issued_at_s,
                signature,
            }
            .serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for SignedNamespace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let form = match deserializer.is_human_readable() {
            true => NamedForm::deserialize(deserializer)?,
            false => {
                let form = BinaryForm::deserialize(deserializer)?;
                NamedForm {
                    namespace: form.namespace,
                    issued_at_s: form.issued_at_s,
                    signature: form.signature,
                    kid: Cow::default(),
                }
            }
        };
        Ok(SignedNamespace {
            namespace: Arc::new(form.namespace.into_owned()),
            issued_at_s: form.issued_at_s,
            signature: form.signature.into(),
            kid: form.kid.into(),
        })
    }
}

impl SignedNamespace {
    /// A namespace without a signature, which no service accepts. Simulations need no other.
    pub fn unsigned(namespace: Namespace) -> Self {
        SignedNamespace {
            namespace: Arc::new(namespace),
            issued_at_s: 0,
            signature: "".into(),
            kid: "".into(),
        }
    }

    /// The bytes under the signature: a domain tag, the time, and the length-prefixed parts.
    pub fn signed_bytes(namespace: &Namespace, issued_at_s: u64) -> Vec<u8> {
        [
            &b"refrain-namespace-v1"[..],
            &issued_at_s.to_le_bytes(),
            &namespace.length_prefixed(),
        ]
        .concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(tenant: &str, model: &str) -> Namespace {
        Namespace {
            tenant: tenant.into(),
            model: model.into(),
            tokenizer: "t".into(),
        }
    }

    /// The type of the version before `kid`.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Earlier {
        namespace: Namespace,
        issued_at_s: u64,
        signature: String,
    }

    #[test]
    fn earlier_versions_read_what_is_written_and_the_other_way_round() {
        let earlier = Earlier {
            namespace: namespace("a", "m"),
            issued_at_s: 7,
            signature: "00ff".into(),
        };
        let mut signed = SignedNamespace {
            namespace: namespace("a", "m").into(),
            issued_at_s: 7,
            signature: "00ff".into(),
            kid: "1f".into(),
        };
        let written = serde_json::to_string(&signed).unwrap();
        assert_eq!(
            serde_json::from_str::<SignedNamespace>(&written).unwrap(),
            signed
        );
        assert_eq!(serde_json::from_str::<Earlier>(&written).unwrap(), earlier);
        let written = serde_json::to_string(&earlier).unwrap();
        signed.kid = "".into();
        assert_eq!(
            serde_json::from_str::<SignedNamespace>(&written).unwrap(),
            signed
        );
        assert_eq!(serde_json::to_string(&signed).unwrap(), written);
    }

    #[test]
    fn a_part_of_a_tenant_is_a_namespace_of_its_own_and_of_the_tenant() {
        let part = namespace("acme\u{1f}key:1f", "m");
        assert_ne!(part.id(), namespace("acme", "m").id());
        assert_eq!((part.tenant_name(), part.is_partition()), ("acme", true));
        assert!(part.is_of("acme") && part.is_of("acme\u{1f}key:1f"));
        assert!(!part.is_of("acme\u{1f}key:2e") && !part.is_of("acm"));
        assert_eq!(TenantId::of(&part.tenant), TenantId::of("acme"));
        assert_ne!(TenantId::of("acme"), TenantId::of("acm"));
        let whole = namespace("acme", "m");
        assert_eq!((whole.tenant_name(), whole.is_partition()), ("acme", false));
        assert!(whole.is_of("acme") && !whole.is_of("acme\u{1f}key:1f"));
    }

    #[test]
    fn a_fault_of_a_name_or_a_part_is_found() {
        let fault = |tenant: &str| namespace(tenant, "m").fault().unwrap_or_default();
        assert_eq!(fault("acme"), "");
        assert_eq!(fault("acme\u{1f}key:1f"), "");
        assert!(fault("none").contains("reserved"));
        for part in ["", "key:1f\u{1f}user:2e"] {
            assert!(
                fault(&format!("acme\u{1f}{part}")).contains("part"),
                "{part}"
            );
        }
        assert!(namespace("acme", "m\n").fault().is_some());
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        assert_ne!(namespace("ab", "c").id(), namespace("a", "bc").id());
        assert_eq!(namespace("a", "b").id(), namespace("a", "b").id());
    }
}
