//! The shared indexes of a replay: one per namespace, and one per group of samples.

use std::collections::HashMap;
use std::rc::Rc;

use refrain_protocol::document::LEFT_CONTEXT_TOKENS;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, IndexError, SegmentError, Token};
use serde::Serialize;

use super::clock::Spent;
use super::namespace::Namespace;
use super::presets::{Automaton, add_text};
use crate::logs::RecordedCall;

/// Most groups at once. Beyond this the least recently used group is evicted, as it would be after its rollout.
const GROUPS_MAX: usize = 4096;

/// The settings of the shared indexes.
#[derive(Clone, Debug)]
pub(crate) struct SharedIndexConfig {
    pub(crate) index: IndexConfig,
    /// Keep an index per namespace.
    pub(crate) global: bool,
    /// Keep an index per group.
    pub(crate) groups: bool,
    /// Keep an automaton per namespace of the warm outputs.
    pub(crate) corpus: bool,
    /// Seal a namespace's finished outputs once its live part has this many tokens; warm outputs are then sealed as
    /// well. `None` keeps everything live.
    pub(crate) seal_tokens: Option<u64>,
}

/// The namespace and the group to which a call's output belongs.
#[derive(Clone, Debug)]
pub(super) struct Membership {
    /// Number of the namespace, in the order of first occurrence.
    pub(super) namespace: usize,
    group: Option<GroupKey>,
}

type GroupKey = (usize, Rc<str>);

/// All shared indexes of a replay.
pub(super) struct SharedIndexes {
    config: SharedIndexConfig,
    namespaces: Vec<Namespace>,
    /// Number of each tenant's namespace. Calls without a tenant share one of their own.
    tenants: HashMap<Option<String>, usize>,
    groups: HashMap<GroupKey, Group>,
    next_key: u128,
    /// The times so far, and the number of evicted groups.
    costs: IndexCosts,
}

struct Group {
    index: Index,
    /// Key of the most recently opened document.
    used: u128,
    running: u32,
}

/// Sizes of the shared indexes at the end of a replay.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct SharedIndexSizes {
    /// Bytes of the live parts of the namespaces' indexes.
    pub live_bytes: u64,
    /// Bytes of the sealed segments of these indexes.
    pub segment_bytes: u64,
    /// Sealed segments.
    pub segments: u64,
    /// Bytes of the groups' indexes.
    pub group_bytes: u64,
    /// Namespaces that occurred.
    pub namespaces: u64,
    /// Groups in memory.
    pub groups: u64,
    /// Groups that were evicted before.
    pub groups_evicted: u64,
}

/// Sizes of the shared indexes, and the times that they took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IndexCosts {
    pub(crate) sizes: SharedIndexSizes,
    /// Time to add to namespaces.
    pub(crate) inserted: Spent,
    /// Time to add to groups.
    pub(crate) grouped: Spent,
    /// Time to add warm outputs to namespaces.
    pub(crate) warmed: Spent,
    /// Time to seal and merge, by sealed tokens.
    pub(crate) sealed: Spent,
}

impl SharedIndexes {
    pub(super) fn new(config: SharedIndexConfig) -> Self {
        SharedIndexes {
            config,
            namespaces: Vec::new(),
            tenants: HashMap::new(),
            groups: HashMap::new(),
            next_key: 0,
            costs: IndexCosts::default(),
        }
    }

    /// The settings of all indexes.
    pub(super) fn index_config(&self) -> &IndexConfig {
        &self.config.index
    }

    /// Finds or makes the call's namespace and group. A group stays until all of its calls [`leave`](Self::leave).
    pub(super) fn enter(&mut self, call: &RecordedCall) -> Membership {
        let next = self.namespaces.len();
        let namespace = *self.tenants.entry(call.tenant.clone()).or_insert(next);
        if namespace == next {
            let index = self.config.index.clone();
            self.namespaces.push(Namespace::new(index));
        }
        let name = call.group.as_deref().filter(|_| self.config.groups);
        let group = name.map(|name| (namespace, Rc::from(name)));
        if let Some(key) = &group {
            let used = self.next_key;
            let group = self.groups.entry(key.clone()).or_insert_with(|| Group {
                index: Index::new(self.config.index.clone()),
                used,
                running: 0,
            });
            group.used = used;
            group.running += 1;
            self.evict();
        }
        Membership { namespace, group }
    }

