//! The replicas of a store beside each other: what they hold, how far they are, and where they differ.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::ensure;
use refrain_lab::text_table::text_table;
use refrain_protocol::NamespaceId;
use refrain_protocol::admin::{NamespaceSum, VerifyReply};
use serde::Serialize;

use super::replicas::{ReplicaReport, Replicas};

/// The replicas and how they differ.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    replicas: Vec<ComparedReplica>,
    /// Namespaces that not all replicas of their shard hold alike, as far as these were verified.
    differing: Vec<NamespaceId>,
}

/// A replica that was asked.
#[derive(Debug, Default, Serialize)]
struct ComparedReplica {
    url: String,
    /// `None`: it did not say.
    shard: Option<u32>,
    documents: Option<u64>,
    tokens: Option<u64>,
    /// Damaged records and documents; `None` if nobody looked for them.
    damaged: Option<u64>,
    /// The last message of the stream that it had applied.
    sequence: Option<u64>,
    /// Messages that it was behind the furthest of its shard.
    lag: Option<u64>,
    /// The reason why it has no numbers.
    trouble: Option<String>,
    #[serde(skip)]
    namespaces: Vec<NamespaceSum>,
}

impl From<VerifyReply> for ComparedReplica {
    fn from(reply: VerifyReply) -> Self {
        ComparedReplica {
            documents: Some(reply.documents),
            tokens: Some(reply.tokens),
            damaged: Some(reply.damaged),
            sequence: reply.feed_sequence,
            namespaces: reply.namespaces,
            ..ComparedReplica::default()
        }
    }
}

impl From<ReplicaReport> for ComparedReplica {
    fn from(report: ReplicaReport) -> Self {
        ComparedReplica {
            documents: Some(report.stats.documents),
            tokens: Some(report.stats.tokens),
            sequence: Some(report.sequence),
            ..ComparedReplica::default()
        }
    }
}

/// Has all replicas read and check everything, one after the other, and compares them.
pub(super) async fn verify(replicas: &Replicas) -> Comparison {
    let mut all = Vec::new();
    for replica in replicas.iter() {
        let reply = replica.verify().await.map(ComparedReplica::from);
        all.push((
            replica.url.clone(),
            Some(replica.shard),
            reply.map_err(|error| error.to_string()),
        ));
    }
    compare(with_silent(all, replicas))
}

/// Asks all replicas for their size and how far they are.
pub(super) async fn sizes(replicas: &Replicas) -> Comparison {
    let reports = replicas.iter().map(|replica| async {
        let report = replica.report().await.map(ComparedReplica::from);
        (
            replica.url.clone(),
            Some(replica.shard),
            report.map_err(|error| error.to_string()),
        )
    });
    let all = futures_util::future::join_all(reports).await;
    compare(with_silent(all, replicas))
}

/// A replica's URL, its shard, and what it says or why it says nothing.
type Answer = (String, Option<u32>, Result<ComparedReplica, String>);

/// Adds those that were named and did not answer, unless another replica has named them.
fn with_silent(mut answers: Vec<Answer>, replicas: &Replicas) -> Vec<Answer> {
    for (url, error) in &replicas.silent {
        if !answers.iter().any(|(known, ..)| known == url) {
            answers.push((url.clone(), None, Err(error.to_string())));
        }
    }
    answers
}

impl Comparison {
    /// # Errors
    /// Damage, a difference, or a replica that does not answer.
    pub(super) fn ensure_equal(&self) -> anyhow::Result<()> {
        let damaged: u64 = self
            .replicas
            .iter()
            .filter_map(|replica| replica.damaged)
            .sum();
        ensure!(damaged == 0, "{damaged} records or documents are damaged");
        let first: Vec<String> = self
            .differing
            .iter()
            .take(5)
            .map(ToString::to_string)
            .collect();
        ensure!(
            self.differing.is_empty(),
            "{} namespaces are not alike on all replicas: {}. While outputs arrive they differ for a moment, so run \
             this again when the lag is 0",
            self.differing.len(),
            first.join(", ")
        );
        let away = self
            .replicas
            .iter()
            .filter(|replica| replica.trouble.is_some());
        let away = away.count();
        ensure!(away == 0, "{away} replicas were not compared");
        Ok(())
    }

