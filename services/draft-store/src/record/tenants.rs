//! The records of tenants, which gateways keep here.

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use crate::record::{RecordKind, bytes_at, key};

/// Bytes of a tenant's text in one record. With its name, the record stays within the limit of a value.
pub(crate) const TENANT_PART_BYTES: usize = 3_072;

/// A part of a tenant's text. Parts of different versions do not make a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct TenantPartRecord {
    pub(crate) name: String,
    pub(crate) version: u64,
    /// Number of parts of this version.
    pub(crate) parts: u16,
    pub(crate) text: Vec<u8>,
}

/// Key of a part of a tenant.
pub(crate) fn tenant_key(name: &str, part: u16) -> Vec<u8> {
    let hash = xxh3_128(name.as_bytes()).to_be_bytes();
    key(RecordKind::Tenant, &[&hash, &part.to_be_bytes()])
}

/// The number of the part in a key.
pub(crate) fn tenant_part_of(key: &[u8]) -> Option<u16> {
    bytes_at(key, 17).map(u16::from_be_bytes)
}