    /// Ends a call; `key` is its document, if it has one.
    pub(super) fn leave(
        &mut self,
        of: &Membership,
        key: Option<DocumentKey>,
    ) -> Result<(), IndexError> {
        if let Some(group) = group_of(&mut self.groups, of) {
            group.running -= 1;
        }
        let namespace = &mut self.namespaces[of.namespace];
        if let Some(key) = key {
            namespace.open.remove(&key);
        }
        let before = namespace.index.live_tokens();
        let most = self.config.seal_tokens;
        if most.is_some_and(|most| before >= most.max(1)) {
            let sealed = &mut self.costs.sealed;
            sealed.on(0, || namespace.seal())?;
            sealed.tokens += before - namespace.index.live_tokens();
        }
        Ok(())
    }

    /// Adds a whole warm call. It can be drafted from after [`warm_up`](Self::warm_up).
    pub(super) fn add_known(&mut self, call: &RecordedCall) -> anyhow::Result<()> {
        let of = self.enter(call);
        let key = self.next_key();
        let left = left_context(&call.prompt);
        let (output, warmed) = (&call.output, &mut self.costs.warmed);
        let namespace = &mut self.namespaces[of.namespace];
        if self.config.global {
            let is_sealed = self.config.seal_tokens.is_some();
            warmed.on(output.len(), || match is_sealed {
                true => anyhow::Ok(namespace.add_known(key, left, output)?),
                false => Ok(add_whole(&mut namespace.index, key, left, output)?),
            })?;
        }
        if self.config.corpus {
            let corpus = namespace.corpus.get_or_insert_default();
            warmed.on(output.len(), || add_text(corpus, output));
        }
        if let Some(group) = group_of(&mut self.groups, &of) {
            add_whole(&mut group.index, key, left, output)?;
            group.running -= 1;
        }
        Ok(())
    }

    /// Builds the segments of the warm calls, after the last of them.
    pub(super) fn warm_up(&mut self) -> Result<(), SegmentError> {
        for namespace in &mut self.namespaces {
            self.costs.warmed.on(0, || namespace.mount())?;
        }
        Ok(())
    }

    fn next_key(&mut self) -> DocumentKey {
        self.next_key += 1;
        DocumentKey(self.next_key)
    }

    fn evict(&mut self) {
        while self.groups.len() > GROUPS_MAX {
            let idle = self.groups.iter().filter(|(_, group)| group.running == 0);
            let Some(oldest) = idle.min_by_key(|(_, group)| group.used) else {
                return;
            };
            let key = oldest.0.clone();
            self.groups.remove(&key);
            self.costs.sizes.groups_evicted += 1;
        }
    }

    /// Begins the document of a call's output.
    pub(super) fn open(
        &mut self,
        of: &Membership,
        prompt: &[Token],
    ) -> Result<DocumentKey, IndexError> {
        let key = self.next_key();
        let left = left_context(prompt);
        if self.config.global {
            let namespace = &mut self.namespaces[of.namespace];
            namespace.open.insert(key);
            let index = &mut namespace.index;
            self.costs.inserted.on(0, || index.open(key, left))?;
        }
        if let Some(Group { index, .. }) = group_of(&mut self.groups, of) {
            self.costs.grouped.on(0, || index.open(key, left))?;
        }
        Ok(key)
    }

    /// Appends to the document.
    pub(super) fn append(
        &mut self,
        of: &Membership,
        key: DocumentKey,
        tokens: &[Token],
    ) -> Result<(), IndexError> {
        let costs = &mut self.costs;
        if self.config.global {
            let index = &mut self.namespaces[of.namespace].index;
            costs
                .inserted
                .on(tokens.len(), || index.append(key, tokens))?;
        }
        if let Some(Group { index, .. }) = group_of(&mut self.groups, of) {
            costs
                .grouped
                .on(tokens.len(), || index.append(key, tokens))?;
        }
        Ok(())
    }

    /// The namespace's index, if there is one.
    pub(super) fn global(&self, of: &Membership) -> Option<&Index> {
        let namespace = &self.namespaces[of.namespace];
        self.config.global.then_some(&namespace.index)
    }

