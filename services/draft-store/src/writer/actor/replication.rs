//! The writer of a replica: messages that came, entries that were sent, and callers that wait for replication.

use std::collections::BTreeMap;

use refrain_protocol::{ApiError, NamespaceId};
use tokio::sync::oneshot;

use crate::record::DocumentKey;
use crate::record::replication::{PositionRecord, StreamErasureRecord};
use crate::segments::{self, ReceivedSegment};
use crate::shared_store::unavailable;
use crate::writer::actor::WriterActor;
use crate::writer::outcome::CommitOutcome;
use crate::writer::replication::{AppliedMessages, JoinedParts, ReceivedMessage, SentEntry};

impl WriterActor {
    /// Applies messages of the stream that was created at `stream`. The last one has the checksum `checksum`.
    pub(crate) fn apply_messages(
        &mut self,
        stream: u64,
        checksum: u64,
        messages: &[ReceivedMessage],
    ) -> Result<AppliedMessages, ApiError> {
        self.answer(|core, catalog, now_ms| {
            let outcome = core.apply_messages(catalog, stream, checksum, messages, now_ms)?;
            let applied = AppliedMessages {
                repeated: outcome.repeated_messages,
                has_erasures: !catalog.replication.open_erasures().is_empty(),
            };
            Ok((applied, outcome))
        })
    }

    /// Begins to take over the documents of another replica.
    pub(crate) fn begin_joining(&mut self) -> Result<(), ApiError> {
        self.run(|core, catalog, now_ms| core.begin_joining(catalog, now_ms))?;
        Ok(())
    }

    /// Remembers erasures that another replica knows.
    pub(crate) fn note_erasures(
        &mut self,
        erasures: &[StreamErasureRecord],
    ) -> Result<(), ApiError> {
        self.run(|core, catalog, now_ms| core.note_erasures(catalog, erasures, now_ms))?;
        Ok(())
    }

    /// Puts a segment file of another replica into use.
    pub(crate) fn adopt_segment(&mut self, received: ReceivedSegment) -> Result<(), ApiError> {
        if !segments::is_there(&received.file) {
            let message = "an erasure has deleted the received file";
            return Err(unavailable().with_detail(message));
        }
        let id = self.sealer.next_id(&*self.shared.read()?);
        let dir = self.config.data_dir.clone();
        self.run(|core, catalog, now_ms| core.adopt_segment(catalog, &dir, id, received, now_ms))?;
        Ok(())
    }

    /// Stores documents of another replica.
    pub(crate) fn store_joined(&mut self, documents: &[JoinedParts]) -> Result<(), ApiError> {
        self.run(|core, catalog, now_ms| core.store_joined(catalog, documents, now_ms))?;
        Ok(())
    }

    /// Removes documents that another replica does not have any more.
    pub(crate) fn drop_missing(&mut self, keys: &[DocumentKey]) -> Result<(), ApiError> {
        self.run(|core, catalog, now_ms| core.drop_missing(catalog, keys, now_ms))?;
        Ok(())
    }

    /// Sets how far the stream is applied.
    pub(crate) fn set_position(&mut self, position: PositionRecord) -> Result<(), ApiError> {
        self.run(|core, catalog, now_ms| core.set_position(catalog, position, now_ms))?;
        Ok(())
    }

    /// Follows the stream once more from a position, and sends all documents again.
    pub(crate) fn begin_anew(&mut self, from: PositionRecord) -> Result<(), ApiError> {
        self.run(|core, catalog, now_ms| core.begin_anew(catalog, from, now_ms))?;
        Ok(())
    }

    /// Notes that everything is applied that was in the stream when the session began.
    pub(crate) fn note_end_of_stream(&mut self) -> Result<(), ApiError> {
        self.run(|core, catalog, now_ms| {
            core.note_end_of_stream(catalog, now_ms);
            Ok(CommitOutcome::default())
        })?;
        Ok(())
    }

    /// Notes that the broker has taken entries of the outbox, and answers those who wait for them.
    pub(crate) fn note_taken(&mut self, sent: &[SentEntry]) {
        // While the store is closed nothing is noted: the entries are sent again.
        let noted = self.run(|core, catalog, _| {
            core.note_taken(catalog, sent);
            Ok(CommitOutcome::default())
        });
        if noted.is_ok() {
            for document in sent.iter().filter_map(|sent| sent.document) {
                self.replication_waiters
                    .answer(document.key, document.sequence);
            }
        }
    }

    /// Has documents sent at once, finished or not. Each receiver learns when the brokers have what is stored now.
    pub(crate) fn await_replication(
        &mut self,
        keys: &[DocumentKey],
    ) -> Result<Vec<oneshot::Receiver<()>>, ApiError> {
        let waiting = self.answer(|_, catalog, _| {
            let mut waiting = Vec::new();
            for key in keys {
                // The broker may have taken the document already, or it was removed meanwhile.
                let known = catalog.document(*key).map(|known| known.state.sequence);
                let outbox = &mut catalog.replication.outbox;
                if let Some(sequence) = known.filter(|_| outbox.awaits_broker(*key)) {
                    outbox.release(*key);
                    waiting.push((*key, sequence));
                }
            }
            let outcome = CommitOutcome {
                sends: true,
                ..CommitOutcome::default()
            };
            Ok((waiting, outcome))
        })?;
        Ok(waiting
            .into_iter()
            .map(|(key, sequence)| {
                let (reply, answer) = oneshot::channel();
                self.replication_waiters.add(key, sequence, reply);
                answer
            })
            .collect())
    }

    /// Takes the uses that other replicas have not been told, by namespace.
    pub(crate) fn take_uses(&mut self) -> BTreeMap<NamespaceId, Vec<(u128, u64)>> {
        let mut uses: BTreeMap<NamespaceId, Vec<(u128, u64)>> = BTreeMap::new();
        let taken = self
            .core
            .as_mut()
            .map(|core| core.take_uses())
            .unwrap_or_default();
        for (key, used_ms) in taken {
            let namespace = uses.entry(key.namespace).or_default();
            namespace.push((key.document.0, used_ms));
        }
        uses
    }

    /// Records that this replica has carried out an erasure of the stream.
    pub(crate) fn complete_erasure(&mut self, id: u128, sequence: u64) -> Result<(), ApiError> {
        self.run(|core, catalog, now_ms| core.complete_erasure(catalog, id, sequence, now_ms))?;
        Ok(())
    }

    /// Lets documents be sent that have been silent for long, and forgets callers that wait no longer.
    pub(super) fn tend_outbox(&mut self) {
        self.replication_waiters.sweep();
        let Some(silent_s) = self.config.feed.as_ref().map(|feed| feed.silent_s) else {
            return;
        };
        let _ = self.run(|core, catalog, now_ms| {
            let silent_ms = now_ms.saturating_sub(silent_s.saturating_mul(1_000));
            Ok(CommitOutcome {
                sends: core.release_silent(catalog, silent_ms),
                ..CommitOutcome::default()
            })
        });
    }
}
