//! The shared indexes of a replay: one per namespace, and one per group of samples.

use std::collections::HashMap;
use std::rc::Rc;

use refrain_protocol::document::LEFT_CONTEXT_TOKENS;
use refrain_suffix_index::{
    DocumentKey, Index, IndexConfig, IndexError, IndexSizes, SegmentError, Token,
};

use super::clock::Spent;
use super::namespace::Namespace;
use super::presets::{Automaton, add_text};
use super::trace::RecordedCall;

/// Most groups at once. Beyond this the least recently used group is evicted, as it would be after its rollout.
const GROUPS_MAX: usize = 4096;

/// The settings of the shared indexes.
#[derive(Clone, Debug)]
pub(crate) struct MemoryConfig {
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

/// The namespace and group of a call's output.
#[derive(Clone, Debug)]
pub(super) struct Home {
    namespace: usize,
    group: Option<GroupKey>,
}

type GroupKey = (usize, Rc<str>);

impl Home {
    /// Number of the namespace, in the order of first occurrence.
    pub(super) fn namespace(&self) -> usize {
        self.namespace
    }
}

/// All shared indexes of a replay.
pub(super) struct Memory {
    config: MemoryConfig,
    namespaces: Vec<Namespace>,
    /// Number of each tenant's namespace. Calls without a tenant share one of their own.
    tenants: HashMap<Option<String>, usize>,
    groups: HashMap<GroupKey, Group>,
    /// By namespace.
    corpora: HashMap<usize, Automaton>,
    groups_evicted: u64,
    next_key: u128,
    /// Time to add to namespaces.
    inserted: Spent,
    /// Time to add to groups.
    grouped: Spent,
    /// Time to add warm outputs to namespaces.
    warmed: Spent,
    /// Time to seal and merge, by sealed tokens.
    sealed: Spent,
}

struct Group {
    index: Index,
    /// Key of the most recently opened document.
    used: u128,
    running: u32,
}

/// Sizes, for the report.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sizes {
    pub(crate) live_bytes: u64,
    pub(crate) segment_bytes: u64,
    pub(crate) segments: u64,
    pub(crate) group_bytes: u64,
    pub(crate) namespaces: u64,
    pub(crate) groups: u64,
    pub(crate) groups_evicted: u64,
}

/// Sizes and times of a memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryCosts {
    pub(crate) sizes: Sizes,
    pub(crate) inserted: Spent,
    pub(crate) grouped: Spent,
    pub(crate) warmed: Spent,
    pub(crate) sealed: Spent,
}

impl Memory {
    pub(super) fn new(config: MemoryConfig) -> Self {
        Memory {
            config,
            namespaces: Vec::new(),
            tenants: HashMap::new(),
            groups: HashMap::new(),
            corpora: HashMap::new(),
            groups_evicted: 0,
            next_key: 0,
            inserted: Spent::default(),
            grouped: Spent::default(),
            warmed: Spent::default(),
            sealed: Spent::default(),
        }
    }

    /// The settings of all indexes.
    pub(super) fn index_config(&self) -> &IndexConfig {
        &self.config.index
    }

    /// Finds or makes the call's namespace and group. A group stays until all of its calls [`leave`](Self::leave).
    pub(super) fn enter(&mut self, call: &RecordedCall) -> Home {
        let namespace = match self.tenants.get(&call.tenant) {
            Some(namespace) => *namespace,
            None => {
                self.namespaces
                    .push(Namespace::new(self.config.index.clone()));
                self.tenants
                    .insert(call.tenant.clone(), self.namespaces.len() - 1);
                self.namespaces.len() - 1
            }
        };
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
        Home { namespace, group }
    }

    /// Ends a call; `key` is its document, if it has one.
    pub(super) fn leave(
        &mut self,
        home: &Home,
        key: Option<DocumentKey>,
    ) -> Result<(), IndexError> {
        if let Some(group) = home.group.as_ref().and_then(|key| self.groups.get_mut(key)) {
            group.running -= 1;
        }
        let namespace = &mut self.namespaces[home.namespace];
        if let Some(key) = key {
            namespace.close(key);
        }
        let before = namespace.live_tokens();
        if self
            .config
            .seal_tokens
            .is_some_and(|most| before >= most.max(1))
        {
            self.sealed.on(0, || namespace.seal())?;
            self.sealed.tokens += before - namespace.live_tokens();
        }
        Ok(())
    }

    /// Adds a whole warm call. It can be drafted from after [`warm_up`](Self::warm_up).
    pub(super) fn add_known(&mut self, call: &RecordedCall) -> anyhow::Result<()> {
        let home = self.enter(call);
        let key = self.next_key();
        let left = left_context(&call.prompt);
        if self.config.global {
            let namespace = &mut self.namespaces[home.namespace];
            let is_sealed = self.config.seal_tokens.is_some();
            self.warmed.on(call.output.len(), || {
                if is_sealed {
                    namespace.add_known(key, left, &call.output)?;
                } else {
                    namespace.open(key, left)?;
                    namespace.append(key, &call.output)?;
                    namespace.close(key);
                }
                anyhow::Ok(())
            })?;
        }
        if self.config.corpus {
            let corpus = self.corpora.entry(home.namespace).or_default();
            self.warmed
                .on(call.output.len(), || add_text(corpus, &call.output));
        }
        if let Some(group) = home.group.as_ref().and_then(|key| self.groups.get_mut(key)) {
            group.index.open(key, left)?;
            group.index.append(key, &call.output)?;
            group.running -= 1;
        }
        Ok(())
    }

