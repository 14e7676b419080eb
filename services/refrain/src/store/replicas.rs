//! A draft store of several replicas and shards, as one store for an operator.
//!
//! A call about documents goes to one replica of their shard, and the feed brings its changes to the others. A call
//! about a store's own files, as a compaction, goes to each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use async_trait::async_trait;
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ErasedReplica,
    ExportCursor, ExportReply, ExportRequest, ImportRequest, VerifyReply,
};
use refrain_protocol::document::{AppendReply, StoreStats};
use refrain_protocol::shard::{StoreDirectory, shard_of};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{
    HttpReplicaPeer, HttpStoreAdmin, HttpUsageStore, ReplicaPeer, StoreAdmin, UsageReplica,
};
use refrain_service_kit::http::MeshClient;

/// How long a replica may take to say where the others are.
const DIRECTORY_WAIT: Duration = Duration::from_secs(5);

/// A replica of the store.
pub(super) struct Replica {
    pub(super) url: String,
    pub(super) shard: u32,
    /// Whether it said that it may serve.
    is_ready: bool,
    admin: Arc<HttpStoreAdmin>,
    peer: HttpReplicaPeer,
    usage: Arc<HttpUsageStore>,
}

/// All replicas that are known, in the order of their shards and URLs.
pub(crate) struct Replicas {
    all: Vec<Replica>,
    shards: u32,
    pub(super) silent: Silent,
}

/// The size of a replica and its place in the stream.
pub(super) struct ReplicaReport {
    pub(super) stats: StoreStats,
    /// The last message of the stream that it has applied.
    pub(super) sequence: u64,
}

impl Replicas {
    /// Asks the named replicas where the others are.
    ///
    /// # Errors
    /// None of them answers, one has no feed, or no replica of a shard is known.
    pub(crate) async fn find(client: &MeshClient, urls: &[String]) -> anyhow::Result<Self> {
        let questions = urls.iter().map(|url| async {
            let url = url.trim_end_matches('/');
            let peer = HttpReplicaPeer::new(client.at(url));
            let answer = tokio::time::timeout(DIRECTORY_WAIT, peer.directory()).await;
            let late = || ApiError::new(ErrorKind::Timeout, "the replica does not answer");
            (url.to_owned(), answer.unwrap_or_else(|_| Err(late())))
        });
        let answers = futures_util::future::join_all(questions).await;
        let (found, silent, shards) = merge(answers)?;
        let all = found.into_iter().map(|((shard, url), is_ready)| Replica {
            shard,
            is_ready,
            admin: HttpStoreAdmin::new(client.at(&url)).into(),
            peer: HttpReplicaPeer::new(client.at(&url)),
            usage: HttpUsageStore::new(client.at(&url)).into(),
            url,
        });
        let replicas = Replicas {
            all: without_twins(all.collect()).await,
            shards,
            silent,
        };
        for shard in 0..shards {
            ensure!(
                replicas.of_shard(shard).next().is_some(),
                "no replica of shard {shard} is known, of {shards}: name one of them as well, and see that each \
                 replica has feed.advertise_url"
            );
        }
        Ok(replicas)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Replica> {
        self.all.iter()
    }

    /// The replicas of a shard, those first that may serve.
    fn of_shard(&self, shard: u32) -> impl Iterator<Item = &Replica> {
        let of_shard = move |is_ready: bool| {
            let all = self.all.iter();
            all.filter(move |replica| replica.shard == shard && replica.is_ready == is_ready)
        };
        of_shard(true).chain(of_shard(false))
    }

    /// Makes a call at one replica of a shard, and at the next one if that does not answer. Errors name the replica.
    async fn at_shard<T, F>(
        &self,
        shard: u32,
        call: impl Fn(Arc<HttpStoreAdmin>) -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let mut last = None;
        for replica in self.of_shard(shard) {
            match call(replica.admin.clone()).await {
                Err(error) if error.kind.status() >= 502 => last = Some(replica.named(error)),
                Err(error) => return Err(replica.named(error)),
                Ok(reply) => return Ok(reply),
            }
        }
        let none = || {
            ApiError::new(
                ErrorKind::Unavailable,
                format!("shard {shard} has no replica"),
            )
        };
        Err(last.unwrap_or_else(none))
    }

    /// Repeats an erasure at the replicas of a shard that may have quarantined data with erased documents. One that
    /// does not answer keeps its entry, which has its trouble.
    async fn erase_quarantines(&self, shard: u32, request: &EraseRequest, reply: &mut EraseReply) {
        // A document that began since the first erasure is not in its scope.
        let again = EraseRequest {
            until_ms: request.until_ms.or(Some(reply.erased_at_ms)),
            ..request.clone()
        };
        for replica in self.of_shard(shard) {
            let is_open = |of: &ErasedReplica| of.url == replica.url && !of.is_done;
            if !reply.replicas.iter().any(is_open) {
                continue;
            }
            if let Ok(more) = replica.admin.erase(again.clone()).await {
                reply.quarantines += more.quarantines;
                reply.quarantines_kept += more.quarantines_kept;
                reply.replicas.retain(|of| of.url != replica.url);
            }
        }
    }
}

impl Replica {
    /// It as a store of usage.
    pub(super) fn usage(&self) -> UsageReplica {
        UsageReplica {
            name: self.url.clone(),
            store: self.usage.clone(),
        }
    }

