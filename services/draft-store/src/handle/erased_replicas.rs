//! Whether the other replicas have carried out an erasure.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use refrain_protocol::admin::ErasedReplica;
use refrain_protocol::join::ReplicaState;
use refrain_rpc::{HttpReplicaPeer, ReplicaPeer as _};
use refrain_service_kit::http::MeshClient;

use crate::handle::DraftStoreHandle;
use crate::record::ErasureRecord;

/// How long an erasure waits for the other replicas. Those that need longer are named, and go on.
const REPLICAS_WAIT: Duration = Duration::from_secs(15);

/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(100);

const CALL_TIMEOUT: Duration = Duration::from_secs(2);

impl DraftStoreHandle {
    /// Asks the other replicas until they have carried out an erasure, or the wait is over.
    pub(super) async fn erased_replicas(&self, mark: &ErasureRecord) -> Vec<ErasedReplica> {
        let (Some(feed), Some(status)) = (&self.inner.config.feed, &self.inner.feed) else {
            return Vec::new();
        };
        let heard = status.directory.urls(feed.shard).into_iter();
        let named = feed.peers.iter().cloned();
        let mut urls: BTreeSet<_> = named.chain(heard).map(without_slash).collect();
        urls.remove(&without_slash(feed.advertise_url.clone()));
        if urls.is_empty() {
            return Vec::new();
        }
        let until = Instant::now() + REPLICAS_WAIT;
        let sequence = self.sequence_of(mark, until).await;
        let asked = urls
            .iter()
            .map(|url| self.erased_replica(url, sequence, until));
        let answers = futures_util::future::join_all(asked).await;
        one_for_each(answers.into_iter().flatten().collect())
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

    /// Asks one replica, and returns its generation, if it answered, with its state. `None` if the URL is this one's
    /// own.
    async fn erased_replica(
        &self,
        url: &str,
        wanted: Option<u64>,
        until: Instant,
    ) -> Option<(Option<u64>, ErasedReplica)> {
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
            let generation = answer.as_ref().ok().map(|state| state.generation);
            if generation.is_some() && generation == own {
                return None;
            }
            let (is_carried_out, replica) = described(url, answer, wanted);
            if is_carried_out || wanted.is_none() || Instant::now() >= until {
                return Some((generation, replica));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

fn without_slash(url: String) -> String {
    url.trim_end_matches('/').to_owned()
}

/// One entry for each replica, since the configuration may name one otherwise than it names itself.
fn one_for_each(answers: Vec<(Option<u64>, ErasedReplica)>) -> Vec<ErasedReplica> {
    let mut known = BTreeSet::new();
    let is_new = |generation: Option<u64>| generation.is_none_or(|of| known.insert(of));
    let kept = answers
        .into_iter()
        .scan(is_new, |is_new, (generation, replica)| {
            Some(is_new(generation).then_some(replica))
        });
    kept.flatten().collect()
}

/// Whether a replica has carried out an erasure, and what its answer says.
fn described(
    url: &str,
    answer: Result<ReplicaState, String>,
    wanted: Option<u64>,
) -> (bool, ErasedReplica) {
    let state = answer.as_ref().ok();
    let sequence = state.map(|state| state.erased_sequence);
    let quarantines = state.map_or(0, |state| state.quarantines);
    let is_carried_out = sequence
        .zip(wanted)
        .is_some_and(|(sequence, wanted)| sequence >= wanted);
    let trouble = match (answer, wanted) {
        (Err(error), _) => Some(error),
        (Ok(_), None) => Some("the broker is away; the erasure is sent when it is back".to_owned()),
        (Ok(state), Some(wanted)) if !is_carried_out => {
            let sequence = state.erased_sequence;
            Some(format!(
                "it has carried out erasures up to message {sequence}, and this one is {wanted}"
            ))
        }
        (Ok(_), Some(_)) => (quarantines > 0).then(|| {
            format!(
                "{quarantines} quarantine-* folders in its data_dir could not be fully read and may hold documents \
                 that should be erased; inspect them, then erase there with --quarantines to delete them"
            )
        }),
    };
    let replica = ErasedReplica {
        url: url.to_owned(),
        is_done: trouble.is_none(),
        sequence,
        trouble,
    };
    (is_carried_out, replica)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(erased_sequence: u64, quarantines: u64) -> Result<ReplicaState, String> {
        Ok(ReplicaState {
            generation: 1,
            sequence: 9,
            erased_sequence,
            quarantines,
        })
    }

    #[test]
    fn a_replica_is_done_when_nothing_of_the_documents_can_be_on_its_disk() {
        let described = |answer, wanted| {
            let (is_carried_out, replica) = described("u", answer, wanted);
            let trouble = replica.trouble.unwrap_or_default();
            (is_carried_out, replica.is_done, trouble)
        };
        assert_eq!(described(state(5, 0), Some(5)), (true, true, String::new()));
        for (answer, wanted, is_carried_out, word) in [
            (state(4, 0), Some(5), false, "up to message 4"),
            (state(5, 2), Some(5), true, "2 quarantine-* folders"),
            (state(5, 0), None, false, "the broker is away"),
            (
                Err("nobody listens".to_owned()),
                Some(5),
                false,
                "nobody listens",
            ),
        ] {
            let (carried_out, is_done, trouble) = described(answer, wanted);
            assert_eq!((carried_out, is_done), (is_carried_out, false));
            assert!(trouble.contains(word), "{trouble}");
        }
    }

    #[test]
    fn a_replica_with_two_urls_is_named_once() {
        let replica = |generation, url: &str| {
            let (_, replica) = described(url, state(5, 0), Some(5));
            (generation, replica)
        };
        let answers = vec![
            replica(Some(1), "a"),
            replica(Some(1), "b"),
            replica(Some(2), "c"),
            replica(None, "d"),
            replica(None, "e"),
        ];
        let kept = one_for_each(answers);
        let urls: Vec<_> = kept.iter().map(|replica| &*replica.url).collect();
        assert_eq!(urls, ["a", "c", "d", "e"]);
    }
}
