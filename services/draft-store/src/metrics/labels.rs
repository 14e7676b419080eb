//! The values of metric labels: why calls are refused, and why documents are removed.

refrain_service_kit::label_values! {
    /// The limit because of which a call was refused: a key of the configuration, or the name of a constant.
    pub(crate) enum Limit {
        Mailbox = "mailbox_max",
        PendingTokens = "pending_tokens_max",
        Updates = "updates_max",
        Scopes = "pull_scopes_max",
        DocumentTokens = "document_tokens_max",
        Head = "head",
        Namespaces = "namespaces_max",
        Waiters = "waiters_max",
        Groups = "groups_max",
        GroupTokens = "group_tokens_max",
        GroupDocuments = "group_documents_max",
        Erasures = "erasures_max",
        Disk = "disk_reserve_bytes",
        LogBytes = "log_bytes_max",
        Exports = "exports_max",
        ExportHeld = "export_held_bytes_max",
        ExportDisk = "export_disk_bytes_max",
        Outbox = "outbox_max",
        TenantRecords = "tenant_records_max",
        UsageRows = "usage_rows_max",
    }
}

refrain_service_kit::label_values! {
    /// Why documents were removed; the label of the evictions metric.
    pub(crate) enum RemovalReason {
        Tokens = "tokens",
        Bytes = "bytes",
        TenantTokens = "tenant_tokens",
        TenantBytes = "tenant_bytes",
        Age = "age",
        Damage = "damage",
        Erased = "erased",
        OtherReplica = "other_replica",
    }
}
