//! The tenants that gateways keep here, and what a change of one does. Pure: the time is a parameter.
//!
//! They belong to no namespace. No budget, no age and no erasure of documents removes them.

use std::collections::BTreeMap;
use std::sync::Arc;

use refrain_protocol::error::code;
use refrain_protocol::tenants::{TenantChange, TenantRecord, state_part};
use refrain_protocol::{ApiError, ErrorKind};

use crate::metrics::Limit;
use crate::record::tenants::TenantPartRecord;

/// Most bytes of one tenant's text: some thousand keys.
pub(crate) const TENANT_BYTES_MAX: usize = 1 << 20;

/// Most bytes of all tenants. One answer has to hold them.
const TENANTS_BYTES_MAX: u64 = 32 << 20;

/// All tenants.
#[derive(Clone, Default)]
pub(crate) struct TenantTable {
    tenants: BTreeMap<String, StoredTenant>,
    bytes: u64,
    /// Changes with each version that comes or goes, and is equal for equal tenants.
    state: u64,
    /// No change so far had a later version.
    version: u64,
}

/// A tenant without its name.
#[derive(Clone)]
pub(crate) struct StoredTenant {
    pub(crate) version: u64,
    pub(crate) entry: Arc<str>,
}

/// Why a change was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TenantRefusal {
    /// The tenant has another version, or exists although it should not, or the reverse.
    Changed,
    /// A limit on tenants or their bytes is reached.
    Full,
}

impl TenantRefusal {
    /// The limit that was reached.
    pub(crate) fn limit(self) -> Option<Limit> {
        (self == TenantRefusal::Full).then_some(Limit::TenantRecords)
    }

    pub(crate) fn error(self) -> ApiError {
        match self {
            TenantRefusal::Changed => ApiError::new(
                ErrorKind::Conflict,
                "the tenant has been changed meanwhile; read it again, and repeat the change",
            )
            .with_code(code::TENANT_CHANGED),
            TenantRefusal::Full => ApiError::new(
                ErrorKind::TooLarge,
                "the draft store has room for no more tenants and keys; remove some, or use a file of tenants \
                 (gateway.tenants_file)",
            ),
        }
    }
}

fn bytes_of(name: &str, entry: &str) -> u64 {
    (name.len() + entry.len()) as u64
}

impl TenantTable {
    pub(crate) fn len(&self) -> usize {
        self.tenants.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn state(&self) -> u64 {
        self.state
    }

    pub(crate) fn get(&self, name: &str) -> Option<&StoredTenant> {
        self.tenants.get(name)
    }

    /// All tenants in order of their names.
    pub(crate) fn records(&self) -> Vec<TenantRecord> {
        let record = |(name, tenant): (&String, &StoredTenant)| TenantRecord {
            name: name.clone(),
            version: tenant.version,
            entry: tenant.entry.to_string(),
        };
        self.tenants.iter().map(record).collect()
    }

    /// The version that a change gets, at a time in Unix milliseconds. It grows even if the clock does not, and after
    /// a backup was restored, versions from before do not come again.
    pub(crate) fn version_of(
        &self,
        change: &TenantChange,
        tenants_max: usize,
        now_ms: u64,
    ) -> Result<u64, TenantRefusal> {
        let known = self.tenants.get(&change.name);
        if known.map(|known| known.version) != change.expected {
            return Err(TenantRefusal::Changed);
        }
        let before = known.map_or(0, |known| bytes_of(&change.name, &known.entry));
        if let Some(entry) = &change.entry {
            // A tenant that becomes smaller always has room.
            let after = bytes_of(&change.name, entry);
            let is_full = self.bytes - before + after > TENANTS_BYTES_MAX && after > before;
            if is_full || known.is_none() && self.tenants.len() >= tenants_max {
                return Err(TenantRefusal::Full);
            }
        }
        Ok(now_ms.max(self.version + 1))
    }

    /// Puts a tenant in the place of the one with its name, or removes that with `None`.
    pub(crate) fn set(&mut self, name: &str, version: u64, entry: Option<Arc<str>>) {
        self.version = self.version.max(version);
        let before = match entry {
            Some(entry) => {
                self.bytes += bytes_of(name, &entry);
                self.state ^= state_part(name, version);
                let tenant = StoredTenant { version, entry };
                self.tenants.insert(name.to_owned(), tenant)
            }
            None => self.tenants.remove(name),
        };
        if let Some(before) = before {
            self.bytes -= bytes_of(name, &before.entry);
            self.state ^= state_part(name, before.version);
        }
    }
}

/// The parts of one tenant, as they are read.
#[derive(Default)]
pub(crate) struct TenantParts(Vec<TenantPartRecord>);

impl TenantParts {
    /// Adds the next part in order of their numbers.
    pub(crate) fn push(&mut self, part: TenantPartRecord) {
        self.0.push(part);
    }

