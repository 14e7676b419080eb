//! The account of what stores have acknowledged, and what has to be there in the end. It knows nothing of processes.

use std::collections::BTreeMap;

use refrain_protocol::TokenId;
use refrain_protocol::document::Acknowledgement;

/// How much of a document there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct State {
    pub(crate) epoch: u64,
    pub(crate) len: u32,
    pub(crate) is_finished: bool,
}

impl State {
    /// Whether it has all of an earlier state. A writer that begins a new epoch sends all that it has so far. So a
    /// document only ever becomes longer, but an end may belong to the last epoch.
    fn includes(&self, earlier: &State) -> bool {
        self.epoch >= earlier.epoch
            && self.len >= earlier.len
            && (self.is_finished || !earlier.is_finished || self.epoch > earlier.epoch)
    }
}

/// A document that a writer has begun.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub(crate) tenant: usize,
    pub(crate) session: Option<String>,
    /// Unix milliseconds.
    pub(crate) created_ms: u64,
    pub(crate) round: usize,
    /// The largest state that was sent to any store. Whether it arrived does not matter.
    sent: State,
    acknowledged: Vec<Acknowledged>,
    /// The state that all replicas had at the end of a round.
    settled: Option<State>,
}

#[derive(Clone, Debug)]
struct Acknowledged {
    store: usize,
    level: Acknowledgement,
    state: State,
}

/// An erasure that a store has confirmed.
#[derive(Clone, Debug)]
struct Erased {
    tenant: usize,
    session: String,
    at_ms: u64,
}

/// The account of all documents, by their numbers.
#[derive(Default)]
pub(crate) struct Ledger {
    documents: BTreeMap<u128, Written>,
    erased: Vec<Erased>,
}

impl Ledger {
    /// A writer begins a document.
    pub(crate) fn begin(
        &mut self,
        number: u128,
        round: usize,
        tenant: usize,
        session: Option<String>,
        created_ms: u64,
    ) {
        let written = Written {
            tenant,
            session,
            created_ms,
            round,
            sent: State::default(),
            acknowledged: Vec::new(),
            settled: None,
        };
        self.documents.insert(number, written);
    }

    /// A state goes out to a store.
    pub(crate) fn send(&mut self, number: u128, state: State) {
        if let Some(document) = self.documents.get_mut(&number) {
            document.sent = document.sent.max(state);
        }
    }

    /// A store has acknowledged a state.
    pub(crate) fn acknowledge(
        &mut self,
        number: u128,
        store: usize,
        level: Acknowledgement,
        state: State,
    ) {
        if let Some(document) = self.documents.get_mut(&number) {
            document.acknowledged.push(Acknowledged {
                store,
                level,
                state,
            });
        }
    }

    /// A store loses its disk, or gets an old one. It does not have to keep what only it has acknowledged.
    pub(crate) fn lose(&mut self, store: usize) {
        for document in self.documents.values_mut() {
            document.acknowledged.retain(|acknowledged| {
                acknowledged.store != store || acknowledged.level == Acknowledgement::Replicated
            });
        }
    }

    /// A store has erased a session: documents of it that began before are to be gone.
    pub(crate) fn erase(&mut self, tenant: usize, session: &str, at_ms: u64) {
        self.erased.push(Erased {
            tenant,
            session: session.to_owned(),
            at_ms,
        });
    }

    /// The replicas agree on a document, so none of them may lose it any more.
    pub(crate) fn settle(&mut self, number: u128, found: Option<State>) {
        if let Some(document) = self.documents.get_mut(&number) {
            document.settled = found;
            document.acknowledged.clear();
        }
    }

    pub(crate) fn documents(&self) -> impl Iterator<Item = (u128, &Written)> {
        self.documents
            .iter()
            .map(|(number, written)| (*number, written))
    }

    /// Numbers of documents that were acknowledged as replicated, or only by their store, since the last settlement.
    pub(crate) fn promises(&self) -> (usize, usize) {
        let of = |level| {
            let has = |document: &&Written| {
                let mut acknowledged = document.acknowledged.iter();
                acknowledged.any(|acknowledged| acknowledged.level == level)
            };
            self.documents.values().filter(has).count()
        };
        (of(Acknowledgement::Replicated), of(Acknowledgement::Local))
    }

