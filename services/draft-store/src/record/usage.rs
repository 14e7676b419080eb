//! The records of usage: one per hour, tenant, key, model and gateway, and one per tenant whose usage was erased.
//!
//! A key has the fields in their order, with a zero byte after each name. No name has one, so keys are in the order
//! of [`UsageRowId`].

use bincode::{Decode, Encode};
use refrain_protocol::usage::{UsageCounts, UsageRowId, UsageTotal};

use super::{RecordKind, key};

/// The state of a row. Its name is its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct UsageRecord {
    began_ms: u64,
    counts: [u64; 7],
}

impl From<UsageTotal> for UsageRecord {
    fn from(total: UsageTotal) -> Self {
        UsageRecord {
            began_ms: total.began_ms,
            counts: total.counts.values(),
        }
    }
}

impl From<UsageRecord> for UsageTotal {
    fn from(record: UsageRecord) -> Self {
        UsageTotal {
            began_ms: record.began_ms,
            counts: UsageCounts::of_values(record.counts),
        }
    }
}

/// The time at which the usage of a tenant was erased, in Unix milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct UsageErasureRecord {
    pub(crate) at_ms: u64,
}

/// Key of a row.
pub(crate) fn usage_key(id: &UsageRowId) -> Vec<u8> {
    let (hour, gateway) = (id.hour.to_be_bytes(), id.gateway.to_be_bytes());
    let (tenant, of_key, model) = (id.tenant.as_bytes(), id.key.as_bytes(), id.model.as_bytes());
    let parts: [&[u8]; 8] = [&hour, tenant, &[0], of_key, &[0], model, &[0], &gateway];
    key(RecordKind::Usage, &parts)
}

/// The lowest key of an hour.
pub(crate) fn usage_hour_key(hour: u32) -> Vec<u8> {
    key(RecordKind::Usage, &[&hour.to_be_bytes()])
}

/// The row that a key names.
pub(crate) fn usage_of(key: &[u8]) -> Option<UsageRowId> {
    let (hour, names) = key.get(1..)?.split_first_chunk()?;
    let (names, gateway) = names.split_last_chunk()?;
    let names = std::str::from_utf8(names).ok()?.strip_suffix('\0')?;
    let mut names = names.split('\0').map(str::to_owned);
    let id = UsageRowId {
        hour: u32::from_be_bytes(*hour),
        tenant: names.next()?,
        key: names.next()?,
        model: names.next()?,
        gateway: u128::from_be_bytes(*gateway),
    };
    names.next().is_none().then_some(id)
}

/// Key of the erasure of a tenant's usage.
pub(crate) fn usage_erasure_key(tenant: &str) -> Vec<u8> {
    key(RecordKind::UsageErasure, &[tenant.as_bytes()])
}

/// The tenant in such a key.
pub(crate) fn usage_erasure_of(key: &[u8]) -> Option<String> {
    String::from_utf8(key.get(1..)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_their_rows_and_are_in_their_order() {
        let row = |hour, tenant: &str, key: &str, model: &str, gateway| UsageRowId {
            hour,
            tenant: tenant.into(),
            key: key.into(),
            model: model.into(),
            gateway,
        };
        let mut rows = [
            row(1, "b", "", "m", 1),
            row(1, "a", "k", "m", u128::MAX),
            row(1, "a", "k", "m-long", 1),
            row(1, "ab", "", "", 7),
            row(1, "a", "", "z", 7),
            row(0x0100_0000, "", "", "", 0),
            row(2, "ü", "k", "m", 1 << 100),
        ];
        rows.sort();
        let keys: Vec<_> = rows.iter().map(usage_key).collect();
        assert!(keys.is_sorted());
        for (row, key) in rows.iter().zip(&keys) {
            assert_eq!(usage_of(key).as_ref(), Some(row));
            assert!(usage_hour_key(row.hour) <= *key && *key < usage_hour_key(row.hour + 1));
        }
        assert_eq!(usage_of(b"u"), None);
        assert_eq!(usage_of(&usage_key(&row(1, "a\0b", "", "", 1))), None);
        let erasure = usage_erasure_key("acme");
        assert_eq!(usage_erasure_of(&erasure).as_deref(), Some("acme"));
    }
}
