//! The check at the end of a round: replicas are equal, what was acknowledged is there, and what was erased is not.

use std::collections::BTreeMap;

use anyhow::ensure;
use e2e::Program;
use refrain_protocol::admin::NamespaceSum;
use refrain_protocol::document::DocumentUpdate;

use crate::cluster::{Cluster, eventually};
use crate::ledger::{State, text};
use crate::load::Account;
use crate::network::NODES;
use crate::store::{TENANTS, namespace};

/// Faults of documents that are named.
const NAMED_MAX: usize = 10;

/// The numbers of a round that was checked.
pub(crate) struct Checked {
    /// Documents of all rounds that there are.
    pub(crate) documents: u64,
    /// Documents of this round that were acknowledged as replicated.
    pub(crate) replicated: usize,
    /// Those that were acknowledged by a store that still had to have them.
    pub(crate) local: usize,
}

/// Waits until all replicas have everything, and checks what they have.
pub(crate) async fn check(
    cluster: &mut Cluster,
    account: &Account,
    round: usize,
) -> anyhow::Result<Checked> {
    eventually("all stores have sent and applied everything", async || {
        cluster.trouble().await
    })
    .await?;
    let mut sums = Vec::new();
    let equal = eventually("the replicas are equal", async || {
        sums = all_sums(cluster)
            .await
            .map_err(|error| format!("{error:#}"))?;
        match sums.windows(2).all(|pair| pair[0] == pair[1]) {
            true => Ok(()),
            false => Err(format!("{sums:#?}")),
        }
    });
    let is_equal = equal.await;
    let (replicated, local) = account.ledger().promises();
    let mut faults = Vec::new();
    let mut first: Option<BTreeMap<u128, State>> = None;
    for store in 0..NODES {
        for tenant in 0..TENANTS {
            // All that earlier rounds have left is the same everywhere, as the sums say. So one store is read.
            let numbers: Vec<u128> = {
                let ledger = account.ledger();
                let documents = ledger.documents().filter(|(_, written)| {
                    written.tenant == tenant && (written.round == round || store == round % NODES)
                });
                documents.map(|(number, _)| number).collect()
            };
            let read = cluster.stores[store].calls.read(tenant, &numbers).await?;
            let mut found = BTreeMap::new();
            for update in read {
                if update.tokens != text(update.document.0, update.tokens.len() as u32) {
                    faults.push(format!(
                        "store {store}: {} has another text",
                        update.document
                    ));
                }
                found.insert(update.document.0, state(&update));
            }
            let ledger = account.ledger();
            for number in numbers {
                let judged = ledger.judge(number, found.get(&number).copied());
                faults.extend(judged.err().map(|fault| format!("store {store}: {fault}")));
            }
            if store == round % NODES {
                let of_store = sums.get(store).into_iter().flatten();
                let id = namespace(tenant).id();
                let documents = of_store
                    .filter(|sum| sum.namespace == id)
                    .map(|sum| sum.documents)
                    .sum::<u64>();
                if documents != found.len() as u64 {
                    faults.push(format!(
                        "store {store} has {documents} documents of tenant {tenant}, and {} were written",
                        found.len()
                    ));
                }
                first.get_or_insert_default().extend(found);
            }
        }
    }
    is_equal.map_err(|error| error.context(first_of(&faults)))?;
    ensure!(faults.is_empty(), "{}", first_of(&faults));
    cluster.check_running()?;
    let first = first.unwrap_or_default();
    let mut ledger = account.ledger();
    let numbers: Vec<u128> = ledger.documents().map(|(number, _)| number).collect();
    for number in numbers {
        ledger.settle(number, first.get(&number).copied());
    }
    Ok(Checked {
        documents: first.len() as u64,
        replicated,
        local,
    })
}

fn first_of(faults: &[String]) -> String {
    let named: Vec<&str> = faults.iter().take(NAMED_MAX).map(String::as_str).collect();
    format!(
        "{} documents are not as they have to be:\n{}",
        faults.len(),
        named.join("\n")
    )
}

fn state(update: &DocumentUpdate) -> State {
    State {
        epoch: update.epoch,
        len: update.tokens.len() as u32,
        is_finished: update.finish.is_some(),
    }
}

/// The documents of each store, as it reports them by itself.
///
/// # Errors
/// A store is damaged.
pub(crate) async fn all_sums(cluster: &Cluster) -> anyhow::Result<Vec<Vec<NamespaceSum>>> {
    let mut sums = Vec::new();
    for (number, store) in cluster.stores.iter().enumerate() {
        let reply = store.calls.verify().await?;
        ensure!(
            reply.damaged == 0 && reply.quarantines == 0,
            "store {number} is damaged: {:?}, {} quarantines",
            reply.damage,
            reply.quarantines
        );
        sums.push(reply.namespaces);
    }
    Ok(sums)
}

/// Has the operator's command compare the replicas.
pub(crate) async fn compare_by_command(cluster: &Cluster) -> anyhow::Result<()> {
    let urls: Vec<String> = cluster.calls().into_iter().map(|calls| calls.url).collect();
    let (urls, secret) = (urls.join(","), &*cluster.keys.secret);
    let arguments = ["store", "verify", "--cluster", &*urls, "--secret", secret];
    let mut program = Program::start(cluster.dir(), &arguments, &[])?;
    let status = program.ended().await?;
    ensure!(status.success(), "{}", program.output());
    Ok(())
}
