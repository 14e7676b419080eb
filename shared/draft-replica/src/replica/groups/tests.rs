use refrain_protocol::document::{DocumentHead, DocumentUpdate};
use refrain_service_kit::telemetry::Metrics;

use super::*;

const ONE: NamespaceId = NamespaceId(1);
const ANOTHER: NamespaceId = NamespaceId(2);

fn groups(change: impl FnOnce(&mut ReplicaConfig)) -> Groups {
    let mut config = ReplicaConfig::default();
    change(&mut config);
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    Groups::new(config, IndexConfig::default(), metrics, Arc::default())
}

fn update(document: u128, prev_len: u32, tokens: &[u32], weight_version: u64) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len,
        tokens: tokens.to_vec(),
        head: DocumentHead {
            weight_version,
            ..DocumentHead::default()
        },
        finish: None,
    }
}

fn join(groups: &Groups, namespace: NamespaceId, name: &str, document: u128) -> GroupMembership {
    groups.join(namespace, name, DocumentId(document)).unwrap()
}

fn lengths<const N: usize>(group: &GroupReplica, documents: [u128; N]) -> [Option<u32>; N] {
    documents.map(|document| group.read().len_of(DocumentId(document)))
}

#[test]
fn groups_of_one_name_are_apart_in_two_namespaces() {
    let groups = groups(|_| {});
    let members = [
        join(&groups, ONE, "a", 1),
        join(&groups, ONE, "a", 2),
        join(&groups, ANOTHER, "a", 3),
        join(&groups, ONE, "b", 4),
    ];
    members[0].group().merge((&update(1, 0, &[1, 2], 1)).into());
    let seen = members
        .each_ref()
        .map(|member| lengths(member.group(), [1]));
    assert_eq!(seen, [[Some(2)], [Some(2)], [None], [None]]);
    assert_eq!(groups.all().len(), 3);
    groups.forget(ONE);
    assert_eq!(groups.all().len(), 1);
}

#[test]
fn the_least_recently_used_idle_group_is_evicted() {
    let groups = groups(|config| config.groups_max = 2);
    let first = join(&groups, ONE, "first", 1);
    first.group().merge((&update(1, 0, &[1, 2], 1)).into());
    drop(join(&groups, ONE, "second", 2));
    let third = join(&groups, ONE, "third", 3);
    // "second" was evicted, and requests of both other groups run.
    assert!(groups.join(ONE, "fourth", DocumentId(4)).is_none());
    assert_eq!(
        lengths(join(&groups, ONE, "first", 5).group(), [1]),
        [Some(2)]
    );
    drop(third);
    assert!(groups.join(ONE, "fourth", DocumentId(4)).is_some());
    assert_eq!(groups.all().len(), 2);
}

#[test]
fn a_group_expires_when_no_request_has_joined_it_for_a_while() {
    let groups = groups(|config| config.group_ttl_ms = 1000);
    let running = join(&groups, ONE, "running", 1);
    drop(join(&groups, ONE, "idle", 2));
    let now = Instant::now();
    groups.expire(now);
    assert_eq!(groups.all().len(), 2);
    groups.expire(now + Duration::from_secs(2));
    assert_eq!(groups.all().len(), 1);
    drop(running);
    groups.expire(Instant::now() + Duration::from_secs(2));
    assert!(groups.all().is_empty());
}

#[test]
fn outputs_of_older_weights_stay_beside_those_of_newer_ones() {
    let groups = groups(|_| {});
    let member = join(&groups, ONE, "a", 1);
    let group = member.group();
    // A continued output is merged before its weights are known.
    group.merge((&update(1, 0, &[1, 2], 0)).into());
    group.merge((&update(2, 0, &[1, 2], 3)).into());
    group.merge((&update(3, 0, &[5], 4)).into());
    group.merge((&update(2, 2, &[6], 3)).into());
    group.merge((&update(4, 0, &[7], 3)).into());
    group.merge((&update(1, 2, &[8], 4)).into());
    let all = [Some(3), Some(3), Some(1), Some(1)];
    assert_eq!(lengths(group, [1, 2, 3, 4]), all);
    assert_eq!(group.read().index.tokens(), 8);
}

#[test]
fn a_full_group_evicts_ended_outputs_and_takes_no_more_of_running_ones() {
    let groups = groups(|config| config.group_tokens_max = 10);
    drop(join(&groups, ONE, "a", 1));
    let member = join(&groups, ONE, "a", 2);
    let group = member.group();
    group.merge((&update(1, 0, &[1; 6], 1)).into());
    group.merge((&update(2, 0, &[2; 6], 1)).into());
    assert_eq!(lengths(group, [1, 2]), [None, Some(6)]);
    group.merge((&update(2, 6, &[3; 4], 1)).into());
    // One more token is too many, and the next update comes after a gap.
    group.merge((&update(2, 10, &[4], 1)).into());
    group.merge((&update(2, 11, &[], 1)).into());
    assert_eq!(lengths(group, [2]), [Some(10)]);
}