    /// The name, the version and the text, if all parts are there.
    pub(crate) fn whole(self) -> Option<(String, u64, Arc<str>)> {
        let first = self.0.first()?;
        let (name, version, parts) = (first.name.clone(), first.version, first.parts);
        let is_same = |part: &TenantPartRecord| {
            (part.version, part.parts) == (version, parts) && part.name == name
        };
        let is_whole = self.0.len() == usize::from(parts) && self.0.iter().all(is_same);
        let text: Vec<u8> = self.0.iter().flat_map(|part| &part.text).copied().collect();
        let text = String::from_utf8(text).ok().filter(|_| is_whole)?;
        Some((name, version, text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(expected: Option<u64>, entry: Option<&str>) -> TenantChange {
        TenantChange {
            name: "acme".into(),
            expected,
            entry: entry.map(str::to_owned),
        }
    }

    #[test]
    fn a_change_that_expects_another_version_is_refused() {
        let mut table = TenantTable::default();
        let version = |table: &TenantTable, expected, now_ms| {
            table.version_of(&change(expected, Some("{}")), 10, now_ms)
        };
        assert_eq!(version(&table, Some(1), 50), Err(TenantRefusal::Changed));
        assert_eq!(version(&table, None, 50), Ok(50));
        table.set("acme", 50, Some("{}".into()));
        assert_eq!(version(&table, None, 60), Err(TenantRefusal::Changed));
        assert_eq!(version(&table, Some(49), 60), Err(TenantRefusal::Changed));
        assert_eq!(version(&table, Some(50), 60), Ok(60));
        // A clock that went back makes no version smaller.
        assert_eq!(version(&table, Some(50), 7), Ok(51));
    }

    #[test]
    fn equal_tenants_have_one_state_and_others_another() {
        let mut table = TenantTable::default();
        let empty = table.state();
        table.set("a", 1, Some("{}".into()));
        let one = table.state();
        table.set("b", 2, Some("{}".into()));
        let two = table.state();
        table.set("b", 3, Some("{}".into()));
        let changed = table.state();
        table.set("b", 4, None);
        assert_eq!(table.state(), one);
        table.set("a", 5, None);
        assert_eq!((table.state(), table.bytes(), table.len()), (empty, 0, 0));
        let all = [empty, one, two, changed];
        assert!((0..4).all(|at| !all[..at].contains(&all[at])));
    }

    #[test]
    fn a_full_table_takes_no_new_tenant_but_every_smaller_one() {
        let mut table = TenantTable::default();
        let large = "x".repeat(TENANTS_BYTES_MAX as usize);
        table.set("acme", 1, Some(large.into()));
        let refused = |table: &TenantTable, change: &TenantChange, tenants_max| {
            table.version_of(change, tenants_max, 9)
        };
        let smaller = change(Some(1), Some("x"));
        assert_eq!(refused(&table, &smaller, 1), Ok(9));
        assert_eq!(refused(&table, &change(Some(1), None), 1), Ok(9));
        let other = TenantChange {
            name: "bolt".into(),
            ..change(None, Some("x"))
        };
        assert_eq!(refused(&table, &other, 9), Err(TenantRefusal::Full));
        table.set("acme", 2, Some("{}".into()));
        assert_eq!(refused(&table, &other, 9), Ok(9));
        assert_eq!(refused(&table, &other, 1), Err(TenantRefusal::Full));
    }

    #[test]
    fn parts_of_two_versions_make_no_tenant() {
        let part = |version, text: &str| TenantPartRecord {
            name: "acme".into(),
            version,
            parts: 2,
            text: text.into(),
        };
        let whole = |parts: [TenantPartRecord; 2]| {
            let mut all = TenantParts::default();
            parts.into_iter().for_each(|part| all.push(part));
            all.whole()
        };
        let expected = ("acme".to_owned(), 1, "{}".into());
        assert_eq!(whole([part(1, "{"), part(1, "}")]), Some(expected));
        assert_eq!(whole([part(1, "{"), part(2, "}")]), None);
        let mut half = TenantParts::default();
        half.push(part(1, "{"));
        assert_eq!(half.whole(), None);
    }
}