    /// Whether a replica may have a document as it does. `Err` says why not.
    pub(crate) fn judge(&self, number: u128, found: Option<State>) -> Result<(), String> {
        let Some(document) = self.documents.get(&number) else {
            return Err(format!("nobody wrote document {number:x}"));
        };
        let fault = |why: &str| {
            Err(format!(
                "document {number:x} {why}: {found:?} of {document:?}"
            ))
        };
        let times = self.erased.iter().filter(|erased| {
            erased.tenant == document.tenant
                && document.session.as_deref() == Some(&*erased.session)
        });
        let erased_ms = times.map(|erased| erased.at_ms).max().unwrap_or(0);
        if document.created_ms < erased_ms {
            return match found {
                None => Ok(()),
                Some(_) => fault("was erased"),
            };
        }
        // One that began in the same millisecond may be on either side.
        let is_free = document.created_ms == erased_ms;
        let Some(found) = found else {
            let is_promised = document.settled.is_some() || !document.acknowledged.is_empty();
            return match is_promised && !is_free {
                true => fault("is lost"),
                false => Ok(()),
            };
        };
        if found > document.sent {
            return fault("was never sent like this");
        }
        let mut promised = document
            .acknowledged
            .iter()
            .map(|acknowledged| &acknowledged.state)
            .chain(&document.settled);
        match promised.find(|promised| !found.includes(promised)) {
            Some(promised) => fault(&format!("lacks what was promised, {promised:?}")),
            None => Ok(()),
        }
    }
}

/// The text of a document up to a length. It is the same in all epochs, as outputs of a fixed seed are.
pub(crate) fn text(number: u128, len: u32) -> Vec<TokenId> {
    let seed = (number as u64) ^ (number >> 64) as u64;
    let token = |at: u32| {
        let mixed = (seed + u64::from(at)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 49) as TokenId
    };
    (0..len).map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: Acknowledgement = Acknowledgement::Local;

    fn state(epoch: u64, len: u32, is_finished: bool) -> State {
        State {
            epoch,
            len,
            is_finished,
        }
    }

    /// A document that began at 100 and was sent with 30 tokens and its end.
    fn ledger() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.begin(1, 0, 0, Some("s".into()), 100);
        ledger.send(1, state(1, 30, true));
        ledger
    }

    #[test]
    fn a_document_that_nobody_has_acknowledged_may_be_lost() {
        let ledger = ledger();
        assert_eq!(ledger.judge(1, None), Ok(()));
        assert_eq!(ledger.judge(1, Some(state(1, 10, false))), Ok(()));
        assert!(ledger.judge(1, Some(state(2, 10, false))).is_err());
        assert!(ledger.judge(2, None).is_err(), "it was never begun");
    }

    #[test]
    fn acknowledged_text_and_its_end_have_to_be_there() {
        let mut ledger = ledger();
        ledger.acknowledge(1, 2, LOCAL, state(1, 20, false));
        assert!(ledger.judge(1, None).is_err());
        assert!(ledger.judge(1, Some(state(1, 19, false))).is_err());
        assert_eq!(ledger.judge(1, Some(state(1, 20, false))), Ok(()));
        ledger.acknowledge(1, 2, LOCAL, state(1, 30, true));
        assert!(ledger.judge(1, Some(state(1, 30, false))).is_err());
        // In a later epoch the end is still to come.
        ledger.send(1, state(2, 30, false));
        assert_eq!(ledger.judge(1, Some(state(2, 30, false))), Ok(()));
    }

    #[test]
    fn a_lost_disk_takes_what_only_it_had() {
        let mut ledger = ledger();
        ledger.acknowledge(1, 2, LOCAL, state(1, 20, false));
        assert_eq!(ledger.promises(), (0, 1));
        ledger.lose(1);
        assert!(ledger.judge(1, None).is_err(), "that was another store");
        ledger.lose(2);
        assert_eq!(ledger.judge(1, None), Ok(()));
        ledger.acknowledge(1, 2, Acknowledgement::Replicated, state(1, 20, false));
        ledger.lose(2);
        assert!(ledger.judge(1, None).is_err());
        // All that every replica had stays, too.
        ledger.settle(1, Some(state(1, 20, false)));
        ledger.lose(2);
        assert!(ledger.judge(1, Some(state(1, 10, false))).is_err());
    }

    #[test]
    fn what_began_before_an_erasure_has_to_be_gone() {
        let mut ledger = ledger();
        ledger.acknowledge(1, 0, LOCAL, state(1, 20, false));
        let found = Some(state(1, 20, false));
        ledger.erase(0, "another", 200);
        ledger.erase(1, "s", 200);
        ledger.erase(0, "s", 99);
        assert_eq!(ledger.judge(1, found), Ok(()));
        assert!(ledger.judge(1, None).is_err(), "it began later");
        ledger.erase(0, "s", 101);
        assert!(ledger.judge(1, found).is_err());
        assert_eq!(ledger.judge(1, None), Ok(()));
    }

    #[test]
    fn a_text_goes_on_as_it_began() {
        assert_eq!(text(7, 40)[..15], text(7, 15));
        assert_ne!(text(7, 15), text(8, 15));
    }
}