    /// Builds the segments of the warm calls, after the last of them.
    pub(super) fn warm_up(&mut self) -> Result<(), SegmentError> {
        for namespace in &mut self.namespaces {
            self.warmed.on(0, || namespace.mount())?;
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
            self.groups_evicted += 1;
        }
    }

    /// Begins the document of a call's output.
    pub(super) fn open(
        &mut self,
        home: &Home,
        prompt: &[Token],
    ) -> Result<DocumentKey, IndexError> {
        let key = self.next_key();
        let left = left_context(prompt);
        if self.config.global {
            let namespace = &mut self.namespaces[home.namespace];
            self.inserted.on(0, || namespace.open(key, left))?;
        }
        if let Some(group) = home.group.as_ref().and_then(|key| self.groups.get_mut(key)) {
            self.grouped.on(0, || group.index.open(key, left))?;
        }
        Ok(key)
    }

    /// Appends to the document.
    pub(super) fn append(
        &mut self,
        home: &Home,
        key: DocumentKey,
        tokens: &[Token],
    ) -> Result<(), IndexError> {
        if self.config.global {
            let namespace = &mut self.namespaces[home.namespace];
            self.inserted
                .on(tokens.len(), || namespace.append(key, tokens))?;
        }
        if let Some(group) = home.group.as_ref().and_then(|key| self.groups.get_mut(key)) {
            self.grouped
                .on(tokens.len(), || group.index.append(key, tokens))?;
        }
        Ok(())
    }

    /// The namespace's index, if there is one.
    pub(super) fn global(&self, home: &Home) -> Option<&Index> {
        self.config
            .global
            .then(|| self.namespaces[home.namespace].index())
    }

    /// The warm outputs, if they are kept as a corpus.
    pub(super) fn corpus(&self, home: &Home) -> Option<&Automaton> {
        self.corpora.get(&home.namespace)
    }

    /// The group's index, if there is one.
    pub(super) fn group(&self, home: &Home) -> Option<&Index> {
        Some(&self.groups.get(home.group.as_ref()?)?.index)
    }

    pub(super) fn costs(&self) -> MemoryCosts {
        MemoryCosts {
            sizes: self.sizes(),
            inserted: self.inserted,
            grouped: self.grouped,
            warmed: self.warmed,
            sealed: self.sealed,
        }
    }

    fn sizes(&self) -> Sizes {
        let mut sizes = Sizes {
            group_bytes: self
                .groups
                .values()
                .map(|group| group.index.bytes() as u64)
                .sum(),
            namespaces: self.namespaces.len() as u64,
            groups: self.groups.len() as u64,
            groups_evicted: self.groups_evicted,
            ..Sizes::default()
        };
        for namespace in &self.namespaces {
            let IndexSizes {
                live_bytes,
                segment_bytes,
                segments,
                ..
            } = namespace.index().sizes();
            sizes.live_bytes += live_bytes as u64;
            sizes.segment_bytes += segment_bytes as u64;
            sizes.segments += segments as u64;
        }
        sizes
    }
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

    fn memory() -> Memory {
        Memory::new(MemoryConfig {
            index: IndexConfig::default(),
            global: true,
            groups: true,
            corpus: false,
            seal_tokens: None,
        })
    }

    #[test]
    fn tenants_and_their_groups_are_separate() -> Result<(), IndexError> {
        let mut memory = memory();
        let homes =
            [None, Some("a"), Some("b")].map(|tenant| memory.enter(&call(tenant, Some("g"))));
        let key = memory.open(&homes[1], &[7; 40])?;
        memory.append(&homes[1], key, &[1, 2, 3])?;
        let tokens = homes.each_ref().map(|home| {
            let index = [memory.global(home), memory.group(home)];
            index.map(|index| index.map(Index::tokens))
        });
        // The last 16 tokens of the prompt are kept for matching.
        assert_eq!(tokens, [[Some(0); 2], [Some(19); 2], [Some(0); 2]]);
        assert_eq!((memory.inserted.tokens, memory.grouped.tokens), (3, 3));
        let alone = memory.enter(&call(None, None));
        assert!(memory.group(&alone).is_none());
        Ok(())
    }

    #[test]
    fn the_least_recently_used_group_is_evicted_unless_it_runs() -> Result<(), IndexError> {
        let mut memory = memory();
        let mut homes = Vec::new();
        for group in 0..=GROUPS_MAX + 1 {
            let home = memory.enter(&call(None, Some(&group.to_string())));
            let key = memory.open(&home, &[])?;
            // The first group keeps running.
            if group > 0 {
                memory.leave(&home, Some(key))?;
            }
            homes.push(home);
        }
        let there: Vec<bool> = homes
            .iter()
            .map(|home| memory.group(home).is_some())
            .collect();
        assert_eq!(there[..4], [true, false, false, true]);
        assert_eq!(memory.sizes().groups, GROUPS_MAX as u64);
        assert_eq!(memory.sizes().groups_evicted, 2);
        Ok(())
    }
}
