//! Settings of a mesh as TOML tables.

use toml::{Table, Value};

/// Waits of the scheduler in milliseconds. A busy machine must not look like a lost worker, so they are longer than
/// by default. Tests of lost or silent workers set their own.
pub(crate) const SCHEDULER_PATIENCE: [(&str, i64); 3] = [
    ("worker_ttl_ms", 20_000),
    ("lease_ttl_ms", 30_000),
    ("worker_wait_ms", 120_000),
];

/// How long a gateway waits for a scheduler, which may need this long to start on a busy machine.
pub(crate) const GATEWAY_SCHEDULER_WAIT_MS: i64 = 120_000;

/// Sets keys of a section that a test has not set itself.
pub(crate) fn set_defaults(
    file: &mut Table,
    section: &str,
    defaults: impl IntoIterator<Item = (&'static str, Value)>,
) {
    let section = file.entry(section).or_insert_with(|| Table::new().into());
    if let Some(section) = section.as_table_mut() {
        for (key, value) in defaults {
            section.entry(key).or_insert(value);
        }
    }
}

/// The value of `gateway.keys` with these keys and their tenants.
pub(crate) fn api_keys(keys: &[(&str, &str)]) -> Value {
    let table = |(key, tenant): &(&str, &str)| {
        let fields = [("key", *key), ("tenant", *tenant)];
        Table::from_iter(fields.map(|(name, value)| (name.to_owned(), value.into())))
    };
    keys.iter().map(table).collect::<Vec<_>>().into()
}
