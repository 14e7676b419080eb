//! Tenants that gateways keep here: a few records each, replaced as a whole.

use refrain_protocol::tenants::TenantChange;

use crate::catalog::TenantTable;
use crate::record::tenants::{TENANT_PART_BYTES, TenantPartRecord, tenant_key};
use crate::writer::edit::pending_writes::PendingWrites;

/// Carries out a change that was allowed, as this version.
pub(in crate::writer) fn set_tenant(
    tenants: &mut TenantTable,
    writes: &mut PendingWrites,
    change: &TenantChange,
    version: u64,
) {
    let name = &change.name;
    let text = change.entry.as_deref().unwrap_or_default();
    let pieces = text.as_bytes().chunks(TENANT_PART_BYTES);
    let parts = pieces.len() as u16;
    for (part, piece) in (0..).zip(pieces) {
        let record = TenantPartRecord {
            name: name.clone(),
            version,
            parts,
            text: piece.to_vec(),
        };
        writes.put(tenant_key(name, part), &record);
    }
    let before = tenants.get(name).map_or(0, |before| before.entry.len());
    for part in parts..before.div_ceil(TENANT_PART_BYTES) as u16 {
        writes.remove(tenant_key(name, part));
    }
    tenants.set(name, version, change.entry.as_deref().map(Into::into));
}
