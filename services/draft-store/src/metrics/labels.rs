//! The values of metric labels: why calls are refused, and why documents are removed.

/// The limit because of which a call was refused; the label of the rejections metric.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    Mailbox,
    PendingTokens,
    Updates,
    DocumentTokens,
    Head,
    Namespaces,
    Waiters,
    Erasures,
    Groups,
    GroupTokens,
    Disk,
    LogBytes,
    Lookups,
    LookupContexts,
    Exports,
    ExportHeld,
    ExportDisk,
}

impl Limit {
    pub(super) const ALL: [Limit; 17] = [
        Limit::Mailbox,
        Limit::PendingTokens,
        Limit::Updates,
        Limit::DocumentTokens,
        Limit::Head,
        Limit::Namespaces,
        Limit::Waiters,
        Limit::Erasures,
        Limit::Groups,
        Limit::GroupTokens,
        Limit::Disk,
        Limit::LogBytes,
        Limit::Lookups,
        Limit::LookupContexts,
        Limit::Exports,
        Limit::ExportHeld,
        Limit::ExportDisk,
    ];

    /// The key in the configuration, or the name of a constant.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Limit::Mailbox => "mailbox_max",
            Limit::PendingTokens => "pending_tokens_max",
            Limit::Updates => "updates_max",
            Limit::DocumentTokens => "document_tokens_max",
            Limit::Head => "head",
            Limit::Namespaces => "namespaces_max",
            Limit::Waiters => "waiters_max",
            Limit::Erasures => "erasures_max",
            Limit::Groups => "groups_max",
            Limit::GroupTokens => "group_tokens_max",
            Limit::Disk => "disk_reserve_bytes",
            Limit::LogBytes => "log_bytes_max",
            Limit::Lookups => "lookups_max",
            Limit::LookupContexts => "lookup_contexts_max",
            Limit::Exports => "exports_max",
            Limit::ExportHeld => "export_held_bytes_max",
            Limit::ExportDisk => "export_disk_bytes_max",
        }
    }
}

/// Why documents were removed; the label of the evictions metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemovalReason {
    Tokens,
    Bytes,
    TenantTokens,
    TenantBytes,
    Age,
    Damage,
    Erased,
}

impl RemovalReason {
    pub(crate) const ALL: [RemovalReason; 7] = [
        RemovalReason::Tokens,
        RemovalReason::Bytes,
        RemovalReason::TenantTokens,
        RemovalReason::TenantBytes,
        RemovalReason::Age,
        RemovalReason::Damage,
        RemovalReason::Erased,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            RemovalReason::Tokens => "tokens",
            RemovalReason::Bytes => "bytes",
            RemovalReason::TenantTokens => "tenant_tokens",
            RemovalReason::TenantBytes => "tenant_bytes",
            RemovalReason::Age => "age",
            RemovalReason::Damage => "damage",
            RemovalReason::Erased => "erased",
        }
    }
}
