//! The texts that a request may draft from, and the form of its output.

use std::sync::Arc;

use refrain_draft_replica::{DocumentUpdateRef, DraftIndex, GroupMembership, NamespaceReplica};
use refrain_protocol::chunk::ChunkRequest;
use refrain_protocol::document::LEFT_CONTEXT_TOKENS;
use refrain_protocol::{ApiError, DocumentId};
use refrain_speculation::draft::{Candidate, Lookup, ProposeParams, Scope, Source, propose_valued};
use refrain_speculation::statistics::AcceptanceStatistics;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig};

use super::form::RunningForm;
use super::text::Text;

/// The one document of a request's own index.
const OWN: DocumentKey = DocumentKey(0);

/// The texts that a request may draft from, and the form of its output.
pub(crate) struct Sources {
    /// The document of the request's output, which the namespace's index keeps while this lives.
    document: DocumentId,
    pub(crate) replica: Arc<NamespaceReplica>,
    /// The outputs of its group of samples, on this worker and on others, if it belongs to a group.
    pub(crate) group: Option<GroupMembership>,
    /// The request's own tree: prompt and output.
    own: Index,
    /// The output that the client predicts, if it predicts one.
    predicted: Option<Index>,
    /// The form of the output, where drafts can come from it.
    pub(crate) form: Option<RunningForm>,
}

impl Sources {
    /// Reads the text of a request that begins.
    ///
    /// # Errors
    /// A text that is too long for an index.
    pub(crate) fn new(
        request: &mut ChunkRequest,
        replica: Arc<NamespaceReplica>,
        group: Option<GroupMembership>,
        index: IndexConfig,
    ) -> Result<Self, ApiError> {
        let read = |left_context: &[u32], tokens: &[u32]| {
            let mut read = Index::new(index.clone());
            read.open(OWN, left_context)
                .and_then(|()| read.append(OWN, tokens))
                .map_err(ApiError::internal)?;
            Ok(read)
        };
        let own = read(&[], &request.tokens)?;
        let prediction = std::mem::take(&mut request.prediction);
        let predicted = match prediction.is_empty() {
            true => None,
            // The end of the prompt stands before it, so that the first token is drafted as the others are.
            false => Some(read(prompt_end(request), &prediction)?),
        };
        let document = request.request.into();
        replica.pin(document);
        Ok(Sources {
            document,
            replica,
            group,
            own,
            predicted,
            form: None,
        })
    }

    /// Adds emitted tokens to the request's own tree.
    pub(super) fn append(&mut self, tokens: &[u32]) -> Result<(), ApiError> {
        self.own.append(OWN, tokens).map_err(ApiError::internal)
    }

    /// Indexes a piece of the output, so that other requests can draft from it.
    pub(super) fn merge(&self, piece: DocumentUpdateRef<'_>) {
        self.replica.merge(piece);
        if let Some(membership) = &self.group {
            membership.group().merge(piece);
        }
    }

    /// Indexes the earlier output of a request that begins. An index may have a part of it already.
    pub(super) fn merge_earlier<'a>(&self, from: impl Fn(u32) -> DocumentUpdateRef<'a>) {
        let held = self.replica.read().len_of(self.document);
        self.replica.merge(from(held.unwrap_or(0)));
        if let Some(group) = self.group.as_ref().map(GroupMembership::group) {
            let held = group.read().len_of(self.document);
            group.merge(from(held.unwrap_or(0)));
        }
    }

    /// The best draft over all suffix indexes that the request may read, by what is learnt about drafts of its
    /// namespace if the parameters have a price.
    pub(super) fn suffix_draft(
        &self,
        text: &Text,
        draft_max: u32,
        params: &ProposeParams,
        statistics: Option<&AcceptanceStatistics>,
    ) -> Option<Candidate> {
        let context = text.tokens();
        let drafts = self.replica.read();
        let group = self.group.as_ref().map(|member| member.group().read());
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context,
        };
        let cursor_in =
            |drafts: &DraftIndex| drafts.cursor(self.document, text.output_len(), context);
        let mut lookups = Vec::with_capacity(4);
        // Comes first, so that ties are credited to the client's prediction.
        lookups.extend(self.predicted.as_ref().map(|predicted| Lookup {
            source: Source::Prediction,
            ..lookup(Scope::Request, predicted, predicted.start(context))
        }));
        let own = self.own.tip(OWN);
        lookups.extend(own.map(|cursor| lookup(Scope::Request, &self.own, cursor)));
        // A group of one holds only the request's own output.
        if let Some(group) = group.as_ref().filter(|group| group.index().documents() > 1) {
            lookups.push(lookup(Scope::Group, group.index(), cursor_in(group)));
        }
        lookups.push(lookup(Scope::Tenant, drafts.index(), cursor_in(&drafts)));
        propose_valued(&lookups, params, statistics, draft_max as usize)
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        self.replica.unpin(self.document);
    }
}

/// The prompt of a request whose text is complete.
pub(super) fn prompt(request: &ChunkRequest) -> &[u32] {
    &request.tokens[..request.prompt_len as usize]
}

/// The end of the prompt, which stands before an output wherever that is kept.
pub(super) fn prompt_end(request: &ChunkRequest) -> &[u32] {
    let prompt = prompt(request);
    &prompt[prompt.len().saturating_sub(LEFT_CONTEXT_TOKENS)..]
}
