//! Reading the logs of several groups with one call.

use std::collections::HashSet;

use refrain_protocol::document::{FeedCursor, FollowReply};
use refrain_protocol::group::{GroupCursor, GroupLog};
use refrain_protocol::{ApiError, DocumentId, NamespaceId};

use crate::catalog::{GroupKey, GroupReader};
use crate::reading::feed::{FeedRead, read_group};
use crate::record::DocumentKey;
use crate::shared_store::SharedStore;

/// Reads the changes of groups, the first ones first, until `tokens_max` tokens are read. Those for which nothing is
/// left keep their cursors.
///
/// Blocks on the disk and on the writer, so call it from blocking threads only.
pub(crate) fn read_groups(
    shared: &SharedStore,
    namespace: NamespaceId,
    wanted: Vec<GroupCursor>,
    tokens_max: usize,
) -> Result<(Vec<GroupLog>, HashSet<DocumentKey>), ApiError> {
    let mut left = tokens_max;
    let mut is_spent = false;
    let mut damaged = HashSet::new();
    let mut logs = Vec::with_capacity(wanted.len());
    for GroupCursor { group, after, own } in wanted {
        let group: GroupKey = (namespace, group);
        if !shared
            .read()?
            .catalog
            .groups
            .is_live(&group, shared.now_ms())
        {
            logs.push(without_news(false, FeedCursor::default()));
            continue;
        }
        if is_spent {
            logs.push(without_news(true, after));
            continue;
        }
        let own: HashSet<DocumentId> = own.into_iter().collect();
        let reader = GroupReader {
            group: &group,
            own: &own,
        };
        let mut emitted_ms: Option<u64> = None;
        let read = read_group(shared, &reader, after, left, |catalog, sequence| {
            let newest_ms = catalog.groups.emitted_ms(&group, sequence);
            emitted_ms = [emitted_ms, newest_ms].into_iter().flatten().min();
        })?;
        let FeedRead {
            reply,
            damaged: unreadable,
        } = read;
        damaged.extend(unreadable);
        left = left.saturating_sub(reply.tokens() as usize);
        is_spent = left == 0 || !reply.caught_up;
        let age_ms = emitted_ms.map(|emitted_ms| shared.now_ms().saturating_sub(emitted_ms));
        logs.push(GroupLog {
            is_registered: true,
            log: reply,
            age_ms: age_ms.map(|age_ms| u32::try_from(age_ms).unwrap_or(u32::MAX)),
        });
    }
    Ok((logs, damaged))
}

/// The answer for a group that is not registered, or for which this answer had no room left.
fn without_news(is_registered: bool, cursor: FeedCursor) -> GroupLog {
    GroupLog {
        is_registered,
        log: FollowReply {
            reset: !is_registered,
            events: Vec::new(),
            cursor,
            caught_up: !is_registered,
        },
        age_ms: None,
    }
}
