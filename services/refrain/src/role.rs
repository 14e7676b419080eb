//! The roles of a process.

/// The services that a process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// All of them, in one process.
    Up,
    /// The OpenAI-compatible gateway.
    Gateway,
    /// The scheduler, which grants leases.
    Scheduler,
    /// A worker, which decodes on one engine.
    Worker,
    /// The draft store, which keeps outputs.
    DraftStore,
    /// The CPU engine that ships with Refrain.
    ReferenceEngine,
}

impl Role {
    /// All of them.
    pub(crate) const ALL: [Role; 6] = [
        Role::Up,
        Role::Gateway,
        Role::Scheduler,
        Role::Worker,
        Role::DraftStore,
        Role::ReferenceEngine,
    ];

    /// The command that starts it.
    pub(crate) fn command(self) -> &'static str {
        match self {
            Role::Up => "up",
            role => role.name(),
        }
    }

    /// The role's name in logs and in traces.
    pub fn name(self) -> &'static str {
        match self {
            Role::Up => "refrain",
            Role::Gateway => "gateway",
            Role::Scheduler => "scheduler",
            Role::Worker => "worker",
            Role::DraftStore => "draft-store",
            Role::ReferenceEngine => "reference-engine",
        }
    }
}