#[test]
fn all_groups_together_are_bounded_and_idle_ones_make_room() {
    let groups = groups(|config| config.groups_tokens_max = 16);
    let idle = join(&groups, ONE, "idle", 1);
    idle.group().merge((&update(1, 0, &[1; 6], 0)).into());
    let running = join(&groups, ONE, "running", 2);
    running.group().merge((&update(2, 0, &[2; 9], 0)).into());
    // Two more would be too many.
    running.group().merge((&update(2, 9, &[3; 2], 0)).into());
    assert_eq!(lengths(running.group(), [2]), [Some(9)]);
    assert_eq!(groups.recount(), 15, "both run");
    drop(idle);
    assert_eq!(groups.recount(), 9);
    assert_eq!(groups.all().len(), 1);
    running.group().merge((&update(2, 9, &[3; 2], 0)).into());
    assert_eq!(lengths(running.group(), [2]), [Some(11)]);
}

#[test]
fn tokens_that_a_full_group_has_already_need_no_capacity() {
    let groups = groups(|config| config.group_tokens_max = 10);
    drop(join(&groups, ONE, "a", 1));
    let member = join(&groups, ONE, "a", 2);
    let group = member.group();
    group.merge((&update(1, 0, &[1; 4], 1)).into());
    group.merge((&update(2, 0, &[2; 5], 1)).into());
    group.merge((&update(2, 0, &[2; 6], 1)).into());
    assert_eq!(lengths(group, [1, 2]), [Some(4), Some(6)]);
    group.merge((&update(2, 5, &[2; 2], 1)).into());
    assert_eq!(lengths(group, [1, 2]), [None, Some(7)]);
}

#[test]
fn removed_documents_are_removed_from_groups_too() {
    let groups = groups(|_| {});
    let member = join(&groups, ONE, "a", 1);
    let group = member.group();
    for document in 1..4 {
        group.merge((&update(document, 0, &[1, 2], 1)).into());
    }
    groups.remove(ANOTHER, &[DocumentId(2)]);
    assert_eq!(lengths(group, [1, 2, 3]), [Some(2); 3]);
    groups.remove(ONE, &[DocumentId(2)]);
    assert_eq!(lengths(group, [1, 2, 3]), [Some(2), None, Some(2)]);
    let read_to = FeedCursor {
        generation: 1,
        sequence: 9,
        ..FeedCursor::default()
    };
    let before = group.log_position();
    group.advance_log(before, read_to);
    assert_eq!(group.log_position().cursor, read_to);
    assert!(!group.has_begun_anew(before));
    groups.reset(ONE);
    assert_eq!(lengths(group, [1, 2, 3]), [Some(2), None, None]);
    assert_eq!(group.log_position().cursor, FeedCursor::default());
    // A reader that comes back with what was read before is late: that is gone with the tree.
    assert!(group.has_begun_anew(before));
    group.advance_log(before, read_to);
    assert_eq!(group.log_position().cursor, FeedCursor::default());
}

#[test]
fn calls_that_must_not_wait_return_while_another_thread_holds_a_lock() {
    let groups = groups(|config| config.groups_max = 1);
    let try_join = |document| groups.try_join(ONE, "a", DocumentId(document));
    let another = join(&groups, ONE, "another", 1);
    // The other group would have to be evicted, which only a call that may wait does.
    drop(another);
    assert!(try_join(1).is_none());
    groups.forget(ONE);
    let member = try_join(1).unwrap();

    let all = groups.groups.lock();
    assert!(try_join(2).is_none());
    drop(all);
    let drafts = member.group().write();
    assert!(try_join(2).is_none());
    assert!(
        member
            .group()
            .try_merge_emitted((&update(1, 0, &[1, 2], 1)).into(), true)
            .is_none()
    );
    drop(drafts);
    // The time of the last use is not waited for.
    let last_used = member.group().last_used.lock();
    let second = try_join(2).unwrap();
    drop(last_used);

    assert!(
        member
            .group()
            .try_merge_emitted((&update(1, 0, &[1, 2], 2)).into(), true)
            .is_some()
    );
    assert!(
        second
            .group()
            .try_merge_emitted((&update(2, 0, &[3, 4], 2)).into(), true)
            .is_some()
    );
    assert_eq!(lengths(member.group(), [1, 2]), [Some(2), Some(2)]);
    let drafts = member.group().write();
    assert!(
        member
            .group()
            .try_merge_emitted((&update(2, 2, &[5], 3)).into(), true)
            .is_none()
    );
    drop(drafts);
    assert!(
        second
            .group()
            .try_merge_emitted((&update(2, 0, &[5], 3)).into(), true)
            .is_some()
    );
    assert_eq!(lengths(member.group(), [1, 2]), [Some(2), Some(2)]);
}
