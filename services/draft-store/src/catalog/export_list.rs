//! The beginning and the end of exports: which documents they list, and which erasures end them.

use std::sync::Arc;

use refrain_protocol::Namespace;

use crate::catalog::exports::{ExportEnd, ExportLimits, ExportSnapshot, ExportedNamespace};
use crate::catalog::state::Catalog;
use crate::record::ErasureRecord;

impl Catalog {
    /// Begins an export of all namespaces whose names are wanted; see `Exports::begin`.
    pub(crate) fn begin_export(
        &self,
        number: u64,
        is_wanted: impl Fn(&Namespace) -> bool,
        limits: ExportLimits,
    ) -> Option<Result<Arc<ExportSnapshot>, ExportEnd>> {
        let list = || self.export_list(is_wanted);
        self.exports.begin(number, list, limits)
    }

    /// The documents of all namespaces whose names are wanted, in order of the namespaces.
    fn export_list(&self, is_wanted: impl Fn(&Namespace) -> bool) -> Vec<ExportedNamespace> {
        let namespaces = self.namespaces().into_iter();
        let wanted = namespaces.filter_map(|(id, names)| Some((id, names.filter(&is_wanted)?)));
        let mut listed: Vec<_> = wanted
            .map(|(namespace, names)| {
                ExportedNamespace::new(namespace, names, self.unsealed_states(namespace))
            })
            .collect();
        for (_, mounted) in self.segments().iter() {
            let namespace = mounted.file.namespace;
            if let Ok(at) = listed.binary_search_by_key(&namespace, |listed| listed.namespace) {
                let segment = (mounted.file.clone(), mounted.live.clone());
                listed[at].sealed.push(segment);
            }
        }
        listed
    }

    /// Ends the exports of all namespaces that an erasure hits. This includes documents that were evicted meanwhile,
    /// which no removal would report.
    pub(crate) fn end_exports(&self, mark: &ErasureRecord) {
        for (namespace, names) in self.namespaces() {
            if mark.hits_namespace(names.as_ref()) {
                self.exports.erased(namespace);
            }
        }
    }
}
