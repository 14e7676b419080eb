//! Following the draft store: one task pulls the news of all namespaces and of the groups that run here.
//!
//! A scope is *ready* when it may be asked for, and *busy* while a job of its own works on it: takes it over, applies
//! news or pauses after a refusal. So no scope holds up another one. The position of a scope is a value that its job
//! gets and gives back. `schedule.rs` decides when the store is asked for which scopes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::pull::{
    NamespacePull, PullReply, PullRequest, Scope, ScopeDelta, ScopeNews, ScopePull,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::backoff::Backoff;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::Instant;

use super::group_log::GroupLog;
use super::groups::GroupReplica;
use super::ingest::Ingest;
use super::namespace::NamespaceReplica;
use super::namespace_feed::NamespaceFeed;
use super::registry::{Registry, SharedState};
use super::schedule::{Ask, Next, Schedule, ScopeKey};
use super::take_over::store_backoff;
use crate::metrics::{DONE, FAILED};

/// Most documents that a call names as the reader's own. Further ones come back with the news.
const OWN_DOCUMENTS_MAX: usize = 2_048;

/// Longest wait for news while further scopes have to wait for their turn.
const TURN_MS: u32 = 100;

/// Pause until a scope whose job panicked begins anew.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// The namespace or the group that is followed under a key.
#[derive(Clone)]
struct Followed {
    namespace: Arc<NamespaceReplica>,
    group: Option<Arc<GroupReplica>>,
}

/// A scope that is known, with the last job that worked on it. The job is aborted when this is dropped.
struct KnownScope {
    followed: Followed,
    job: AbortHandle,
    /// `None` while the job has it.
    ready: Option<Box<ReadyScope>>,
}

/// A scope with its position.
struct ReadyScope {
    namespace: Arc<NamespaceReplica>,
    feed: Feed,
    /// When the signature of the last call was made.
    signed_at_s: u64,
    backoff: Backoff,
    is_refused: bool,
}

enum Feed {
    Namespace(Box<NamespaceFeed>),
    Group(GroupLog),
}

/// A call that is not answered yet.
struct Pull {
    ask: Ask,
    call: AbortHandle,
}

/// The result of a task.
enum Done {
    Ready(ScopeKey, Box<ReadyScope>),
    Pulled(u32, Result<PullReply, ApiError>),
}

/// The task that follows the store.
pub(super) struct Follower {
    registry: Arc<Registry>,
    schedule: Schedule,
    scopes: BTreeMap<ScopeKey, KnownScope>,
    /// The calls by shard.
    pulls: HashMap<u32, Pull>,
    outage: Outage,
    /// All jobs and calls. They end with the follower.
    tasks: JoinSet<Done>,
}

impl Drop for KnownScope {
    fn drop(&mut self) {
        self.job.abort();
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.call.abort();
    }
}

