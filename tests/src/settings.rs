//! Settings of a mesh as TOML tables.

use toml::{Table, Value};

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
