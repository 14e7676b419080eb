//! Sorts recorded calls by workload and tenant.

use crate::replay::trace::RecordedCall;

/// The calls of one workload of one tenant.
#[derive(Debug, Default)]
pub(super) struct TenantWorkload {
    pub(super) workload: Option<String>,
    pub(super) tenant: Option<String>,
    /// Whether it holds the calls of all further workloads, once the number of rows is reached.
    pub(super) is_rest: bool,
    /// The calls that are analyzed, in order.
    pub(super) calls: Vec<RecordedCall>,
    /// Calls that were read.
    pub(super) calls_read: u64,
    /// Output tokens of the calls that were read.
    pub(super) tokens_read: u64,
}

/// Workloads in the order in which they first occur.
pub(super) struct WorkloadSorter {
    workloads: Vec<TenantWorkload>,
    rows_max: usize,
    calls_max: usize,
}

impl WorkloadSorter {
    /// Keeps at most `rows_max` workloads and one for the rest, each with at most `calls_max` calls.
    pub(super) fn new(rows_max: usize, calls_max: usize) -> Self {
        WorkloadSorter {
            workloads: Vec::new(),
            rows_max,
            calls_max,
        }
    }

    pub(super) fn add(&mut self, call: RecordedCall) {
        let is_of = |row: &TenantWorkload| {
            !row.is_rest && (&row.workload, &row.tenant) == (&call.workload, &call.tenant)
        };
        let found = self.workloads.iter().position(is_of);
        let at = found.unwrap_or_else(|| {
            // The rest comes last.
            if self.workloads.len() <= self.rows_max {
                let is_rest = self.workloads.len() == self.rows_max;
                let name = |name: &Option<String>| name.clone().filter(|_| !is_rest);
                self.workloads.push(TenantWorkload {
                    workload: name(&call.workload),
                    tenant: name(&call.tenant),
                    is_rest,
                    ..TenantWorkload::default()
                });
            }
            self.workloads.len() - 1
        });
        let row = &mut self.workloads[at];
        row.calls_read += 1;
        row.tokens_read += call.output.len() as u64;
        if row.calls.len() < self.calls_max {
            row.calls.push(call);
        }
    }

    pub(super) fn into_workloads(self) -> Vec<TenantWorkload> {
        self.workloads
    }
}

impl TenantWorkload {
    /// Its name in tables.
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
    fn calls_are_sorted_and_workloads_and_calls_are_limited() {
        let mut rows = WorkloadSorter::new(2, 2);
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
            rows.add(RecordedCall {
                workload: Some(workload.into()),
                tenant: Some(tenant.into()),
                output: vec![1, 2],
                ..RecordedCall::default()
            });
        }
        let found: Vec<_> = rows
            .into_workloads()
            .iter()
            .map(|row| (row.name(), row.calls.len(), row.calls_read, row.tokens_read))
            .collect();
        let row = |name: &str, kept, read, tokens| (name.to_owned(), kept, read, tokens);
        assert_eq!(
            found,
            [
                row("a / x", 2, 3, 6),
                row("a / y", 2, 2, 4),
                row("(others)", 2, 2, 4)
            ]
        );
    }

    #[test]
    fn a_workload_and_a_tenant_of_the_same_name_are_different() {
        let mut rows = WorkloadSorter::new(3, 1);
        let x = Some("x".to_owned());
        for (workload, tenant) in [(&x, &None), (&None, &x), (&None, &None)] {
            rows.add(RecordedCall {
                workload: workload.clone(),
                tenant: tenant.clone(),
                ..RecordedCall::default()
            });
        }
        let names: Vec<_> = rows
            .into_workloads()
            .iter()
            .map(TenantWorkload::name)
            .collect();
        assert_eq!(names, ["x", "(unnamed) / x", "(unnamed)"]);
    }
}