impl Follower {
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        let interval = Duration::from_millis(registry.shared.config.pull_interval_ms);
        Follower {
            schedule: Schedule::new(interval),
            registry,
            scopes: BTreeMap::new(),
            pulls: HashMap::new(),
            outage: Outage::default(),
            tasks: JoinSet::new(),
        }
    }

    /// Follows all scopes of the registry until it is aborted.
    pub(super) async fn run(mut self) {
        let shared = self.registry.shared.clone();
        self.find_scopes();
        loop {
            let wake_at = match self.schedule.next(Instant::now().into_std()) {
                Next::Ask(ask) => {
                    self.pull(ask);
                    continue;
                }
                Next::Wait(until) => until.map(Instant::from_std),
            };
            let due = async {
                match wake_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(done) = self.tasks.join_next_with_id() => self.end(done),
                () = shared.scopes_changed.notified() => self.find_scopes(),
                () = due => {}
            }
        }
    }

    /// Begins with new scopes, and ends with those that are gone.
    fn find_scopes(&mut self) {
        let mut wanted = BTreeMap::new();
        for namespace in self.registry.namespaces() {
            let key = (namespace.id, Scope::Namespace);
            let group = None;
            wanted.insert(key, Followed { namespace, group });
        }
        let groups = self.registry.shared.groups.entries().into_iter();
        for ((id, name), group) in groups.filter(|(_, group)| group.is_in_use()) {
            // Without the namespace there is no signature. The next request of the namespace brings one.
            let Some(namespace) = self.registry.followed(id) else {
                continue;
            };
            let group = Some(group);
            wanted.insert((id, Scope::Group(name)), Followed { namespace, group });
        }
        let gone = |key: &ScopeKey, known: &KnownScope| {
            let wanted = wanted.get(key);
            !wanted.is_some_and(|wanted| wanted.is_same(&known.followed))
        };
        let known = self.scopes.iter();
        let gone = known.filter(|(key, known)| gone(key, known));
        let gone: Vec<ScopeKey> = gone.map(|(key, _)| key.clone()).collect();
        for key in gone {
            self.forget(&key);
        }
        for (key, followed) in wanted {
            if !self.scopes.contains_key(&key) {
                self.begin(key, followed, Duration::ZERO);
            }
        }
        self.count_groups();
    }

    fn forget(&mut self, key: &ScopeKey) {
        self.scopes.remove(key);
        self.schedule.remove(key);
    }

    fn count_groups(&self) {
        let scopes = self.scopes.values();
        let groups = scopes.filter(|known| known.followed.group.is_some());
        let followed = &self.registry.shared.metrics.groups_followed;
        followed.set(groups.count() as i64);
    }

    /// Begins to follow a scope after a pause.
    fn begin(&mut self, key: ScopeKey, followed: Followed, pause: Duration) {
        let shared = self.registry.shared.clone();
        let (begun, of) = (key.clone(), followed.clone());
        let job = self.tasks.spawn(async move {
            tokio::time::sleep(pause).await;
            let ready = ReadyScope::begin(shared, of, &begun.1).await;
            Done::Ready(begun, Box::new(ready))
        });
        let ready = None;
        let known = KnownScope {
            followed,
            job,
            ready,
        };
        self.scopes.insert(key, known);
    }

    /// Makes a call.
    fn pull(&mut self, mut ask: Ask) {
        let config = &self.registry.shared.config;
        let mut request = PullRequest {
            namespaces: Vec::new(),
            max_tokens: config.pull_tokens,
            wait_ms: match ask.is_partial {
                true => config.pull_wait_ms.min(TURN_MS),
                false => config.pull_wait_ms,
            },
        };
        let mut own_left = OWN_DOCUMENTS_MAX;
        let mut idle = Vec::new();
        ask.scopes.retain(|key| {
            let known = self.scopes.get_mut(key);
            let Some(scope) = known.and_then(|known| known.ready.as_mut()) else {
                return false;
            };
            if !scope.is_wanted() {
                idle.push(key.clone());
                return false;
            }
            if scope.is_urgent() {
                request.wait_ms = 0;
            }
            scope.add_to(&mut request, &key.1, &mut own_left);
            true
        });
        for key in idle {
            self.forget(&key);
        }
        self.count_groups();
        if ask.scopes.is_empty() {
            let now = Instant::now().into_std();
            return self.schedule.record_answer(&ask, false, None, now);
        }
        let (store, shard) = (self.registry.shared.store.clone(), ask.shard);
        let call = async move { Done::Pulled(shard, store.pull(request).await) };
        let call = self.tasks.spawn(call);
        self.pulls.insert(shard, Pull { ask, call });
    }

    /// Takes the result of a task. That of a task which has been replaced meanwhile does not count.
    fn end(&mut self, done: Result<(Id, Done), JoinError>) {
        match done {
            Ok((id, Done::Ready(key, scope))) => {
                let known = self.scopes.get_mut(&key);
                if let Some(known) = known.filter(|known| known.job.id() == id) {
                    known.ready = Some(scope);
                    let shard = self.registry.shared.store.shard_of(key.0);
                    self.schedule.set_idle(key, shard);
                }
            }
            Ok((id, Done::Pulled(shard, answer))) => {
                if self
                    .pulls
                    .get(&shard)
                    .is_some_and(|pull| pull.call.id() == id)
                    && let Some(pull) = self.pulls.remove(&shard)
                {
                    self.absorb(&pull.ask, answer);
                }
            }
            Err(error) => self.recover(&error),
        }
    }

    /// Begins anew with the scope whose job panicked: the job may have left anything.
    fn recover(&mut self, error: &JoinError) {
        let id = error.id();
        if let Some(pull) = self.pulls.extract_if(|_, pull| pull.call.id() == id).next() {
            self.schedule
                .record_failure(&pull.1.ask, Instant::now().into_std());
        }
        let mut known = self.scopes.iter();
        let Some((key, known)) = known.find(|(_, known)| known.job.id() == id) else {
            return;
        };
        tracing::error!("a job that follows the draft store panicked; its scope begins anew");
        let (key, followed) = (key.clone(), known.followed.clone());
        self.forget(&key);
        followed.reset(&self.registry);
        self.begin(key, followed, RESTART_PAUSE);
    }

    fn absorb(&mut self, ask: &Ask, answer: Result<PullReply, ApiError>) {
        let (now, metrics) = (Instant::now(), &self.registry.shared.metrics);
        let outcome = if answer.is_ok() { DONE } else { FAILED };
        metrics.pulls.with_label_values(&[outcome]).inc();
        let reply = match answer {
            Ok(reply) => reply,
            Err(error) => {
                metrics.follow_failures.inc();
                if self.outage.is_news(error.kind) {
                    tracing::warn!(
                        %error,
                        "the draft store cannot be followed; it is asked again, with growing pauses"
                    );
                }
                self.schedule.record_failure(ask, now.into_std());
                // The shards may have become known since.
                for key in &ask.scopes {
                    let shard = self.registry.shared.store.shard_of(key.0);
                    self.schedule.set_shard(key, shard);
                }
                return;
            }
        };
        if self.outage.end() {
            tracing::info!("the draft store is followed again");
        }
        let deltas = reply.deltas.into_iter();
        let mut news: HashMap<usize, ScopeNews> = deltas
            .map(|ScopeDelta { scope, news }| (scope as usize, news))
            .collect();
        let last = news.keys().max().copied();
        let scopes = (0..).zip(&ask.scopes);
        let asked: Vec<(usize, &ScopeKey)> = scopes
            .filter(|(_, key)| self.schedule.is_asked(key, ask))
            .collect();
        self.schedule
            .record_answer(ask, reply.is_full, last, now.into_std());
        for (at, key) in asked {
            match news.remove(&at) {
                None if reply.is_full => {}
                news => self.visit(key, news, now),
            }
        }
    }

    /// Has a job do what an answer asks for, if there is anything. Without news the scope is at its end.
    fn visit(&mut self, key: &ScopeKey, news: Option<ScopeNews>, arrived: Instant) {
        let needs_visit = |scope: &mut Box<ReadyScope>| news.is_some() || scope.needs_visit();
        let Some(known) = self.scopes.get_mut(key) else {
            return;
        };
        let Some(mut scope) = known.ready.take_if(needs_visit) else {
            return;
        };
        self.schedule.set_busy(key);
        if matches!(news, Some(ScopeNews::Refused { .. })) {
            self.registry.shared.metrics.follow_failures.inc();
        }
        let key = key.clone();
        known.job = self.tasks.spawn(async move {
            scope.absorb(news, arrived).await;
            Done::Ready(key, scope)
        });
    }
}