    fn named(&self, error: ApiError) -> ApiError {
        let message = format!("{}: {}", self.url, error.message);
        ApiError { message, ..error }
    }

    /// Reads its size and its place in the stream.
    pub(super) async fn report(&self) -> Result<ReplicaReport, ApiError> {
        let (stats, state) = tokio::join!(self.admin.store_stats(), self.peer.replica_state());
        Ok(ReplicaReport {
            stats: stats?,
            sequence: state?.sequence,
        })
    }

    /// Reads and checks all of its records.
    pub(super) async fn verify(&self) -> Result<VerifyReply, ApiError> {
        self.admin.verify().await
    }
}

/// Replicas by shard and URL, with whether they may serve.
type Found = BTreeMap<(u32, String), bool>;

/// Replicas that were named and do not answer, with the reasons.
type Silent = Vec<(String, ApiError)>;

/// Puts the answers of the named replicas together: the replicas, those that do not answer, and the number of shards.
fn merge(
    answers: Vec<(String, Result<StoreDirectory, ApiError>)>,
) -> anyhow::Result<(Found, Silent, u32)> {
    let (mut found, mut silent, mut shards) = (Found::new(), Silent::new(), None);
    for (url, answer) in answers {
        let directory = match answer {
            Ok(directory) => directory,
            Err(error) if error.kind == ErrorKind::NotFound => {
                return Err(error).with_context(|| {
                    format!("{url} is a store without a feed: call it with --url")
                });
            }
            Err(error) if error.kind == ErrorKind::Unauthorized => return Err(error).context(url),
            Err(error) => {
                silent.push((url, error));
                continue;
            }
        };
        let before = *shards.get_or_insert(directory.shards);
        ensure!(
            before == directory.shards,
            "{url} has {} shards, and another replica has {before}: feed.shards has to be the same everywhere",
            directory.shards
        );
        for entry in directory.replicas {
            // Its own answer counts more than what others heard of it.
            found
                .entry((entry.shard, entry.url))
                .or_insert(entry.is_ready);
        }
        found.insert((directory.shard, url), directory.is_ready);
    }
    match shards {
        Some(shards) => Ok((found, silent, shards)),
        None => {
            let (url, error) = silent.pop().context("no replica is named")?;
            Err(error).with_context(|| format!("{url}, the last of the named replicas"))
        }
    }
}

/// Replicas without those that were named otherwise than they name themselves: a store has a generation that no other
/// store has. A replica that does not answer stays.
async fn without_twins(all: Vec<Replica>) -> Vec<Replica> {
    let questions = all.iter().map(|replica| async {
        let answer = tokio::time::timeout(DIRECTORY_WAIT, replica.peer.replica_state()).await;
        Some(answer.ok()?.ok()?.generation)
    });
    let generations = futures_util::future::join_all(questions).await;
    let mut known = BTreeSet::new();
    let mut answered: Vec<_> = all.into_iter().zip(generations).collect();
    answered.retain(|(replica, generation)| {
        generation.is_none_or(|of| known.insert((replica.shard, of)))
    });
    answered.into_iter().map(|(replica, _)| replica).collect()
}

/// The cursor of an export over all shards. It has the number of the shard beside that of the store's snapshot, which
/// has 32 bits.
fn split(cursor: ExportCursor, shards: u32) -> (u32, ExportCursor) {
    let shards = u64::from(shards);
    let at_store = ExportCursor {
        snapshot: cursor.snapshot / shards,
        ..cursor
    };
    ((cursor.snapshot % shards) as u32, at_store)
}

fn joined(shard: u32, at_store: ExportCursor, shards: u32) -> ExportCursor {
    ExportCursor {
        snapshot: at_store.snapshot * u64::from(shards) + u64::from(shard),
        ..at_store
    }
}

#[async_trait]
impl StoreAdmin for Replicas {
    /// The sum over the shards.
    async fn store_stats(&self) -> Result<StoreStats, ApiError> {
        let mut all = StoreStats::default();
        for shard in 0..self.shards {
            all = all
                + self
                    .at_shard(shard, |admin| async move { admin.store_stats().await })
                    .await?;
        }
        Ok(all)
    }

    async fn import(&self, request: ImportRequest) -> Result<AppendReply, ApiError> {
        let shard = shard_of(request.namespace.id(), self.shards);
        self.at_shard(shard, |admin| {
            let request = request.clone();
            async move { admin.import(request).await }
        })
        .await
    }

