//! Where a request's drafts come from, and where its output goes.

use std::sync::Arc;

use refrain_draft_replica::{Membership, NamespaceMemory};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use crate::metrics::InEngineMetrics;

/// A request's place.
pub(crate) struct Place {
    pub(crate) memory: Arc<NamespaceMemory>,
    pub(crate) group: Option<Membership>,
}

/// What is known of it. One that would have to be waited for the background thread finds.
pub(crate) enum Placed {
    /// It is drafted for from its own text alone, and is not kept.
    Nowhere,
    Coming(oneshot::Receiver<Place>),
    At(Place),
}

impl Placed {
    /// The place, if it has been found.
    pub(crate) fn place(&mut self) -> Option<&Place> {
        if let Placed::Coming(coming) = self {
            match coming.try_recv() {
                Ok(place) => *self = Placed::At(place),
                Err(TryRecvError::Closed) => *self = Placed::Nowhere,
                Err(TryRecvError::Empty) => {}
            }
        }
        match self {
            Placed::At(place) => Some(place),
            Placed::Coming(_) | Placed::Nowhere => None,
        }
    }

    /// The same in a step, which counts as one that goes without where it is still being looked for.
    pub(crate) fn place_or_count(&mut self, metrics: &InEngineMetrics) -> Option<&Place> {
        self.place();
        if matches!(self, Placed::Coming(_)) {
            metrics.busy.inc();
        }
        self.place()
    }
}
