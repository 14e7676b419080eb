//! The texts that a request may draft from.

use std::sync::Arc;

use refrain_draft_replica::{GroupMembership, NamespaceReplica};
use refrain_protocol::ApiError;
use refrain_protocol::chunk::ChunkRequest;
use refrain_protocol::document::LEFT_CONTEXT_TOKENS;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig};

/// The one document of a request's own index.
pub(super) const OWN: DocumentKey = DocumentKey(0);

/// The texts that a request may draft from.
pub(crate) struct Sources {
    pub(crate) replica: Arc<NamespaceReplica>,
    /// The outputs of its group of samples, on this worker and on others, if it belongs to a group.
    pub(crate) group: Option<GroupMembership>,
    /// The request's own tree: prompt and output.
    pub(super) own: Index,
    /// The output that the client predicts, if it predicts one.
    pub(super) predicted: Option<Index>,
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
        Ok(Sources {
            replica,
            group,
            own,
            predicted,
        })
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