    async fn export(&self, request: ExportRequest) -> Result<ExportReply, ApiError> {
        let (shard, after) = split(request.after, self.shards);
        let request = ExportRequest { after, ..request };
        // The numbers of snapshots are a replica's own, so all pages of a shard come from the same one.
        let none = || {
            ApiError::new(
                ErrorKind::Unavailable,
                format!("shard {shard} has no replica"),
            )
        };
        let replica = self.of_shard(shard).next().ok_or_else(none)?;
        let reply = replica.admin.export(request).await;
        let mut reply = reply.map_err(|error| replica.named(error))?;
        let is_last = shard + 1 == self.shards;
        reply.next = match reply.next {
            Some(next) => Some(joined(shard, next, self.shards)),
            None if is_last => None,
            None => Some(joined(shard + 1, ExportCursor::default(), self.shards)),
        };
        Ok(reply)
    }

    /// Checks one replica of each shard. [`Replica::verify`] checks a certain one.
    async fn verify(&self) -> Result<VerifyReply, ApiError> {
        let mut all = VerifyReply::default();
        for shard in 0..self.shards {
            let reply = self
                .at_shard(shard, |admin| async move { admin.verify().await })
                .await?;
            all.records += reply.records;
            all.documents += reply.documents;
            all.tokens += reply.tokens;
            all.damaged += reply.damaged;
            all.quarantines += reply.quarantines;
            all.damage.extend(reply.damage);
            all.namespaces.extend(reply.namespaces);
        }
        Ok(all)
    }

    /// Compacts every replica, one after the other.
    async fn compact(&self) -> Result<CompactReply, ApiError> {
        let mut all = CompactReply::default();
        for replica in &self.all {
            let reply = replica.admin.compact().await;
            let reply = reply.map_err(|error| replica.named(error))?;
            all.before_bytes += reply.before_bytes;
            all.after_bytes += reply.after_bytes;
        }
        Ok(all)
    }

    /// Erases in every shard. The stream brings the erasure to all replicas, but quarantined data is deleted only by
    /// a replica that is asked for it, so with `quarantines` each of them is.
    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError> {
        let mut all = EraseReply::default();
        for shard in 0..self.shards {
            let mut reply = self
                .at_shard(shard, |admin| {
                    let request = request.clone();
                    async move { admin.erase(request).await }
                })
                .await?;
            if request.quarantines {
                self.erase_quarantines(shard, &request, &mut reply).await;
            }
            all.erased_at_ms = all.erased_at_ms.max(reply.erased_at_ms);
            all.documents += reply.documents;
            all.files.extend(reply.files);
            all.quarantines += reply.quarantines;
            all.quarantines_kept += reply.quarantines_kept;
            all.replicas.extend(reply.replicas);
        }
        Ok(all)
    }

    async fn confirm(&self, _: ConfirmRequest) -> Result<ConfirmReply, ApiError> {
        Err(ApiError::new(
            ErrorKind::InvalidRequest,
            "a confirmation is for one store: name it with --url",
        ))
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::shard::ReplicaEntry;

    use super::*;

    fn directory(shard: u32, entries: &[(&str, u32, bool)]) -> StoreDirectory {
        let entry = |(url, shard, is_ready): &(&str, u32, bool)| ReplicaEntry {
            url: (*url).into(),
            shard: *shard,
            is_ready: *is_ready,
            sequence: 1,
            lag: 0,
        };
        StoreDirectory {
            shards: 2,
            shard,
            is_ready: true,
            replicas: entries.iter().map(entry).collect(),
        }
    }

    #[test]
    fn the_named_replicas_bring_the_others_and_silent_ones_are_remembered() {
        let away = || ApiError::new(ErrorKind::Unavailable, "nobody listens");
        let answers = vec![
            ("c".into(), Err(away())),
            (
                "a".into(),
                Ok(directory(
                    0,
                    &[("b", 1, true), ("a", 0, false), ("c", 1, false)],
                )),
            ),
        ];
        let (found, silent, shards) = merge(answers).unwrap();
        let found: Vec<_> = found.into_iter().collect();
        let named = |shard: u32, url: &str, is_ready: bool| ((shard, url.to_owned()), is_ready);
        assert_eq!(
            found,
            [
                named(0, "a", true),
                named(1, "b", true),
                named(1, "c", false)
            ]
        );
        assert_eq!((silent[0].0.as_str(), shards), ("c", 2));
        let error = merge(vec![("c".into(), Err(away()))]).unwrap_err();
        assert!(format!("{error:#}").contains("nobody listens"));
        let without_feed = ApiError::new(ErrorKind::NotFound, "no route");
        let error = merge(vec![("d".into(), Err(without_feed))]).unwrap_err();
        assert!(format!("{error:#}").contains("without a feed"));
        let other = StoreDirectory {
            shards: 3,
            ..directory(0, &[])
        };
        let both = vec![("a".into(), Ok(directory(0, &[]))), ("b".into(), Ok(other))];
        assert!(merge(both).unwrap_err().to_string().contains("feed.shards"));
    }

    #[test]
    fn the_cursor_of_an_export_names_the_shard() {
        let at_store = ExportCursor {
            snapshot: 41,
            sequence: 9,
            ..ExportCursor::default()
        };
        for shard in 0..3 {
            assert_eq!(split(joined(shard, at_store, 3), 3), (shard, at_store));
        }
        assert_eq!(
            split(ExportCursor::default(), 3),
            (0, ExportCursor::default())
        );
    }
}
