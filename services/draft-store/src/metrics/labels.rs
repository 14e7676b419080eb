//! The values of metric labels: why calls are refused, and why documents are removed.

/// Defines an enum of label values.
macro_rules! labels {
    ($(#[$attribute:meta])* $name:ident { $($variant:ident => $text:literal,)+ }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name { $($variant,)+ }

        impl $name {
            pub(crate) const ALL: &[$name] = &[$($name::$variant,)+];

            /// The value of the label.
            pub(crate) fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }
        }
    };
}

labels! {
    /// The limit because of which a call was refused: a key of the configuration, or the name of a constant.
    Limit {
        Mailbox => "mailbox_max",
        PendingTokens => "pending_tokens_max",
        Updates => "updates_max",
        DocumentTokens => "document_tokens_max",
        Head => "head",
        Namespaces => "namespaces_max",
        Waiters => "waiters_max",
        Erasures => "erasures_max",
        Disk => "disk_reserve_bytes",
        LogBytes => "log_bytes_max",
        Lookups => "lookups_max",
        LookupContexts => "lookup_contexts_max",
        Exports => "exports_max",
        ExportHeld => "export_held_bytes_max",
        ExportDisk => "export_disk_bytes_max",
    }
}

labels! {
    /// Why documents were removed; the label of the evictions metric.
    RemovalReason {
        Tokens => "tokens",
        Bytes => "bytes",
        TenantTokens => "tenant_tokens",
        TenantBytes => "tenant_bytes",
        Age => "age",
        Damage => "damage",
        Erased => "erased",
    }
}