    /// The replicas as lines for people.
    pub(super) fn table(&self) -> String {
        let number =
            |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
        let rows = self.replicas.iter().map(|replica| {
            vec![
                replica.url.clone(),
                number(replica.shard.map(u64::from)),
                number(replica.documents),
                number(replica.tokens),
                number(replica.damaged),
                number(replica.sequence),
                number(replica.lag),
            ]
        });
        let head = [
            "replica",
            "shard",
            "documents",
            "tokens",
            "damaged",
            "sequence",
            "lag",
        ];
        let mut text = text_table(1, &head, rows);
        for replica in &self.replicas {
            if let Some(trouble) = &replica.trouble {
                text += &format!("{}: {trouble}\n", replica.url);
            }
        }
        text
    }
}

fn compare(answers: Vec<Answer>) -> Comparison {
    let mut furthest: BTreeMap<Option<u32>, u64> = BTreeMap::new();
    for (_, shard, answer) in &answers {
        let sequence = answer.as_ref().ok().and_then(|replica| replica.sequence);
        let of_shard = furthest.entry(*shard).or_default();
        *of_shard = (*of_shard).max(sequence.unwrap_or(0));
    }
    let replicas: Vec<ComparedReplica> = answers
        .into_iter()
        .map(|(url, shard, answer)| {
            let (replica, trouble) = match answer {
                Ok(replica) => (replica, None),
                Err(trouble) => (ComparedReplica::default(), Some(trouble)),
            };
            let behind = |sequence| furthest.get(&shard).map(|furthest| furthest - sequence);
            ComparedReplica {
                url,
                shard,
                trouble,
                lag: replica.sequence.and_then(behind),
                ..replica
            }
        })
        .collect();
    let verified = || replicas.iter().filter(|replica| replica.damaged.is_some());
    let mut held: BTreeMap<(Option<u32>, NamespaceId), BTreeSet<Option<&str>>> = BTreeMap::new();
    for replica in verified() {
        for sum in &replica.namespaces {
            held.entry((replica.shard, sum.namespace)).or_default();
        }
    }
    for ((shard, namespace), checksums) in &mut held {
        for replica in verified().filter(|replica| replica.shard == *shard) {
            let sums = &replica.namespaces;
            let sum = sums.iter().find(|sum| sum.namespace == *namespace);
            checksums.insert(sum.map(|sum| sum.checksum.as_str()));
        }
    }
    let differing = held.iter().filter(|(_, checksums)| checksums.len() > 1);
    let differing = differing.map(|((_, namespace), _)| *namespace).collect();
    Comparison {
        replicas,
        differing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(url: &str, shard: u32, sequence: u64, sums: &[(u128, &str)]) -> Answer {
        let sums = sums.iter().map(|(namespace, checksum)| NamespaceSum {
            namespace: NamespaceId(*namespace),
            documents: 1,
            tokens: 2,
            checksum: (*checksum).into(),
        });
        let reply = VerifyReply {
            feed_sequence: Some(sequence),
            namespaces: sums.collect(),
            ..VerifyReply::default()
        };
        (url.into(), Some(shard), Ok(reply.into()))
    }

    #[test]
    fn a_namespace_that_one_replica_lacks_or_holds_otherwise_differs() {
        let compared = compare(vec![
            answer("a", 0, 9, &[(1, "x"), (2, "y"), (3, "z")]),
            answer("b", 0, 7, &[(1, "x"), (2, "other")]),
            answer("c", 1, 99, &[(4, "of another shard")]),
        ]);
        assert_eq!(compared.differing, [NamespaceId(2), NamespaceId(3)]);
        let lags: Vec<_> = compared
            .replicas
            .iter()
            .map(|replica| replica.lag)
            .collect();
        assert_eq!(lags, [Some(0), Some(2), Some(0)]);
        assert!(compared.ensure_equal().is_err());
        let equal = || {
            vec![
                answer("a", 0, 9, &[(1, "x")]),
                answer("b", 0, 9, &[(1, "x")]),
            ]
        };
        assert!(compare(equal()).ensure_equal().is_ok());
        let mut with_silent = equal();
        with_silent.push(("c".into(), None, Err("nobody listens".into())));
        let compared = compare(with_silent);
        assert!(compared.table().contains("c: nobody listens"));
        let error = compared.ensure_equal().unwrap_err().to_string();
        assert_eq!(error, "1 replicas were not compared");
    }
}
