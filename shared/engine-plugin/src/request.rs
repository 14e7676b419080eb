//! A running request of the engine: its state, its own index, its sources, and the draft of the step in progress.

use std::time::Instant;

use refrain_draft_replica::DocumentUpdateRef;
use refrain_protocol::chunk::DraftRules;
use refrain_protocol::document::FinishReason;
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_speculation::draft::{
    Candidate, DraftNode, Lookup, ProposeParams, Scope, Source, propose_valued,
};
use refrain_speculation::statistics::AcceptanceStatistics;

use crate::background::{BackgroundEvent, EndedRequest};
use crate::metrics::{INDEX, PluginMetrics};
use crate::own_index::OwnIndex;
use crate::request_state::RequestState;
use crate::sources::{AwaitedSources, DraftSources};
use crate::speculation::tokens_max_of_request;

/// Most documents remembered as touched between two uploads.
const TOUCHED_MAX: usize = 64;

/// A draft that is a chain. Without tokens there is none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftChain {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// SCORE: the expected number of accepted tokens by what is learnt, and 1 for the engine's own.
    pub score: f32,
    /// Length of the match, tokens.
    pub match_len: u32,
}

/// A request that runs.
pub(crate) struct Request {
    state: RequestState,
    /// The rules that its caller set for its drafts.
    rules: DraftRules,
    sources: AwaitedSources,
    own: OwnIndex,
    /// Output tokens that were queued for upload.
    uploaded: usize,
    /// The chain that was found for the step in progress. Its first tokens are worth their price.
    found: Option<Candidate>,
    paying: PayingPart,
    /// The place that they were offered to.
    offered: OfferedTo,
    /// The engine's own draft for the step in progress, where it is known.
    engine_draft: Vec<u32>,
    /// Documents whose drafts were accepted since the last upload.
    touched: Vec<DocumentId>,
}

/// The place that a draft was offered to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum OfferedTo {
    #[default]
    Nobody,
    /// The engine verifies it.
    Engine,
    /// The engine's devices draft from the same texts. Their drafts are not known here, and counted elsewhere.
    Devices,
}

/// The tokens at the beginning of a chain that are worth their price.
#[derive(Clone, Default)]
struct PayingPart {
    /// The probability that each of them is accepted with all before it, by what is learnt.
    path_probabilities: Vec<f32>,
    /// Accepted tokens that they are expected to bring: their sum.
    expected: f32,
}

impl Request {
    pub(crate) fn new(
        state: RequestState,
        rules: DraftRules,
        sources: AwaitedSources,
        own: OwnIndex,
    ) -> Self {
        Request {
            uploaded: state.output().len(),
            state,
            rules,
            sources,
            own,
            found: None,
            paying: PayingPart::default(),
            offered: OfferedTo::Nobody,
            engine_draft: Vec::new(),
            touched: Vec::new(),
        }
    }

    /// Takes the tokens that the engine emitted, and compares them with the last draft. The acceptance statistics
    /// learn from the draft that was found and from the engine's own, whichever was verified.
    pub(crate) fn extend(
        &mut self,
        emitted: &[u32],
        statistics: &mut AcceptanceStatistics,
        metrics: &PluginMetrics,
    ) {
        metrics.emitted.inc_by(emitted.len() as u64);
        if let Some(found) = &self.found {
            statistics.observe(found, emitted);
        }
        // Nothing is known of the part of its draft that lies beyond the emitted tokens.
        let depth = self.engine_draft.len().min(emitted.len());
        let agreed = self.engine_draft.iter().zip(emitted);
        let agreed = agreed.take_while(|(drafted, emitted)| drafted == emitted);
        let agreed = agreed.count() as u32;
        statistics.observe_head(self.state.text.len() as u32, depth as u32, agreed);
        self.engine_draft.clear();
        let offered_to = std::mem::take(&mut self.offered);
        let found = self.found.take();
        if let Some(offered) = found.filter(|_| offered_to != OfferedTo::Nobody) {
            let nodes = offered.tree.nodes();
            let nodes = &nodes[..self.paying.path_probabilities.len().min(nodes.len())];
            let agreed = nodes.iter().zip(emitted);
            let agreed = agreed.take_while(|(node, emitted)| node.token == **emitted);
            // The last emitted token is the bonus token, whatever was offered.
            let accepted = agreed.count().min(emitted.len().saturating_sub(1));
            if offered_to == OfferedTo::Engine {
                metrics.accepted.inc_by(accepted as u64);
            }
            self.touch(&nodes[..accepted]);
        }
        self.state.text.extend_from_slice(emitted);
        self.own.catch_up(&self.state.text);
        self.merge(metrics);
    }