    /// The warm outputs, if they are kept as a corpus.
    pub(super) fn corpus(&self, of: &Membership) -> Option<&Automaton> {
        self.namespaces[of.namespace].corpus.as_ref()
    }

    /// The group's index, if there is one.
    pub(super) fn group(&self, of: &Membership) -> Option<&Index> {
        Some(&self.groups.get(of.group.as_ref()?)?.index)
    }

    /// Sizes and times at the end of a replay.
    pub(super) fn into_costs(self) -> IndexCosts {
        let mut costs = self.costs;
        let sizes = &mut costs.sizes;
        sizes.namespaces = self.namespaces.len() as u64;
        sizes.groups = self.groups.len() as u64;
        for group in self.groups.values() {
            sizes.group_bytes += group.index.bytes() as u64;
        }
        for namespace in &self.namespaces {
            let of_index = namespace.index.sizes();
            sizes.live_bytes += of_index.live_bytes as u64;
            sizes.segment_bytes += of_index.segment_bytes as u64;
            sizes.segments += of_index.segments as u64;
        }
        costs
    }
}

fn group_of<'a>(
    groups: &'a mut HashMap<GroupKey, Group>,
    of: &Membership,
) -> Option<&'a mut Group> {
    groups.get_mut(of.group.as_ref()?)
}

/// Adds an output that is complete.
fn add_whole(
    index: &mut Index,
    key: DocumentKey,
    left: &[Token],
    output: &[Token],
) -> Result<(), IndexError> {
    index.open(key, left)?;
    index.append(key, output)
}

/// The end of the prompt, into which patterns may reach.
fn left_context(prompt: &[Token]) -> &[Token] {
    &prompt[prompt.len().saturating_sub(LEFT_CONTEXT_TOKENS)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(tenant: Option<&str>, group: Option<&str>) -> RecordedCall {
        RecordedCall {
            tenant: tenant.map(str::to_owned),
            group: group.map(str::to_owned),
            ..RecordedCall::default()
        }
    }

    fn indexes() -> SharedIndexes {
        SharedIndexes::new(SharedIndexConfig {
            index: IndexConfig::default(),
            global: true,
            groups: true,
            corpus: false,
            seal_tokens: None,
        })
    }

    #[test]
    fn tenants_and_their_groups_are_separate() -> Result<(), IndexError> {
        let mut indexes = indexes();
        let memberships =
            [None, Some("a"), Some("b")].map(|tenant| indexes.enter(&call(tenant, Some("g"))));
        let key = indexes.open(&memberships[1], &[7; 40])?;
        indexes.append(&memberships[1], key, &[1, 2, 3])?;
        let tokens = memberships.each_ref().map(|of| {
            let index = [indexes.global(of), indexes.group(of)];
            index.map(|index| index.map(Index::tokens))
        });
        // The last 16 tokens of the prompt are kept for matching.
        assert_eq!(tokens, [[Some(0); 2], [Some(19); 2], [Some(0); 2]]);
        assert_eq!(
            (indexes.costs.inserted.tokens, indexes.costs.grouped.tokens),
            (3, 3)
        );
        let alone = indexes.enter(&call(None, None));
        assert!(indexes.group(&alone).is_none());
        Ok(())
    }

    #[test]
    fn the_least_recently_used_group_is_evicted_unless_it_runs() -> Result<(), IndexError> {
        let mut indexes = indexes();
        let mut memberships = Vec::new();
        for group in 0..=GROUPS_MAX + 1 {
            let of = indexes.enter(&call(None, Some(&group.to_string())));
            let key = indexes.open(&of, &[])?;
            // The first group keeps running.
            if group > 0 {
                indexes.leave(&of, Some(key))?;
            }
            memberships.push(of);
        }
        let there: Vec<bool> = memberships
            .iter()
            .map(|of| indexes.group(of).is_some())
            .collect();
        assert_eq!(there[..4], [true, false, false, true]);
        let sizes = indexes.into_costs().sizes;
        assert_eq!((sizes.groups, sizes.groups_evicted), (GROUPS_MAX as u64, 2));
        Ok(())
    }
}
