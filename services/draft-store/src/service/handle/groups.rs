//! Groups of samples: registered by the owner of a rollout, read by workers that draft.

use refrain_protocol::ApiError;
use refrain_protocol::document::{
    FeedCursor, FetchGroupsReply, FetchGroupsRequest, FollowReply, GroupLog, RegisterGroupRequest,
};

use crate::catalog::GroupKey;
use crate::metrics::Limit;
use crate::reading::feed::FeedName;
use crate::service::handle::{DraftStoreHandle, REPLY_TOKENS_MAX};
use crate::shared_store::unavailable;
use crate::writer::messages::WriterMessage;
use crate::writer::requests::GroupRegistration;

/// How long a group may live without being registered again, whatever the caller asks for: one day.
const GROUP_TTL_MS_MAX: u64 = 24 * 3_600 * 1_000;

impl DraftStoreHandle {
    pub(super) async fn register(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        self.check_name("group", &request.group)?;
        let registration = GroupRegistration {
            group: (namespace, request.group),
            ttl_ms: request.ttl_ms.min(GROUP_TTL_MS_MAX),
            weight_version: request.weight_version,
        };
        self.ask(|reply| WriterMessage::Register(registration, reply))
            .await
    }

    pub(super) async fn fetch(
        &self,
        request: FetchGroupsRequest,
    ) -> Result<FetchGroupsReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        let most = self.inner.config.tuning.updates_max;
        self.check_count(request.groups.len(), most, "groups", Limit::Updates)?;
        let mut tokens_max = request.max_tokens.min(REPLY_TOKENS_MAX);
        let mut groups = Vec::with_capacity(request.groups.len());
        let mut is_spent = false;
        for wanted in request.groups {
            let group = (namespace, wanted.group);
            if !self.is_registered(&group)? {
                groups.push(GroupLog {
                    is_registered: false,
                    log: empty_reply(FeedCursor::default(), true),
                });
            } else if is_spent {
                groups.push(GroupLog {
                    is_registered: true,
                    log: empty_reply(wanted.after, false),
                });
            } else {
                let log = self
                    .read(FeedName::Group(group), wanted.after, tokens_max)
                    .await?;
                tokens_max = tokens_max.saturating_sub(log.tokens());
                is_spent = tokens_max == 0 || !log.caught_up;
                groups.push(GroupLog {
                    is_registered: true,
                    log,
                });
            }
        }
        Ok(FetchGroupsReply { groups })
    }

    fn is_registered(&self, group: &GroupKey) -> Result<bool, ApiError> {
        let open = self.inner.shared.read();
        let open = open.as_ref().ok_or_else(unavailable)?;
        Ok(open
            .catalog
            .groups()
            .is_live(group, self.inner.shared.now_ms()))
    }
}

/// An answer without news: for an unknown group (`reset`), or one for which this answer had no room left.
fn empty_reply(cursor: FeedCursor, reset: bool) -> FollowReply {
    FollowReply {
        reset,
        events: Vec::new(),
        cursor,
        caught_up: reset,
    }
}
