//! Recorded calls, sorted by workload and tenant.

use crate::replay::trace::Call;

/// The calls of one workload of one tenant.
#[derive(Debug, Default)]
pub(super) struct Row {
    pub(super) workload: Option<String>,
    pub(super) tenant: Option<String>,
    /// Whether it is what was left when no more rows were to be told apart.
    pub(super) is_rest: bool,
    /// Those that are kept, in order.
    pub(super) calls: Vec<Call>,
    /// Calls and output tokens of all that were read.
    pub(super) calls_read: u64,
    pub(super) tokens_read: u64,
}

/// Rows in the order in which they were met.
pub(super) struct Rows {
    rows: Vec<Row>,
    rows_max: usize,
    calls_max: usize,
}

impl Rows {
    /// At most `rows_max` and one for the rest, each with at most `calls_max` calls kept.
    pub(super) fn new(rows_max: usize, calls_max: usize) -> Self {
        Rows {
            rows: Vec::new(),
            rows_max,
            calls_max,
        }
    }

    pub(super) fn add(&mut self, call: Call) {
        let is_of = |row: &Row| {
            !row.is_rest && (&row.workload, &row.tenant) == (&call.workload, &call.tenant)
        };
        let found = self.rows.iter().position(is_of);
        let at = found.unwrap_or_else(|| {
            // The rest stands last.
            if self.rows.len() <= self.rows_max {
                let is_rest = self.rows.len() == self.rows_max;
                let name = |name: &Option<String>| name.clone().filter(|_| !is_rest);
                self.rows.push(Row {
                    workload: name(&call.workload),
                    tenant: name(&call.tenant),
                    is_rest,
                    ..Row::default()
                });
            }
            self.rows.len() - 1
        });
        let row = &mut self.rows[at];
        row.calls_read += 1;
        row.tokens_read += call.output.len() as u64;
        if row.calls.len() < self.calls_max {
            row.calls.push(call);
        }
    }

    pub(super) fn into_rows(self) -> Vec<Row> {
        self.rows
    }
}

impl Row {
    /// What to call it.
    pub(super) fn name(&self) -> String {
        match (&self.workload, &self.tenant) {
            _ if self.is_rest => "(others)".into(),
            (None, None) => "(unnamed)".into(),
            (Some(workload), None) => workload.clone(),
            (None, Some(tenant)) => format!("(unnamed) / {tenant}"),
            (Some(workload), Some(tenant)) => format!("{workload} / {tenant}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_sorted_and_rows_and_calls_are_limited() {
        let mut rows = Rows::new(2, 2);
        let names = [
            ("a", "x"),
            ("a", "y"),
            ("a", "x"),
            ("b", "x"),
            ("a", "x"),
            ("c", "x"),
            ("a", "y"),
        ];
        for (workload, tenant) in names {
            rows.add(Call {
                workload: Some(workload.into()),
                tenant: Some(tenant.into()),
                output: vec![1, 2],
                ..Call::default()
            });
        }
        let told: Vec<_> = rows
            .into_rows()
            .iter()
            .map(|row| (row.name(), row.calls.len(), row.calls_read, row.tokens_read))
            .collect();
        let row = |name: &str, kept, read, tokens| (name.to_owned(), kept, read, tokens);
        assert_eq!(
            told,
            [
                row("a / x", 2, 3, 6),
                row("a / y", 2, 2, 4),
                row("(others)", 2, 2, 4)
            ]
        );
    }

    #[test]
    fn a_workload_and_a_tenant_of_one_name_are_told_apart() {
        let mut rows = Rows::new(3, 1);
        let x = Some("x".to_owned());
        for (workload, tenant) in [(&x, &None), (&None, &x), (&None, &None)] {
            rows.add(Call {
                workload: workload.clone(),
                tenant: tenant.clone(),
                ..Call::default()
            });
        }
        let names: Vec<_> = rows.into_rows().iter().map(Row::name).collect();
        assert_eq!(names, ["x", "(unnamed) / x", "(unnamed)"]);
    }
}
