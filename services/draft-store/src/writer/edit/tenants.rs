//! Tenants that gateways keep here: a few records each, replaced as a whole.

use refrain_protocol::tenants::TenantChange;

use crate::record::tenants::{TENANT_PART_BYTES, TenantPartRecord, tenant_key};
use crate::writer::edit::Edit;

impl Edit<'_> {
    /// Carries out a change that was allowed, as this version.
    pub(in crate::writer) fn set_tenant(&mut self, change: &TenantChange, version: u64) {
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
            self.batch.put_record(tenant_key(name, part), &record);
        }
        let tenants = &mut self.catalog.tenants;
        let before = tenants.get(name).map_or(0, |before| before.entry.len());
        for part in parts..before.div_ceil(TENANT_PART_BYTES) as u16 {
            self.batch.remove(tenant_key(name, part));
        }
        tenants.set(name, version, change.entry.as_deref().map(Into::into));
    }
}
