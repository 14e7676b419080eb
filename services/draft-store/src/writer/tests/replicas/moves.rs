//! Readers who move to a replica that knows little of the time before.

use super::*;

/// Two namespaces with documents that all replicas have and that the first reader has read at replica 0.
fn followed() -> Cluster {
    let mut cluster = Cluster::new();
    for document in 0..4 {
        cluster.append(0, finished(update(document, 1, 0, &[1, 2, 3])));
    }
    cluster.settle();
    cluster.follow(0, 1 << 20);
    cluster.readers[0].resets = 0;
    cluster.readers[0].events = 0;
    cluster
}

/// Appends a document in a later epoch, and lets `replicas` apply it after some time.
fn append_and_apply(cluster: &mut Cluster, document: u128, epoch: u64, replicas: &[usize]) {
    cluster.append(0, finished(update(document, epoch, 0, &[4, 5, 6, 7])));
    cluster.read(0, 1);
    cluster.arrive(0);
    cluster.acknowledge(0, true);
    for replica in replicas {
        cluster.store(*replica).now_ms += 500;
        cluster.apply(*replica, 1, 0);
    }
}

fn move_to(cluster: &mut Cluster, replica: usize) {
    cluster.readers[0].replica = replica;
    while !cluster.follow(0, 1 << 20) {}
}

#[test]
fn a_reader_reads_nothing_again_at_a_replica_that_was_just_restarted() {
    let mut cluster = followed();
    // The last messages of the namespaces are far enough from each other for a stored checkpoint between them.
    for document in [1, 3] {
        cluster.store(1).now_ms += 10_000;
        append_and_apply(&mut cluster, document, 2, &[0, 1]);
    }
    cluster.follow(0, 1 << 20);
    cluster.readers[0].events = 0;
    cluster.reopen(1);
    move_to(&mut cluster, 1);
    let reader = &cluster.readers[0];
    assert_eq!((reader.resets, reader.events), (0, 0));
    cluster.check_readers();
}

#[test]
fn a_reader_of_a_quiet_namespace_does_not_begin_anew_after_the_restart_of_another_replica() {
    let mut cluster = followed();
    // Tenant b is quiet from here on, and replica 1 stores where it was meanwhile.
    for epoch in 2..22 {
        for document in 0..3 {
            append_and_apply(&mut cluster, document, epoch, &[0, 1]);
        }
    }
    cluster.reopen(1);
    cluster.follow(0, 1 << 20);
    cluster.readers[0].events = 0;
    move_to(&mut cluster, 1);
    let reader = &cluster.readers[0];
    assert_eq!(reader.resets, 0);
    assert!(reader.events <= 3, "{} of tenant a", reader.events);
    cluster.settle();
    cluster.check_readers();
}

#[test]
fn a_reader_may_be_ahead_of_a_replica_that_was_just_restarted() {
    let mut cluster = followed();
    append_and_apply(&mut cluster, 1, 2, &[0]);
    cluster.follow(0, 1 << 20);
    // The reader's copy has nothing of a document that only this replica has.
    cluster.append(1, finished(update(3, 3, 0, &[8, 8])));
    cluster.reopen(1);
    cluster.readers[0].events = 0;
    move_to(&mut cluster, 1);
    assert_eq!(
        (cluster.readers[0].resets, cluster.readers[0].events),
        (0, 1)
    );
    cluster.settle();
    cluster.check_equal();
    cluster.check_readers();
}

#[test]
fn a_reader_can_move_to_a_new_replica_that_has_applied_its_first_message() {
    let mut cluster = Cluster::new();
    append_and_apply(&mut cluster, 0, 1, &[0]);
    append_and_apply(&mut cluster, 1, 1, &[0]);
    cluster.follow(0, 1 << 20);
    cluster.apply(1, 1, 0);
    move_to(&mut cluster, 1);
    assert_eq!(cluster.readers[0].resets, 0);
    cluster.settle();
    cluster.check_readers();
}

#[test]
fn a_replica_that_joins_is_none_to_go_on_at_before_the_end_of_the_stream() {
    let mut cluster = followed();
    let store = cluster.store(1);
    let now_ms = store.now_ms;
    store.run(|core, catalog| core.begin_joining(catalog, now_ms));
    for _ in 0..2 {
        let here = cluster.store(1).shared.read().unwrap();
        let seen = here.catalog.replication.position.unwrap();
        let (moves, head) = (&here.catalog.replication.moves, here.catalog.head());
        assert_eq!(moves.resume(names("a").id(), seen.sequence, head), None);
        drop(here);
        // A restart does not change that.
        cluster.reopen(1);
    }
    move_to(&mut cluster, 1);
    assert_eq!(cluster.readers[0].resets, 2, "both namespaces");
    cluster.settle();
    cluster.check_readers();
}
