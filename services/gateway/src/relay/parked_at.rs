//! Where the context of a choice is parked between two of its chunks.

use refrain_protocol::WorkerId;
use refrain_protocol::chunk::ParkedContext;
use refrain_protocol::prefix::PrefixHasher;
use refrain_protocol::scheduling::Lease;

/// The worker that has parked the context of a choice, as far as this gateway knows.
#[derive(Default)]
pub(crate) struct ParkedAt {
    /// The worker of the last chunk and the chunk's epoch, if the chunk ended so that the choice goes on.
    last: Option<(WorkerId, u64)>,
}

impl ParkedAt {
    /// Notes that a chunk ended with the choice's context parked at its worker.
    pub(crate) fn chunk_ended(&mut self, lease: &Lease) {
        self.last = Some((lease.worker.clone(), lease.epoch));
    }

    /// Names the context to the worker of the next chunk, if that is the one that has parked it. Nobody else may then
    /// have it, so a second call returns `None`. `context` returns the hashes of all of the context.
    pub(crate) fn take<'a>(
        &mut self,
        lease: &Lease,
        context: impl FnOnce() -> &'a PrefixHasher,
    ) -> Option<ParkedContext> {
        let (_, epoch) = self.last.take().filter(|(at, _)| *at == lease.worker)?;
        let context = context();
        Some(ParkedContext {
            epoch,
            tokens: u32::try_from(context.context_len()).ok()?,
            hash: context.whole(),
        })
    }
}