impl Followed {
    fn is_same(&self, other: &Followed) -> bool {
        let groups = (&self.group, &other.group);
        let is_same_group = match groups {
            (Some(group), Some(other)) => Arc::ptr_eq(group, other),
            (None, None) => true,
            _ => false,
        };
        is_same_group && Arc::ptr_eq(&self.namespace, &other.namespace)
    }

    /// Removes all documents but those of requests that run here.
    fn reset(&self, registry: &Registry) {
        match &self.group {
            Some(group) => {
                group.begin_log_anew();
                group.write().reset();
            }
            None => {
                let (namespace, shared) = (self.namespace.clone(), registry.shared.clone());
                Ingest { namespace, shared }.reset();
            }
        }
    }
}

impl ReadyScope {
    async fn begin(shared: Arc<SharedState>, of: Followed, scope: &Scope) -> Self {
        let namespace = of.namespace.clone();
        let feed = match (of.group, scope) {
            (Some(group), Scope::Group(name)) => {
                let name = name.clone();
                Feed::Group(GroupLog::begin(shared, of.namespace, name, group).await)
            }
            _ => {
                let namespace = of.namespace;
                let feed = NamespaceFeed::begin(Ingest { namespace, shared });
                Feed::Namespace(Box::new(feed.await))
            }
        };
        ReadyScope {
            namespace,
            feed,
            signed_at_s: 0,
            backoff: store_backoff(),
            is_refused: false,
        }
    }

