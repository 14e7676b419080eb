//! Where the context of a choice is parked between two of its chunks.

use refrain_protocol::chunk::ParkedContext;
use refrain_protocol::prefix::PrefixHasher;
use refrain_protocol::scheduling::Lease;
use refrain_protocol::{NamespaceId, WorkerId};

use crate::relay::choice::ChoiceState;

/// The worker that has parked the context of a choice, as far as this gateway knows.
#[derive(Default)]
pub(crate) struct ParkedAt {
    /// The worker of the last chunk and the chunk's epoch, if the chunk ended so that the choice goes on.
    last: Option<(WorkerId, u64)>,
    /// The hash of the context, as far as it has been asked for. A choice of one chunk needs none.
    hasher: Option<PrefixHasher>,
}

impl ParkedAt {
    /// Notes that a chunk ended with the choice's context parked at its worker.
    pub(crate) fn chunk_ended(&mut self, lease: &Lease) {
        self.last = Some((lease.worker.clone(), lease.epoch));
    }

    /// Names the context to the worker of the next chunk, if that is the one that has parked it. Nobody else may then
    /// have it, so a second call returns `None`.
    pub(crate) fn take(
        &mut self,
        lease: &Lease,
        namespace: &NamespaceId,
        choice: &ChoiceState,
    ) -> Option<ParkedContext> {
        let (_, epoch) = self.last.take().filter(|(at, _)| *at == lease.worker)?;
        let hasher = self.hasher.get_or_insert_with(|| {
            let mut hasher = PrefixHasher::new(namespace);
            hasher.extend(choice.prompt());
            hasher
        });
        let known = hasher.context_len() - choice.prompt().len();
        hasher.extend(&choice.output()[known..]);
        Some(ParkedContext {
            epoch,
            tokens: choice.prompt_len() + choice.output_len(),
            hash: hasher.whole(),
        })
    }
}
