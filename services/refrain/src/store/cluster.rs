//! `refrain store verify --cluster`: whether replicas hold the same documents.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, ensure};
use refrain_lab::text_table::text_table;
use refrain_protocol::NamespaceId;
use refrain_protocol::admin::{NamespaceSum, VerifyReply};
use serde::Serialize;

use super::target::{Access, Target, TargetArgs};

/// The replicas and how they differ.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    replicas: Vec<CheckedReplica>,
    /// Namespaces that not all of them hold alike.
    differing: Vec<NamespaceId>,
}

/// A replica that was checked.
#[derive(Debug, Serialize)]
struct CheckedReplica {
    url: String,
    documents: u64,
    tokens: u64,
    damaged: u64,
    /// The last message of the stream that it had applied.
    sequence: Option<u64>,
    /// Messages that it was behind the furthest of the others.
    lag: Option<u64>,
    #[serde(skip)]
    namespaces: Vec<NamespaceSum>,
}

/// Checks all replicas, and compares them.
///
/// # Errors
/// A replica that does not answer.
pub(super) async fn check(target: &TargetArgs, urls: &[String]) -> anyhow::Result<Comparison> {
    let mut replies = Vec::new();
    for url in urls {
        let args = TargetArgs {
            url: Some(url.clone()),
            data_dir: None,
            ..target.clone()
        };
        let target = Target::open(&args, Access::Read).await?;
        let reply = target.store().verify().await;
        target.close().await;
        replies.push((url.clone(), reply.with_context(|| url.clone())?));
    }
    Ok(compare(replies))
}

impl Comparison {
    /// # Errors
    /// Damage, or a difference.
    pub(super) fn ensure_equal(&self) -> anyhow::Result<()> {
        let damaged: u64 = self.replicas.iter().map(|replica| replica.damaged).sum();
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
        Ok(())
    }

    /// The replicas as lines for people.
    pub(super) fn table(&self) -> String {
        let number = |number: Option<u64>| {
            number.map_or_else(|| "-".to_owned(), |number| number.to_string())
        };
        let rows = self.replicas.iter().map(|replica| {
            vec![
                replica.url.clone(),
                replica.documents.to_string(),
                replica.tokens.to_string(),
                replica.damaged.to_string(),
                number(replica.sequence),
                number(replica.lag),
            ]
        });
        let head = [
            "replica",
            "documents",
            "tokens",
            "damaged",
            "sequence",
            "lag",
        ];
        text_table(1, &head, rows)
    }
}

fn compare(replies: Vec<(String, VerifyReply)>) -> Comparison {
    let furthest = replies.iter().filter_map(|(_, reply)| reply.feed_sequence);
    let furthest = furthest.max();
    let replicas: Vec<CheckedReplica> = replies
        .into_iter()
        .map(|(url, reply)| CheckedReplica {
            url,
            documents: reply.documents,
            tokens: reply.tokens,
            damaged: reply.damaged,
            sequence: reply.feed_sequence,
            lag: furthest
                .zip(reply.feed_sequence)
                .map(|(furthest, sequence)| furthest - sequence),
            namespaces: reply.namespaces,
        })
        .collect();
    let mut held: BTreeMap<NamespaceId, BTreeSet<Option<&str>>> = BTreeMap::new();
    for replica in &replicas {
        for sum in &replica.namespaces {
            held.entry(sum.namespace).or_default();
        }
    }
    for (namespace, checksums) in &mut held {
        for replica in &replicas {
            let sums = &replica.namespaces;
            let sum = sums.iter().find(|sum| sum.namespace == *namespace);
            checksums.insert(sum.map(|sum| sum.checksum.as_str()));
        }
    }
    let differing = held.iter().filter(|(_, checksums)| checksums.len() > 1);
    let differing = differing.map(|(namespace, _)| *namespace).collect();
    Comparison {
        replicas,
        differing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(sequence: u64, sums: &[(u128, &str)]) -> VerifyReply {
        let sums = sums.iter().map(|(namespace, checksum)| NamespaceSum {
            namespace: NamespaceId(*namespace),
            documents: 1,
            tokens: 2,
            checksum: (*checksum).into(),
        });
        VerifyReply {
            feed_sequence: Some(sequence),
            namespaces: sums.collect(),
            ..VerifyReply::default()
        }
    }

    #[test]
    fn a_namespace_that_one_replica_lacks_or_holds_otherwise_differs() {
        let compared = compare(vec![
            ("a".into(), reply(9, &[(1, "x"), (2, "y"), (3, "z")])),
            ("b".into(), reply(7, &[(1, "x"), (2, "other")])),
        ]);
        assert_eq!(compared.differing, [NamespaceId(2), NamespaceId(3)]);
        let lags: Vec<_> = compared
            .replicas
            .iter()
            .map(|replica| replica.lag)
            .collect();
        assert_eq!(lags, [Some(0), Some(2)]);
        let equal = compare(vec![
            ("a".into(), reply(9, &[(1, "x")])),
            ("b".into(), reply(9, &[(1, "x")])),
        ]);
        assert!(equal.ensure_equal().is_ok() && compared.ensure_equal().is_err());
        assert!(equal.table().contains("sequence"));
    }
}