    /// Whether it is still followed. The log of a group that no longer runs here goes on with the next request.
    fn is_wanted(&self) -> bool {
        match &self.feed {
            Feed::Namespace(_) => true,
            Feed::Group(log) => log.is_in_use(),
        }
    }

    /// Whether an answer is wanted at once, even without news.
    fn is_urgent(&self) -> bool {
        matches!(&self.feed, Feed::Namespace(feed) if feed.is_urgent())
    }

    /// Whether there is something to do at the end, even without news.
    fn needs_visit(&self) -> bool {
        match &self.feed {
            Feed::Namespace(feed) => feed.needs_visit(),
            Feed::Group(log) => log.needs_registration(),
        }
    }

    /// Adds the scope to a call, with at most as many own documents as are left for it.
    fn add_to(&mut self, request: &mut PullRequest, scope: &Scope, own_left: &mut usize) {
        let (mut own, after) = match &mut self.feed {
            Feed::Namespace(feed) => (feed.own(), feed.cursor),
            Feed::Group(log) => log.ask(),
        };
        own.truncate(*own_left);
        *own_left -= own.len();
        let scope = scope.clone();
        let pull = ScopePull { scope, after, own };
        let signed = self.namespace.signed();
        self.signed_at_s = signed.issued_at_s;
        match request.namespaces.last_mut() {
            Some(last) if last.namespace == signed => last.scopes.push(pull),
            _ => request.namespaces.push(NamespacePull {
                namespace: signed,
                scopes: vec![pull],
            }),
        }
    }

    async fn absorb(&mut self, news: Option<ScopeNews>, arrived: Instant) {
        if let Some(ScopeNews::Refused { kind, message }) = news {
            return self.pause(kind, &message).await;
        }
        if news.is_some() {
            self.backoff.reset();
            self.is_refused = false;
        }
        match (&mut self.feed, news) {
            (Feed::Namespace(feed), Some(ScopeNews::Changes { delta, .. })) => {
                feed.apply(delta).await;
            }
            (Feed::Namespace(feed), _) => feed.reach_end().await,
            (Feed::Group(log), Some(ScopeNews::Changes { delta, age_ms })) => {
                log.apply(delta, age_ms, arrived).await;
                log.renew().await;
            }
            (Feed::Group(log), Some(_)) => log.register_again().await,
            (Feed::Group(log), None) => log.renew().await,
        }
    }

    /// Waits until the store may answer for the scope again.
    async fn pause(&mut self, kind: ErrorKind, message: &str) {
        if kind == ErrorKind::Unauthorized {
            tracing::info!(
                message,
                "a namespace is followed again when a request brings a newer signature"
            );
            return self.namespace.newer_signature(self.signed_at_s).await;
        }
        if !std::mem::replace(&mut self.is_refused, true) {
            tracing::warn!(
                ?kind,
                message,
                "the draft store refuses a namespace or a group; it is asked again, with growing pauses"
            );
        }
        tokio::time::sleep(self.backoff.pause()).await;
    }
}

/// Which failures of calls have been logged: each outage once, not every retry.
#[derive(Default)]
struct Outage {
    is_logged: bool,
    is_refusal_logged: bool,
}

impl Outage {
    /// Notes a failed call. Returns whether it is to be logged.
    ///
    /// A store in which too many wait refuses a call whenever there is no news, and answers it where there is.
    /// Refusals are then the normal case, so only the first one is logged.
    fn is_news(&mut self, kind: ErrorKind) -> bool {
        let was_logged = match kind {
            ErrorKind::Overloaded => &mut self.is_refusal_logged,
            _ => &mut self.is_logged,
        };
        !std::mem::replace(was_logged, true)
    }

    /// Notes a call that succeeded. Returns whether an outage has ended with it.
    fn end(&mut self) -> bool {
        std::mem::take(&mut self.is_logged)
    }
}

#[cfg(test)]
mod tests;
