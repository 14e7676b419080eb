//! Tenants in commits, and what is left of damaged ones.

use super::*;

use refrain_protocol::tenants::TenantChange;

use crate::catalog::TenantRefusal;
use crate::record::RecordKind;
use crate::record::tenants::tenant_key;
use crate::writer::tests::scripts::small;

fn change(store: &mut Store, name: &str, entry: &str) -> Result<u64, TenantRefusal> {
    let mut open = store.shared.write();
    let catalog = &mut open.as_mut().unwrap().catalog;
    let change = TenantChange {
        name: name.into(),
        expected: catalog.tenants.get(name).map(|known| known.version),
        entry: Some(entry.to_owned()),
    };
    store.now_ms += 1;
    let changed = store.core.change_tenant(catalog, &change, store.now_ms);
    changed.unwrap().0
}

/// The names and the lengths of the texts.
fn kept(store: &Store) -> Vec<(String, usize)> {
    let open = store.shared.read().unwrap();
    let records = open.catalog.tenants.records().into_iter();
    records
        .map(|record| (record.name, record.entry.len()))
        .collect()
}

/// Records of tenants in the log.
fn records(store: &Store) -> usize {
    let (from, to) = RecordKind::Tenant.range();
    store.log.records().range(from..to).count()
}

#[test]
fn a_tenant_that_becomes_shorter_leaves_no_part_behind() {
    let mut store = Store::new(small());
    change(&mut store, "acme", &"x".repeat(10_000)).unwrap();
    change(&mut store, "bolt", "{}").unwrap();
    assert_eq!(records(&store), 5);
    change(&mut store, "acme", &"x".repeat(4_000)).unwrap();
    assert_eq!(records(&store), 3);
    let store = store.reopen();
    let expected = [("acme".to_owned(), 4_000), ("bolt".to_owned(), 2)];
    assert_eq!(kept(&store), expected);
}

#[test]
fn a_tenant_with_a_damaged_part_is_gone_and_the_others_stay() {
    for (part, is_missing) in [(0, false), (1, false), (2, false), (0, true), (2, true)] {
        let mut store = Store::new(small());
        change(&mut store, "acme", &"x".repeat(8_000)).unwrap();
        change(&mut store, "bolt", "{}").unwrap();
        let key = tenant_key("acme", part);
        {
            let mut records = store.log.records();
            match is_missing {
                true => drop(records.remove(&key)),
                false => records.get_mut(&key).unwrap()[20] ^= 1,
            }
        }
        let mut store = store.reopen();
        assert_eq!(kept(&store), [("bolt".to_owned(), 2)]);
        assert_eq!(store.damaged_records, u64::from(!is_missing));
        // The rest is removed with the next commit, and the name is free.
        change(&mut store, "acme", "{}").unwrap();
        let mut open = store.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        store.core.tick(catalog, store.now_ms).unwrap();
        drop(open);
        let store = store.reopen();
        assert_eq!(records(&store), 2);
        assert_eq!(kept(&store).len(), 2);
    }
}
