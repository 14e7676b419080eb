//! The times at which keys end, for an alert before callers are turned away.

use std::collections::{BTreeMap, HashMap};

use refrain_protocol::TenantName;

use crate::tenants::file::{TenantEntry, TenantsFile};

/// The ends of keys by tenant, in Unix seconds. Tenants whose keys never end are not there.
#[derive(Debug, Default)]
pub(super) struct KeyEnds(BTreeMap<TenantName, Vec<i64>>);

impl KeyEnds {
    pub(super) fn of(file: &TenantsFile) -> Self {
        let ends = file.tenants.iter().map(|tenant| {
            let ends = ends(tenant);
            (tenant.name.clone(), ends)
        });
        KeyEnds(ends.filter(|(_, ends)| !ends.is_empty()).collect())
    }

    /// The next end of a key of each tenant that is after `now`.
    pub(super) fn next(&self, now: i64) -> impl Iterator<Item = (&str, i64)> {
        self.0.iter().filter_map(move |(tenant, ends)| {
            let next = ends.iter().copied().filter(|end| *end > now).min();
            Some((&**tenant, next?))
        })
    }
}

/// The ends of a tenant's keys, without those that another key of the same name outlives: these were rotated.
fn ends(tenant: &TenantEntry) -> Vec<i64> {
    // Faults were refused before.
    let end_of = |entry: &crate::tenants::file::KeyEntry| entry.expires_unix_s().ok().flatten();
    let mut last: HashMap<&str, Option<i64>> = HashMap::new();
    for key in &tenant.keys {
        let end = end_of(key);
        let last = last.entry(&key.name).or_insert(end);
        *last = last.zip(end).map(|(last, end)| last.max(end));
    }
    last.into_values().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenants::file::KeyEntry;

    fn key(name: &str, end: Option<&str>) -> KeyEntry {
        KeyEntry {
            name: name.to_owned(),
            expires_at: end.map(str::to_owned),
            ..KeyEntry::default()
        }
    }

    #[test]
    fn a_rotated_key_is_no_end_and_an_end_in_the_past_is_none() {
        let tenant = |name: &str, keys| TenantEntry {
            keys,
            ..TenantEntry::named(name.parse().unwrap())
        };
        let day = |day: i64| Some(format!("1970-01-0{}T00:00:00Z", day + 1));
        let file = TenantsFile {
            tenants: vec![
                tenant("rotated", vec![key("a", day(1).as_deref()), key("a", None)]),
                tenant("forever", vec![key("a", None)]),
                tenant(
                    "both",
                    vec![
                        key("a", day(2).as_deref()),
                        key("a", day(4).as_deref()),
                        key("b", day(3).as_deref()),
                    ],
                ),
            ],
        };
        let ends = KeyEnds::of(&file);
        let next = |now: i64| ends.next(now * 86_400).collect::<Vec<_>>();
        assert_eq!(next(0), [("both", 3 * 86_400)]);
        assert_eq!(next(3), [("both", 4 * 86_400)]);
        assert_eq!(next(4), []);
    }
}