    fn touch(&mut self, accepted: &[DraftNode]) {
        let others = accepted
            .iter()
            .filter(|node| node.origin.scope != Scope::Request);
        for place in others.filter_map(|node| node.origin.place) {
            let document = DocumentId(place.document.0);
            let is_own = document == self.state.update.document;
            if !is_own && !self.touched.contains(&document) && self.touched.len() < TOUCHED_MAX {
                self.touched.push(document);
            }
        }
    }

    /// Lets other requests draft from the output. A replica that another thread holds gets it with a later step.
    fn merge(&mut self, metrics: &PluginMetrics) {
        let state = &mut self.state;
        let Some(DraftSources { namespace, group }) = self.sources.poll_or_count(metrics) else {
            return;
        };
        let merge = |update: DocumentUpdateRef<'_>, is_sole_source| {
            let mut index = namespace.try_write()?;
            let merged = index.merge(update, is_sole_source, Instant::now());
            Some(merged.unwrap_or_else(|_| {
                metrics.rejected(INDEX);
                is_sole_source
            }))
        };
        state.merged = state.merge_rest(state.merged, merge, metrics);
        if let Some(membership) = group {
            let merge = |update: DocumentUpdateRef<'_>, is_sole_source| {
                membership.group().try_merge_emitted(update, is_sole_source)
            };
            state.group_merged = state.merge_rest(state.group_merged, merge, metrics);
        }
    }

    /// Output tokens that are still to be uploaded from here.
    pub(crate) fn tokens_to_upload(&self) -> usize {
        match self.state.namespace {
            Some(_) if !self.state.is_named => self.state.output().len() - self.uploaded,
            _ => 0,
        }
    }

    /// The upload of these tokens, if the sources have been found.
    pub(crate) fn take_upload(&mut self) -> Option<BackgroundEvent> {
        let namespace = self.sources.poll()?.namespace.clone();
        let update = self.state.update_from(self.uploaded).clone();
        self.uploaded = self.state.output().len();
        let touched = std::mem::take(&mut self.touched);
        Some(BackgroundEvent::Upload(namespace, update, touched))
    }

    /// Ends the request, maybe only for now.
    pub(crate) fn end(mut self, finish: FinishReason) -> (RequestState, Option<Box<EndedRequest>>) {
        let state = &mut self.state;
        state.update.finish = Some(finish);
        if matches!(self.sources, AwaitedSources::Missing) {
            return (self.state, None);
        }
        let has_no_group = matches!(
            self.sources,
            AwaitedSources::Ready(DraftSources { group: None, .. })
        );
        let (merged, group_merged) = (state.merged, state.group_merged);
        let ended = EndedRequest {
            sources: self.sources,
            unmerged: state.unmerged(merged),
            group_unmerged: (!has_no_group).then(|| state.unmerged(group_merged)),
            upload: (!state.is_named).then(|| state.update_from(self.uploaded).clone()),
            touched: self.touched,
        };
        (self.state, Some(Box::new(ended)))
    }

    /// The rules that its caller set for its drafts.
    pub(crate) fn rules(&self) -> &DraftRules {
        &self.rules
    }

    /// Cuts the engine's own draft to the most tokens that the request may draft. Returns what is left, if that is
    /// not all.
    pub(crate) fn cut(&self, engine_draft: &mut Vec<u32>) -> Option<Vec<u32>> {
        let tokens_max = tokens_max_of_request(&self.rules);
        let is_cut = engine_draft.len() > tokens_max;
        engine_draft.truncate(tokens_max);
        is_cut.then(|| engine_draft.clone())
    }

    /// Searches the best draft of at most `tokens_max` tokens, by what is learnt.
    pub(crate) fn propose(
        &mut self,
        params: &ProposeParams,
        statistics: &AcceptanceStatistics,
        tokens_max: usize,
        metrics: &PluginMetrics,
    ) {
        self.own.catch_up(&self.state.text);
        let sources = self.sources.poll_or_count(metrics);
        let RequestState {
            text,
            prompt_len,
            update,
            ..
        } = &self.state;
        let output_len = (text.len() - prompt_len) as u32;
        let unless_busy = |drafts: Option<_>| {
            drafts.or_else(|| {
                metrics.busy.inc();
                None
            })
        };
        let namespace = sources.and_then(|sources| unless_busy(sources.namespace.try_read()));
        let membership = sources.and_then(|sources| sources.group.as_ref());
        let group = membership.and_then(|member| unless_busy(member.group().try_read()));
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context: text,
        };
        let own = self
            .own
            .search()
            .map(|(own, tip)| lookup(Scope::Request, own, tip));
        // A request alone in its group would search its own output again.
        let group = group.as_ref();
        let group = group.filter(|group| group.index().documents() > 1);
        let group = group.map(|group| {
            let cursor = group.cursor(update.document, output_len, text);
            lookup(Scope::Group, group.index(), cursor)
        });
        let tenant = namespace.as_ref().map(|namespace| {
            let cursor = namespace.cursor(update.document, output_len, text);
            lookup(Scope::Tenant, namespace.index(), cursor)
        });
        let lookups = Vec::from_iter([own, group, tenant].into_iter().flatten());
        let tokens_max = tokens_max.min(tokens_max_of_request(&self.rules));
        self.found = propose_valued(&lookups, params, Some(statistics), tokens_max);
        self.paying = PayingPart::default();
        if let Some(found) = &self.found {
            let mut paths = statistics.path_probabilities(found);
            // No token of a chain is likelier than the one before it.
            let pays = |path: &f32| params.price.is_none_or(|price| *path >= price);
            paths.truncate(paths.iter().take_while(|path| pays(path)).count());
            self.paying = PayingPart {
                expected: paths.iter().sum(),
                path_probabilities: paths,
            };
        }
    }

    /// Offers the engine the tokens of the draft that are worth their price; `None` if none are.
    pub(crate) fn offer(&mut self, metrics: &PluginMetrics) -> Option<DraftChain> {
        let (len, expected) = (self.paying.path_probabilities.len(), self.paying.expected);
        let found = self.found.as_ref().filter(|_| len > 0)?;
        self.offered = OfferedTo::Engine;
        metrics.drafts.inc();
        metrics.drafted.inc_by(len as u64);
        Some(DraftChain {
            tokens: found.tree.tokens().take(len).collect(),
            score: 1.0 + expected,
            match_len: found.match_len,
        })
    }

    /// The path probabilities of the draft that was found, as far as it is worth its price. It is searched for if
    /// tokens were emitted since.
    pub(crate) fn prospect(
        &mut self,
        params: &ProposeParams,
        statistics: &AcceptanceStatistics,
        tokens_max: usize,
        metrics: &PluginMetrics,
    ) -> Vec<f32> {
        if self.found.is_none() {
            self.propose(params, statistics, tokens_max, metrics);
        }
        self.offered = OfferedTo::Devices;
        self.paying.path_probabilities.clone()
    }

    /// Length of the text, tokens, and how many tokens the last draft was expected to bring.
    pub(crate) fn standing(&self) -> (u32, f32) {
        (self.state.text.len() as u32, self.paying.expected)
    }

    /// Whether the draft that was found is expected to have more accepted tokens than the engine's own, by the
    /// acceptance statistics of both.
    pub(crate) fn beats(
        &mut self,
        engine_draft: Vec<u32>,
        statistics: &AcceptanceStatistics,
    ) -> bool {
        self.engine_draft = engine_draft;
        let context_tokens = self.state.text.len() as u32;
        let of_engine: f32 = statistics
            .head_path_probabilities(context_tokens, self.engine_draft.len() as u32)
            .sum();
        self.paying.expected > of_engine
    }

    /// The namespace that the request drafts from.
    pub(crate) fn namespace(&self) -> Option<NamespaceId> {
        self.state.namespace
    }
}
