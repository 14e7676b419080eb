//! Whether the other replicas have carried out an erasure.

use std::time::{Duration, Instant};

use refrain_protocol::admin::ErasedReplica;
use refrain_protocol::join::ReplicaState;
use refrain_rpc::{HttpReplicaPeer, ReplicaPeer as _};
use refrain_service_kit::http::MeshClient;

use crate::record::ErasureRecord;
use crate::service::handle::DraftStoreHandle;

/// How long an erasure waits for the other replicas. Those that need longer are named, and go on.
const REPLICAS_WAIT: Duration = Duration::from_secs(15);

/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(100);

const CALL_TIMEOUT: Duration = Duration::from_secs(2);

impl DraftStoreHandle {
    /// Asks the other replicas until they have carried out an erasure, or the wait is over.
    pub(super) async fn erased_replicas(&self, mark: &ErasureRecord) -> Vec<ErasedReplica> {
        let feed = self.inner.config.feed.as_ref();
        let peers = feed.map_or(&[][..], |feed| &feed.peers);
        if peers.is_empty() {
            return Vec::new();
        }
        let until = Instant::now() + REPLICAS_WAIT;
        let sequence = self.sequence_of(mark, until).await;
        let asked = peers
            .iter()
            .map(|url| self.erased_replica(url, sequence, until));
        let answers = futures_util::future::join_all(asked).await;
        answers.into_iter().flatten().collect()
    }

    /// The sequence that the stream gave to an erasure. `None` if the broker has not taken it in time.
    async fn sequence_of(&self, mark: &ErasureRecord, until: Instant) -> Option<u64> {
        loop {
            let wanted = mark.clone();
            let found = self.read_blocking(move |shared| {
                let open = shared.read()?;
                let mut erasures = open.catalog.replication.erasures();
                let ours = erasures.find(|erasure| erasure.mark == wanted);
                Ok(ours.map(|erasure| erasure.sequence))
            });
            let found = found.await.ok().flatten();
            let status = self.inner.feed.as_ref();
            let is_connected = status.is_some_and(|status| status.state().connected);
            if found.is_some() || !is_connected || Instant::now() >= until {
                return found;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Asks one replica. `None` if the URL is this one's own.
    async fn erased_replica(
        &self,
        url: &str,
        wanted: Option<u64>,
        until: Instant,
    ) -> Option<ErasedReplica> {
        let own = self.read_blocking(|shared| Ok(shared.read()?.catalog.generation()));
        let own = own.await.ok();
        let credentials = self.inner.mesh.credentials().clone();
        let peer = MeshClient::with_credentials(url, credentials, CALL_TIMEOUT);
        let peer = peer.map(HttpReplicaPeer::new);
        loop {
            let answer = match &peer {
                Ok(peer) => peer
                    .replica_state()
                    .await
                    .map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            if answer
                .as_ref()
                .is_ok_and(|state| Some(state.generation) == own)
            {
                return None;
            }
            let replica = described(url, answer, wanted);
            if replica.is_done || wanted.is_none() || Instant::now() >= until {
                return Some(replica);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

fn described(
    url: &str,
    answer: Result<ReplicaState, String>,
    wanted: Option<u64>,
) -> ErasedReplica {
    let sequence = answer.as_ref().ok().map(|state| state.erased_sequence);
    let is_done = sequence
        .zip(wanted)
        .is_some_and(|(sequence, wanted)| sequence >= wanted);
    let trouble = match (answer, wanted) {
        (Err(error), _) => Some(error),
        (Ok(_), None) => Some("the broker is away; the erasure is sent when it is back".to_owned()),
        (Ok(state), Some(wanted)) => (!is_done).then(|| {
            let sequence = state.erased_sequence;
            format!(
                "it has carried out erasures up to message {sequence}, and this one is {wanted}"
            )
        }),
    };
    ErasedReplica {
        url: url.to_owned(),
        is_done,
        sequence,
        trouble,
    }
}
